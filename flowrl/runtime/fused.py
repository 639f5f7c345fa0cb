"""A graph as programs: rounds of its stages traced inline, with one carry of all their arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.core.items import Tally
from flowrl.core.texts import plural
from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Loop, Unit, one_by_one
from flowrl.graph.stages import Schedule
from flowrl.graph.versions import Newest, later
from flowrl.runtime.counted import Counts, add, back_to, counted, since
from flowrl.runtime.inline import Number, ProgramPlace, value_of
from flowrl.runtime.packing import Packing, packed, taken_out, whole
from flowrl.runtime.periodicity import Repetition, Stretch
from flowrl.runtime.state import State, Structure, differing, strong

Array = Any


@dataclass
class Segment:
    """Rounds of a run as a function of arrays, and what tracing them once found to be static."""

    run: Callable[[Sequence[Array], list[Array]], tuple[list[Array], list[Array], Array]]
    """Takes the values of `numbers` first; if it gets none of them, they are constants. It returns
    the arrays of the state, those of the rows, and whether an update was not finite."""
    numbers: tuple[Number, ...]
    """The fractional numbers among the settings that its functions read."""
    before: Structure
    """The structure of the state in which it was traced."""
    after: Structure
    """The structure of the state afterwards."""
    arrays: list[Any]
    """The shapes of the arrays of the state afterwards."""
    updates: Newest
    """By learner: how many updates it makes."""
    counts: Counts
    """What the nodes count."""
    packing: Packing
    """Where what closed is among the arrays of the rows."""
    rows: int
    """How many Rows close."""

    def values(self) -> list[Array]:
        """Return the values of its numbers.

        They are weakly typed, as numbers of Python are, and so take on the type of what they meet.
        """
        return [jnp.asarray(number.value) for number in self.numbers]


@dataclass
class Program:
    """A segment, compiled."""

    segment: Segment
    compiled: Any
    numbers: list[Array]
    """What it takes beside the arrays of the state."""
    turns: int = 1
    """How many turns its next chunk is to have."""


class _Start(NamedTuple):
    """The state in which a scan begins, without its arrays."""

    structure: Structure
    newest: Newest
    counts: Counts


class _Body(NamedTuple):
    """What tracing the body of a scan found to be static."""

    structure: Structure
    """The structure of the state after it ran once."""
    updates: Newest
    sources: list[Any]
    """The nodes from which items reached the reporting operator, in order."""
    packing: Packing
    """Where the items, or the rows that closed, are among the arrays that the body returns."""
    counts: Counts


class Tracing:
    """Makes programs of the rounds of a schedule.

    Args:
        graph: the graph.
        place: where its resources are open.
        schedule: the schedule of its stages.
    """

    def __init__(self, graph: Graph, place: ProgramPlace, schedule: Schedule) -> None:
        self.place = place
        self.schedule = schedule
        self.state = State(graph, place, schedule)
        self.reporting: Unit = next(
            unit for loop in schedule.loops for unit in loop.units.values() if unit.op.reports
        )
        self.loop = next(loop for loop in schedule.loops if self.reporting.name in loop.units)
        self.coming: Iterator[Repetition] = iter(())
        """The repetitions of a stretch that were not traced yet."""
        self.repeating = False
        """Whether an item of a repetition is on its way."""
        for loop in schedule.loops:
            for unit in loop.units.values():
                unit.ctx.repeat = partial(self._repeat, loop, unit)

    def rounds(self, count: int) -> list[Tally]:
        """Run `count` rounds, one after another, and return what closed."""
        return [tally for _ in range(count) for tally in self.schedule.round()]

    def section(self, stretches: Sequence[Stretch]) -> list[Tally]:
        """Run a section of the steady period once, and return what closed.

        Raises:
            GraphError: the graph does not repeat itself in a program, or a row closes before the
                last item of a stretch.
        """
        rows: list[Tally] = []
        for stretch in stretches:
            if stretch.times == 1:
                rows += self._turn(stretch)
                continue
            self.loop.rows = []
            what = f"{stretch.rounds} {plural(stretch.rounds, 'round')}"
            self._scan(stretch.times, partial(self._turn, stretch), what, closes=False)
            rows += self.loop.rows
        return rows

    def _turn(self, stretch: Stretch) -> list[Tally]:
        """Run the rounds of a stretch once."""
        self.coming, self.repeating = iter(stretch.repetitions), False
        return self.rounds(stretch.rounds)

    def _repeat(self, loop: Loop, unit: Unit, times: int, make: Callable[[], Any]) -> Iterator[Any]:
        """Yield what a function returns, so many times.

        In a program items are not yielded but given to the nodes after this one here, as scans.

        Args:
            loop: the loop of the node.
            unit: the node whose step repeats something.
            times: how often.
            make: the function.
        """
        # Before the steady period nodes run function by function.
        if self.place.number is None or self.repeating or times < 2:
            yield from one_by_one(times, make)
            return
        self.repeating = True
        repetition = next(self.coming, None)
        if repetition is None or sum(each.items * each.times for each in repetition.parts) != times:
            raise GraphError(
                f"repeats {times} items in a program, and others in its plan; let nothing but its "
                "state and its item decide how many",
                f"{self.loop.graph}.{unit.name}",
            )
        for part in repetition.parts:
            if part.times == 1:
                yield from one_by_one(part.items, make)
                continue
            work = partial(self._give, loop, unit, part.items, make)
            what = f"{part.items} {plural(part.items, 'item')} of {unit.name}"
            self._scan(part.times, work, what, repetition.closes)
        self.repeating = False

    def _give(self, loop: Loop, unit: Unit, items: int, make: Callable[[], Any]) -> None:
        """Give items of a node to those after it, while its own step waits."""
        step, source = unit.step, unit.ctx.source
        unit.step = lambda *_: one_by_one(items, make)
        try:
            loop.enter(unit, None, source)
        finally:
            unit.step = step

    def _scan(self, times: int, work: Callable[[], Any], what: str, closes: bool) -> None:
        """Run some work so many times as one scan.

        Args:
            times: how often.
            work: what is run.
            what: what it is, as an error says.
            closes: whether rows close meanwhile; if not, the reporting operator takes all items
                that reached it only then.

        Raises:
            GraphError: the work does not come back to the state in which it began, or a row closes
                before the last item.
        """
        ledger = self.place.ledger
        # Where it works only afterwards, what it holds is no part of what the scan carries.
        held = self.reporting.state
        self.reporting.state = held if closes else None
        arrays, structure, newest = self.state.get()
        start = _Start(structure, newest, counted(ledger))
        # `jax.lax.scan` may trace its body more than once: each trace starts from the same counts,
        # and the facts of the last one hold.
        facts: list[_Body] = []
        body = partial(self._body, work, what, closes, start, facts)
        arrays, stacked = jax.lax.scan(body, strong(arrays), None, length=times)
        one = facts[-1]
        # The body was traced once; it counts as often as it runs.
        back_to(ledger, start.counts)
        add(ledger, one.counts, times)
        after = structure.later(structure, one.structure, times)
        if after is None:
            raise GraphError(
                f"{self.loop.graph} does not repeat itself every {what} in a program; a count "
                "reaches its mark sooner than in its plan"
            )
        self.state.put(arrays, after, later(newest, one.updates, times))
        given = list(itertools.chain(*one.packing.turns(stacked, times)))
        if closes:
            self.loop.rows += given
            return
        self.reporting.state = held
        rows = len(self.loop.rows)
        for source, item in zip(one.sources * times, given, strict=True):
            # A row that closes before the last item would report the resources as they are after
            # all of them. The abstract trace found none.
            if len(self.loop.rows) > rows:
                raise GraphError(
                    "closes a row in a program sooner than in its plan; let what it counts not "
                    "depend on values",
                    f"{self.loop.graph}.{self.reporting.name}",
                )
            self.loop.enter(self.reporting, item, source)

    def _body(
        self,
        work: Callable[[], Any],
        what: str,
        closes: bool,
        start: _Start,
        facts: list[_Body],
        arrays: list[Array],
        _: None,
    ) -> tuple[list[Array], list[Array]]:
        """Run some work once: the body of the scan.

        Returns:
            The arrays of the state, and those of the rows that closed or of the items that reached
            the reporting operator. What is static is appended to `facts`.
        """
        ledger = self.place.ledger
        back_to(ledger, start.counts)
        self.state.put(arrays, start.structure, start.newest)
        rows, self.loop.rows = self.loop.rows, []
        received: list[tuple[Any, Any]] = []
        if closes:
            work()
        else:
            with self._collected(received):
                work()
        given, packing = packed(self.loop.rows if closes else [item for _, item in received])
        self.loop.rows = rows
        after, structure, newest = self.state.get()
        # A scan needs a carry of the same structure after each turn.
        if structure != start.structure:
            raise GraphError(
                f"{self.loop.graph} does not repeat itself every {what} in a program; "
                f"{differing(start.structure, structure)}"
            )
        facts.append(
            _Body(
                structure,
                later(newest, start.newest, -1),
                [source for source, _ in received],
                packing,
                since(start.counts, counted(ledger)),
            )
        )
        return strong(after), given

    @contextmanager
    def _collected(self, items: list[tuple[Any, Any]]) -> Iterator[None]:
        """Collect in `items` what reaches the reporting operator, in place of its step."""
        step = self.reporting.step

        def note(state: Any, item: Any, ctx: Any) -> Iterator[Any]:  # noqa: ARG001
            items.append((ctx.source, item))
            yield from ()

        self.reporting.step = note
        try:
            yield
        finally:
            self.reporting.step = step

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Restore counts and state afterwards, so that tracing leaves no tracers in them."""
        before, (arrays, structure, newest) = counted(self.place.ledger), self.state.get()
        try:
            yield
        finally:
            back_to(self.place.ledger, before)
            self.state.put(arrays, structure, newest)

    def segment(
        self,
        structure: Structure,
        arrays: Sequence[Array],
        work: Callable[[], list[Tally]],
        inputs: bool,
    ) -> Segment:
        """Trace some work once and return it as a function of numbers and arrays.

        Args:
            structure: what is static about the state from which the work starts.
            arrays: the arrays of that state, of which only shapes and dtypes are used.
            work: runs rounds, and returns what closed.
            inputs: whether it takes the numbers among settings, or has them as constants.
        """
        ledger, before = self.place.ledger, counted(self.place.ledger)
        seen: list[Structure] = []
        facts: list[Any] = []

        def traced(
            number: Callable[[Number], Any], arrays: list[Array]
        ) -> tuple[list[Array], list[Array], Array]:
            back_to(ledger, before)
            # Versions start at 0, so that those found afterwards are the numbers of updates.
            self.state.put(arrays, structure, {})
            with self.place.traced(number):
                rows = work()
            self.reporting.state = taken_out(self.reporting.state)
            after, structure_after, updates = self.state.get()
            given, packing = packed(rows)
            counts = since(before, counted(ledger))
            facts[:] = [updates, counts, packing, len(rows)]
            seen[:] = [structure_after]
            return strong(after), given, _not_finite(rows)

        # A dictionary keeps the order in which they are met, which is that of every trace.
        found: dict[Number, Array] = {}

        # One tracer stands for all numbers, of which it is not known yet how many there are.
        def first(stand_in: Array, arrays: list[Array]) -> Any:
            if not inputs:
                return traced(value_of, arrays)
            return traced(lambda number: found.setdefault(number, stand_in), arrays)

        # Nothing is computed: this only fills `facts` and `found`.
        after, *_ = jax.eval_shape(first, 1.0, list(arrays))
        numbers = tuple(found)

        def run(
            values: Sequence[Array], arrays: list[Array]
        ) -> tuple[list[Array], list[Array], Array]:
            if not values:
                return traced(value_of, arrays)
            given = dict(zip(numbers, values, strict=True))
            return traced(given.__getitem__, arrays)

        return Segment(run, numbers, structure, seen[0], after, *facts)


