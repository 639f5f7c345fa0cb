"""Hold interrupts back during a pass, and close things without hiding the first error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def noting(error: BaseException | None, ending: Callable[[], None]) -> Callable[[], None]:
    """Wrap `ending` so that its own failure does not hide an earlier error.

    Args:
        error: the error that came first, if there is one. A failure of `ending` then becomes a note
            of it, since the first error is the one that the user has to see.
        ending: closes something.

    Returns:
        `ending`, which raises its own failure only where `error` is None.
    """

    def end() -> None:
        try:
            ending()
        except Exception as later:
            if error is None:
                raise
            error.add_note(f"and then {type(later).__name__}: {later}")

    return end


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Hold a first Ctrl-C back, so that a pass is never left midway; raise a second one at once.

    Within another such context it is that one which holds interrupts back, until its own end.

    Yields:
        A function that returns whether an interrupt came. Raising it is left to the caller.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Python delivers signals to the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
    elif isinstance(handler, _Held):
        yield lambda: handler.pressed
    elif handler is not signal.default_int_handler:
        # A handler of the user's has priority.
        yield lambda: False
    else:
        held = _Held()
        signal.signal(signal.SIGINT, held)
        try:
            yield lambda: held.pressed
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_come() -> Iterator[None]:
    """Let an interrupt be raised at once, within `interrupts_wait`, where a run only waits."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not isinstance(handler, _Held):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if handler.pressed:
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class _Held:
    """A handler that notes a first interrupt, and raises a second one."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
