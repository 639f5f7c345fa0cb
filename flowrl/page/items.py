"""The last items of the nodes at which somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Any, ClassVar

from flowrl.core.events import Observer, OperatorRan

LOOKING = 5.0
"""The seconds for which a node's items are kept after somebody looked at it."""


class LastItems:
    """An observer of a run that keeps the newest item of each node at which somebody looks.

    It takes events only while somebody looks, for they cost the run a little for each item.

    Args:
        observe: begins to pass the events of the run to an observer, and returns what ends that.
    """

    live = True
    kinds: ClassVar[tuple[type, ...]] = (OperatorRan,)

    def __init__(self, observe: Callable[[Observer], Callable[[], None]]) -> None:
        self._observe = observe
        self._lock = Lock()
        """Held by the thread of the run and by those that look."""
        self._end: Callable[[], None] | None = None
        self._looked = 0.0
        """When somebody looked last, by the clock `monotonic`."""
        self._items: dict[str, Any] = {}
        """By node at which somebody looks: its newest item, None before there is one."""

    def look(self, node: str) -> Any:
        """Return the newest item of a node, None before there is one; and keep those to come."""
        with self._lock:
            self._looked = monotonic()
            found = self._items.setdefault(node, None)
            if self._end is None:
                self._end = self._observe(self)
            return found

    def __call__(self, event: OperatorRan) -> None:
        """Keep the item that a node yielded, if somebody looks at that node."""
        if event.item is None:
            return
        with self._lock:
            if monotonic() - self._looked > LOOKING:
                self._stop()
            elif event.node in self._items:
                self._items[event.node] = event.item

    def stop(self) -> None:
        """Take no more events until somebody looks again, and let go of the items."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        end, self._end = self._end, None
        self._items = {}
        if end is not None:
            end()
