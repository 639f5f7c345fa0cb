"""Where the time goes: every instant of a thread at work belongs to exactly one node and one kind of work."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

KINDS = ("start", "reset", "step", "inference", "transfer", "waiting", "blocked", "concat", "update", "weight sync", "evaluation", "other", "outside")
"""``start``: making environments, processes and programs; ``waiting``: for something to do; ``blocked``: for room behind; ``outside``: between
rows, in the code of who runs the graph."""
IDLE = ("waiting", "blocked", "outside")
"""The kinds in which a thread does nothing of the graph's."""
SPANS = 200_000
"""How many of its last spans a clock keeps."""

Spent = Mapping[tuple[str, str], float]
"""Seconds by node (empty where none is at work) and kind."""


class Span(NamedTuple):
    """A time from `start` to `end`, of `time.perf_counter`, in which a node did one kind of work."""

    node: str
    kind: str
    start: float
    end: float


class Clock:
    """The seconds of one thread or process by node and kind, from `since` on: a time of `time.perf_counter`, or the moment it is made.

    `spans`: the last of what it counted, one by one, where these are wanted: see `trace`.
    """

    def __init__(self, kind: str, since: float | None = None) -> None:
        self.stack = [kind]
        self.node = ""
        self.slot = ("", kind)
        """What is being counted."""
        self.spent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.since = perf_counter() if since is None else since
        self.spans: deque[Span] | None = None

    def trace(self) -> None:
        """Keep spans from now on."""
        self.spans = deque(maxlen=SPANS)

    def at(self, node: str) -> None:
        """From now on this node is at work."""
        now = perf_counter()  # as in `_count`, which a call would make a third slower: this is done twice for each hop
        self.spent[self.slot] += now - self.since
        if self.spans is not None:
            self.spans.append(Span(*self.slot, self.since, now))
        self.since, self.node, self.slot = now, node, (node, self.stack[-1])

    def enter(self, kind: str) -> None:
        """From now on it is this kind of work."""
        self._count(self.node, kind)
        self.stack.append(kind)

    def leave(self) -> None:
        """It is what it was before again."""
        self.stack.pop()
        self._count(self.node, self.stack[-1])

    def _count(self, node: str, kind: str) -> None:
        now = perf_counter()
        self.spent[self.slot] += now - self.since
        if self.spans is not None:
            self.spans.append(Span(*self.slot, self.since, now))
        self.since, self.slot = now, (node, kind)

    def move(self, seconds: float, old: str, new: str) -> None:
        """Say that some of the seconds of one kind were of another."""
        self.spent[self.node, old] -= seconds
        self.spent[self.node, new] += seconds

    def read(self) -> Spent:
        """The seconds by node and kind, up to now. Any thread may ask."""
        slot, since, spent = self.slot, self.since, self.spent.copy()
        return {**spent, slot: spent.get(slot, 0.0) + perf_counter() - since}


def by_kind(spent: Spent) -> dict[str, float]:
    """The seconds by kind alone."""
    found: defaultdict[str, float] = defaultdict(float)
    for (_, kind), seconds in spent.items():
        found[kind] += seconds
    return dict(found)


class _Here(threading.local):
    def __init__(self) -> None:
        self.clock = Clock("outside")


_here = _Here()


def here() -> Clock:
    """The clock by which this thread works."""
    return _here.clock


class Work:
    """A kind of work: ``with STEP: ...`` counts towards the clock of the thread."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        _here.clock.enter(self.kind)

    def __exit__(self, *_: object) -> None:
        _here.clock.leave()


class By:
    """``with By(clock): ...``: this thread works by that clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __enter__(self) -> None:
        self.before, _here.clock = _here.clock, self.clock

    def __exit__(self, *_: object) -> None:
        _here.clock = self.before


START, RESET, STEP, INFERENCE, TRANSFER, WAITING, BLOCKED, CONCAT, UPDATE, WEIGHTS, EVALUATION, OTHER = map(Work, KINDS[:-1])
