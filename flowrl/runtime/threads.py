"""Stages side by side, a thread each. They wait for one another only at the queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from flowrl.core.clock import BLOCKED, OTHER, WAITING, By, Clock, here
from flowrl.core.items import Tally
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Loop
from flowrl.graph.stages import Channel, Make, channels_of

CLOSING_SECONDS = 5.0
"""How long a stage may take to end its pass."""


class SharedChannel(Channel):
    """A channel between threads: who waits for something to change is told."""

    def __init__(self, turn: threading.Condition, *args: Any) -> None:
        super().__init__(*args)
        self.turn = turn

    def put(self, source: str, item: Any) -> tuple[str, Any] | None:
        """Put an item; what had to go for it is returned."""
        with self.turn:
            gone = super().put(source, item)
            self.turn.notify_all()
        return gone

    def take(self) -> tuple[str, Any] | None:
        """The next item."""
        with self.turn:
            taken = super().take()
            self.turn.notify_all()
        return taken


class Threads:
    """Runs the stage of the clock in the caller's thread, and every other in one of its own."""

    def __init__(self, graph: Graph, make: Make) -> None:
        self.turn = threading.Condition()
        self.channels = channels_of(graph, partial(SharedChannel, self.turn))
        self.loops = make(self.channels)
        clock = next(n.name for n in graph.nodes if n.op.reports)
        self.main = next(loop for loop in self.loops if clock in loop.units)
        self.ending = False
        self.error: BaseException | None = None
        others = [loop for loop in self.loops if loop is not self.main]
        self.locks = [threading.Lock() for _ in others]
        """By thread: held while a pass is under way."""
        self.threads = [
            threading.Thread(
                target=partial(self._work, loop, lock),
                name=f"flowrl {loop.graph}.{loop.first}",
                daemon=True,
            )
            for loop, lock in zip(others, self.locks, strict=True)
        ]
        self.started = False
        self.clock = Clock("outside")
        self.clocks = {
            f"stage of {self.main.first}": self.clock,
            **{f"stage of {loop.first}": Clock("waiting") for loop in others},
        }
        self.clocks = {
            name: self.clocks[name] for name in (f"stage of {loop.first}" for loop in self.loops)
        }

    def stages(self) -> dict[str, tuple[str, ...]]:
        """By thread: the nodes of its stage."""
        return {f"stage of {loop.first}": tuple(loop.units) for loop in self.loops}

    def wait(self) -> None:
        """Wait until the stage of the clock can go on.

        Raises:
            BaseException: what ended another stage.
        """
        if not self.started:
            self.started = True
            for thread in self.threads:
                thread.start()
        with By(self.clock):
            self._until(self.main, lambda: self.error is not None)
        if self.error is not None:
            raise self.error

    def round(self, most: float) -> list[Tally]:
        """A pass of the clock's stage. What it closed is returned."""
        try:
            with By(self.clock), OTHER:
                return self.main.run_pass()
        finally:
            self._tell()

    def _tell(self) -> None:
        """A pass is over: it may have changed what others wait for."""
        with self.turn:
            self.turn.notify_all()

    @contextmanager
    def still(self) -> Iterator[None]:
        """While no other stage is within a pass, or at the end none but one whose workers hang."""
        with ExitStack() as held:
            for lock in self.locks:
                if lock.acquire(timeout=CLOSING_SECONDS if self.ending else -1):
                    held.callback(lock.release)
            yield

    def close(self) -> None:
        """Let every stage end its pass, and no more. One that does not in time is left to find its workers gone."""
        with self.turn:
            self.ending = True
            self.turn.notify_all()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(CLOSING_SECONDS)

    def _until(self, loop: Loop, over: Callable[[], bool]) -> None:
        """Wait until a stage can go on, or all is over. Its first node is the one that waits: for something to do, or for room behind."""
        with self.turn:
            while not (over() or loop.ready()):
                with BLOCKED if loop.blocked() else WAITING:
                    here().at(loop.first)
                    self.turn.wait()
                here().at("")

    def _work(self, loop: Loop, lock: threading.Lock) -> None:
        try:
            with By(self.clocks[f"stage of {loop.first}"]):
                while True:
                    self._until(loop, lambda: self.ending)
                    if self.ending:
                        return
                    with OTHER, lock:
                        loop.run_pass()
                    self._tell()
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            with self.turn:
                self.error = error
                self.turn.notify_all()
