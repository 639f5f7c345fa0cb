"""Where the time goes: every instant of a thread at work belongs to exactly one kind of work."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from time import perf_counter

KINDS = ("start", "reset", "step", "inference", "transfer", "waiting", "concat", "update", "weight sync", "evaluation", "other", "outside")
"""``start``: making environments, processes and programs; ``outside``: between rows, in the code of who runs the graph."""


class Clock:
    """The seconds of one thread or process by kind, from `since` on: a time of `time.perf_counter`, or the moment it is made."""

    def __init__(self, kind: str, since: float | None = None) -> None:
        self.stack = [kind]
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.since = perf_counter() if since is None else since

    def enter(self, kind: str) -> None:
        """From now on it is this kind of work."""
        now = perf_counter()
        self.spent[self.stack[-1]] += now - self.since
        self.since = now
        self.stack.append(kind)

    def leave(self) -> None:
        """It is what it was before again."""
        now = perf_counter()
        self.spent[self.stack.pop()] += now - self.since
        self.since = now

    def move(self, seconds: float, old: str, new: str) -> None:
        """Say that some of the seconds of one kind were of another."""
        self.spent[old] -= seconds
        self.spent[new] += seconds

    def read(self) -> Mapping[str, float]:
        """The seconds by kind, up to now."""
        kind = self.stack[-1]
        return {**self.spent, kind: self.spent.get(kind, 0.0) + perf_counter() - self.since}


class _Here(threading.local):
    def __init__(self) -> None:
        self.clock = Clock("outside")


_here = _Here()


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


START, RESET, STEP, INFERENCE, TRANSFER, WAITING, CONCAT, UPDATE, WEIGHTS, EVALUATION, OTHER = map(Work, KINDS[:-1])
