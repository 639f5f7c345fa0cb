"""What each node of a run did, in whole numbers."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping


class At(threading.local):
    """Where a thread is: the node at work; empty while resources open."""

    node = ""


class Ledger:
    """What each node did, in whole numbers: what the plan predicts, the run counts and the audit compares."""

    def __init__(self) -> None:
        self.at = At()
        self.counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        """By node and resource: calls, bytes and the like, as the verbs report them."""
        self.put: Counter[tuple[str, str]] = Counter()
        self.got: Counter[tuple[str, str]] = Counter()
        """By edge: items handed over, and items whose step was gone through to its end."""
        self.put_steps: Counter[tuple[str, str]] = Counter()
        self.got_steps: Counter[tuple[str, str]] = Counter()
        self.dropped: Counter[tuple[str, str]] = Counter()
        """By edge into a queue: items that had to go, or were too old."""
        self.dropped_steps: Counter[tuple[str, str]] = Counter()

    def count(self, resource: str, numbers: Mapping[str, int]) -> None:
        """Add to the counters of the node at work, for a resource."""
        counts = self.counts[self.at.node, resource]
        for name, number in numbers.items():
            counts[name] += number
