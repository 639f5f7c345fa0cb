"""Requests of a page to the prompt, which waits for a line in another thread."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import NamedTuple

from flowrl.errors import SettingError

MOST = 100
"""The most requests that wait for the run to look at them."""
SIGNAL = signal.SIGURG
"""What interrupts the prompt; where nobody handles it, it does nothing."""


class Asked(BaseException):
    """Exception that leaves the reading of a line, because a page asked for something.

    It is no `Exception`, so that no handler on the way takes it for an error.
    """


class Request(NamedTuple):
    """A line for the prompt, which a page asked for."""

    line: str
    taken: Event
    """Is set once the prompt has the line."""


class Requests:
    """The lines that a page gives to the prompt.

    A prompt that reads a line can't wait for anything else, and readline edits a line only while it
    reads. So a signal interrupts it, as Ctrl-C does, and only where the prompt allows it.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._allowed = False
        """Whether the main thread reads a line, which a request may interrupt."""
        self._noticed: Callable[[], None] = lambda: None

    # -- for the page, from any thread

    def ask(self, line: str) -> bool:
        """Give a line to the prompt, and wait until it has it if it reads one now.

        Returns:
            False where too many requests wait already.
        """
        if len(self._requests) >= MOST:
            return False
        request = Request(line, Event())
        self._requests.append(request)
        # One that comes just before the main thread begins to read interrupts nothing.
        while self._allowed:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            if request.taken.wait(0.05):
                break
        return True

    # -- for the prompt, in the main thread

    @contextmanager
    def listening(self, noticed: Callable[[], None]) -> Iterator[None]:
        """Let requests interrupt the prompt in this context, wherever it allows that.

        Args:
            noticed: a function that is called before the reading of a line is left.

        Raises:
            SettingError: this is not the main thread, which alone gets signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise SettingError(
                "a page interrupts the prompt by a signal, which only the main thread gets; call "
                "this there, or leave ui out"
            )
        self._noticed = noticed
        before = signal.signal(SIGNAL, self._interrupt)
        try:
            yield
        finally:
            signal.signal(SIGNAL, before)

    def allow(self) -> None:
        """Let a request raise `Asked` from now on.

        Raises:
            Asked: there is one already.
        """
        # In this order: one that comes in between is seen here, or sends a signal, or both.
        self._allowed = True
        if self._requests:
            self._allowed = False
            raise Asked

    def forbid(self) -> None:
        """Let requests wait from now on."""
        self._allowed = False

    def lines(self) -> Iterator[str]:
        """Yield the lines that wait, and no longer than they are asked for."""
        while self._requests:
            request = self._requests.popleft()
            request.taken.set()
            yield request.line

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle the signal."""
        # It may come late, when the line is read, or again, when another one has done its work.
        if self._allowed and self._requests:
            self._allowed = False
            self._noticed()
            raise Asked


class HalfTyped:
    """What the user has typed of a line when a request interrupts it: the next prompt has it again.

    Without readline, the terminal itself keeps what is typed until the line ends.
    """

    def __init__(self) -> None:
        self.text = ""
        """What to put into the next prompt."""
        self._open = False
        """Whether readline shows a prompt."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the text into the first prompt in this context, and note that readline shows it."""
        try:
            import readline
        except ImportError:
            yield
            return

        def opened() -> None:
            self._open = True
            readline.insert_text(self.text)
            self.text = ""

        readline.set_startup_hook(opened)
        try:
            yield
        finally:
            self._open = False
            readline.set_startup_hook(None)

    def note(self) -> None:
        """Keep what is typed now."""
        # Between two lines, readline still has the line before.
        if self._open:
            import readline

            self.text = readline.get_line_buffer()

    def finished(self) -> None:
        """Note that the line is read."""
        self._open = False
