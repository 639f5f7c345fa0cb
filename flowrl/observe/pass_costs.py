"""What the passes of a measured run cost: the numbers with which a cluster is simulated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist, fmean
from typing import Any

import jax

from flowrl.core.clock import IDLE
from flowrl.core.items import nbytes
from flowrl.core.profile import DRIVER, Profile
from flowrl.errors import GraphError
from flowrl.graph.bounds import Bounds
from flowrl.graph.graph import Node
from flowrl.graph.plan import Plan
from flowrl.observe.what_if import FULL

OF_RUNNERS = ("step", "reset", "inference", "concat", "weight sync")
"""The kinds of work of a sampling node that runners do, where they are in its process."""


@dataclass(frozen=True)
class Sampling:
    """How a node asks runners for rollouts."""

    in_flight: int = 1
    """Requests to each runner at once."""
    min_fraction: float | None = 1.0
    """The share of the runners whose rollouts end a round; None for rollouts as they come."""
    ask: float = 0.0
    """Seconds to send one request."""
    receive: float = 0.0
    """Seconds to receive one rollout and to add it to the item."""


@dataclass(frozen=True)
class NodeCost:
    """What a node costs and does with an item. All seconds are those of its stage's thread."""

    name: str
    """The node."""
    after: tuple[str, ...] = ()
    """The nodes whose items it takes."""
    per_item: float = 0.0
    """Seconds for each item."""
    per_step: float = 0.0
    """Seconds for each step in an item, besides."""
    given: float = 1.0
    """Items that it yields for each that it takes."""
    given_steps: float | None = None
    """Steps in each item that it yields; None for those that it takes."""
    gathers: int = 0
    """It joins items until there are so many steps; 0 for none."""
    sampling: Sampling | None = None
    """How it asks the runners; None where it does not."""
    queue: Bounds | None = None
    """The bounds of the queue that it is; None where it is none."""
    paced: Fraction | None = None
    """Updates per rollout by which a queue paces requests; None where it does not."""
    adds: bool = False
    """Whether it adds what it takes to the replay."""
    draws: bool = False
    """Whether it samples batches from the replay, of `given_steps` steps each."""
    draws_per_step: float | None = None
    """Batches for each step that is added; None: as many as it can, or one with each item."""
    updates: float = 0.0
    """Updates of a learner with each item."""
    publishes: float = 0.0
    """Publications of weights with each item."""


@dataclass(frozen=True)
class RunnerCost:
    """What a rollout costs a runner."""

    seconds: tuple[float, ...]
    """By measured runner: the seconds of a rollout, without those of waiting for a request."""
    steps: int
    """Steps (T x B) of a rollout."""
    cpu: float = 1.0
    """The share of the seconds in which it needs a core; in the rest it sleeps or waits."""
    spread: float = 0.0
    """The standard deviation of a rollout's seconds, as a share of them."""
    answer: float = 0.0
    """Seconds from the end of a rollout until its result is there, besides the network's."""
    env_share: float = 1.0
    """Environment steps for each step of a rollout; below 1 where rows hold resets."""
    nbytes: int = 0
    """Bytes of a rollout."""
    weight_bytes: int = 0
    """Bytes of the weights that a publication sends."""


@dataclass(frozen=True)
class Costs:
    """A graph and what its parts cost, measured in one run."""

    stages: tuple[tuple[str, ...], ...]
    """The nodes of each stage."""
    nodes: Mapping[str, NodeCost]
    """By name: what a node costs, in the order of the graph."""
    runner: RunnerCost
    """What a rollout costs a runner."""
    count: int = 1
    """The runners of the measured run."""
    side_by_side: bool = True
    """Whether these worked side by side in other processes, and did not take turns in one."""
    cores: int = 1
    """The cores of the machine on which it ran."""
    measured_speed: float = math.nan
    """The environment steps per second that it made."""
    stage_cpu: float = 1.0
    """The share of a stage's working seconds in which it needs a core."""
    notes: tuple[str, ...] = ()
    """What the run could not say, and what is assumed in its place."""


