"""Discrete-event simulation: processes that wait for seconds, for servers and for signals.

A process is a generator. It yields a number of seconds, `Servers` of which it needs one, or a
`Signal` for which it waits, and goes on when it has got that.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias, Union

Process: TypeAlias = Generator[Union[float, "Servers", "Signal"], None, None]


class World:
    """Virtual time, and the processes that go on at moments to come.

    Processes of the same moment go on in the order in which they came to wait for it, so that a
    simulation gives the same result each time.

    >>> world, seen = World(), []
    >>> def process(seconds):
    ...     yield seconds
    ...     seen.append(world.now)
    >>> world.start(process(2.0))
    >>> world.start(process(1.0))
    >>> world.run(lambda: False)
    >>> seen
    [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The virtual seconds since the beginning."""
        self._moments: list[tuple[float, int, Process]] = []
        """A heap of the moments to come, each with the process that goes on then."""
        self._numbers = itertools.count()

    def start(self, process: Process, delay: float = 0.0) -> None:
        """Let a process go on after so many seconds."""
        heapq.heappush(self._moments, (self.now + delay, next(self._numbers), process))

    def run(self, over: Callable[[], bool]) -> None:
        """Let processes go on until `over` returns True, or until each waits for another one."""
        while self._moments and not over():
            self.now, _, process = heapq.heappop(self._moments)
            self._go_on(process)

    def _go_on(self, process: Process) -> None:
        """Let a process run until it has to wait."""
        for wanted in process:
            if isinstance(wanted, float):
                self.start(process, wanted)
                return
            if not wanted.take(process):
                return


class Servers:
    """Servers of one kind, such as the cores of a node: who needs one waits in line.

    Args:
        world: whose time it is.
        count: how many there are.
    """

    def __init__(self, world: World, count: int = 1) -> None:
        self.world, self.count = world, count
        self._taken = 0
        self._line: deque[Process] = deque()
        self._seconds = 0.0
        self._since = 0.0

    def take(self, process: Process) -> bool:
        """Give a process a server; return False if it has to wait for one."""
        if self._taken == self.count:
            self._line.append(process)
            return False
        self._add_up()
        self._taken += 1
        return True

    def release(self) -> None:
        """Give a server back. The first process in line, if there is one, goes on with it."""
        if self._line:
            self.world.start(self._line.popleft())
            return
        self._add_up()
        self._taken -= 1

    @property
    def seconds(self) -> float:
        """The seconds of all servers so far in which a process had them."""
        self._add_up()
        return self._seconds

    def _add_up(self) -> None:
        self._seconds += self._taken * (self.world.now - self._since)
        self._since = self.world.now


class Signal:
    """Signal for which processes wait until it is given.

    Args:
        world: whose time it is.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._waiting: list[Process] = []

    def take(self, process: Process) -> bool:
        """Let a process wait; return False, for it always has to."""
        self._waiting.append(process)
        return False

    def give(self) -> None:
        """Let all that wait go on."""
        for process in self._waiting:
            self.world.start(process)
        self._waiting.clear()
