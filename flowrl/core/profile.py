"""Profile of a run: where its time went up to a moment, and what flowed.

Tables, reports and explanations are made of it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flowrl.core.clock import IDLE, Spent, by_kind

DRIVER = "this process"
"""The process that drives a run, as `Profile.cpu` names it."""
READ_SECONDS = 1.0
"""The most seconds between the readings of two clocks of one profile."""


@dataclass(frozen=True)
class Profile:
    """A run up to a moment, as plain data.

    The difference of two profiles, ``later - earlier``, is the profile of the time between them.
    """

    seconds: float = 0.0
    """Seconds since the run was opened."""
    rows: int = 0
    """Rows that closed."""
    env_steps: int = 0
    """Environment steps of these rows."""
    processes: Mapping[str, Spent] = field(default_factory=dict)
    """By process or thread: seconds by node and kind of work."""
    stages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By thread that runs stages: the nodes that it runs."""
    counts: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    """By node and resource: what the verbs counted."""
    edges: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By edge: items, and steps in them."""
    queues: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By queue: the items that it holds, and the items that it may hold."""
    ops: Mapping[str, str] = field(default_factory=dict)
    """By node: the name of its operator."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By resource: the facts that its handle reports."""
    cores: int = 1
    """The cores of this machine."""
    busy: float = 0.0
    """Seconds of all cores of this machine at any work; NaN where the system does not report it."""
    findings: tuple[str, ...] = ()
    """The findings about the run, as text."""
    rows_before: int = 0
    """Rows that closed before the beginning of this part of the run."""
    cpu: Mapping[str, float] = field(default_factory=dict)
    """By process: the seconds in which cores ran its code, where they were measured.

    That is `DRIVER` with all of its threads, and each worker in another process.
    """

    def __sub__(self, earlier: Profile) -> Profile:
        return replace(
            self,
            seconds=self.seconds - earlier.seconds,
            rows=self.rows - earlier.rows,
            rows_before=self.rows_before + earlier.rows,
            env_steps=self.env_steps - earlier.env_steps,
            processes={
                name: _added(spent, earlier.processes.get(name, {}))
                for name, spent in self.processes.items()
            },
            counts={
                key: _added(numbers, earlier.counts.get(key, {}))
                for key, numbers in self.counts.items()
            },
            edges=self._edges_since(earlier),
            facts={
                name: _since(facts, earlier.facts.get(name, {}))
                for name, facts in self.facts.items()
            },
            busy=self.busy - earlier.busy,
            cpu={
                name: _seconds_since(seconds, earlier.cpu.get(name, 0.0))
                for name, seconds in self.cpu.items()
            },
        )

    def _edges_since(self, earlier: Profile) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the items and steps that passed each edge since an earlier moment."""
        since = {}
        for edge, (items, steps) in self.edges.items():
            items_before, steps_before = earlier.edges.get(edge, (0, 0))
            since[edge] = (items - items_before, steps - steps_before)
        return since

    def wall(self, process: str) -> float:
        """Return the seconds of a process, which are the sum over all kinds of work."""
        return sum(self.processes[process].values())

    def uptime(self, process: str) -> float:
        """Return the seconds of a process without those in which it was started or compiled.

        Its speed and its shares are computed from them. They are at least 1e-9.
        """
        return max(self.wall(process) - by_kind(self.processes[process]).get("start", 0.0), 1e-9)

    @property
    def going(self) -> float:
        """The seconds in which no thread that runs stages compiled, at least 1e-9."""
        threads = [thread for thread in self.stages if thread in self.processes]
        # Threads compile at the same time: the longest of them is what the run waited for.
        longest_start = max((self.wall(t) - self.uptime(t) for t in threads), default=0.0)
        return max(self.seconds - longest_start, 1e-9)

    def node_seconds(self, node: str) -> dict[str, float]:
        """Return the seconds of a node by kind of work, summed over the threads that run stages."""
        spent: dict[str, float] = {}
        for thread in self.stages:
            for (name, kind), seconds in self.processes.get(thread, {}).items():
                if name == node:
                    spent[kind] = spent.get(kind, 0.0) + seconds
        return spent

    def work(self, thread: str) -> dict[tuple[str, str], float]:
        """Return the seconds of a thread that runs stages, by node and kind of work.

        Seconds in which a node after the one that dispatched an update waits for that update count
        for the one that dispatched it.
        """
        names = self.stages[thread]
        spent: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (node, kind), seconds in self.processes[thread].items():
            if kind in IDLE or kind == "start":
                continue
            trainer = self._trainer_before(node, names) if kind == "update" else node
            spent[trainer, kind] += seconds
        return dict(spent)

    def between_rows(self, thread: str) -> float:
        """Return the seconds of a thread between rows: those of the code that runs the graph."""
        return by_kind(self.processes[thread]).get("outside", 0.0)

    def _trainer_before(self, node: str, names: tuple[str, ...]) -> str:
        """Return the node that dispatched the update for which this one waits.

        Args:
            node: the node; empty for the thread itself, which runs after its nodes.
            names: the nodes of the thread, in order.

        Returns:
            Of the nodes upstream that updated a learner, the last one; the node itself if there is
            none, or if it updated one.
        """
        updating = {name for (name, _), counts in self.counts.items() if counts.get("updates")}
        if node in updating:
            return node
        trainers = [name for name in names if name in updating]
        return next(
            (x for x in reversed(trainers) if not node or node in self._downstream({x})), node
        )

    def sampling(self) -> list[str]:
        """Return the threads that sampling depends on.

        They run the samplers or nodes downstream of them; they are all threads if sampling ever
        waited for capacity downstream.
        """
        samplers = {
            node for (node, _), counts in self.counts.items() if counts.get("sampled_steps")
        }
        fed = self._downstream(samplers)
        blocked = any(
            self.node_seconds(names[0]).get("blocked", 0.0) > 0
            for names in self.stages.values()
            if samplers & {*names}
        )
        return [
            thread
            for thread, names in self.stages.items()
            if blocked or not samplers or not names or fed & {*names}
        ]

    def _downstream(self, nodes: set[str]) -> set[str]:
        """Return these nodes and all nodes downstream of them."""
        reached = set(nodes)
        # One pass is enough: in `ops` a node stands after those upstream of it.
        for node in self.ops:
            if any(target == node and source in reached for source, target in self.edges):
                reached.add(node)
        return reached

    def total(self, counter: str) -> int:
        """Return a counter, summed over all nodes and resources."""
        return sum(numbers.get(counter, 0) for numbers in self.counts.values())

    def workers(self, resource: str) -> dict[str, dict[str, float]]:
        """Return the seconds by kind of work, by worker of a resource with remote workers."""
        return {
            name: by_kind(spent)
            for name, spent in self.processes.items()
            if name.startswith(f"{resource}, ")
        }

    def plain(self) -> dict[str, Any]:
        """Return the profile as plain data, which `Profile.of` reads."""
        # The keys of JSON are texts, so pairs become the beginnings of lists.
        plain = asdict(self)
        for name in ("counts", "edges"):
            plain[name] = _entries_of(plain[name])
        plain["processes"] = {name: _entries_of(spent) for name, spent in self.processes.items()}
        return plain

    @staticmethod
    def of(data: Mapping[str, Any]) -> Profile:
        """Return the profile of which `plain` returned the data."""
        plain = dict(data)
        plain["processes"] = {
            name: _spent_of(entries) for name, entries in plain["processes"].items()
        }
        plain["counts"] = {(node, resource): numbers for node, resource, numbers in plain["counts"]}
        plain["edges"] = {
            (source, target): tuple(numbers) for source, target, numbers in plain["edges"]
        }
        plain["queues"] = {name: tuple(numbers) for name, numbers in plain["queues"].items()}
        plain["stages"] = {name: tuple(nodes) for name, nodes in plain["stages"].items()}
        return Profile(**{**plain, "findings": tuple(plain["findings"])})


def _entries_of(by_pair: Mapping[tuple[str, str], Any]) -> list[list[Any]]:
    return [[*pair, value] for pair, value in by_pair.items()]


def _spent_of(entries: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    return {(node, kind): seconds for node, kind, seconds in entries}


def to_text(whole: Profile, steady: Profile) -> str:
    """Return the profile of a run, and that of the part which shows its speed, as JSON."""
    return json.dumps({"whole": whole.plain(), "steady": steady.plain()}) + "\n"


def from_text(text: str) -> tuple[Profile, Profile]:
    """Return the two profiles that `to_text` wrote."""
    both = json.loads(text)
    return Profile.of(both["whole"]), Profile.of(both["steady"])


def use(spent: Mapping[str, float]) -> float:
    """Return the share of its time in which a process works; being started is no work."""
    seconds = sum(spent.values())
    return (seconds - idle(spent) - spent.get("start", 0.0)) / max(seconds, 1e-9)


def idle(spent: Mapping[str, float]) -> float:
    """Return the seconds in which no work of the graph was done."""
    return sum(spent.get(kind, 0.0) for kind in IDLE)


def _seconds_since(now: float, before: float) -> float:
    """Return the seconds since an earlier moment of a process, which may have been restarted."""
    return now - before if now >= before else now


def _added(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what was added to numbers since an earlier moment."""
    # A process that was started again began at 0. The sum of one that goes on may be a little less
    # while the run stands between two rows, for what is taken off it is not read at the same time.
    if sum(now.values()) < sum(before.values()) - READ_SECONDS:
        return dict(now)
    # A clock may find out later that time was of another kind: what was added is never negative.
    return {key: max(number - before.get(key, 0), 0) for key, number in now.items()}


def _since(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the time since an earlier moment.

    Lists count events, so they become differences; all other facts are as they are now.
    """
    facts = {}
    for key, fact in now.items():
        comparable = isinstance(fact, list) and len(before.get(key, ())) == len(fact)
        facts[key] = _differences(fact, before[key]) if comparable else fact
    return facts


def _differences(now: list[Any], before: list[Any]) -> list[Any]:
    return [number - earlier for number, earlier in zip(now, before, strict=True)]
