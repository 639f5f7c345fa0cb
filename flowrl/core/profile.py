"""Where the time of a run went up to a moment, and what flowed: what tables, reports and explanations are made of."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core.clock import IDLE, Spent, by_kind


@dataclass(frozen=True)
class Profile:
    """A run up to a moment, all of it plain data. The difference of two, ``later - earlier``, is the time between them."""

    seconds: float = 0.0
    """Since it was opened."""
    rows: int = 0
    env_steps: int = 0
    processes: Mapping[str, Spent] = field(default_factory=dict)
    """By process or thread: seconds by node and kind of work."""
    stages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By such a thread, the nodes that it runs."""
    counts: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    """By node and resource: what the verbs counted."""
    edges: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By edge: items, and steps in them."""
    queues: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By queue: the items that it holds, and may hold."""
    ops: Mapping[str, str] = field(default_factory=dict)
    """By node: the name of its operator."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By resource: what its handle tells of itself."""
    cores: int = 1
    busy: float = 0.0
    """Seconds of all cores of this machine at work, with whatever; NaN where the system does not tell."""
    findings: tuple[str, ...] = ()

    def __sub__(self, earlier: Profile) -> Profile:
        return Profile(
            self.seconds - earlier.seconds,
            self.rows - earlier.rows,
            self.env_steps - earlier.env_steps,
            {
                name: _less(spent, earlier.processes.get(name, {}))
                for name, spent in self.processes.items()
            },
            self.stages,
            {
                key: _less(numbers, earlier.counts.get(key, {}))
                for key, numbers in self.counts.items()
            },
            {
                edge: (
                    n - earlier.edges.get(edge, (0, 0))[0],
                    s - earlier.edges.get(edge, (0, 0))[1],
                )
                for edge, (n, s) in self.edges.items()
            },
            self.queues,
            self.ops,
            {
                name: _since(facts, earlier.facts.get(name, {}))
                for name, facts in self.facts.items()
            },
            self.cores,
            self.busy - earlier.busy,
            self.findings,
        )

    def wall(self, process: str) -> float:
        """The seconds of a process, which are the sum of all that it did."""
        return sum(self.processes[process].values())

    def uptime(self, process: str) -> float:
        """The seconds of a process without those in which it was started or compiled, at least 1e-9: what its speed and shares are of."""
        return max(self.wall(process) - by_kind(self.processes[process]).get("start", 0.0), 1e-9)

    @property
    def going(self) -> float:
        """The seconds in which no thread that runs stages compiled, at least 1e-9."""
        return max(
            self.seconds
            - max(
                (self.wall(t) - self.uptime(t) for t in self.stages if t in self.processes),
                default=0.0,
            ),
            1e-9,
        )

    def node_seconds(self, node: str) -> dict[str, float]:
        """The seconds of a node by kind of work, in all threads that run stages."""
        return by_kind(
            {
                key: x
                for thread in self.stages
                for key, x in self.processes.get(thread, {}).items()
                if key[0] == node
            }
        )

    def work(self, thread: str) -> dict[tuple[str, str], float]:
        """What a thread that runs stages does, by node and kind. What waits for an update behind the node that dispatched it is that node's."""
        names = self.stages[thread]
        trainer = next(
            (
                n
                for n in names
                if any(c.get("updates") for (m, _), c in self.counts.items() if m == n)
            ),
            "",
        )
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (node, kind), seconds in self.processes[thread].items():
            if kind in IDLE or kind == "start":
                continue
            late = (
                trainer
                and kind == "update"
                and (not node or (node in names and names.index(node) > names.index(trainer)))
            )
            found[trainer if late else node, kind] += seconds
        return dict(found)

    def sampling(self) -> list[str]:
        """The threads that sampling has to do with: what it feeds; all of them, if it ever waits for room."""
        samplers = {
            node for (node, _), counts in self.counts.items() if counts.get("sampled_steps")
        }
        fed = set(samplers)
        for node in self.ops:  # what comes before stands before
            fed |= {node} if any(b == node and a in fed for a, b in self.edges) else set()
        held = any(
            self.node_seconds(names[0]).get("blocked", 0.0) > 0
            for names in self.stages.values()
            if samplers & {*names}
        )
        return [
            thread
            for thread, names in self.stages.items()
            if held or not samplers or not names or fed & {*names}
        ]

    def total(self, counter: str) -> int:
        """A counter, summed over all nodes."""
        return sum(numbers.get(counter, 0) for numbers in self.counts.values())

    def workers(self, resource: str) -> dict[str, dict[str, float]]:
        """By worker of a resource that is elsewhere: its seconds by kind."""
        return {
            name: by_kind(spent)
            for name, spent in self.processes.items()
            if name.startswith(f"{resource}, ")
        }

    def plain(self) -> dict[str, Any]:
        """As plain data, for `Profile.of`."""
        plain = asdict(self)
        for name in ("counts", "edges"):
            plain[name] = [[*key, value] for key, value in plain[name].items()]
        plain["processes"] = {
            name: [[*key, value] for key, value in spent.items()]
            for name, spent in self.processes.items()
        }
        return plain

    @staticmethod
    def of(told: Mapping[str, Any]) -> Profile:
        """What `plain` gave."""
        plain = dict(told)
        plain["processes"] = {
            name: {(node, kind): x for node, kind, x in spent}
            for name, spent in plain["processes"].items()
        }
        plain["counts"] = {(node, resource): numbers for node, resource, numbers in plain["counts"]}
        plain["edges"] = {(a, b): tuple(numbers) for a, b, numbers in plain["edges"]}
        plain["queues"] = {name: tuple(x) for name, x in plain["queues"].items()}
        plain["stages"] = {name: tuple(x) for name, x in plain["stages"].items()}
        return Profile(**{**plain, "findings": tuple(plain["findings"])})


def to_text(whole: Profile, steady: Profile) -> str:
    """A run and the part of it that tells its speed, as JSON."""
    return json.dumps({"whole": whole.plain(), "steady": steady.plain()}) + "\n"


def from_text(text: str) -> tuple[Profile, Profile]:
    """What `to_text` wrote."""
    told = json.loads(text)
    return Profile.of(told["whole"]), Profile.of(told["steady"])


def use(spent: Mapping[str, float]) -> float:
    """The share of its time in which a process works. To be started is no work."""
    return (sum(spent.values()) - idle(spent) - spent.get("start", 0.0)) / max(
        sum(spent.values()), 1e-9
    )


def idle(spent: Mapping[str, float]) -> float:
    """The seconds in which nothing of the graph was done."""
    return sum(spent.get(kind, 0.0) for kind in IDLE)


def _less(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    """What was added; a process that was started anew began at 0. A clock may find out later that time was of another kind."""
    anew = sum(now.values()) < sum(before.values())
    return {key: x if anew else max(x - before.get(key, 0), 0) for key, x in now.items()}


def _since(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Lists count what happened, so their differences do; all else is as it is now."""
    return {
        key: [a - b for a, b in zip(x, before[key], strict=True)]
        if isinstance(x, list) and len(before.get(key, ())) == len(x)
        else x
        for key, x in now.items()
    }


def machine() -> tuple[int, float]:
    """The cores of this machine, and the seconds that they were at work since it was started; NaN where the system does not tell."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.cpu_count() or 1, float("nan")
    cores: Iterable[str] = [line for line in lines if line.startswith("cpu") and line[3].isdigit()]
    user, nice, system, _, _, irq, soft = map(int, lines[0].split()[1:8])
    return max(1, len(list(cores))), (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
