"""Where the time goes: every instant of a thread at work belongs to exactly one node and one kind of work."""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import ContextDecorator
from time import perf_counter, time
from types import MappingProxyType
from typing import Any, NamedTuple

KINDS = (
    "start",
    "reset",
    "step",
    "inference",
    "transfer",
    "waiting",
    "blocked",
    "concat",
    "replay",
    "update",
    "weight sync",
    "evaluation",
    "other",
    "outside",
)
"""``start``: making environments, processes and programs; ``waiting``: for something to do; ``blocked``: for room behind; ``outside``: between
rows, in the code of who runs the graph."""
IDLE = ("waiting", "blocked", "outside")
"""The kinds in which a thread does nothing of the graph's."""
TRACE = "FLOWRL_TRACE"
"""The environment variable that, if it is not empty, has clocks keep spans, in this process and in those that a run starts."""
SPANS = 200_000
"""How many of its last spans a clock keeps until they are fetched."""

AHEAD = time() - perf_counter()
"""What is to be added to times of this process to get the seconds since 1970."""

Spent = Mapping[tuple[str, str], float]
"""Seconds by node (empty where none is at work) and kind."""


class Span(NamedTuple):
    """A time from `start` to `end`, of `time.perf_counter`, in which a node did one kind of work."""

    node: str
    kind: str
    start: float
    end: float

    def later(self, seconds: float) -> Span:
        """By a clock that is so far ahead."""
        return self._replace(start=self.start + seconds, end=self.end + seconds)


class Mark(NamedTuple):
    """A moment at which something was handed on: ``put`` into a queue, ``taken`` out of it, ``gave`` (a worker its fragment), ``came`` (to us)."""

    node: str
    """That was at work."""
    what: str
    where: str
    """The queue, or the process of the worker."""
    at: float
    item: int
    """By which what was put is known when it is taken."""

    def later(self, seconds: float) -> Mark:
        """By a clock that is so far ahead."""
        return self._replace(at=self.at + seconds)


class Reading(NamedTuple):
    """What a clock tells: the seconds so far, and the spans since it was read the last time, if it keeps any."""

    spent: Spent = MappingProxyType({})
    spans: tuple[Span | Mark, ...] = ()
    ahead: float = 0.0
    """`AHEAD` of its process."""


class Clock:
    """The seconds of one thread or process by node and kind, from `since` on: a time of `time.perf_counter`, or the moment it is made.

    `spans`: the last of what it counted, one by one, where `TRACE` says that these are wanted.
    """

    def __init__(self, kind: str, since: float | None = None) -> None:
        self.stack = [kind]
        self.node = ""
        self.slot = ("", kind)
        """What is being counted."""
        self.spent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.since = perf_counter() if since is None else since
        self.spans: deque[Span | Mark] | None = (
            deque(maxlen=SPANS) if os.environ.get(TRACE) else None
        )

    def at(self, node: str) -> None:
        """From now on this node is at work."""
        now = (
            perf_counter()
        )  # as in `_count`, which a call would make a third slower: this is done twice for each hop
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

    def mark(self, what: str, where: str, item: Any = None) -> None:
        """Note that something was handed on, where spans are kept."""
        if self.spans is not None:
            self.spans.append(Mark(self.node, what, where, perf_counter(), id(item)))

    def reading(self) -> Reading:
        """All that it tells; each span only once."""
        spans = self.spans or ()
        return Reading(
            self.read(),
            tuple(self.spans.popleft() for _ in range(len(spans))) if self.spans else (),
            AHEAD,
        )


EPOCHS: deque[Span] = deque(maxlen=SPANS)
"""Epochs of updates, of this process, until they are fetched."""
_began = [0.0]


def update_begins() -> None:
    """The epochs that end from now on are those of another update."""
    _began[0] = perf_counter()


def epoch_ended(number: Any, _: Any) -> None:
    """Note it. Called from within an update, where spans are kept."""
    now = perf_counter()
    EPOCHS.append(Span("", f"epoch {int(number) + 1}", _began[0], now))
    _began[0] = now


def traced() -> dict[str, str]:
    """`TRACE`, as a process that is started is to have it."""
    return {TRACE: os.environ.get(TRACE, "")}


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


class Work(ContextDecorator):
    """A kind of work: ``with STEP: ...`` counts towards the clock of the thread, and so does what a function marked ``@STEP`` does."""

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


(
    START,
    RESET,
    STEP,
    INFERENCE,
    TRANSFER,
    WAITING,
    BLOCKED,
    CONCAT,
    REPLAY,
    UPDATE,
    WEIGHTS,
    EVALUATION,
    OTHER,
) = map(Work, KINDS[:-1])
