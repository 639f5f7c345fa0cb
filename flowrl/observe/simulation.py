"""Simulation of a graph on a cluster: its stages, queues, requests, weights and the network."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from flowrl.errors import GraphError
from flowrl.graph.stages import Channel
from flowrl.observe.pass_costs import Costs, NodeCost, Sampling
from flowrl.observe.virtual_time import Process, Servers, Signal, World
from flowrl.rollout.handle import allowed_requests, part_of

PROCESSES_PER_CORE = 2
"""Processes of runners per core, as the ray runtime starts them."""
SLICES = 4
"""Parts of a rollout. In each of them a runner first sleeps and then needs a core."""
WARM_UP = 6
"""Rollouts of each runner before anything is counted."""
COUNTED = 12
"""Rollouts of each runner that are counted, at least."""
LEAST_ROLLOUTS, LEAST_UPDATES = 200, 10
"""The rollouts and updates of all together that are counted, at least."""

RUNNERS, LEARNER, RECEIVING = "the runners", "the learner", "receiving rollouts"
CORES, NETWORK = "cores of the nodes", "network of the learner's node"
"""What parts of a run are called."""


@dataclass(frozen=True)
class Cluster:
    """The machines of a cluster, which are alike; the first runs the stages and the learner."""

    nodes: int = 1
    """How many."""
    cores: int = 1
    """Cores of each."""
    bandwidth: float = 1.25e9
    """Bytes per second that the network of a node carries, each way."""
    latency: float = 1e-4
    """Seconds that a message between two nodes takes."""


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
    sampled: float = 0.0
    updates: float = 0.0
    lags: float = 0.0
    """Sum over updates of the mean policy lag of their rollouts."""
    lagged: int = 0
    """Updates in that sum."""
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    service: float = 0.0
    """Seconds that runners slept and computed for rollouts."""
    worked: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By part of the graph: the seconds in which a stage worked at it."""
    used: tuple[float, ...] = ()
    """By server: the seconds in which it was taken: cores of each node, network in, and out."""


def simulate(costs: Costs, cluster: Cluster, runners: int, seed: int = 0) -> Flow:
    """Return what a graph does with so many runners on a cluster.

    Args:
        costs: of its parts.
        cluster: the machines.
        runners: how many runners sample.
        seed: of how much rollouts vary.

    Raises:
        GraphError: no stage can go on, for each waits for another.
    """
    return Simulation(costs, cluster, runners, seed).flow()


