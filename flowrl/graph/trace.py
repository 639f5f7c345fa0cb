"""The abstract trace: the stage loop over handles that compute only shapes.

It runs a graph until the graph repeats itself, and counts what one repetition does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import jax
import numpy as np

from flowrl.core.compiled import explained
from flowrl.core.events import OperatorRan, Stream, Tap
from flowrl.core.items import Batch, Filling, Gradients, Trained
from flowrl.errors import FlowrlError
from flowrl.graph.abstract import AbstractSite, OpaqueError, abstract
from flowrl.graph.graph import Graph
from flowrl.graph.period import REPORTED, ROUNDS, ROWS, Did, Noted, Search, Static, is_counter
from flowrl.graph.protocols import Handle
from flowrl.graph.site import Place
from flowrl.graph.stages import Schedule, loops_of
from flowrl.graph.versions import VersionOwners, is_version

PATIENCE = 10_000
"""Steps of operators after which the trace stops looking for a period and the plan gives means.

They are no seconds, for a plan must be the same on each machine: a run goes on only with its own.
"""
LONG_ROWS = 8
"""Rows as long as the first one that are looked through at least: a period may be of several."""
UNFILLED = 1_000
"""Rounds that the trace runs at least, even after its patience is over, before it ends without a
further Row.

An operator that took so many items and yielded none is taken for a mistake.
"""
OLD = 32
"""Age in updates from which on the trace no longer distinguishes policy versions."""


class Watched:
    """Stand-in for a handle that reports each verb that is looked up and not `shared`.

    Args:
        handle: the handle whose attributes it gives.
        called: what is called with the name of each such verb.
    """

    def __init__(self, handle: Handle, called: Callable[[str], None]) -> None:
        self.handle = handle
        self.called = called

    def part(self, name: str) -> Watched:
        """Return the stand-in for the handle of a part, whose verbs are those of the resource."""
        return Watched(self.handle.part(name), self.called)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.handle, name)
        if callable(found) and name not in self.handle.shared:
            self.called(name)
        return found


@dataclass(frozen=True)
class Traffic:
    """What one node does in a number of Rows."""

    counts: dict[str, Counter[str]]
    """By resource: the counters of its verbs."""
    taken: int
    """Items that the node took."""
    given: int
    """Items that the node yielded."""
    given_steps: int
    """Environment steps in the items that the node yielded."""
    calls: int
    """How often the node's step ran, which at a source takes no item."""


@dataclass
class Trace:
    """What the abstract trace found."""

    rows: int = 0
    """Rows in the steady period."""
    reported: int = 0
    """Updates that those Rows report."""
    ever: Did = field(default_factory=Counter)
    """By node, resource and counter: what was done from the start to the end of that period."""
    warmup_rows: int = 0
    """Rows before the steady period."""
    warmup_rounds: int = 0
    """Rounds of the stages before the steady period."""
    warmup_steps: int = 0
    """Environment steps sampled in the warm-up rounds."""
    idle_steps: int = 0
    """Environment steps sampled before the first update."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """By resource that sets memory aside: how many bytes."""
    shareable: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By resource: the rows of a step that devices may share, and the bytes exchanged in it."""
    exact: bool = True
    """Whether the period was found; if not, the numbers are means over `rows`."""
    steady: dict[str, Traffic] = field(default_factory=dict)
    """By node: what it does in the steady period."""
    first_items: dict[str, Any] = field(default_factory=dict)
    """By node: the first item that it yields, with shapes for arrays."""
    lags: dict[str, list[float]] = field(default_factory=dict)
    """By node that yields updates, its own or passed on: the largest policy lag of each of them.

    It is NaN where it can't be known.
    """
    gradient_data_lags: dict[tuple[str, str], float] = field(default_factory=dict)
    """By node and learner whose gradients it yields: the largest lag of their data, or NaN."""
    mean_lags: Counter[float] = field(default_factory=Counter)
    """How many updates that a node yields or passes on in it have which mean policy lag."""
    metrics: dict[str, str] = field(default_factory=dict)
    """By name of a metric that `Context.metric` or an environment reports: what reports it."""
    timed: bool = False
    """Whether an operator looked at the time."""
    restless: dict[str, str] = field(default_factory=dict)
    """Where no period was found, by node: a number in its state that never recurred."""
    opaque: dict[str, str] = field(default_factory=dict)
    """By node whose function works only on real data: why the trace ends there."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of (node or resource, what is wrong)."""

    @property
    def totals(self) -> Counter[tuple[str, str]]:
        """By resource and counter: what all nodes count in the steady period."""
        totals: Counter[tuple[str, str]] = Counter()
        for traffic in self.steady.values():
            for resource, counters in traffic.counts.items():
                totals += Counter({(resource, name): n for name, n in counters.items()})
        return totals


