"""How a graph repeats itself: in rounds of its stages, and in items of a round that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from flowrl.core.events import OperatorRan
from flowrl.graph.graph import Graph
from flowrl.graph.loop import one_by_one
from flowrl.graph.protocols import Handle
from flowrl.graph.stages import Schedule
from flowrl.graph.trace import Trace, Tracer

UNROLLED = 64
"""Rounds that a program may unroll: the time to compile it grows with them."""
UNROLLED_UPDATES = 256
"""Updates that a program may unroll. Each takes a second or two to compile on two cores."""


class Part(NamedTuple):
    """So many items, or rounds, which come so many times over."""

    items: int
    times: int


@dataclass(frozen=True)
class Repetition:
    """How the items of one `Context.repeat` repeat themselves, with all that is done with them."""

    parts: tuple[Part, ...]
    """One after another. A program has one scan for each that comes several times over."""
    closes: bool
    """Whether rows close within the parts. If not, the reporting operator takes what reached it
    after each part, with the last item of which alone a row may close."""

    @property
    def items(self) -> int:
        """The items that a program has of all parts: each part is there once."""
        return sum(part.items for part in self.parts)


@dataclass(frozen=True)
class Stretch:
    """Rounds of the steady period, which come so many times over, one after another.

    Those that come several times over are one scan in a program: the reporting operator takes what
    reached it only after them, with the last item of which alone a row may close.
    """

    rounds: int
    times: int
    repetitions: tuple[Repetition, ...] = ()
    """Each `Context.repeat` of these rounds, in order."""


@dataclass(frozen=True)
class Periodicity:
    """How a graph repeats itself, in rounds of its stages."""

    warmup: int
    """Rounds before the steady period."""
    period: int
    """Rounds of the steady period, after which the static state is the same again."""
    stretches: tuple[Stretch, ...]
    """What a period consists of."""
    updates: int
    """Updates that a program has: those of each stretch, and there of each part of a repetition,
    are in it once."""

    @property
    def rounds(self) -> int:
        """Rounds that a program has: those of each stretch are in it once."""
        return sum(stretch.rounds for stretch in self.stretches)


class UnitTracer(Tracer):
    """An abstract trace that records the static state after each round, and when rows close.

    The state of the reporting operator is left out.
    """

    # In a program operators' NumPy counters are arrays, so their values are not static.
    counters = False

    def __init__(self, graph: Graph, found: Trace) -> None:
        super().__init__(graph, found.totals)
        self.seen: list[Any] = []
        self.reporting = next(node.name for node in graph.nodes if node.op.reports)
        self.items: list[bool] = []
        """By item that reached the reporting operator: whether a row closed with it."""
        self.items_before: list[int] = []
        """By round: how many items reached the reporting operator before it."""
        self.closed = False
        """Whether a row closed with the item that the reporting operator is taking."""
        self.repetitions: list[tuple[Repetition, int]] = []
        """Each repetition, and how many updates of it a program need not have."""
        self.repetitions_before: list[int] = []
        """By round: how many repetitions came before it."""
        self.repeating = False
        """Whether an item of a repetition is on its way: one within another is none of its own."""

    def between(self, schedule: Schedule) -> None:
        """Record the static state between two rounds."""
        self.seen.append(self.signature(schedule, reporting=False))
        self.items_before.append(len(self.items))
        self.repetitions_before.append(len(self.repetitions))

    def watch(self, event: OperatorRan) -> None:
        """Note what a node yielded, and with which items rows close."""
        super().watch(event)
        if event.node != self.reporting:
            return
        if event.item is not None:
            self.closed = True
            return
        # A step ends with None.
        self.items.append(self.closed)
        self.closed = False

    def of_period(self, warmup: int, period: int) -> Periodicity:
        """Return how the last rounds that were traced repeat themselves."""
        first = len(self.seen) - 1 - period
        rounds = itertools.pairwise(self.items_before[first:])
        closings = [self.items[before:after] for before, after in rounds]
        stretches, updates, begin = [], 0, first
        for part in between_rows(self.seen[first:], closings):
            end = begin + part.items
            found = self.repetitions[self.repetitions_before[begin] : self.repetitions_before[end]]
            updates += self.items_before[end] - self.items_before[begin]
            updates -= sum(saved for _, saved in found)
            stretches.append(Stretch(part.items, part.times, tuple(each for each, _ in found)))
            begin += part.items * part.times
        return Periodicity(warmup, period, tuple(stretches), updates)

    # -- items that repeat themselves

    def _schedule(self, handles: Mapping[str, Handle]) -> Schedule:
        """Return the schedule, in which it is noted how items repeat themselves."""
        schedule = super()._schedule(handles)
        for loop in schedule.loops:
            for unit in loop.units.values():
                unit.ctx.repeat = partial(self._repeat, schedule)
        return schedule

    def _repeat(self, schedule: Schedule, times: int, make: Callable[[], Any]) -> Iterator[Any]:
        """Yield what a function returns, so many times, and note how the state repeats itself."""
        if self.repeating or times < 2:
            yield from one_by_one(times, make)
            return
        self.repeating, before = True, len(self.items)
        # By number of items: the state but for that of the reporting operator, and the whole one.
        apart: list[Any] = [self.signature(schedule, reporting=False)]
        whole: list[Any] = [self.signature(schedule)]
        closings, since, turn = [], 0, 0
        for number in range(1, times + 1):
            reported = len(self.items)
            yield from one_by_one(1, make)
            closings.append(self.items[reported:])
            # A row takes what runners gathered, so what follows it is not what followed before.
            if any(closings[-1]):
                since, turn = number, 0
            # To compare states costs as much as an item: once one recurs, what follows is known.
            apart.append(apart[-turn] if turn else self.signature(schedule, reporting=False))
            turn = turn or number - apart.index(apart[-1], since)
            # Before a row closes, what the reporting operator holds grows.
            whole.append(self.signature(schedule) if any(closings[-1]) else object())
        self.repeating = False
        found = Repetition(between_rows(apart, closings), closes=False)
        closing = Repetition(parts_of(whole), closes=True)
        if closing.items < found.items:
            found = closing
        saved = (times - found.items) * (len(self.items) - before) // times
        self.repetitions.append((found, saved))


def between_rows(seen: Sequence[Any], closings: Sequence[Sequence[bool]]) -> tuple[Part, ...]:
    """Return how items, or rounds, repeat themselves, with no row but at the end of a part.

    Args:
        seen: the state before the first item and after each, but for the reporting operator's own.
        closings: by item, for all that reached the reporting operator, whether a row closed then.
    """
    ends = {0, len(closings)}
    for number, closed in enumerate(closings):
        if any(closed):
            ends.add(number + 1)
        # A row that closes within an item is in no scan, so that the item is a part of its own.
        if any(closed[:-1]):
            ends.add(number)
    parts = [parts_of(seen[a : b + 1]) for a, b in itertools.pairwise(sorted(ends))]
    return tuple(itertools.chain(*parts))


def parts_of(seen: Sequence[Any]) -> tuple[Part, ...]:
    """Return how items repeat themselves.

    Args:
        seen: the state before the first item and after each; equal ones are followed by equal ones.
    """
    items = len(seen) - 1
    first: dict[Any, int] = {}
    for end, state in enumerate(seen):
        if (begin := first.setdefault(state, end)) < end:
            times, rest = divmod(items - begin, end - begin)
            parts = Part(begin, 1), Part(end - begin, times), Part(rest, 1)
            return tuple(part for part in parts if part.items)
    return (Part(items, 1),)


def periodicity(graph: Graph, found: Trace) -> Periodicity | None:
    """Return how a graph repeats itself.

    Args:
        graph: the graph.
        found: what its abstract trace found.

    Returns:
        The periodicity, or None where there is no steady period.
    """
    # A faulty graph, one with steps that were not traced, or one without Rows has no period.
    if found.problems or found.opaque or not found.rows:
        return None
    tracer = UnitTracer(graph, found)
    traced = tracer.run()
    if not traced.exact:
        return None
    return tracer.of_period(traced.warmup_rounds, traced.passes - traced.warmup_rounds)
