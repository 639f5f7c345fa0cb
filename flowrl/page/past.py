"""What a run did at a moment of its past, as a page shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    entries: Sequence[Entry], number: int, row: Callable[[int], Mapping[str, float]]
) -> dict[str, Any] | None:
    """Return what a run did at a moment of its history, as plain data.

    Args:
        entries: its history.
        number: index of the moment.
        row: returns a row by its number, as `Source.row` does.

    Returns:
        When it was, as in `past_of`; ``now``, what the run did since the moment before it, as
        `flowrl.page.moment.moment` returns it; and ``row``, the numbers of the row at that time.
        None if there is no moment of this index.
    """
    if not 0 <= number < len(entries):
        return None
    entry = entries[number]
    now = moment(part(entries, number), entry.whole)
    return dict(without_nan({**_when(entry), "now": now, "row": dict(row(entry.rows))}))


def _when(entry: Entry) -> dict[str, Any]:
    return {"seconds": entry.seconds, "env_steps": entry.env_steps, "rows": entry.rows}
