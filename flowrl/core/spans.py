"""Spans: what a clock counted, time by time, where a run is traced.

A clock counts some 10,000 times a second, so a span is two numbers in arrays, and no object until
somebody looks at the trace.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

SPANS = 200_000
"""The number of its last spans that a clock keeps until they are fetched."""
SLACK = 1_000
"""The spans that a clock may add while its older ones are copied."""


class Span(NamedTuple):
    """The time from `start` to `end` in which a node did one kind of work.

    Both are seconds of `time.perf_counter`.
    """

    node: str
    kind: str
    start: float
    end: float

    def later(self, seconds: float) -> Span:
        """Return the same as measured by a clock that is so many seconds ahead."""
        return self._replace(start=self.start + seconds, end=self.end + seconds)


class Mark(NamedTuple):
    """A moment at which an item was handed on."""

    node: str
    """The node that was at work."""
    what: str
    """The event.

    An item was ``put`` into a queue or ``taken`` out of it; a worker ``returned`` its rollout,
    which this process ``received``.
    """
    where: str
    """The queue, or the process of the worker."""
    at: float
    """The moment, in seconds of `time.perf_counter`."""
    item: int
    """A number by which an item that was put is recognised when it is taken."""

    def later(self, seconds: float) -> Mark:
        """Return the same as measured by a clock that is so many seconds ahead."""
        return self._replace(at=self.at + seconds)


@dataclass(frozen=True)
class Spans:
    """Spans that follow each other without a gap, and the marks of their time."""

    slots: tuple[tuple[str, str], ...] = ()
    """The nodes and kinds of work, by number."""
    numbers: Array | tuple[()] = ()
    """By span: the number of its node and kind."""
    ends: Array | tuple[()] = ()
    """By span: its end, which is the start of the next one."""
    start: float = 0.0
    """The start of the first one."""
    marks: tuple[Mark, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers) + len(self.marks)

    def __iter__(self) -> Iterator[Span | Mark]:
        start = self.start
        for number, end in zip(self.numbers, self.ends, strict=True):
            node, kind = self.slots[number]
            yield Span(node, kind, start, float(end))
            start = float(end)
        yield from self.marks

    def later(self, seconds: float) -> Spans:
        """Return the same as measured by a clock that is so many seconds ahead."""
        return replace(
            self,
            ends=np.add(self.ends, seconds),
            start=self.start + seconds,
            marks=tuple(mark.later(seconds) for mark in self.marks),
        )


class SpanLog:
    """The last spans and marks of a clock, each of which is taken once.

    Args:
        since: the start of the first span.
    """

    def __init__(self, since: float) -> None:
        self.slots: list[tuple[str, str]] = []
        self.number_of: dict[tuple[str, str], int] = {}
        self.numbers = array("I", bytes(4 * SPANS))
        self.ends = array("d", bytes(8 * SPANS))
        self.count = 0
        """The spans so far; number i is at the place ``i % SPANS``."""
        self.taken = 0
        """How many of them were taken, or had to make room for newer ones."""
        self.last = since
        """The end of the last one that was taken."""
        self.marks: deque[Mark] = deque(maxlen=SPANS)

    def add(self, slot: tuple[str, str], end: float) -> None:
        """Add a span of a node and kind, from the end of the last one on."""
        number = self.number_of.get(slot)
        if number is None:
            self.slots.append(slot)
            number = self.number_of[slot] = len(self.slots) - 1
        place = self.count % SPANS
        self.numbers[place], self.ends[place] = number, end
        # Last: another thread may take what is there meanwhile.
        self.count += 1

    def take(self) -> Spans:
        """Return what was added since this was called last; any one thread may call it."""
        count = self.count
        first, start = self.taken, self.last
        if first < (oldest := count - SPANS + SLACK):
            first, start = oldest, self.ends[(oldest - 1) % SPANS]
        places = np.arange(first, count) % SPANS
        ends = np.frombuffer(self.ends)[places]
        self.taken, self.last = count, float(ends[-1]) if len(ends) else start
        # The clock's thread may append meanwhile, so a fixed number is taken, one by one.
        marks = tuple(self.marks.popleft() for _ in range(len(self.marks)))
        numbers = np.frombuffer(self.numbers, np.uint32)[places]
        return Spans(tuple(self.slots), numbers, ends, start, marks)


class Newest:
    """The newest spans and marks of a process, about `SPANS` of them."""

    def __init__(self) -> None:
        self.pieces: deque[Spans | tuple[Span, ...]] = deque()
        self.count = 0

    def add(self, piece: Spans | tuple[Span, ...]) -> None:
        """Add newer ones, and drop the oldest that are too many."""
        if not piece:
            return
        self.pieces.append(piece)
        self.count += len(piece)
        while self.count - len(self.pieces[0]) >= SPANS:
            self.count -= len(self.pieces.popleft())

    def __iter__(self) -> Iterator[Span | Mark]:
        for piece in tuple(self.pieces):
            yield from piece
