"""The abstract trace: the stage loop over handles that compute only shapes, until it repeats itself."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import jax
import numpy as np

from flowrl.core.compiled import told
from flowrl.core.events import OperatorRan, Stream, Tap
from flowrl.core.items import Batch, Filling, Trained
from flowrl.errors import FlowrlError
from flowrl.graph.abstract import AbstractSite, Opaque, abstract
from flowrl.graph.graph import Graph
from flowrl.graph.protocols import Handle
from flowrl.graph.site import Place
from flowrl.graph.stages import Schedule, loops_of
from flowrl.graph.versions import Clocks, is_version

PATIENCE = 2.0
"""Seconds of work after which the trace stops looking for a period and the plan gives means."""
UNFILLED = 1_000
"""Passes without a Row from which on patience counts: an operator that took so many items and gave none is taken for a mistake."""
OLD = 32
"""The age in updates from which on the trace tells versions no longer apart."""


class Watched:
    """A handle whose verbs for one stage are noted when they are reached for."""

    def __init__(self, handle: Handle, called: Callable[[str], None]) -> None:
        self.handle = handle
        self.called = called

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
    given: int
    given_steps: int


@dataclass
class Trace:
    """What the abstract trace found."""

    rows: int = 0
    """Rows in the steady period."""
    reported: int = 0
    """Updates that those Rows tell of."""
    passes: int = 0
    """Passes in all."""
    warmup_rows: int = 0
    """Rows before it."""
    warmup_rounds: int = 0
    """Rounds of the stages before it; the last of them is that of the last of these rows."""
    warmup_steps: int = 0
    """Steps sampled in them."""
    idle_steps: int = 0
    """Steps sampled before the first update."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """By resource that sets bytes aside: how many."""
    exact: bool = True
    """Whether the period was found; if not, the numbers are means over `rows`."""
    steady: dict[str, Traffic] = field(default_factory=dict)
    forms: dict[str, Any] = field(default_factory=dict)
    """By node: the first item that it yields, with shapes for arrays."""
    lags: dict[str, list[float]] = field(default_factory=dict)
    """By node that trains: the largest lag of each update; NaN where it can't be known."""
    mean_lags: list[float] = field(default_factory=list)
    """The mean lag of each update in the steady period."""
    metrics: dict[str, str] = field(default_factory=dict)
    """By name of a metric that `Context.metric` or an environment tells: who tells it."""
    timed: bool = False
    """Whether an operator looked at the clock."""
    restless: dict[str, str] = field(default_factory=dict)
    """Where no period was found, by node: a number in its state that never had the same value twice."""
    opaque: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(node or resource, what is wrong)."""

    @property
    def totals(self) -> Counter[tuple[str, str]]:
        """By resource and counter: what all nodes count in the steady period."""
        each = (
            Counter({(resource, k): n for k, n in c.items()})
            for t in self.steady.values()
            for resource, c in t.counts.items()
        )
        return sum(each, Counter())


def trace(graph: Graph) -> Trace:
    """Run the graph abstractly until the static state at a Row recurs.

    Where an operator asks for what the plan says, once more with what was found.
    """
    tracer = Tracer(graph, {})
    found = tracer.run()
    return (
        Tracer(graph, found.totals).run()
        if tracer.site.asked[0] and found.rows and not found.problems
        else found
    )


def is_counter(path: Any, x: Any) -> bool:
    """Whether a part of a graph's state, of which the operators' comes first, is one of their NumPy numbers: those go on within a program."""
    return getattr(path[0], "idx", None) == 0 and isinstance(x, np.integer | np.floating)


Did = Counter[tuple[str, str, str]]
"""By node, resource and counter; a node's items under no resource, and under no node what these are of:"""
ROUNDS, ROWS, REPORTED = (("", "", name) for name in ("rounds", "rows", "reported"))


class Noted(NamedTuple):
    """Where the trace was behind a round."""

    did: Did
    lags: int
    """Mean lags that it had found."""
    filled: tuple[Filling, ...]