def costs_of(plan: Plan, p: Profile) -> Costs:
    """Return what the passes of a run cost.

    Args:
        plan: of the graph that is to be simulated, with the number of runners of the run.
        p: the profile of the run, or of a part of it.

    Raises:
        GraphError: it has no runners, several sets of them, made no update, or was one program.
    """
    return _Reader(plan, p).costs()


class _Reader:
    """Reads the costs out of a profile."""

    def __init__(self, plan: Plan, p: Profile) -> None:
        self.plan, self.p, self.graph = plan, p, plan.graph
        self.notes: list[str] = []
        self.samplers = {n: r for (n, r), c in p.counts.items() if "sampled_steps" in c}
        self._check()
        self.runners = next(iter(self.samplers.values()))
        self.facts = p.facts[self.runners]
        self.remote = bool(self.facts["remote"])
        self.rollouts = sum(self.facts["rollouts"])
        self.work = self._work()

    def _check(self) -> None:
        """Raise an error if the run can't be simulated."""
        resources = {*self.samplers.values()}
        wrong = way = ""
        if len(resources) != 1:
            wrong = f"needs a graph with one set of runners, got {len(resources)}"
            way = "what is not sampled by runners does not grow with a cluster"
        elif "rollouts" not in self.p.facts.get(next(iter(resources)), {}):
            wrong = "the run does not say what a rollout cost, for it was one program"
            way = "measure one with --runtime ray, or local"
        elif not self.p.total("updates") or not sum(
            self.p.facts[next(iter(resources))]["rollouts"]
        ):
            wrong = "the run made no update after its first row, so that nothing was measured"
            way = "take a longer run"
        if wrong:
            raise GraphError(f"{wrong}; {way}", self.graph.name)

    def _work(self) -> dict[tuple[str, str], float]:
        """Return the working seconds of all stages, by node and kind of work.

        What no node did is booked to the last node, which closes rows. The time between rows is
        left out: it holds what happens once, such as the end of the run.
        """
        work: defaultdict[tuple[str, str], float] = defaultdict(float)
        for thread, names in self.p.stages.items():
            last = names[-1] if names else ""
            for (node, kind), seconds in self.p.work(thread).items():
                work[node or last, kind] += seconds
        return work

    def costs(self) -> Costs:
        """Return all of them."""
        runner_work, cpu, stage_cpu = self._runner_work()
        nodes = {node.name: self._node(node) for node in self.graph.nodes}
        spread, answer = self._rounds(runner_work)
        used = self.p.busy / max(self.p.seconds * self.p.cores, 1e-9)
        if used >= FULL:
            self.notes.append(
                f"the {self.p.cores} cores were full ({used:.0%}) while the run was measured, so "
                "its seconds hold waits for a core; take fewer runners, or an idle machine"
            )
        sampler = next(iter(self.samplers))
        counts = self.plan.counts(sampler)
        # What came after the last row was sampled, too, in the same seconds.
        env_steps = self.p.env_steps + self.facts.get("unreported", 0)
        calls = self.plan.found.steady[sampler].given
        item = self.plan.found.first_items.get(sampler)
        item_bytes = sum(map(nbytes, jax.tree.leaves(item)))
        publishes = self.p.total("publishes")
        runner = RunnerCost(
            seconds=tuple(runner_work),
            steps=round(counts["sampled_steps"] / max(counts["requests"], 1)),
            cpu=cpu,
            spread=spread,
            answer=answer,
            env_share=env_steps / max(self.p.total("sampled_steps"), 1),
            nbytes=round(item_bytes * calls / max(counts["requests"], 1)),
            weight_bytes=self.p.total("weight_bytes") // max(publishes, 1),
        )
        return Costs(
            stages=self.graph.stages(),
            nodes=nodes,
            runner=runner,
            count=self.facts["count"],
            side_by_side=self.remote,
            cores=self.p.cores,
            measured_speed=env_steps / self.p.going,
            stage_cpu=stage_cpu,
            notes=tuple(self.notes),
        )

    # -- runners

    def _runner_work(self) -> tuple[list[float], float, float]:
        """Return the seconds of a rollout by runner, and the shares in which cores are needed.

        The shares are those of the runners' seconds and of the stages'.
        """
        stages = sum(self.work.values())
        if self.remote:
            workers = self.p.workers(self.runners)
            spent = {name: _working(kinds) for name, kinds in workers.items()}
            each = [
                spent[f"{self.runners}, {index}"] / rollouts
                for index, rollouts in enumerate(self.facts["rollouts"])
                if rollouts and f"{self.runners}, {index}" in spent
            ]
            step = sum(kinds.get("step", 0.0) for kinds in workers.values())
            cpu = sum(self.p.cpu.get(name, 0.0) for name in workers)
            of_stages = min(1.0, self.p.cpu.get(DRIVER, math.inf) / max(stages, 1e-9))
            if cpu:
                return each, min(1.0, cpu / max(sum(spent.values()), 1e-9)), of_stages
            return (
                each,
                self._share_of_busy(sum(spent.values()), step, stages, self.p.busy),
                of_stages,
            )
        mine = {
            key: s
            for key, s in self.work.items()
            if key[0] in self.samplers and key[1] in OF_RUNNERS
        }
        for key in mine:
            del self.work[key]
        spent_here = sum(mine.values())
        step = sum(s for (_, kind), s in mine.items() if kind == "step")
        self.notes.append(
            "the run was local: its runners took turns, so what calls of other processes cost is "
            "not known, and taken for 0; a run with --runtime ray knows it"
        )
        busy = self.p.cpu.get(DRIVER, self.p.busy)
        share = self._share_of_busy(spent_here, step, stages - spent_here, busy)
        return [spent_here / self.rollouts], share, 1.0

    def _share_of_busy(self, spent: float, step: float, stages: float, busy: float) -> float:
        """Return the share of the runners' seconds that needs cores, by how busy these were.

        Args:
            spent: the seconds of the runners.
            step: those of them in which environments stepped, which may have slept.
            stages: the working seconds of the stages.
            busy: the seconds of cores at work; NaN where they are not known.
        """
        if math.isnan(busy):
            self.notes.append(
                "this system does not report how long cores worked, so every second of a runner is "
                "taken to need one"
            )
            return 1.0
        if self.remote:
            self.notes.append(
                "the run did not measure the seconds of cores by runner, so they are what was left "
                "of the machine's, which may hold other programs"
            )
        other = spent - step
        of_steps = min(max(busy - stages - other, 0.0), step)
        return float((other + of_steps) / max(spent, 1e-9))

    def _rounds(self, each: list[float]) -> tuple[float, float]:
        """Return how much rollouts vary, as a share, and the seconds until a result is there.

        Both follow from rounds, at whose ends the runners wait for the slowest.
        """
        in_rounds, idle = self.facts.get("rounds", (0.0, 0.0))
        count = self.facts["count"]
        mean = fmean(each)
        if not self.remote or not in_rounds:
            return 0.0, 0.0
        rounds = self.rollouts / count
        answer = max(0.0, (in_rounds - idle) / (rounds * count) - mean)
        gap = idle / (rounds * count)
        if count < 2:
            self.notes.append("with one runner it is not known how much rollouts vary: not at all")
            return 0.0, answer
        # Results are received one after another, and some runners are always slower.
        known = (count - 1) / 2 * self._receive() + max(each) - mean
        return max(0.0, gap - known) / expected_maximum(count) / max(mean, 1e-9), answer

    # -- nodes

    def _receive(self) -> float:
        """Return the seconds to receive one rollout: half of those of moving data, and others."""
        transfer = sum(
            s for (n, k), s in self.work.items() if n in self.samplers and k == "transfer"
        )
        others = sum(s for (n, k), s in self.work.items() if n in self.samplers and k != "transfer")
        return float((transfer / 2 + others) / self.rollouts)

    def _node(self, node: Node) -> NodeCost:
        """Return what a node costs and does."""
        name, op = node.name, node.op
        counts = dict.fromkeys(("updates", "publishes", "draws", "added_steps"), 0)
        for (of, _), numbers in self.p.counts.items():
            if of == name:
                for key in counts:
                    counts[key] += numbers.get(key, 0)
        items, steps = self._taken(name)
        given, given_steps = self._given(name)
        seconds = sum(s for (of, _), s in self.work.items() if of == name)
        about: dict[str, Any] = {"name": name, "after": node.after}
        if name in self.samplers:
            return NodeCost(**about, sampling=self._sampling(op))
        if op.queue:
            about |= {"queue": op.queue, "paced": self._paced(op)}
            return NodeCost(**about, per_item=seconds / max(items, 1))
        if counts["draws"]:
            return NodeCost(
                **about,
                per_item=seconds / counts["draws"],
                draws=True,
                draws_per_step=self._draws_per_step(op),
                given_steps=given_steps / max(given, 1),
            )
        about["updates"] = counts["updates"] / max(items, 1)
        about["publishes"] = counts["publishes"] / max(items, 1)
        about["adds"] = bool(counts["added_steps"])
        # Up to the update, work grows with the steps of an item; afterwards an item has none.
        if counts["updates"] or self._before_update(name):
            about["per_step"] = seconds / max(steps, 1)
        else:
            about["per_item"] = seconds / max(items, 1)
        if any(kind.__name__ == "Concat" for kind in type(op).__mro__):
            about["gathers"] = getattr(op, "batch_size")  # noqa: B009 - no operator is known here
        elif given and given != items:
            about |= {"given": given / max(items, 1), "given_steps": given_steps / given}
        return NodeCost(**about)

    def _taken(self, name: str) -> tuple[int, int]:
        """Return the items that a node took, and the steps in them."""
        edges = [numbers for (_, to), numbers in self.p.edges.items() if to == name]
        return sum(items for items, _ in edges), sum(steps for _, steps in edges)

    def _given(self, name: str) -> tuple[int, int]:
        """Return the items that a node yielded, and the steps in them: one edge has all of them."""
        edges = [numbers for (of, _), numbers in self.p.edges.items() if of == name]
        return max(edges, default=(0, 0))

    def _before_update(self, name: str) -> bool:
        """Return whether items of a node reach one that updates a learner."""
        trainers = {node for (node, _), c in self.p.counts.items() if c.get("updates")}
        return bool(trainers & self._reached(name))

    def _reached(self, name: str) -> set[str]:
        """Return the nodes downstream of one."""
        found = {name}
        for node in self.graph.nodes:
            if found & {*node.after}:
                found.add(node.name)
        return found - {name}

    def _sampling(self, op: Any) -> Sampling:
        """Return how a node asks for rollouts, by the settings of `ParallelSample`."""
        transfer = sum(
            s for (n, k), s in self.work.items() if n in self.samplers and k == "transfer"
        )
        ask = transfer / 2 / self.rollouts
        if getattr(op, "mode", "sync") == "async":
            return Sampling(op.in_flight, None, ask, self._receive())
        return Sampling(1, getattr(op, "min_fraction", 1.0), ask, self._receive())

    def _paced(self, op: Any) -> Fraction | None:
        """Return the updates per rollout by which a queue paces requests, if it does."""
        if getattr(op, "on_stale", "drop") != "pace":
            return None
        return Fraction(self.plan.total("updates"), max(self.plan.total("requests"), 1))

    def _draws_per_step(self, op: Any) -> float | None:
        """Return the batches for each step that is added; None where nothing ties them together."""
        ratio = getattr(op, "updates_per_step", None)
        return None if ratio is None else float(ratio)


def expected_maximum(count: int) -> float:
    """Return about how many standard deviations the largest of normal numbers is above the mean.

    >>> round(expected_maximum(2), 2), round(expected_maximum(16), 2)
    (0.59, 1.77)
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _working(kinds: Mapping[str, float]) -> float:
    """Return the seconds of a worker in which it did something for a rollout."""
    return sum(seconds for kind, seconds in kinds.items() if kind not in (*IDLE, "start"))
