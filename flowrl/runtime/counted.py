"""Copies of what a ledger counted, and their differences.

A program is traced once, and its counts are added as often as it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flowrl.core.ledger import Ledger

Counts = dict[str, dict[Any, Any]]
"""By name of a ledger's counter: what it counted."""
COUNTED = ("put", "got", "put_steps", "got_steps", "dropped", "dropped_steps")
"""The counters of a ledger that count by edge."""


def counted(ledger: Ledger) -> Counts:
    """Return a copy of all that a ledger counts."""
    return {
        **{name: Counter(getattr(ledger, name)) for name in COUNTED},
        "counts": {key: Counter(counter) for key, counter in ledger.counts.items()},
    }


def since(before: Counts, after: Counts) -> Counts:
    """Return what was counted between two copies."""
    # What is new in `after` started from 0.
    difference: Counts = {name: _minus(after[name], before[name]) for name in COUNTED}
    difference["counts"] = {
        key: _minus(counter, before["counts"].get(key, Counter()))
        for key, counter in after["counts"].items()
    }
    return difference


def _minus(after: Mapping[Any, int], before: Mapping[Any, int]) -> Counter[Any]:
    """Subtract counts.

    Unlike the operator of `Counter`, this keeps numbers that are not above 0: by those below it
    `back_to` also raises what is lower than in the copy.
    """
    return Counter({key: number - before[key] for key, number in after.items()})


def add(ledger: Ledger, counts: Counts, times: int) -> None:
    """Add some counts to a ledger, `times` times."""
    for name in COUNTED:
        counter = getattr(ledger, name)
        for key, number in counts[name].items():
            counter[key] += times * number
    for key, numbers in counts["counts"].items():
        for name, number in numbers.items():
            ledger.counts[key][name] += times * number


def back_to(ledger: Ledger, counts: Counts) -> None:
    """Remove from a ledger what it counted since a copy was made."""
    add(ledger, since(counts, counted(ledger)), -1)
