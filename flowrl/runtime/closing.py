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

    Yields:
        A function that returns whether an interrupt came. Raising it is left to the caller.
    """
    # Python delivers signals to the main thread only, and a handler of the user's has priority.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
