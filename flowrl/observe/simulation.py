"""Simulation of a graph on a cluster: its stages, queues, requests, weights and the network."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from flowrl.errors import GraphError
from flowrl.graph.stages import Channel
from flowrl.observe.pass_costs import Costs, NodeCost, Sampling
from flowrl.observe.simulated_runners import Cluster, Machines, SimulatedRunners
from flowrl.observe.virtual_time import Process, Servers, Signal, World
from flowrl.rollout.handle import allowed_requests, part_of

WARM_UP = 6
"""Rollouts of each runner before anything is counted."""
COUNTED = 12
"""Rollouts of each runner that are counted, at least."""
LEAST_ROLLOUTS, LEAST_UPDATES = 200, 10
"""The rollouts and updates of all together that are counted, at least."""
FRUITLESS = 50
"""After so many more rounds, or batches, without the updates that are wanted, a run is stuck."""
DRAWING = 1e-6
"""The least seconds to sample a batch, so that one that is sampled freely takes time."""
FINDING = 0.7e-6
"""Seconds to find the next result, for each runner that has requests.

They are what Ray's ``wait`` (0.3e-6) and `AsyncRequests` (0.4e-6) took for each of 1,024, on a
machine of 2 cores. In a run with few runners it is too little to be seen.
"""
RUNNERS, LEARNER, RECEIVING = "the runners", "the learner", "receiving rollouts"
CORES, FIRST_CORES = "cores of the nodes", "cores of the learner's node"
NETWORK = "network of the learner's node"
"""What parts of a run are called."""
ALIKE = 0.9
"""The cores of all nodes are named, not the first one's alone, if others work at least this share
of its time."""


@dataclass(frozen=True)
class Flow:
    """What a graph on a cluster does, over a part of the simulated time."""

    seconds: float
    """The seconds of that part."""
    env_steps: float
    """Environment steps that were sampled."""
    updates: float
    """Updates of learners."""
    lag_mean: float
    """Mean policy lag of what was trained, in updates; NaN where it can't be known."""
    lag_max: float
    """Largest policy lag, in updates; NaN where it can't be known."""
    bytes_in: float
    """Bytes that came to the first node."""
    bytes_out: float
    """Bytes that left the first node."""
    busy_cores: float
    """Cores of all nodes that worked, on average."""
    use: dict[str, float]
    """By part of the run, such as ``the runners``: the share of the time in which it worked."""


@dataclass(slots=True)
class Item:
    """What flows from node to node."""

    steps: float
    """Steps in it."""
    versions: tuple[int, ...] = ()
    """By rollout in it: the policy version that sampled it; empty where that is not known."""


