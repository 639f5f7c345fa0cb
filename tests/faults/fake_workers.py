"""Workers of a simulated run: they work on a virtual clock, and a seeded schedule harms them.

What they promise is what `RayWorkers` does: the calls of one worker are run in order, those of a
process that ended fail, and a restart replaces a process with all workers in it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from flowrl.core.items import Batch
from flowrl.core.workers import Done, Failed
from flowrl.errors import EnvError, RunError
from flowrl.rollout.evaluation import Evaluation
from flowrl.rollout.runner import Runner
from flowrl.rollout.runner_stub import RunnerStub
from flowrl.rollout.sample import Episodes, Sample, numbers

TIMEOUT = 10.0
"""Seconds that a rollout may take in a simulated run, the setting `timeout` of its runners."""
PROCESSES = 2
"""Processes that share the runners, so that some of them end together."""
RUNNER_FAULTS = ("delay", "reorder", "duplicate", "drop", "late", "lose", "kill", "hang", "break")
"""What may happen to a request for a rollout."""
SHARD_FAULTS = ("delay", "reorder", "lose", "kill")
"""What may happen to a call to a shard of a replay. Nobody would notice a shard that hangs."""
SENT = ("add", "prioritize")
"""The calls to a shard whose results are received, and end a series of restarts."""
HARMLESS = ("delay", "reorder", "duplicate")
"""The faults after which a result comes all the same, before any time-out."""


class Violation(Exception):
    """An invariant does not hold."""


class Clock:
    """A clock that stands still until something waits, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), act))

    def step(self, until: float = math.inf) -> bool:
        """Let the next event happen, unless it comes after `until`; return whether one did."""
        if not self._events or self._events[0][0] > until:
            return False
        when, _, act = heapq.heappop(self._events)
        self.now = max(self.now, when)
        act()
        return True

    def pass_by(self, seconds: float) -> None:
        """Let so many seconds pass, and all that happens in them."""
        end = self.now + seconds
        while self.step(end):
            pass
        self.now = max(self.now, end)

    def wait(self, seconds: float) -> None:
        """Stand for `threading.Event.wait` of an event that does not come."""
        self.pass_by(seconds)

    def is_set(self) -> bool:
        """Stand for `threading.Event.is_set`."""
        return False

    def set(self) -> None:
        """Stand for `threading.Event.set`, which ends the run."""


class Call:
    """One call to a worker, and its result to come."""

    def __init__(self, workers: FakeWorkers, index: int, method: str, args: tuple[Any, ...]):
        self.workers, self.index, self.method, self.args = workers, index, method, args
        self.process = workers.bound[index]
        self.restart_count = workers.restart_counts[index]
        self.number = next(workers.numbers)
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.copy_of: Call | None = None
        """The call that came twice, of which this is the second."""

    def __str__(self) -> str:
        return f"{self.method} {self.number} of {self.workers.name} {self.index}"

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        """Deliver what came of the call; what comes later changes nothing."""
        if self.done:
            return
        self.done, self.value, self.error = True, value, error
        self.workers.sim.note(f"{self} {'failed: ' + str(error) if error else 'is there'}")

    def result(self) -> Any:
        """Wait for the result, as long as it takes."""
        while not self.done:
            if not self.workers.sim.clock.step():
                self.workers.sim.violate("every_request_ends", f"{self} is waited for without end")
        self.workers.took(self)
        if self.error is not None:
            raise self.error
        return self.value


class Process:
    """A process with the workers in it, each of which has a line of calls."""

    def __init__(self, sim: Any, starts: float, mine: Sequence[int]) -> None:
        self.sim = sim
        self.ready_at = sim.clock.now + starts
        self.dead = False
        self.lines: dict[int, deque[Call]] = {index: deque() for index in mine}
        self.at_work: dict[int, Call | None] = dict.fromkeys(mine)
        self.objects: dict[int, tuple[int, Any]] = {}

    def end(self, why: str) -> None:
        """End the process: every call that it has fails."""
        if self.dead:
            return
        self.dead = True
        for index, line in self.lines.items():
            call = self.at_work[index]
            for each in [call, *line] if call else line:
                each.settle(error=RunError(f"{each}: its process ended: {why}"))
            line.clear()


