"""`Threads`: runs stages side by side, a thread each.

A stage waits at its queues, and where an operator may not fire or has no capacity.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from flowrl.core.clock import BLOCKED, OTHER, WAITING, By, Clock, here
from flowrl.core.events import Warned
from flowrl.core.items import Tally
from flowrl.errors import raised
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Loop
from flowrl.graph.stages import Channel, Make, Turns, channels_of

CLOSING_SECONDS = 5.0
"""How long a stage may take to end its pass."""


class SharedChannel(Channel):
    """A channel between threads, which notifies those that wait for a change."""

    def __init__(self, turn: threading.Condition, *args: Any) -> None:
        super().__init__(*args)
        self.turn = turn

    def put(self, source: str, item: Any) -> tuple[str, Any] | None:
        """Put an item. Return the item that was dropped for it, if one was."""
        with self.turn:
            dropped = super().put(source, item)
            self.turn.notify_all()
        return dropped

    def take(self) -> tuple[str, Any] | None:
        """Take the next item; None where there is none."""
        with self.turn:
            taken = super().take()
            self.turn.notify_all()
        return taken


class Threads(Turns):
    """Runs the stage of the reporting operator in the caller's thread, each other in its own."""

    remade = (
        *Turns.remade, "turn", "main", "ending", "error", "raised", "locks", "threads", "started",
    )  # fmt: skip

    def __init__(self, graph: Graph, make: Make) -> None:
        """Make the stages. Their threads start with the first `wait`.

        Args:
            graph: what to run.
            make: makes the loops of its stages.
        """
        self.turn = threading.Condition()
        """Notified whenever something changes for which a stage may wait."""
        self.channels = channels_of(graph, partial(SharedChannel, self.turn))
        self.loops = make(self.channels)
        reporting = next(n.name for n in graph.nodes if n.op.reports)
        # Rows belong to the caller, so the stage that closes them runs in the caller's thread.
        self.main = next(loop for loop in self.loops if reporting in loop.units)
        self.ending = False
        self.error: BaseException | None = None
        """What first ended a stage that runs in a thread of its own."""
        self.raised = False
        """Whether the caller got that error."""
        others = [loop for loop in self.loops if loop is not self.main]
        self.locks = [threading.Lock() for _ in others]
        """By thread: a lock that is held while a pass is under way."""
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
            f"stage of {loop.first}": self.clock if loop is self.main else Clock("waiting")
            for loop in self.loops
        }

    def stages(self) -> dict[str, tuple[str, ...]]:
        """Return, by thread, the nodes of its stage."""
        return {f"stage of {loop.first}": tuple(loop.units) for loop in self.loops}

    def wait(self) -> None:
        """Wait until the stage of the reporting operator can go on.

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
            self.raised = True
            raise self.error

    def round(self, most: float) -> list[Tally]:
        """Run a pass of the reporting operator's stage, and return what closed."""
        try:
            with By(self.clock), OTHER:
                return self.main.run_pass()
        finally:
            self._notify()

    def _notify(self) -> None:
        """Wake the other stages after a pass: it may have changed what they wait for."""
        with self.turn:
            self.turn.notify_all()

    @contextmanager
    def still(self) -> Iterator[bool]:
        """Yield while no other stage is within a pass.

        At the end of a run a stage whose workers hang may still be within one, and a stage that
        failed has lost what it held: then it yields False.
        """
        whole = True
        with ExitStack() as held:
            for lock in self.locks:
                # A hanging stage must not keep a run from its end.
                if lock.acquire(timeout=CLOSING_SECONDS if self.ending else -1):
                    held.callback(lock.release)
                else:
                    whole = False
            yield whole and self.error is None

    def close(self) -> None:
        """Let every stage end its pass, and start no other.

        One that does not end in time is left to find its workers gone. An error that came too late
        for `wait` to raise it becomes a warning: the rows are complete without that stage.
        """
        with self.turn:
            self.ending = True
            self.turn.notify_all()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(CLOSING_SECONDS)
        if self.error is not None and not self.raised:
            self.raised = True
            text = f"a stage failed too late to end the run: {raised(self.error)}"
            self.main.stream.emit(Warned(f"{self.main.graph}: {text}"))

    def _until(self, loop: Loop, over: Callable[[], bool]) -> None:
        """Wait until a stage can go on, or all is over."""
        with self.turn:
            while not (over() or loop.ready()):
                # Its first node counts as the one that waits: for something to do, or for capacity
                # downstream.
                with BLOCKED if loop.blocked() else WAITING:
                    here().at(loop.first)
                    self.turn.wait()
                here().at("")

    def _work(self, loop: Loop, lock: threading.Lock) -> None:
        """Run passes of a stage until the end: the work of a thread."""
        try:
            with By(self.clocks[f"stage of {loop.first}"]), self.computing():
                while True:
                    self._until(loop, lambda: self.ending)
                    if self.ending:
                        return
                    # `still` waits for this lock, and so for the end of the pass.
                    with OTHER, lock:
                        loop.run_pass()
                    self._notify()
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            with self.turn:
                if self.error is None:
                    self.error = error
                else:
                    self.error.add_note(f"and then {type(error).__name__}: {error}")
                self.turn.notify_all()