@dataclass(slots=True)
class Totals:
    """What was counted since the beginning; the difference of two is a `Flow`."""

    now: float = 0.0
    """The virtual time."""
    sampled: int = 0
    """Rollouts that were received, without those that wait in queues.

    While a queue fills, more is received than goes on for long.
    """
    updates: int = 0
    """Updates of learners."""
    lags: float = 0.0
    """Sum over updates of the mean policy lag of their rollouts."""
    lagged: int = 0
    """Updates in that sum."""
    bytes_in: int = 0
    """Bytes that came to the first node."""
    bytes_out: int = 0
    """Bytes that left it."""
    service: float = 0.0
    """Seconds that runners slept and computed for rollouts."""
    worked: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By part of the graph: the seconds in which a stage worked at it."""
    used: tuple[float, ...] = ()
    """The seconds in which servers were taken: the cores of each node, the network in and out."""


def simulate(costs: Costs, cluster: Cluster, runners: int) -> Flow:
    """Return what a graph does with so many runners on a cluster.

    Args:
        costs: of its parts.
        cluster: the machines.
        runners: how many runners sample.

    Raises:
        GraphError: no update comes of what the runners sample.
    """
    return Simulation(costs, cluster, runners).flow()


class Simulation:
    """A graph on a cluster in virtual time.

    Args:
        costs: of the parts of the graph.
        cluster: the machines.
        runners: how many runners sample.
    """

    def __init__(self, costs: Costs, cluster: Cluster, runners: int) -> None:
        self.costs, self.cluster = costs, cluster
        self.world = World()
        self.machines = Machines(self.world, cluster)
        nodes = costs.nodes
        in_flight = max(n.sampling.in_flight for n in nodes.values() if n.sampling)
        self.runners = SimulatedRunners(self.world, costs.runner, self.machines, runners, in_flight)
        self.changed = Signal(self.world)
        """Given whenever something changes for which a stage may wait."""
        self.channels = {
            name: Channel(name, node.after, node.queue.capacity, node.queue.full, node.queue.order)
            for name, node in nodes.items()
            if node.queue
        }
        self.after: dict[str, list[NodeCost]] = {name: [] for name in nodes}
        """By node: the nodes that take what it yields."""
        for node in nodes.values():
            for before in node.after:
                self.after[before].append(node)
        self.held: dict[str, Item] = {name: Item(0) for name, node in nodes.items() if node.gathers}
        self.credit: defaultdict[str, float] = defaultdict(float)
        """By node: the part of an item, an update or a publication that is due already."""
        self.due = {name: 0.0 for name, node in nodes.items() if node.draws}
        """By node that samples from a replay: the batches that it is to sample."""
        self.version = 0
        """The learner's policy version."""
        self.totals, self.begun = Totals(), Totals()
        self.largest_lag = -math.inf
        self.trained = 0
        """Rollouts that were trained on, each as often as that happened."""
        self.dropped = 0
        """Rollouts that queues dropped."""
        for stage in costs.stages:
            self.world.start(self._stage(stage))

    # -- stages

    def _stage(self, names: tuple[str, ...]) -> Process:
        """Run passes of a stage, each of which gives every root that may go on a turn."""
        nodes = [self.costs.nodes[name] for name in names]
        roots = [n for n in nodes if n.queue or n.sampling or (n.draws and not n.after)]
        label = self._called(names)
        while True:
            ready = [root for root in roots if self._may(root)]
            if not ready:
                yield self.changed
                continue
            for root in ready:
                if self._may(root):
                    yield from self._turn(root, label)
            self.changed.give()

    def _may(self, root: NodeCost) -> bool:
        """Return whether a root has something to do, and there is capacity for what it yields."""
        if root.queue and not len(self.channels[root.name]):
            return False
        if root.draws and root.draws_per_step is not None and self.due[root.name] < 1:
            return False
        if root.sampling:
            requests = self._allowed() + self.runners.pending_in_total
            if requests < self._part(root.sampling):
                return False
        return all(self._has_capacity(node) for node in self.after[root.name])

    def _has_capacity(self, node: NodeCost) -> bool:
        """Return whether a node, and all that its outputs reach in its stage, can take an item."""
        if node.queue:
            return self.channels[node.name].has_capacity
        if node.adds and any(self._late(other) for other in self.costs.nodes.values()):
            return False
        return all(self._has_capacity(other) for other in self.after[node.name])

    def _late(self, node: NodeCost) -> bool:
        """Return whether a node that samples from the replay by itself has a batch due."""
        return (
            node.draws
            and not node.after
            and node.draws_per_step is not None
            and self.due[node.name] >= 1
        )

    def _turn(self, root: NodeCost, label: str) -> Process:
        """Give a root one turn, and pass on all that comes of it."""
        if root.sampling:
            # The learner's stage may sample itself, which is no work of the learner.
            sampling = RECEIVING if label == LEARNER else label
            item = yield from self._sample(root.sampling, sampling)
            yield from self._give(root, item, label)
        elif root.draws:
            yield from self._draw(root, label)
        else:
            taken = self.channels[root.name].take()
            self.changed.give()
            item = taken[1] if taken else Item(0)
            yield from self._work(root.per_item, label)
            bound = root.queue.max_lag if root.queue else None
            if bound is not None and self._lag(item) > bound:
                self.dropped += len(item.versions)
            else:
                yield from self._give(root, item, label)

    def _work(self, seconds: float, label: str) -> Process:
        """Let a stage's thread work, which needs a core of the first node for a part of it."""
        if not seconds:
            return
        self.totals.worked[label] += seconds
        computing = seconds * self.costs.stage_cpu
        yield max(seconds - computing, 0.0)
        if computing:
            yield self.machines.cores[0]
            yield computing
            self.machines.cores[0].release()

    def _sample(self, how: Sampling, label: str) -> Generator[float | Servers | Signal, None, Item]:
        """Ask runners, wait for a round of rollouts or for the next one, and return the item."""
        runners = self.runners
        for _ in range(int(min(self._allowed(), len(runners.idle)))):
            yield from self._work(how.ask, label)
            runners.ask()
        versions = []
        for _ in range(self._part(how)):
            while not runners.results:
                yield runners.arrived
            asked = min(runners.count, runners.pending_in_total)
            versions.append(runners.receive())
            yield from self._work(how.receive + FINDING * asked, label)
        return Item(len(versions) * self.costs.runner.steps, tuple(versions))

    def _part(self, how: Sampling) -> int:
        """Return the rollouts of a turn."""
        return 1 if how.min_fraction is None else part_of(self.runners.count, how.min_fraction)

    def _allowed(self) -> float:
        """Return how many more requests pacing allows; infinity without it."""
        for node in self.costs.nodes.values():
            if node.paced and node.queue:
                rollouts = self.runners.received + self.runners.pending_in_total
                oldest = min([self.runners.published, *self.runners.pending])
                return allowed_requests(node.queue.max_lag or 0, node.paced, oldest, rollouts)
        return math.inf

    def _enter(self, node: NodeCost, item: Item, label: str) -> Process:
        """Give a node an item, and pass on all that comes of it."""
        if node.draws:
            yield from self._draw(node, label)
            return
        if node.gathers:
            held = self.held[node.name]
            held.steps += item.steps
            held.versions += item.versions
            if held.steps < node.gathers:
                return
            item, self.held[node.name] = held, Item(0)
        lag = self._lag(item) if node.updates else math.nan
        mean = self._mean_lag(item) if node.updates else math.nan
        yield from self._work(node.per_item + node.per_step * item.steps, label)
        if node.adds:
            for name in self.due:
                self.due[name] += item.steps * (self.costs.nodes[name].draws_per_step or 0.0)
        if node.updates:
            self._count_update(node, item, lag, mean)
        if node.publishes and self._falls_due(f"{node.name} publishes", node.publishes):
            self.runners.published = self.version
        yield from self._give(node, item, label)

    def _draw(self, node: NodeCost, label: str) -> Process:
        """Sample batches from the replay: one, or after an item all that are due."""
        alone, tied = not node.after, node.draws_per_step is not None
        while not tied or self.due[node.name] >= 1:
            self.due[node.name] -= float(tied)
            yield from self._work(max(node.per_item, DRAWING), label)
            yield from self._give(node, Item(node.given_steps or 0.0), label)
            if alone or not tied:
                return

    def _give(self, node: NodeCost, item: Item, label: str) -> Process:
        """Hand what a node yields to the nodes after it, or to their queues."""
        for _ in range(self._falls_due(f"{node.name} gives", node.given)):
            steps = item.steps if node.given_steps is None else node.given_steps
            given = Item(steps, item.versions)
            for other in self.after[node.name]:
                if other.queue is None:
                    yield from self._enter(other, given, label)
                    continue
                dropped = self.channels[other.name].put(node.name, given)
                if dropped is not None:
                    self.dropped += len(dropped[1].versions)
                self.changed.give()

    def _falls_due(self, what: str, number: float) -> int:
        """Add a number to what is due, and return its whole part, which no longer is."""
        self.credit[what] += number
        # The small number is for sums such as 10 x 0.1.
        whole = math.floor(self.credit[what] + 1e-9)
        self.credit[what] -= whole
        return whole

    def _lag(self, item: Item) -> float:
        """Return the largest policy lag of an item; NaN where it is not known."""
        return self.version - min(item.versions) if item.versions else math.nan

    def _mean_lag(self, item: Item) -> float:
        """Return the mean policy lag of an item; NaN where it is not known."""
        if not item.versions:
            return math.nan
        return self.version - sum(item.versions) / len(item.versions)

    def _count_update(self, node: NodeCost, item: Item, lag: float, mean: float) -> None:
        """Count the updates of a learner with an item."""
        number = self._falls_due(f"{node.name} updates", node.updates)
        self.version += number
        self.totals.updates += number
        self.trained += len(item.versions)
        if item.versions:
            self.totals.lags += mean
            self.totals.lagged += 1
            self.largest_lag = max(self.largest_lag, lag)

    # -- counting

    def flow(self) -> Flow:
        """Run until enough was counted, and return it.

        What is counted begins and ends with an update, so that parts of rounds do not count.

        Raises:
            GraphError: no update comes of what the runners sample.
        """
        count = self.runners.count
        self._run_to(max(WARM_UP * count, LEAST_ROLLOUTS // 2), LEAST_UPDATES // 2)
        self.begun = self._read()
        self.largest_lag = -math.inf
        self._run_to(
            self.runners.received + max(COUNTED * count, LEAST_ROLLOUTS),
            self.totals.updates + LEAST_UPDATES,
        )
        return self._flow(self._read())

    def _run_to(self, rollouts: int, updates: int) -> None:
        """Run until so many rollouts were received and updates made, and to the next update."""
        gathers = max(node.gathers for node in self.costs.nodes.values())
        runners, totals = self.runners, self.totals
        most = rollouts + FRUITLESS * (runners.count + gathers // self.costs.runner.steps)
        self.world.run(
            lambda: (
                runners.received >= rollouts
                and (totals.updates >= updates or runners.received >= most)
            )
        )
        before = totals.updates
        self.world.run(lambda: totals.updates > before or runners.received >= most)
        if totals.updates <= before:
            raise GraphError("no update comes of what the runners of the simulated graph sample")

    def _read(self) -> Totals:
        """Return what was counted so far."""
        machines = self.machines
        queued = [item for channel in self.channels.values() for _, item in channel.items]
        waiting = sum(len(item.versions) for item in queued)
        servers = (*machines.cores, machines.into, machines.out)
        return replace(
            self.totals,
            now=self.world.now,
            sampled=self.runners.received - waiting,
            bytes_in=machines.bytes_in,
            bytes_out=machines.bytes_out,
            service=self.runners.service,
            worked=self.totals.worked.copy(),
            used=tuple(server.seconds for server in servers),
        )

    def _flow(self, end: Totals) -> Flow:
        """Return what was counted since `begun`."""
        begun = self.begun
        seconds = max(end.now - begun.now, 1e-12)
        used = [now - before for now, before in zip(end.used, begun.used, strict=True)]
        *cores, into, out = used
        use = {RUNNERS: (end.service - begun.service) / (self.runners.count * seconds)}
        for label, worked in end.worked.items():
            use[label] = (worked - begun.worked[label]) / seconds
        alike = max(cores[1:], default=cores[0]) >= ALIKE * cores[0]
        use[CORES if alike else FIRST_CORES] = max(cores) / (self.cluster.cores * seconds)
        use[NETWORK] = max(into, out) / seconds
        lagged = end.lagged - begun.lagged
        steps = self.costs.runner.steps * self.costs.runner.env_share
        return Flow(
            seconds=seconds,
            env_steps=(end.sampled - begun.sampled) * steps,
            updates=end.updates - begun.updates,
            lag_mean=(end.lags - begun.lags) / lagged if lagged else math.nan,
            lag_max=self.largest_lag if lagged else math.nan,
            bytes_in=end.bytes_in - begun.bytes_in,
            bytes_out=end.bytes_out - begun.bytes_out,
            busy_cores=sum(cores) / seconds,
            use=use,
        )

    def _called(self, stage: tuple[str, ...]) -> str:
        """Return what a stage is called: the learner, if it updates one."""
        learns = any(self.costs.nodes[name].updates for name in stage)
        return LEARNER if learns else f"the stage of {stage[0]}"