class Simulation:
    """A graph on a cluster in virtual time.

    Args:
        costs: of the parts of the graph.
        cluster: the machines.
        runners: how many runners sample.
        seed: of how much rollouts vary.
    """

    def __init__(self, costs: Costs, cluster: Cluster, runners: int, seed: int = 0) -> None:
        self.costs, self.cluster, self.runners = costs, cluster, runners
        self.world = world = World()
        self.random = random.Random(seed)  # noqa: S311 - nothing is kept secret by it
        self.cores = [Servers(world, cluster.cores) for _ in range(cluster.nodes)]
        self.into, self.out = Servers(world), Servers(world)
        """The network of the first node, each way."""
        processes = min(runners, PROCESSES_PER_CORE * cluster.cores * cluster.nodes)
        self.interpreters = [Servers(world) for _ in range(processes)]
        """One for each process of runners, for one thread of it runs Python code at a time."""
        self.changed = Signal(world)
        """Given whenever something changes for which a stage may wait."""
        self.arrived = Signal(world)
        """Given whenever the result of a runner has arrived."""
        self._make_runners()
        self._make_stages()
        self.totals, self.begun = Totals(), Totals()
        self.largest_lag = -math.inf
        self.trained = 0
        """Rollouts that were trained on, each as often as that happened."""
        self.dropped = 0
        """Rollouts that queues dropped."""
        self.received = 0
        """Rollouts that runners returned and a stage received."""

    def _make_runners(self) -> None:
        self.asked: list[deque[int]] = [deque() for _ in range(self.runners)]
        """By runner: the policy versions of the requests that it has not begun."""
        self.requested = [Signal(self.world) for _ in range(self.runners)]
        self.pending: Counter[int] = Counter()
        """By policy version: the requests without a received result."""
        self.results: deque[tuple[int, int]] = deque()
        """The results that have arrived: runner and policy version."""
        self.idle: deque[int] = deque()
        """The runners that can be asked, each once for every request, the longest idle first."""
        self.version = self.published = 0
        """The learner's policy version, and that of the newest weights of the runners."""
        self.node_has = [0] * self.cluster.nodes
        """By node: the policy version of the newest weights that it got."""
        for runner in range(self.runners):
            self.world.start(self._runner(runner))

    def _make_stages(self) -> None:
        nodes = self.costs.nodes
        self.channels = {
            name: Channel(name, node.after, node.queue.capacity, node.queue.full, node.queue.order)
            for name, node in nodes.items()
            if node.queue
        }
        self.after = {
            name: [other for other in nodes.values() if name in other.after] for name in nodes
        }
        self.held: dict[str, Item] = {name: Item(0) for name, node in nodes.items() if node.gathers}
        self.credit: defaultdict[str, float] = defaultdict(float)
        """By node: the part of an item, an update or a publication that is due already."""
        self.due = {name: 0.0 for name, node in nodes.items() if node.draws}
        """By node that samples from a replay: the batches that it is to sample."""
        in_flight = [n.sampling.in_flight for n in nodes.values() if n.sampling]
        self.idle.extend([*range(self.runners)] * max(in_flight))
        for stage in self.costs.stages:
            self.world.start(self._stage(stage))

    # -- runners

    def _runner(self, index: int) -> Process:
        """Sample a rollout for each request, one after another."""
        cost, process = self.costs.runner, index % len(self.interpreters)
        node = process % self.cluster.nodes
        interpreter, cores = self.interpreters[process], self.cores[node]
        usual = cost.seconds[index % len(cost.seconds)]
        while True:
            while not self.asked[index]:
                yield self.requested[index]
            version = self.asked[index].popleft()
            if node and version > self.node_has[node]:
                self.node_has[node] = version
                yield from self._send(self.out, cost.weight_bytes)
                self.totals.bytes_out += cost.weight_bytes
            seconds = usual * self._variation(cost.spread)
            computing = seconds * cost.cpu / SLICES
            for _ in range(SLICES):
                yield max(seconds / SLICES - computing, 0.0)
                if computing:
                    yield interpreter
                    yield cores
                    yield computing
                    cores.release()
                    interpreter.release()
            self.totals.service += seconds
            self.world.start(self._result(index, node, version))

    def _variation(self, spread: float) -> float:
        """Return how many times as long as usually a rollout takes."""
        if not spread:
            return 1.0
        return self.random.gammavariate(spread**-2, spread**2)

    def _result(self, runner: int, node: int, version: int) -> Process:
        """Bring the result of a runner to the first node."""
        if node:
            yield from self._send(self.into, self.costs.runner.nbytes)
            self.totals.bytes_in += self.costs.runner.nbytes
        yield self.costs.runner.answer
        self.results.append((runner, version))
        self.arrived.give()

    def _send(self, link: Servers, size: int) -> Process:
        """Send bytes over a network, which sends one thing after another."""
        yield link
        yield size / self.cluster.bandwidth
        link.release()
        yield self.cluster.latency

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
        if root.sampling and self._allowed() + sum(self.pending.values()) < self._part(
            root.sampling
        ):
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
        """Give a root one turn, and drain what comes of it."""
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
            yield self.cores[0]
            yield computing
            self.cores[0].release()

    def _sample(self, how: Sampling, label: str) -> Generator[float | Servers | Signal, None, Item]:
        """Ask runners, wait for a round of rollouts or for the next one, and return the item."""
        for _ in range(min(len(self.idle), int(min(self._allowed(), len(self.idle))))):
            yield from self._work(how.ask, label)
            runner = self.idle.popleft()
            self.asked[runner].append(self.published)
            self.pending[self.published] += 1
            self.requested[runner].give()
        versions = []
        for _ in range(self._part(how)):
            while not self.results:
                yield self.arrived
            runner, version = self.results.popleft()
            self.pending[version] -= 1
            self.idle.append(runner)
            versions.append(version)
            yield from self._work(how.receive, label)
        self.received += len(versions)
        steps = len(versions) * self.costs.runner.steps
        self.totals.sampled += steps
        return Item(steps, tuple(versions))

    def _part(self, how: Sampling) -> int:
        """Return the rollouts of a turn."""
        return 1 if how.min_fraction is None else part_of(self.runners, how.min_fraction)

    def _allowed(self) -> float:
        """Return how many more requests pacing allows; infinity without it."""
        for node in self.costs.nodes.values():
            if node.paced and node.queue:
                pending = [version for version, number in self.pending.items() if number]
                rollouts = self.received + sum(self.pending.values())
                oldest = min([self.published, *pending])
                return allowed_requests(node.queue.max_lag or 0, node.paced, oldest, rollouts)
        return math.inf

    def _enter(self, node: NodeCost, item: Item, label: str) -> Process:
        """Give a node an item, and drain what comes of it."""
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
            self.published = self.version
        yield from self._give(node, item, label)

    def _draw(self, node: NodeCost, label: str) -> Process:
        """Sample batches from the replay: one, or after an item all that are due."""
        alone, tied = not node.after, node.draws_per_step is not None
        while not tied or self.due[node.name] >= 1:
            self.due[node.name] -= float(tied)
            yield from self._work(node.per_item, label)
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
            GraphError: no stage can go on, for each waits for another.
        """
        self._run_to(max(WARM_UP * self.runners, LEAST_ROLLOUTS // 2), LEAST_UPDATES // 2)
        self.begun = self._read()
        self.largest_lag = -math.inf
        self._run_to(
            self.received + max(COUNTED * self.runners, LEAST_ROLLOUTS),
            self.totals.updates + LEAST_UPDATES,
        )
        return self._flow(self._read())

    def _run_to(self, rollouts: int, updates: float) -> None:
        """Run until so many rollouts were received and updates made, and to the next update."""
        self.world.run(lambda: self.received >= rollouts and self.totals.updates >= updates)
        before = self.totals.updates
        self.world.run(lambda: self.totals.updates > before)
        if self.totals.updates <= before:
            raise GraphError(
                "no stage of the simulated graph can go on, for each waits for another"
            )

    def _read(self) -> Totals:
        """Return what was counted so far."""
        t = self.totals
        servers: Iterable[Servers] = (*self.cores, self.into, self.out)
        return Totals(
            self.world.now, t.sampled, t.updates, t.lags, t.lagged, t.bytes_in, t.bytes_out,
            t.service, t.worked.copy(), tuple(server.seconds for server in servers),
        )  # fmt: skip

    def _flow(self, end: Totals) -> Flow:
        """Return what was counted since `begun`."""
        begun = self.begun
        seconds = max(end.now - begun.now, 1e-12)
        used = [now - before for now, before in zip(end.used, begun.used, strict=True)]
        *cores, into, out = used
        use = {RUNNERS: (end.service - begun.service) / (self.runners * seconds)}
        for label, worked in end.worked.items():
            use[label] = (worked - begun.worked[label]) / seconds
        use[CORES] = max(cores) / (self.cluster.cores * seconds)
        use[NETWORK] = max(into, out) / seconds
        lagged = end.lagged - begun.lagged
        return Flow(
            seconds=seconds,
            env_steps=(end.sampled - begun.sampled) * self.costs.runner.env_share,
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