class Tracer:
    """One abstract run, and what is seen on the way."""

    counters: ClassVar[bool] = True
    """Whether operators' counters tell states apart."""

    def __init__(self, graph: Graph, planned: Mapping[tuple[str, str], int]) -> None:
        self.graph = graph
        self.found = Trace()
        self.did: Did = Counter()
        """What the ledger does not count, and what lies in rounds that were skipped."""
        self.place = Place(
            graph.name,
            graph.resources,
            0,
            AbstractSite,
            planned,
            Stream([Tap(self.watch, OperatorRan)]),
        )
        self.site = cast("AbstractSite", self.place.site)
        self.stage = {name: stage[0] for stage in graph.stages() for name in stage}
        self.owners: dict[str, tuple[str, str]] = {}
        """By resource: its stage, and the node by which it is its."""
        self.trespassed: set[str] = set()

    def run(self) -> Trace:
        """Open the resources and run passes."""
        try:
            handles = self.place.open()
            self.clocks = Clocks(self.graph, handles)
            watched = cast(
                "dict[str, Handle]",
                {
                    name: Watched(handle, partial(self.called, name))
                    for name, handle in handles.items()
                },
            )
            make = partial(
                loops_of,
                self.graph,
                watched,
                self.place.site_of,
                self.place.ledger,
                failed=self.failed,
            )
            self.passes(Schedule(self.graph, make))
            self.found.timed, self.found.metrics = (
                bool(self.site.looks[0]),
                self.place.metrics.names,
            )
            self.found.nbytes = {
                name: handle.nbytes for name, handle in self.place.handles.items() if handle.nbytes
            }
        except FlowrlError as error:  # a resource that can't be opened; the nodes' own errors were caught by `failed`
            self.found.problems.append(
                (self.place.ledger.at.node or self.place.opening, error.message)
            )
        finally:
            self.place.close()
        return self.found

    def passes(self, schedule: Schedule) -> None:
        """Run the stages in lock-step until a round ends in a static state that an earlier one ended in, or patience does.

        While something fills up and all else recurs, what lies between is counted as often as it fits, and not run.
        """
        found, deadline, most, start = self.found, math.inf, 0, Noted(self.snapshot(), 0, ())
        seen: dict[Any, Noted] = {self.signature(schedule): start}
        alike: dict[Any, Noted] = {}
        closings: list[Noted] = []
        self.between(schedule)
        for walked in itertools.count(1):
            tallies = schedule.round()
            self.did.update(
                {
                    ROUNDS: 1,
                    ROWS: len(tallies),
                    REPORTED: sum(len(tally.updates) for tally in tallies),
                }
            )
            if found.problems or found.opaque:
                return
            self.between(schedule)
            if walked == 1 or (tallies and not closings):  # until then functions are traced
                deadline, most = time.thread_time() + PATIENCE, UNFILLED + 3 * walked
            late = time.thread_time() > deadline and (walked >= most or bool(tallies and closings))
            if not tallies and not late and self.did[ROUNDS] % 64:
                continue
            form, filled = self.signature(schedule)
            now = Noted(self.snapshot(), len(found.mean_lags), filled)
            closings += [now] * bool(tallies)
            since = seen.get((form, filled))
            if since is None and late:  # from the first row to the last, if there are two
                found.restless = self.restless(
                    schedule, [facts for (tree, facts, _), _ in seen if tree == form[0]]
                )
                found.exact, (since, *_, now) = (
                    False,
                    closings if len(closings) > 1 else (start, *closings, now)[:2],
                )
            if since is not None:
                self.repeats(since, now)
                return
            seen[form, filled] = now
            if not self.skip(schedule, alike.pop(form, now), now):
                alike[form] = now
            else:
                start = Noted(self.snapshot(), now.lags, ())

    def skip(self, schedule: Schedule, before: Noted, now: Noted) -> int:
        """Of two states that are alike but for what fills up: count what lies between as often as nothing that depends on that begins."""
        rises = [(b, b - a) for a, b in zip(before.filled, now.filled, strict=True)]
        times = min(((x.mark - 1 - x) // rise for x, rise in rises if rise > 0), default=0)
        if not times:
            return 0
        self.did.update(
            {name: times * (number - before.did[name]) for name, number in now.did.items()}
        )
        new = iter([Filling(x + times * rise, x.mark) for x, rise in rises])

        def filled(x: Any) -> Any:
            return next(new) if isinstance(x, Filling) else x

        for loop in schedule.loops:
            loop.states = jax.tree.map(filled, loop.states)
        for handle in self.place.handles.values():
            if any(isinstance(x, Filling) for x in jax.tree.leaves(handle.state)):
                handle.state = jax.tree.map(filled, handle.state)
        return times

    def repeats(self, since: Noted, now: Noted) -> None:
        """What lies between is the period."""
        found, did = (
            self.found,
            Counter({name: number - since.did[name] for name, number in now.did.items()}),
        )
        found.passes, found.warmup_rounds, found.warmup_rows = (
            now.did[ROUNDS],
            since.did[ROUNDS],
            since.did[ROWS],
        )
        found.warmup_steps, found.mean_lags = (
            _sampled(since.did),
            found.mean_lags[since.lags : now.lags],
        )
        found.rows, found.reported = did[ROWS], did[REPORTED]
        for name in (n.name for n in self.graph.nodes):
            counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
            for (node, resource, counter), number in did.items():
                if resource and node == name:
                    counts[resource][counter] = number
            found.steady[name] = Traffic(
                dict(counts),
                *(did[name, "", counter] for counter in ("taken", "given", "given_steps")),
            )

    def between(self, schedule: Schedule) -> None:
        """Called before the first round and behind each."""

    def signature(self, schedule: Schedule, clock: bool = True) -> tuple[Any, tuple[Filling, ...]]:
        """What is static about the states of all operators, resources and queues, and what fills up. Rounds from equal ones do the same.

        Versions count by their age in updates of their own learner, for on it depend the lags; beyond `OLD` all ages are one, or those of
        weights that nobody renews would never recur.
        """
        held = {name: list(channel.items) for name, channel in schedule.channels.items()}
        handles = {name: handle.state for name, handle in self.place.handles.items()}
        states = [
            {n: s for n, s in loop.states.items() if clock or not loop.units[n].op.reports}
            for loop in schedule.loops
        ]
        paths, tree = jax.tree_util.tree_flatten_with_path((states, handles, held))
        versions = {
            i: (self.clocks.of(path), np.asarray(x))
            for i, (path, x) in enumerate(paths)
            if is_version(path, x)
        }
        newest = self.clocks.newest(paths)
        ages = tuple(
            (i, tuple(np.minimum(newest[learner] - v, OLD).ravel().tolist()))
            for i, (learner, v) in versions.items()
        )
        told = {
            i
            for i, (path, x) in enumerate(paths)
            if isinstance(x, np.integer | np.bool_) and (self.counters or not is_counter(path, x))
        }
        facts = tuple(
            x.item() if i in told - versions.keys() else abstract(x)
            for i, (_, x) in enumerate(paths)
        )
        return (tree, facts, ages), tuple(x for _, x in paths if isinstance(x, Filling))

    def restless(self, schedule: Schedule, seen: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Return the numbers in operators' states that were another one each time that the trace looked, by node."""
        found: dict[str, str] = {}
        if len(seen) < 3:
            return found
        # Operators' states come first in a signature, so that leaves have the same numbers here and there.
        leaves = jax.tree_util.tree_flatten_with_path([loop.states for loop in schedule.loops])[0]
        for number, (path, x) in enumerate(leaves):
            if type(x) in (int, float) and len({facts[number] for facts in seen}) == len(seen):
                found[path[1].key] = jax.tree_util.keystr(path[2:])
        return found

    def watch(self, event: OperatorRan) -> None:
        """Note an item that a node yielded."""
        node, item = event.node, event.item
        if item is None:
            return
        self.did.update({(node, "", "given"): 1, (node, "", "given_steps"): event.steps})
        self.found.forms.setdefault(node, item)
        if isinstance(item, Batch):
            fields = f"in a batch whose fields are [{item.shape[0]}, {item.shape[1]}, ...]"
            wrong = [name for name, x in item.data.items() if tuple(x.shape[:2]) != item.shape]
            self.found.problems += [
                (node, f"yields {name} {list(item.data[name].shape)} {fields}") for name in wrong
            ]
        if isinstance(item, Trained):
            self.found.idle_steps = self.found.idle_steps or _sampled(self.snapshot())
            mean, most = (
                math.nan if isinstance(lag, jax.ShapeDtypeStruct) else float(lag)
                for lag in item.lag
            )
            self.found.lags.setdefault(node, []).append(most)
            self.found.mean_lags.append(mean)

    def called(self, resource: str, verb: str) -> None:
        """Note a verb for one stage that a node calls, and so to which stage a resource belongs."""
        node = self.place.ledger.at.node
        mine = self.stage[node]
        owner, first = self.owners.setdefault(resource, (mine, node))
        if owner != mine and resource not in self.trespassed:
            self.trespassed.add(resource)
            text = f"calls {resource}.{verb}, but {resource} belongs to the stage of {first}, which may be at work with it at the same time"
            self.found.problems.append(
                (
                    node,
                    f"{text}; move {node} to where {first} is, or {first} to the same side of the queue",
                )
            )

    def failed(self, node: str, error: Exception) -> None:
        """Note a node's error."""
        if isinstance(error, Opaque):
            self.found.opaque[node] = error.message
        else:
            self.found.problems.append(
                (node, error.message if isinstance(error, FlowrlError) else told(error))
            )

    def snapshot(self) -> Did:
        """What was done so far."""
        did = Counter(self.did)
        for (node, resource), counters in self.place.ledger.counts.items():
            did.update({(node, resource, name): number for name, number in counters.items()})
        for (_, node), number in self.place.ledger.got.items():
            did[node, "", "taken"] += number
        return did


def _sampled(did: Did) -> int:
    return sum(number for (_, _, name), number in did.items() if name == "sampled_steps")