def trace(graph: Graph) -> Trace:
    """Run a graph abstractly until its static state recurs, and return what was found.

    It also ends when it can't go on, and when patience is over.
    The graph is run a second time where an operator asks for the plan's numbers.
    """
    found = (tracer := Tracer(graph, {})).run()
    # In the first trace there was no plan yet, and every such question was answered by 0.
    if tracer.site.plan_lookups[0] and found.rows and not found.problems:
        return Tracer(graph, found.totals).run()
    return found


class Tracer:
    """One abstract run of a graph, and what is seen on the way.

    Args:
        graph: the graph.
        planned: by resource and counter: what an earlier trace counted in its steady period.
    """

    counters: ClassVar[bool] = True
    """Whether the values of operators' whole NumPy numbers distinguish states."""

    def __init__(self, graph: Graph, planned: Mapping[tuple[str, str], int]) -> None:
        self.graph = graph
        self.found = Trace()
        self.did: Did = Counter()
        """What the ledger does not count, and what lies in rounds that were skipped."""
        stream = Stream([Tap(self.watch, OperatorRan)])
        self.place = Place(graph.name, graph.resources, 0, AbstractSite, planned, stream)
        self.site = cast("AbstractSite", self.place.site)
        self.stage = {name: stage[0] for stage in graph.stages() for name in stage}
        self.owners: dict[str, tuple[str, str]] = {}
        """By resource: the stage that owns it, and the node that first called it from there."""
        self.steps = 0
        """The steps of operators that ran."""
        self.trespassed: set[str] = set()
        """The resources that a second stage called: each is reported once."""

    def run(self) -> Trace:
        """Open the resources, run passes until the graph repeats itself, and close them."""
        found, place = self.found, self.place
        try:
            handles = place.open()
            self.version_owners = VersionOwners(self.graph, handles)
            self.passes(self._schedule(handles))
            found.timed = bool(self.site.time_lookups[0])
            found.metrics = place.metrics.names
            found.nbytes = {n: h.nbytes for n, h in place.handles.items() if h.nbytes}
            found.shareable = {n: h.shareable() for n, h in place.handles.items()}
        # A resource that can't be opened, an operator's `init`, `prepare`, `ready` or
        # `has_capacity`, or stages that wait for one another: `failed` caught the errors of steps.
        except FlowrlError as error:
            found.problems.append((place.ledger.at.node or place.opening, error.message))
        finally:
            place.close()
        return found

    def _schedule(self, handles: Mapping[str, Handle]) -> Schedule:
        """Return the schedule of the stages, whose handles report who calls them."""
        watched = {
            name: cast("Handle", Watched(handle, partial(self.called, name)))
            for name, handle in handles.items()
        }
        place = self.place
        make = partial(
            loops_of, self.graph, watched, place.site_of, place.ledger, failed=self.failed
        )
        return Schedule(self.graph, make)

    # -- the search for a period

    def passes(self, schedule: Schedule) -> None:
        """Run the stages in lock-step until a state recurs, or until patience is over.

        While something fills up and all else recurs, what lies between is counted as often as it
        fits, and not run.
        """
        found, patience, most_rounds = self.found, 0, 0
        static, filled = self.signature(schedule)
        search = Search(Noted(self.snapshot(), Counter(), filled))
        search.note(static, search.start)
        self.between(schedule)
        for rounds_run in itertools.count(1):
            closed_row = self._round(schedule)
            if found.problems or found.opaque:
                return
            self.between(schedule)
            # Patience starts again with the first Row, which may be long, and with the first after
            # a skip, where the search for means begins again.
            if rounds_run == 1 or (closed_row and not search.closings):
                patience = self.steps + PATIENCE + LONG_ROWS * (self.steps - search.steps)
                most_rounds = UNFILLED + 3 * rounds_run
            # Once late, end with a Row that is not the first, for means need two. Where none
            # closes, go on for UNFILLED rounds beyond three times those up to the first Row, which
            # leaves room for a second Row that takes longer than the first.
            late = self.steps >= patience and (
                rounds_run >= most_rounds or bool(closed_row and search.closings)
            )
            if not (closed_row or late or search.is_due()):
                continue
            if self._look(schedule, search, closed_row, late):
                return

    def _round(self, schedule: Schedule) -> bool:
        """Run one round of all stages, count it, and return whether it closed a Row."""
        tallies = schedule.round()
        reported = sum(len(tally.updates) for tally in tallies)
        self.did.update({ROUNDS: 1, ROWS: len(tallies), REPORTED: reported})
        return bool(tallies)

    def _look(self, schedule: Schedule, search: Search, closed_row: bool, late: bool) -> bool:
        """Compare the state with the earlier ones, and return whether the search is over.

        Args:
            schedule: the stages.
            search: what is known of the earlier states.
            closed_row: whether the last round closed a Row.
            late: whether patience is over, so that means must do.
        """
        static, filled = self.signature(schedule)
        now = Noted(self.snapshot(), Counter(self.found.mean_lags), filled)
        if closed_row:
            search.quiet = 0
            search.closings.append(now)
        since = search.seen.get((static, filled))
        if since is not None:
            self.repeats(since, now)
            return True
        before = search.before(static, now)
        times = search.times(static, before, now)
        if late and not times:
            same_tree = [seen.facts for seen, _ in search.seen if seen.tree == static.tree]
            self.found.restless = self.restless(schedule, same_tree)
            self._take_means(search, now)
            return True
        search.note(static, now)
        # What fills up for the first time is a beginning: rounds before the skip are no part of a
        # mean over rounds after it.
        begins = before.begins(now)
        if not times:
            return False
        self.skip(schedule, before, now, times)
        now = Noted(self.snapshot(), Counter(self.found.mean_lags), before.risen(now, times))
        if (since := search.seen.get((static, now.filled))) is not None:
            self.repeats(since, now)
            return True
        if begins:
            search.start, search.closings, search.steps = now, [], self.steps
        return False

    def _take_means(self, search: Search, now: Noted) -> None:
        """Take what lies between the first Row and the last for the period.

        Where there are not two Rows, it begins at the start, and ends with the only Row or now.
        """
        self.found.exact = False
        if len(search.closings) > 1:
            self.repeats(search.closings[0], search.closings[-1])
        elif search.closings:
            self.repeats(search.start, search.closings[0])
        else:
            self.repeats(search.start, now)

    def skip(self, schedule: Schedule, before: Noted, now: Noted, times: int) -> None:
        """Skip repetitions of what lies between two states that differ only in what fills up.

        It is counted so many times, and the numbers that fill up are raised accordingly.
        """
        self.did.update(
            {name: times * (number - before.did[name]) for name, number in now.did.items()}
        )
        # In the order in which a signature lists them: operators' states, then those of resources
        # by sorted name, as JAX flattens a dict.
        raised = iter(before.risen(now, times))
        self.found.mean_lags.update(
            {lag: times * (number - before.lags[lag]) for lag, number in now.lags.items()}
        )

        def filled(x: Any) -> Any:
            return next(raised) if isinstance(x, Filling) else x

        for loop in schedule.loops:
            loop.states = jax.tree.map(filled, loop.states)
        # Only where something fills up: not every handle's state can be set.
        for _, handle in sorted(self.place.handles.items()):
            if any(isinstance(x, Filling) for x in jax.tree.leaves(handle.state)):
                handle.state = jax.tree.map(filled, handle.state)

    def repeats(self, since: Noted, now: Noted) -> None:
        """Record what lies between two moments as the steady period."""
        found = self.found
        period = Counter({name: number - since.did[name] for name, number in now.did.items()})
        found.ever = now.did
        found.warmup_rounds, found.warmup_rows = since.did[ROUNDS], since.did[ROWS]
        found.warmup_steps = _sampled(since.did)
        found.mean_lags = now.lags - since.lags
        found.rows, found.reported = period[ROWS], period[REPORTED]
        found.steady = {node.name: _traffic(node.name, period) for node in self.graph.nodes}

    def between(self, schedule: Schedule) -> None:
        """Do nothing; a subclass may look at the states before the first and after each round."""

    def signature(
        self, schedule: Schedule, reporting: bool = True
    ) -> tuple[Static, tuple[Filling, ...]]:
        """Return what is static about the states of all operators, resources and queues.

        Rounds that start from equal signatures do the same. Policy versions count by their age in
        updates of their own learner, for the policy lags depend on it. Beyond `OLD` all ages are
        one, since those of weights that nobody renews would never recur.

        Args:
            schedule: the stages.
            reporting: whether the state of the operator that closes Rows is part of it.

        Returns:
            What is static, and apart from it the numbers that fill up.
        """
        queues = {name: list(channel.items) for name, channel in schedule.channels.items()}
        handles = {name: handle.state for name, handle in self.place.handles.items()}
        states = []
        for loop in schedule.loops:
            units = loop.units
            states.append(
                {n: s for n, s in loop.states.items() if reporting or not units[n].op.reports}
            )
        paths, tree = jax.tree_util.tree_flatten_with_path((states, handles, queues))
        facts = tuple(self._fact(path, x) for path, x in paths)
        filling = tuple(x for _, x in paths if isinstance(x, Filling))
        return Static(tree, facts, self._ages(paths)), filling

    def _fact(self, path: Any, x: Any) -> Any:
        """Return what is static about one leaf of the state, policy versions left out."""
        distinguishes = self.counters or not is_counter(path, x)
        # Not floating ones, such as the time of Report's last row, which would never recur.
        if isinstance(x, np.integer | np.bool_) and distinguishes and not is_version(path, x):
            return x.item()
        return abstract(x)

    def _ages(self, paths: Sequence[tuple[Any, Any]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the index and the ages in updates of every leaf that holds policy versions."""
        newest = self.version_owners.newest(paths)
        ages: list[tuple[int, tuple[int, ...]]] = []
        for index, (path, x) in enumerate(paths):
            if is_version(path, x):
                age = np.minimum(newest[self.version_owners.of(path)] - np.asarray(x), OLD)
                ages.append((index, tuple(age.ravel().tolist())))
        return tuple(ages)

    def restless(self, schedule: Schedule, seen: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Return the numbers in operators' states that differed in each state seen, by node.

        Args:
            schedule: the stages.
            seen: the facts of the states with the same tree structure as now.
        """
        found: dict[str, str] = {}
        if len(seen) < 3:
            return found
        # Operators' states come first in a signature, so a leaf has the same index here and there.
        leaves = jax.tree_util.tree_flatten_with_path([loop.states for loop in schedule.loops])[0]
        for number, (path, x) in enumerate(leaves):
            if type(x) not in (int, float) and not isinstance(x, np.generic):
                continue
            if len({facts[number] for facts in seen}) == len(seen):
                found[path[1].key] = jax.tree_util.keystr(path[2:])
        return found

    # -- what is seen on the way

    def watch(self, event: OperatorRan) -> None:
        """Note an item that a node yielded, or the end of its step."""
        node, item = event.node, event.item
        if item is None:
            self.steps += 1
            self.did[node, "", "calls"] += 1
            return
        self.did.update({(node, "", "given"): 1, (node, "", "given_steps"): event.steps})
        self.found.first_items.setdefault(node, item)
        if isinstance(item, Batch):
            fields = f"in a batch whose fields are [{item.shape[0]}, {item.shape[1]}, ...]"
            wrong = [name for name, x in item.data.items() if tuple(x.shape[:2]) != item.shape]
            self.found.problems += [
                (node, f"yields {name} {list(item.data[name].shape)} {fields}") for name in wrong
            ]
        if isinstance(item, Trained):
            self._watch_update(node, item)
        if isinstance(item, Gradients):
            lags, of = self.found.gradient_data_lags, (node, item.learner)
            lags[of] = float(np.maximum(lags.get(of, 0.0), _known(item.columns["lag"])))

    def _watch_update(self, node: str, trained: Trained) -> None:
        """Note the policy lags of an update."""
        if not self.found.lags:
            self.found.idle_steps = _sampled(self.snapshot())
        mean, largest = map(_known, trained.lag)
        self.found.lags.setdefault(node, []).append(largest)
        self.found.mean_lags[mean] += 1

    def called(self, resource: str, verb: str) -> None:
        """Note that the node at work calls a verb that is for one stage only.

        The first stage to call such a verb owns the resource; for any other it is a problem.
        """
        node = self.place.ledger.at.node
        owner, first = self.owners.setdefault(resource, (self.stage[node], node))
        if owner != self.stage[node] and resource not in self.trespassed:
            self.trespassed.add(resource)
            text = (
                f"calls {resource}.{verb}, but {resource} belongs to the stage of {first}, which "
                f"may be at work with it at the same time; move {node} to where {first} is, or "
                f"{first} to the same side of the queue"
            )
            self.found.problems.append((node, text))

    def failed(self, node: str, error: Exception) -> None:
        """Note a node's error."""
        if isinstance(error, OpaqueError):
            self.found.opaque[node] = error.message
        elif isinstance(error, FlowrlError):
            self.found.problems.append((node, error.message))
        else:
            self.found.problems.append((node, explained(error)))

    def snapshot(self) -> Did:
        """Return what was done so far, by node, resource and counter."""
        did = Counter(self.did)
        for (node, resource), counters in self.place.ledger.counts.items():
            did.update({(node, resource, name): number for name, number in counters.items()})
        for (_, node), number in self.place.ledger.got.items():
            did[node, "", "taken"] += number
        return did


def _known(lags: Any) -> float:
    """Return a policy lag, the largest of several; NaN where `version` was computed on the way."""
    return math.nan if isinstance(lags, jax.ShapeDtypeStruct) else float(np.max(lags))


def _sampled(did: Did) -> int:
    """Return the environment steps that all nodes sampled."""
    return sum(number for (_, _, name), number in did.items() if name == "sampled_steps")


def _traffic(name: str, did: Did) -> Traffic:
    """Return what one node did."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (node, resource, counter), number in did.items():
        if resource and node == name:
            counts[resource][counter] = number
    of_node = (did[name, "", key] for key in ("taken", "given", "given_steps", "calls"))
    return Traffic(dict(counts), *of_node)
