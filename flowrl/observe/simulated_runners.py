"""Simulated machines of a cluster, and the runners on them: requests, rollouts and the network."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from flowrl.core.workers import INLINE_BYTES, PROCESSES_PER_CORE
from flowrl.observe.pass_costs import RunnerCost
from flowrl.observe.virtual_time import Process, Servers, Signal, World

SLICES = 4
"""Parts of a rollout. In each of them a runner first sleeps and then needs a core."""


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


class Machines:
    """The cores of each node, and the network of the first one.

    Args:
        world: whose time it is.
        cluster: the machines.
    """

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cores = [Servers(world, cluster.cores) for _ in range(cluster.nodes)]
        self.into, self.out = Servers(world), Servers(world)
        """The network of the first node, each way."""
        self.bytes_in = self.bytes_out = 0

    def fetch(self, size: int) -> Process:
        """Bring bytes from another node to the first one."""
        yield from self._send(self.into, size)
        self.bytes_in += size

    def distribute(self, size: int) -> Process:
        """Send bytes from the first node to another one."""
        yield from self._send(self.out, size)
        self.bytes_out += size

    def _send(self, link: Servers, size: int) -> Process:
        """Send bytes over a network, which sends one thing after another."""
        yield link
        yield size / self.cluster.bandwidth
        link.release()
        yield self.cluster.latency


class SimulatedRunners:
    """Runners that sample rollouts on request, in processes that are spread over the nodes.

    Args:
        world: whose time it is.
        cost: of a rollout.
        machines: on which they run.
        count: how many they are.
        in_flight: requests to each of them at once.
    """

    def __init__(
        self,
        world: World,
        cost: RunnerCost,
        machines: Machines,
        count: int,
        in_flight: int,
    ) -> None:
        self.world, self.cost, self.machines, self.count = world, cost, machines, count
        cluster = machines.cluster
        processes = min(count, PROCESSES_PER_CORE * cluster.cores * cluster.nodes)
        self.interpreters = [Servers(world) for _ in range(processes)]
        """One for each process, for one thread of it runs Python code at a time."""
        # The same seed each time, so that predictions of one run can be compared.
        self.random = random.Random(0)  # noqa: S311 - nothing is kept secret by it
        self.requests: list[deque[int]] = [deque() for _ in range(count)]
        """By runner: the policy versions of the requests that it has not begun."""
        self.requested = [Signal(world) for _ in range(count)]
        self.idle = deque([*range(count)] * in_flight)
        """The runners that can be asked, each once for every request, the longest idle first."""
        self.pending: Counter[int] = Counter()
        """By policy version: the requests whose result was not received."""
        self.pending_in_total = 0
        self.results: deque[tuple[int, int]] = deque()
        """The results that are there, each a runner and a policy version."""
        self.arrived = Signal(world)
        """Given whenever a result has arrived."""
        self.published = 0
        """The policy version of the newest weights."""
        self.newest_at: Counter[tuple[str, int]] = Counter()
        """By place, a node or runner: the policy version of the newest weights that came there."""
        self.received = 0
        """Rollouts that were received."""
        self.service = 0.0
        """Seconds that runners slept and computed for rollouts."""
        # Runners that sample as they come are soon out of step, and so they are from the start.
        for runner in range(count):
            world.start(self._runner(runner), cost.seconds[0] * runner / count)

    def ask(self) -> None:
        """Send the runner that has been idle for the longest time a request."""
        runner = self.idle.popleft()
        self.requests[runner].append(self.published)
        self.pending[self.published] += 1
        self.pending_in_total += 1
        self.requested[runner].give()

    def receive(self) -> int:
        """Take the next result, which is there, and return its policy version."""
        runner, version = self.results.popleft()
        self.pending[version] -= 1
        if not self.pending[version]:
            del self.pending[version]
        self.pending_in_total -= 1
        self.received += 1
        self.idle.append(runner)
        return version

    def _runner(self, index: int) -> Process:
        """Sample a rollout for each request, one after another."""
        # Runners start one after another, but which of them share a process does not depend on when
        # their rollouts end: so those of a process are taken from all that began.
        process = index % len(self.interpreters)
        node = process % self.machines.cluster.nodes
        interpreter, cores = self.interpreters[process], self.machines.cores[node]
        usual = self.cost.seconds[index % len(self.cost.seconds)]
        while True:
            while not self.requests[index]:
                yield self.requested[index]
            version = self.requests[index].popleft()
            # The object store of a node gets a version once, whoever asks for it there.
            small = self.cost.weight_bytes <= INLINE_BYTES
            place = ("runner", index) if small else ("node", node)
            if node and version > self.newest_at[place]:
                self.newest_at[place] = version
                yield from self.machines.distribute(self.cost.weight_bytes)
            seconds = usual * self._variation()
            computing = seconds * self.cost.cpu / SLICES
            for _ in range(SLICES):
                yield max(seconds / SLICES - computing, 0.0)
                if computing:
                    yield interpreter
                    yield cores
                    yield computing
                    cores.release()
                    interpreter.release()
            self.service += seconds
            # The runner goes on with its next request while its result is on the way.
            self.world.start(self._result(index, node, version))

    def _variation(self) -> float:
        """Return how many times as long as usually a rollout takes."""
        spread = self.cost.spread
        return self.random.gammavariate(spread**-2, spread**2) if spread else 1.0

    def _result(self, runner: int, node: int, version: int) -> Process:
        """Bring the result of a runner to the first node."""
        if node:
            yield from self.machines.fetch(self.cost.nbytes)
        yield self.cost.answer
        self.results.append((runner, version))
        self.arrived.give()