class FakeRunner:
    """Returns rollouts of zeros that know who sampled them with which weights."""

    def __init__(self, sim: Any, spec: Any, index: int, restart_count: int) -> None:
        self.sim, self.spec, self.index, self.restart_count = sim, spec, index, restart_count
        self.weights, self.version, self.turn, self.chain = None, -1, 0, None
        self.goes_on = restart_count == 0

    def close(self) -> None:
        pass

    def localize(self, chain: Any) -> None:
        self.chain = chain

    def go_on(self, turn: int) -> None:
        self.sim.check_turn(self.index, turn)
        self.turn, self.goes_on = turn, True

    def keep(self) -> Any:
        return {"turn": self.turn}

    def take(self, state: Any) -> None:
        self.turn, self.goes_on = state["turn"], True

    def use(self, published: Any) -> None:
        if published is not None:
            self.weights, self.version = published[0], int(published[1])
        self.sim.check_weights(self)

    def evaluate(self, how: tuple[int, int, int], published: Any) -> Evaluation:
        self.use(published)
        episodes, _, max_steps = how
        return Evaluation.empty(episodes, max_steps)

    def sample(self, published: Any) -> Sample:
        self.use(published)
        if self.sim.case.chain != self.chain:
            self.sim.found("a_restarted_runner_has_its_operators", f"runner {self.index} has none")
        if not self.goes_on:
            text = f"runner {self.index} begins at its first step"
            self.sim.found("a_restarted_runner_goes_on", text)
        envs = self.spec.envs_per_runner
        columns = {
            **self.sim.case.columns,
            "version": np.full(envs, self.version, np.int32),
            "producer": np.full(envs, self.index, np.int32),
            "env": numbers(self.index, envs),
            "first": np.full(envs, self.turn, np.int32),
            "rollout": np.full(envs, self.sim.new_rollout(), np.int32),
        }
        self.turn += self.spec.rollout_length
        steps = envs * self.spec.rollout_length
        episodes = Episodes(steps, np.ones(1), np.ones(1))
        return Sample(Batch(self.sim.case.data, columns), episodes, self.turn)


