"""What a ledger counted, taken apart: a program is traced once, and booked as often as it runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flowrl.core.ledger import Ledger

Counts = dict[str, dict[Any, Any]]
COUNTED = ("put", "got", "put_steps", "got_steps", "dropped", "dropped_steps")


def counted(ledger: Ledger) -> Counts:
    """A copy of all that a ledger counts."""
    return {
        **{name: Counter(getattr(ledger, name)) for name in COUNTED},
        "counts": {k: Counter(c) for k, c in ledger.counts.items()},
    }


def since(before: Counts, after: Counts) -> Counts:
    """What was counted between the two."""
    plain: Counts = {
        name: Counter({k: n - before[name][k] for k, n in after[name].items()}) for name in COUNTED
    }
    return plain | {
        "counts": {
            k: Counter({n: x - before["counts"].get(k, Counter())[n] for n, x in c.items()})
            for k, c in after["counts"].items()
        }
    }


def add(ledger: Ledger, counts: Counts, times: int) -> None:
    """Count so many times what was counted once."""
    for name in COUNTED:
        for k, n in counts[name].items():
            getattr(ledger, name)[k] += times * n
    for k, c in counts["counts"].items():
        for n, x in c.items():
            ledger.counts[k][n] += times * x


def back_to(ledger: Ledger, counts: Counts) -> None:
    """Forget what was counted since."""
    add(ledger, since(counts, counted(ledger)), -1)
