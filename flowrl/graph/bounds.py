"""`Bounds`: what a queue may hold, and what it does when it is full."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import SettingError

FULL = ("block", "drop_oldest", "drop_newest")
"""What a queue may do when it is full."""
ORDERS = ("fifo", "lifo")
"""The orders in which items may be taken from a queue."""


@dataclass(frozen=True)
class Bounds:
    """What a queue may hold, and what it does when it is full."""

    capacity: int
    """The largest number of items."""
    full: str = "block"
    """``block``, ``drop_oldest`` or ``drop_newest``, where there is no capacity left."""
    order: str = "fifo"
    """``fifo`` or ``lifo``, the order in which items are taken."""
    max_lag: int | None = None
    """The largest policy lag of what comes out, in updates; None for any."""

    def __post_init__(self) -> None:
        """Refuse what no queue can do.

        Raises:
            SettingError: such a setting.
        """
        for name, known in (("full", FULL), ("order", ORDERS)):
            if (value := getattr(self, name)) not in known:
                raise SettingError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.capacity < 1:
            raise SettingError(f"capacity must be at least 1, got {self.capacity}")
        if self.max_lag is not None and self.max_lag < 0:
            raise SettingError(f"max_lag must not be negative, got {self.max_lag}")