def canned(spec: Any, chain: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and columns of every rollout: zeros, of which every row is a step."""
    stub = RunnerStub(spec, None, 0)

    def zeros(x: Any) -> Any:
        made = np.zeros(x.shape, x.dtype)
        made.flags.writeable = False
        return made

    data = {name: zeros(x) for name, x in stub._data().items()}
    data["valid"] = np.ones_like(data["valid"])
    if chain is not None:
        data["priority"] = np.ones(data["reward"].shape, np.float32)
    return data, {name: zeros(x) for name, x in stub._columns().items()}


class FakeWorkers:
    """The workers of one resource.

    Args:
        sim: the simulation that they are a part of.
        name: of the resource.
        count: how many there are.
        make: makes one of them by its index and restart count; real runners are replaced by fakes.
    """

    def __init__(self, sim: Any, name: str, count: int, make: Callable[[int, int], Any]) -> None:
        self.sim, self.name = sim, name
        self.are_runners = isinstance(make, partial) and make.func is Runner
        self.make = partial(FakeRunner, sim, make.args[0]) if self.are_runners else make
        self.numbers = itertools.count(1)
        self.restart_counts = [0] * count
        of = min(PROCESSES, count)
        self.processes = [Process(sim, 0.0, range(count)[i::of]) for i in range(of)]
        self.bound = [self.processes[i % of] for i in range(count)]
        self.in_a_row = [0] * count
        """By worker: at most so many faults since its last result that was taken."""
        self.last_fault = [0] * count
        """By worker: the number of the newest call that something happened to."""
        self.since, self.tries = [0.0] * count, [0] * count
        """What a time-out is by the rules: since when, and after how many restarts in a row."""
        self.waiting: list[deque[Call]] = [deque() for _ in range(count)]
        self.computed: dict[int, tuple[float, Any]] = {}
        """By the number of a value: when it is computed, and the value."""
        self.last_error: list[Exception | None] = [None] * count

    def __len__(self) -> int:
        return len(self.bound)

    def put(self, value: Any) -> Any:
        return value

    def clocks(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def current(self, call: Any) -> bool:
        return call.process in self.processes

    def ready(self, value: Any) -> bool:
        """Return whether a value is computed, which takes a while from the first question on."""
        if self.sim.calm:
            return True
        if id(value) not in self.computed:
            # The value is kept, so that no other gets its number.
            self.computed[id(value)] = self.sim.ready_at(), value
        return self.sim.clock.now >= self.computed[id(value)][0]

    # -- calls

    def submit(self, index: int, method: str, *args: Any) -> Call:
        call = Call(self, index, method, args)
        if self.are_runners and method == "sample":
            if not self.waiting[index]:
                self.since[index] = self.sim.clock.now
            self.waiting[index].append(call)
        if call.process.dead:
            call.settle(error=RunError(f"{call}: its process had ended"))
        else:
            call.process.lines[index].append(call)
            self._begin(call.process, index)
        return call

    def _begin(self, process: Process, index: int) -> None:
        """Let a worker begin with its next call, if it has one and nothing to do."""
        line = process.lines[index]
        if process.dead or process.at_work[index] is not None or not line:
            return
        call = process.at_work[index] = line.popleft()
        fate = self._fate(call)
        start = max(self.sim.clock.now, process.ready_at)
        seconds = self.sim.duration(call, fate)
        if fate == "kill":
            end = partial(process.end, "it was killed")
            self.sim.clock.at(start + seconds * self.sim.random.random(), end)
        elif fate != "hang":
            self.sim.clock.at(start + seconds, partial(self._finish, call, fate))

    def _fate(self, call: Call) -> str:
        """Return what happens to a call, and log it where that is a fault."""
        mine = [i for i in call.process.lines if call.process is self.bound[i]]
        fate = self.sim.fate(call, max([self.in_a_row[i] for i in mine], default=0))
        if fate != "deliver":
            self.sim.faults[fate] += 1
            self.sim.note(f"{call}: {fate}")
        if fate not in ("deliver", *HARMLESS):
            self._count_fault(mine, call.number)
        return fate

    def _count_fault(self, mine: Sequence[int], number: int) -> None:
        """Count what happens to the workers of a process while one of them has a call."""
        for index in mine:
            self.in_a_row[index] += 1
            self.last_fault[index] = number

    def _finish(self, call: Call, fate: str) -> None:
        """Run a call, and deliver what came of it in the way that its fate says."""
        process, index = call.process, call.index
        if process.dead:
            return
        value, error = self._run(call)
        if fate == "break":
            value, error = None, EnvError(f"{call}: environment 0 raised")
        if fate == "lose":
            value, error = None, RunError(f"{call}: its result was lost")
        target = call.copy_of or call
        if delay := self.sim.on_its_way(fate, self.tries[index]):
            self.sim.clock.at(self.sim.clock.now + delay, partial(target.settle, value, error))
        elif fate != "drop":
            target.settle(value, error)
        if fate == "duplicate":
            copy = Call(self, index, call.method, call.args)
            copy.process, copy.restart_count, copy.copy_of = process, call.restart_count, call
            process.lines[index].appendleft(copy)
        process.at_work[index] = None
        self._begin(process, index)

    def _run(self, call: Call) -> tuple[Any, Exception | None]:
        """Call the method of the worker, which is made again where it was restarted since."""
        objects, index = call.process.objects, call.index
        if objects.get(index, (-1, None))[0] != call.restart_count:
            objects[index] = (call.restart_count, self.make(index, call.restart_count))
        try:
            return getattr(objects[index][1], call.method)(*call.args), None
        except RunError as error:
            return None, error

    # -- what the callers do

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> int | None:
        sim = self.sim
        sim.check_patience(self, futures, timeout)
        end = math.inf if timeout is None else sim.clock.now + timeout
        while True:
            done = [i for i, f in enumerate(futures) if isinstance(f, Done | Failed) or f.done]
            if done:
                return done[0] if sim.calm else sim.random.choice(done)
            if not sim.clock.step(end):
                if end == math.inf:
                    sim.violate("every_request_ends", f"{self.name} are waited for without end")
                sim.clock.now = end
                return None

    def took(self, call: Call) -> None:
        """Note that somebody took the result of a call."""
        index = call.index
        self.last_error[index] = call.error
        # A batch of a replay is no sign that its shard took what it was sent.
        ends_series = ("sample",) if self.are_runners else SENT
        only_kept = self.are_runners and self.sim.keeping
        if call.error is None and call.method in ends_series and not only_kept:
            self.tries[index] = 0
            # What happened to a later call is not noticed yet.
            if call.number > self.last_fault[index]:
                self.in_a_row[index] = 0
        if not self.are_runners or call.method != "sample" or only_kept:
            return
        if call not in self.waiting[index] or call.restart_count != self.restart_counts[index]:
            text = f"{call} was taken, after restart {self.restart_counts[index]}"
            self.sim.found("no_result_of_a_replaced_worker_is_taken", text)
            return
        self.waiting[index].remove(call)
        self.since[index] = self.sim.clock.now

    def restart(self, index: int, restart_count: int, because: Any = None) -> None:
        sim = self.sim
        sim.check_restart(self, index, because)
        sim.note(f"{self.name} {index} is restarted for the {restart_count}. time")
        self.restart_counts[index] = restart_count
        self.tries[index] += 1
        self.in_a_row[index] = max(self.in_a_row[index], self.tries[index])
        self.waiting[index].clear()
        if because is not None and because.process in self.processes:
            at = self.processes.index(because.process)
            because.process.end("it was restarted")
            new = Process(sim, sim.starting(), list(because.process.lines))
            self.processes[at] = new
            if sim.crashes(max(self.in_a_row[i] for i in new.lines)):
                sim.faults["crash"] += 1
                sim.note(f"the new process of {self.name} {index} ends while it starts")
                self._count_fault(list(new.lines), next(self.numbers))
                sim.clock.at(new.ready_at, partial(new.end, "it ended while it started"))
        self.bound[index] = self.processes[index % len(self.processes)]
