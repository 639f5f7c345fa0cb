"""What the search for a graph's period remembers of the rounds that the abstract trace ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.items import Filling

Did = Counter[tuple[str, str, str]]
"""What was done, by node, resource and counter.

The items of a node have no resource (``""``), and the three totals below have no node either.
"""
ROUNDS, ROWS, REPORTED = (("", "", name) for name in ("rounds", "rows", "reported"))
LOOK_EVERY = 64
"""Rounds after which the trace compares states at first, although no Row closed."""


def began_again(before: Filling, after: Filling) -> bool:
    """Return whether a number that fills up did so from its beginning again in between."""
    return after < before or after.turns != before.turns


class Noted(NamedTuple):
    """Where the trace was after a round."""

    did: Did
    """What was done so far."""
    lags: Counter[float]
    """How many updates had which mean policy lag so far."""
    filled: tuple[Filling, ...]
    """The numbers in the state that were filling up."""

    def fits(self, now: Noted) -> int:
        """Return how often what came since can come again before something happens.

        Args:
            now: where the trace is, in a state that differs in nothing but what fills up.
        """
        pairs = list(zip(self.filled, now.filled, strict=True))
        # One that began again in between does so at another moment next time, unless it is where it
        # was.
        if any(begin != end and began_again(begin, end) for begin, end in pairs):
            return 0
        # What happens at a mark must be seen, so each number stays below its own.
        left = [(end.mark - 1 - end) // (end - begin) for begin, end in pairs if end > begin]
        return max(0, min(left, default=0))

    def until(self, now: Noted, filled: tuple[Filling, ...]) -> int:
        """Return after how many times what came since the numbers are these; 0 if never."""
        pairs = zip(self.filled, now.filled, filled, strict=True)
        grown = next(((x - end) // (end - begin) for begin, end, x in pairs if end > begin), 0)
        return grown if grown > 0 and self.risen(now, grown) == filled else 0

    def begins(self, now: Noted) -> bool:
        """Return whether one of the numbers that grew since does so for the first time."""
        pairs = zip(self.filled, now.filled, strict=True)
        return any(end > begin and not end.turns for begin, end in pairs)

    def risen(self, now: Noted, times: int) -> tuple[Filling, ...]:
        """Return the numbers that fill up once what came since came again so often."""
        pairs = zip(self.filled, now.filled, strict=True)
        return tuple(Filling(y + times * (y - x), y.mark, y.turns) for x, y in pairs)


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
        self.alike: dict[tuple[Static, Hashable], Noted] = {}
        """By state without what fills up, and by one with some of it: where the trace was last."""
        self.filled: defaultdict[Static, list[tuple[Filling, ...]]] = defaultdict(list)
        """By state without what fills up: all that it was then."""
        self.steps = 0
        """The steps of operators before `start`."""
        self.closings: list[Noted] = []
        """Where the trace was after each round from `start` on that closed a Row."""
        self.quiet = 0
        """Rounds that were run since the last that closed a Row."""

    def is_due(self) -> bool:
        """Count a round that closed no Row, and return whether it is worth a look.

        Comparing states costs more than a round, and ever more where operators hold what comes, as
        a `Concat` does until its batch is full. So the longer no Row closes, the more seldom a look
        is due, but always after a multiple of `LOOK_EVERY` rounds.
        """
        self.quiet += 1
        every = LOOK_EVERY << (self.quiet // (8 * LOOK_EVERY)).bit_length()
        return self.quiet % every == 0

    def before(self, static: Static, now: Noted) -> Noted:
        """Return where the trace was before, alike but for what fills up; `now` if it never was.

        Of several that is the one since which most rounds can be skipped.
        """
        found = [self.alike.get(key, now) for key in _keys(static, now)]
        return max(found, key=lambda x: x.fits(now) * (now.did[ROUNDS] - x.did[ROUNDS]))

    def times(self, static: Static, before: Noted, now: Noted) -> int:
        """Return how often what came since can come again: at most until the trace was there."""
        most = before.fits(now)
        met = (before.until(now, filled) for filled in self.filled[static])
        return min([most, *(times for times in met if 0 < times < most)])

    def note(self, static: Static, now: Noted) -> None:
        """Remember where the trace is."""
        self.seen[static, now.filled] = now
        self.filled[static].append(now.filled)
        self.alike.update(dict.fromkeys(_keys(static, now), now))


def _keys(static: Static, now: Noted) -> Iterator[tuple[Static, Hashable]]:
    """Yield under what a state is remembered: alone, and with the numbers that began again.

    While one number grows, another may begin again many times, as the count of an `Evaluate` does
    while a replay fills up. What fits is then a state in which that one was the same.
    """
    yield static, ()
    yield static, tuple(int(x) if x.turns else None for x in now.filled)
