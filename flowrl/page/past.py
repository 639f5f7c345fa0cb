"""What a run did at a moment of its past, as a page shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from flowrl.observe.history import Entry, part
from flowrl.page.moment import moment, without_nan

T = TypeVar("T")


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many of these items, evenly spread and the last one among them."""
    step = -(-len(items) // most) if items else 1
    return [*items[::-1][::step]][::-1]


def past_of(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return when each moment of a history was: seconds, environment steps and rows until then."""
    return [_when(entry) for entry in entries]


def past_moment(
    entries: Sequence[Entry], rows: Sequence[Mapping[str, float]], number: int
) -> dict[str, Any] | None:
    """Return what a run did at a moment of its history, as plain data.

    Args:
        entries: its history.
        rows: all its rows.
        number: index of the moment.

    Returns:
        When it was, as in `past_of`; ``now``, what the run did since the moment before it, as
        `flowrl.page.moment.moment` returns it; and ``row``, the numbers of the row at that time.
        None if there is no moment of this index.
    """
    if not 0 <= number < len(entries):
        return None
    entry = entries[number]
    # The newest row may be on its way to whoever asks.
    row = rows[min(entry.rows, len(rows)) - 1] if entry.rows > 0 and rows else {}
    found = {**_when(entry), "now": moment(part(entries, number)), "row": dict(row)}
    return dict(without_nan(found))


def _when(entry: Entry) -> dict[str, Any]:
    return {"seconds": entry.seconds, "env_steps": entry.env_steps, "rows": entry.rows}