def chunk(
    segment: Segment,
    many: bool,
    most: int,
    arrays: list[Array],
    turns: Array,
    numbers: list[Array],
) -> tuple[Array, list[Array], Any]:
    """Run a segment a number of times, but not after an update that is not finite.

    Args:
        segment: rounds of the steady period.
        many: whether the arrays are of many runs, along their first axis.
        most: the length of the buffers.
        arrays: of the state.
        turns: how often to run it, at most `most`.
        numbers: the values of the segment's numbers, the same for all runs; none of them where they
            are constants.

    Returns:
        How often it ran, the arrays of the state, and those of what closed, ``[most, ...]``.
    """
    one_run = partial(segment.run, numbers)
    run = jax.vmap(one_run) if many else one_run
    if segment.before != segment.after:
        # What ends in another state than it begins in runs once.
        arrays, rows, _ = run(arrays)
        return jnp.int32(1), arrays, jax.tree.map(lambda x: x[None], rows)
    buffers = jax.tree.map(
        lambda x: jnp.zeros((most, *x.shape), x.dtype), jax.eval_shape(run, arrays)[1]
    )

    def go_on(carry: Any) -> Array:
        return (carry[0] < turns) & ~carry[3]

    def one(carry: Any) -> Any:
        i, arrays, buffers, _ = carry
        arrays, rows, not_finite = run(arrays)
        buffers = jax.tree.map(
            lambda whole, x: jax.lax.dynamic_update_index_in_dim(whole, x, i, 0), buffers, rows
        )
        return i + 1, arrays, buffers, jnp.any(not_finite)

    start = (jnp.int32(0), arrays, buffers, jnp.bool_(False))
    done, arrays, buffers, _ = jax.lax.while_loop(go_on, one, start)
    return done, arrays, buffers


def _not_finite(rows: list[Tally]) -> Array:
    """Return whether one of the updates was not finite."""
    # Updates of one scan have their metrics in one array, which is looked at once.
    seen = {}
    for row in rows:
        for update in row.updates:
            values, place = whole(update.metrics.values), update.metrics.names.index("bad")
            if (id(values), place) not in seen:
                seen[id(values), place] = jnp.any(values[..., place] > 0)
    return jnp.any(jnp.stack(list(seen.values()) or [jnp.bool_(False)]))
