"""Counts of what each node of a run did, in whole numbers."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from flowrl.core.keeping import Keeping


class At(threading.local):
    """The node at work in a thread; empty while resources open."""

    node = ""


class Ledger(Keeping):
    """Counts of what each node did, in whole numbers.

    The plan predicts them, the run counts them, and the audit compares both.
    """

    lasting = ("counts", "put", "got", "put_steps", "got_steps", "dropped", "dropped_steps")
    remade = ("at", "lock")

    def __init__(self) -> None:
        self.at = At()
        self.lock = threading.Lock()
        self.counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        """By node and resource: calls, bytes and the like, as the verbs report them."""
        self.put: Counter[tuple[str, str]] = Counter()
        """By edge: items that were handed over."""
        self.got: Counter[tuple[str, str]] = Counter()
        """By edge: items whose step ran to its end."""
        self.put_steps: Counter[tuple[str, str]] = Counter()
        """By edge: steps in the items of `put`."""
        self.got_steps: Counter[tuple[str, str]] = Counter()
        """By edge: steps in the items of `got`."""
        self.dropped: Counter[tuple[str, str]] = Counter()
        """By edge into a queue: items that were dropped, for it was full or they were too old."""
        self.dropped_steps: Counter[tuple[str, str]] = Counter()
        """By edge into a queue: steps in the items of `dropped`."""

    def take(self, state: Any) -> None:
        """Go on counting from what was kept."""
        super().take(state)
        for name in self.lasting:
            setattr(self, name, Counter(getattr(self, name)))
        self.counts = defaultdict(
            Counter, {key: Counter(numbers) for key, numbers in state["counts"].items()}
        )

    def drop(self, edge: tuple[str, str], steps: int) -> None:
        """Count an item of so many steps that was dropped on an edge into a queue.

        Unlike the other counts those of an edge are counted by two threads: by that of the stage
        before the queue where it is full, and by that after it where an item is too old.
        """
        with self.lock:
            self.dropped[edge] += 1
            self.dropped_steps[edge] += steps

    def count(self, resource: str, numbers: Mapping[str, int]) -> None:
        """Add numbers to the counters of the node at work, for a resource."""
        counts = self.counts[self.at.node, resource]
        for name, number in numbers.items():
            counts[name] += number
