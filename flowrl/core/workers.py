"""Workers as plain objects in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from flowrl.core.clock import Reading


class Done:
    """A future that is done."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        """The value."""
        return self.value


class Failed:
    """A future whose call raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self) -> Any:
        """Raise it."""
        raise self.error


class HereWorkers:
    """Workers as plain objects in this process; a call runs at once."""

    def __init__(
        self, count: int, make: Callable[[int, int], Any], pick: Callable[[int], int] | None = None
    ) -> None:
        self.make = make
        self.pick = pick
        self.objects = [make(i, 0) for i in range(count)]

    def __len__(self) -> int:
        return len(self.objects)

    def put(self, value: Any) -> Any:
        """The value itself."""
        return value

    def submit(self, index: int, method: str, *args: Any) -> Done | Failed:
        """Call the method now."""
        try:
            return Done(getattr(self.objects[index], method)(*args))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for, as everywhere
            return Failed(error)

    def current(self, future: Any) -> bool:
        """Always."""
        return True

    def restart(self, index: int, restart_count: int, because: Any = None) -> None:
        """Close the worker, as far as it can be, and make it anew."""
        with suppress(Exception):
            self.objects[index].close()
        self.objects[index] = self.make(index, restart_count)

    def ready(self, value: Any) -> bool:
        """Always, so that what a seed leads to does not depend on the machine."""
        return True

    def clocks(self) -> dict[str, Reading]:
        """None: they work by the clock of this thread."""
        return {}

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> int | None:
        """All are done: the first one, or one drawn by lot."""
        return None if not futures else self.pick(len(futures)) if self.pick else 0

    def close(self) -> None:
        """Close every worker."""
        with ExitStack() as each:
            for worker in self.objects:
                each.callback(worker.close)
