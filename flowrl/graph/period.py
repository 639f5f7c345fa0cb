"""What the search for a graph's period remembers of the rounds that the abstract trace ran."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.items import Filling

Did = Counter[tuple[str, str, str]]
"""What was done, by node, resource and counter.

The items of a node have no resource (``""``), and the three totals below have no node either.
"""
ROUNDS, ROWS, REPORTED = (("", "", name) for name in ("rounds", "rows", "reported"))


class Noted(NamedTuple):
    """Where the trace was after a round."""

    did: Did
    """What was done so far."""
    lags: int
    """How many mean policy lags were found so far."""
    filled: tuple[Filling, ...]
    """The numbers in the state that were filling up."""

    def fits(self, now: Noted) -> int:
        """Return how often what came since can come again before something happens.

        Args:
            now: where the trace is, in a state that differs in nothing but what fills up.
        """
        pairs = list(zip(self.filled, now.filled, strict=True))
        # One that began again in between does not do so at the same moment next time.
        if any(end != begin and end.turns != begin.turns for begin, end in pairs):
            return 0
        # What happens at a mark must be seen, so each number stays below its own.
        left = [(end.mark - 1 - end) // (end - begin) for begin, end in pairs if end > begin]
        return max(0, min(left, default=0))

    def begins(self, now: Noted) -> bool:
        """Return whether one of the numbers that grew since does so for the first time."""
        pairs = zip(self.filled, now.filled, strict=True)
        return any(end > begin and not end.turns for begin, end in pairs)

    def risen(self, now: Noted, times: int) -> list[Filling]:
        """Return the numbers that fill up once what came since came again so often."""
        pairs = zip(self.filled, now.filled, strict=True)
        return [Filling(end + times * (end - begin), end.mark, end.turns) for begin, end in pairs]


class Static(NamedTuple):
    """What is static about a graph's state, without the numbers that fill up."""

    tree: Any
    """The tree structure."""
    facts: tuple[Any, ...]
    """By leaf: a number's value, or an array's shape and type."""
    ages: tuple[tuple[int, tuple[int, ...]], ...]
    """Of each leaf with policy versions: its index, and the ages in updates."""


def is_counter(path: Any, x: Any) -> bool:
    """Return whether a leaf of a graph's state is an operator's NumPy number.

    Such numbers go on within a program. In the state that `path` leads through, the states of the
    operators come first.
    """
    return getattr(path[0], "idx", None) == 0 and isinstance(x, np.integer | np.floating)


class Search:
    """What the search for a period remembers of the rounds so far.

    Args:
        start: where the trace was before the first round.
    """

    def __init__(self, start: Noted) -> None:
        self.start = start
        """From where on means are taken: the first round, or the first one after a skip."""
        self.seen: dict[tuple[Static, tuple[Filling, ...]], Noted] = {}
        """By state: where the trace was in it."""
        self.alike: dict[Static, Noted] = {}
        """By state without what fills up: where the trace was in it last."""
        self.closings: list[Noted] = []
        """Where the trace was after each round from `start` on that closed a Row."""
