"""How a graph repeats itself: in rounds of its stages, and in items of a round that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import networkx as nx

from flowrl.core.events import OperatorRan
from flowrl.core.items import Filling
from flowrl.graph.graph import Graph
from flowrl.graph.loop import one_by_one
from flowrl.graph.period import ROUNDS, Noted, Static, began_again
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
class Section:
    """Rounds of the steady period that are one program, which runs so many times over."""

    stretches: tuple[Stretch, ...]
    """What they consist of."""
    times: int = 1

    @property
    def rounds(self) -> int:
        """Rounds that the program has: those of each stretch are in it once."""
        return sum(stretch.rounds for stretch in self.stretches)


@dataclass(frozen=True)
class Periodicity:
    """How a graph repeats itself, in rounds of its stages."""

    warmup: int
    """Rounds before the steady period."""
    period: int
    """Rounds of the steady period, after which the static state is the same again."""
    sections: tuple[Section, ...]
    """What a period consists of. A single one goes on for ever."""
    rounds: int
    """Rounds that its programs have: those of each stretch are in it once."""
    updates: int
    """Updates that its programs have: those of each stretch, and there of each part of a
    repetition, are in it once."""


State = tuple[Static, tuple[Filling, ...]]
"""What is static about the state of a graph, and apart from it the numbers that fill up."""


class Round(NamedTuple):
    """A round that the abstract trace ran."""

    before: State
    """The state before it, but for that of the reporting operator."""
    after: State
    items: list[bool]
    """By item that reached the reporting operator: whether a row closed with it."""
    went_on: bool
    """Whether other nodes did something after the last of these rows."""
    repetitions: list[tuple[Repetition, int]]
    """Each repetition, and how many updates of it a program need not have."""


class Again(NamedTuple):
    """Rounds that the trace ran just before and skipped then, as often as nothing else happens."""

    rounds: list[Round | Again]
    times: int


class UnitTracer(Tracer):
    """An abstract trace that records the static state after each round, and when rows close.

    The state of the reporting operator is left out.
    """

    # In a program operators' NumPy counters are arrays, so their values are not static.
    counters = False

    def __init__(self, graph: Graph, found: Trace) -> None:
        super().__init__(graph, found.totals)
        self.timeline: list[Round | Again] = []
        self.lengths: dict[int, int] = {}
        """By number of rounds, those that were skipped among them: how long `timeline` was."""
        self.last: Any = None
        """The state after the last round; before the first, how it begins."""
        self.reporting = next(node.name for node in graph.nodes if node.op.reports)
        self.items: list[bool] = []
        """By item that reached the reporting operator: whether a row closed with it."""
        self.closed = False
        """Whether a row closed with the item that the reporting operator is taking."""
        ancestors = nx.ancestors(graph.digraph(), self.reporting)
        self.ends = frozenset(map(str, {*ancestors, self.reporting}))
        """The nodes whose steps may end after a row closed, and have nothing left to do then."""
        self.went_on = False
        """Whether other nodes did something after the last row closed."""
        self.repetitions: list[tuple[Repetition, int]] = []
        """Each repetition, and how many updates of it a program need not have."""
        self.repeating = False
        """Whether an item of a repetition is on its way: one within another is none of its own."""

    def between(self, schedule: Schedule) -> None:
        """Record the static state between two rounds."""
        before, self.last = self.last, self.signature(schedule, reporting=False)
        if before is not None:
            found = Round(before, self.last, self.items, self.went_on, self.repetitions)
            self.timeline.append(found)
            self.items, self.repetitions = [], []
        self.lengths[self.did[ROUNDS]] = len(self.timeline)

    def skip(self, schedule: Schedule, before: Noted, now: Noted, times: int) -> None:
        """Skip repetitions of what lies between two states, and note which these are."""
        rounds = self.timeline[self.lengths[before.did[ROUNDS]] :]
        super().skip(schedule, before, now, times)
        self.timeline.append(Again(rounds, times))
        self.lengths[self.did[ROUNDS]] = len(self.timeline)
        self.last = self.signature(schedule, reporting=False)

    def watch(self, event: OperatorRan) -> None:
        """Note what a node yielded, and with which items rows close."""
        super().watch(event)
        if event.node != self.reporting:
            self.went_on |= event.item is not None or event.node not in self.ends
            return
        if event.item is not None:
            self.closed, self.went_on = True, False
            return
        # A step ends with None.
        self.items.append(self.closed)
        self.closed = False

    def of_period(self, warmup: int, period: int) -> Periodicity:
        """Return how the last rounds that were traced repeat themselves."""
        found = list(sections_of(folded(self.timeline[self.lengths[warmup] :])))
        # What comes again is there once; of much the keys take long to compare.
        once = {id(traced): traced for traced in found}.values()
        programs = {traced.key: traced for traced in once}.values()
        rounds = sum(traced.section.rounds for traced in programs)
        updates = sum(traced.updates for traced in programs)
        sections = []
        for _, group in itertools.groupby(found, lambda traced: traced.key):
            each = [traced.section for traced in group]
            sections.append(replace(each[0], times=sum(section.times for section in each)))
        return Periodicity(warmup, period, tuple(sections), rounds, updates)

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
            closings.append(closings_of(self.items[reported:], self.went_on))
            # A row takes what runners gathered, so what follows it is not what followed before.
            if any(closings[-1]):
                since, turn = number, 0
            # To compare states costs as much as an item: once one recurs, what follows is known.
            apart.append(apart[-turn] if turn else self.signature(schedule, reporting=False))
            turn = turn or number - apart.index(apart[-1], since)
            # Before a row closes, what the reporting operator holds grows.
            growing = object(), apart[-1][1]
            whole.append(self.signature(schedule) if any(closings[-1]) else growing)
        self.repeating = False
        found = Repetition(between_rows(apart, closings), closes=False)
        closing = Repetition(fewest(whole), closes=True)
        if closing.items < found.items:
            found = closing
        saved = (times - found.items) * (len(self.items) - before) // times
        self.repetitions.append((found, saved))


class Traced(NamedTuple):
    """A section of the timeline."""

    section: Section
    updates: int
    """The updates that its program has."""
    key: Any
    """What two of them share which are the same program."""


def folded(timeline: Sequence[Round | Again]) -> list[Round | Again]:
    """Return rounds, one after another, in which those that came again are part of what did.

    Args:
        timeline: the rounds as they were traced: what came again stands before it, unless the
            timeline begins in between.
    """
    found: list[Round | Again] = []
    for each in timeline:
        if isinstance(each, Again):
            rounds = folded(each.rounds)
            first = len(found) - len(rounds)
            same = first >= 0 and found[first:] == rounds
            if same:
                del found[first:]
            found.append(Again(rounds, each.times + same))
        else:
            found.append(each)
    return found


def sections_of(timeline: Sequence[Round | Again]) -> Iterator[Traced]:
    """Yield how rounds repeat themselves.

    Args:
        timeline: the rounds, as `folded` returns them.
    """
    for again, group in itertools.groupby(timeline, lambda each: isinstance(each, Again)):
        if not again:
            yield _section(cast("list[Round]", list(group)), 1)
            continue
        for rounds, times in cast("Iterator[Again]", group):
            if any(isinstance(each, Again) for each in rounds):
                yield from times * list(sections_of(rounds))
            else:
                yield _section(cast("list[Round]", rounds), times)


def _section(rounds: list[Round], times: int) -> Traced:
    """Return rounds that were all run as a section."""
    found, updates, begin = [], 0, 0
    seen = [rounds[0].before, *(each.after for each in rounds)]
    closings = [closings_of(each.items, each.went_on) for each in rounds]
    for part in between_rows(seen, closings):
        once = rounds[begin : begin + part.items]
        repetitions = list(itertools.chain(*(each.repetitions for each in once)))
        updates += sum(len(each.items) for each in once) - sum(saved for _, saved in repetitions)
        found.append(Stretch(part.items, part.times, tuple(each for each, _ in repetitions)))
        begin += part.items * part.times
    key = tuple((x.before[0], _marks(x), tuple(x.items), x.went_on) for x in rounds)
    return Traced(Section(tuple(found), times), updates, key)


def _marks(traced: Round) -> tuple[int | None, ...]:
    """Return from where each number that fills up began again in a round; None if it did not.

    Where none did, what they are makes no difference.
    """
    pairs = zip(traced.before[1], traced.after[1], strict=True)
    return tuple(int(begin) if began_again(begin, end) else None for begin, end in pairs)


def closings_of(items: list[bool], went_on: bool) -> list[bool]:
    """Return by item whether a row closed with it.

    Where something came after the last of these rows, there is one item more, with which none
    closed: the resources are no longer as they were when the row closed.
    """
    return [*items, False] if any(items) and went_on else items


def between_rows(seen: Sequence[State], closings: Sequence[Sequence[bool]]) -> tuple[Part, ...]:
    """Return how items, or rounds, repeat themselves, with no row but at the end of a part.

    Args:
        seen: the state before the first item and after each, but for the reporting operator's own.
        closings: by item, for all that reached the reporting operator, whether a row closed then,
            as `closings_of` returns it.
    """
    ends = {0, len(closings)}
    for number, closed in enumerate(closings):
        if any(closed):
            ends.add(number + 1)
        # A row that closes within an item is in no scan, so that the item is a part of its own.
        if any(closed[:-1]):
            ends.add(number)
    return _within(sorted(ends), seen, fewest)


def _within(
    ends: Sequence[int], seen: Sequence[Any], parts: Callable[[Sequence[Any]], tuple[Part, ...]]
) -> tuple[Part, ...]:
    """Return the parts of the items between these ends, one after another."""
    each = [parts(seen[a : b + 1]) for a, b in itertools.pairwise(ends)]
    return tuple(itertools.chain(*each))


def _began_again(before: State, after: State) -> bool:
    """Return whether a number that fills up began again between two states."""
    return any(map(began_again, before[1], after[1]))


def fewest(seen: Sequence[State]) -> tuple[Part, ...]:
    """Return how items repeat themselves, in as few different ones as can be.

    Until one of the numbers that fill up begins again, what they are makes no difference.

    Args:
        seen: the state before the first item and after each.
    """
    begun = [item for item, pair in enumerate(itertools.pairwise(seen)) if _began_again(*pair)]
    ends = {0, len(seen) - 1, *begun, *(item + 1 for item in begun)}
    apart = _within(sorted(ends), [static for static, _ in seen], parts_of)
    return min(parts_of(seen), apart, key=lambda parts: sum(part.items for part in parts))


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
    return tracer.of_period(traced.warmup_rounds, traced.ever[ROUNDS] - traced.warmup_rounds)
