"""Workers as plain objects in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from flowrl.core.clock import Reading

INLINE_BYTES = 2**16
"""Weights up to this size go to a worker in another process with each call that needs them.

Larger ones go to its node, once for all of its workers.
"""
PROCESSES_PER_CORE = 2
"""Processes of runners on Ray per core.

In fewer of them runners wait for one another, since one thread of a process runs Python code at a
time; more of them only take longer to start.
"""

SILENT_SECONDS = 60.0
"""How long a worker whose calls have no time-out may give nothing until that is reported.

It is reported again after twice as long, and so on.
"""


class Done:
    """A future that is done.

    Args:
        value: the result of its call.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        """Return the value."""
        return self.value


class Failed:
    """A future whose call raised.

    Args:
        error: the error that it raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self) -> Any:
        """Raise the error."""
        raise self.error


class HereWorkers:
    """Workers as plain objects in this process, whose calls run at once.

    Args:
        count: the number of workers.
        make: makes a worker from its index and its restart count.
        pick: picks the index of the future that `wait` returns, from their number; None for the
            first.
    """

    def __init__(
        self, count: int, make: Callable[[int, int], Any], pick: Callable[[int], int] | None = None
    ) -> None:
        self.make = make
        self.pick = pick
        self.objects = [make(i, 0) for i in range(count)]

    def __len__(self) -> int:
        return len(self.objects)

    def put(self, value: Any) -> Any:
        """Return the value itself: in this process it need not be sent."""
        return value

    def submit(self, index: int, method: str, *args: Any) -> Done | Failed:
        """Call a method of a worker now, and return a future that is done."""
        # An error is raised by `result`, as it is where workers are remote.
        try:
            return Done(getattr(self.objects[index], method)(*args))
        except Exception as error:  # noqa: BLE001 - `result` raises it
            return Failed(error)

    def current(self, future: Any) -> bool:
        """Return True: all workers are in this process, which is still at work."""
        return True

    def end(self, future: Any) -> None:
        """Do nothing: a call in this process is over before anybody waits for it."""

    def restart(self, index: int, restart_count: int, because: Any = None) -> None:
        """Close a worker, as far as it can be closed, and make it again."""
        with suppress(Exception):
            self.objects[index].close()
        self.objects[index] = self.make(index, restart_count)

    def ready(self, value: Any) -> bool:
        """Return True, so that the results of a seed do not depend on the machine."""
        return True

    def clocks(self) -> dict[str, Reading]:
        """Return no readings: the time of these workers counts for the clock of this thread."""
        return {}

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> int | None:
        """Return the index of a future that is done, None if there is none.

        All are done, so it is the first one, or the one that `pick` picks.
        """
        if not futures:
            return None
        return self.pick(len(futures)) if self.pick else 0

    def close(self) -> None:
        """Close every worker, the last one first, even if one of them raises."""
        with ExitStack() as closing:
            for worker in self.objects:
                closing.callback(worker.close)
