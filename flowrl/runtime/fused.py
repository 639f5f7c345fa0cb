"""A graph as programs: rounds of its stages traced inline, with one carry of all their arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.core.events import OperatorRan
from flowrl.core.items import Tally
from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Unit
from flowrl.graph.stages import Schedule
from flowrl.graph.trace import Trace, Tracer
from flowrl.graph.versions import Newest, later
from flowrl.runtime.counted import Counts, add, back_to, counted, since
from flowrl.runtime.inline import Number, ProgramPlace, value_of
from flowrl.runtime.state import State, Structure, differing, strong

Array = Any
UNROLLED = 64
"""Rounds that a program may unroll: the time to compile it grows with them."""
UNROLLED_UPDATES = 256
"""Updates that a program may unroll. Each takes a second or two to compile on two cores."""


@dataclass(frozen=True)
class Periodicity:
    """How a graph repeats itself, in rounds of its stages."""

    warmup: int
    """Rounds before the steady period."""
    period: int
    """Rounds of the steady period, after which the static state is the same again."""
    unit: int
    """Rounds of the repeating unit, in which all but the reporting operator's own state repeats
    itself. A period consists of whole units. The whole period is one unit where a row closes before
    the last item of the period, or where a node comes after the reporting operator: a scan of
    smaller units could do neither."""
    updates: int
    """Updates in a unit, each of which is in the program as often as it is made."""


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

    def between(self, schedule: Schedule) -> None:
        """Record the static state between two rounds."""
        self.seen.append(self.signature(schedule, reporting=False))
        self.items_before.append(len(self.items))

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

    def closings(self, rounds: int) -> list[bool]:
        """Return of each item of the last rounds whether a row closed with it."""
        return self.items[self.items_before[-1 - rounds] :]


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
    traced, seen = tracer.run(), tracer.seen
    if not traced.exact:
        return None
    end = traced.passes
    period = end - traced.warmup_rounds
    # In a scan of units only the last item may close a row, and no node comes after that.
    reported_on = any(tracer.reporting in node.after for node in graph.nodes)
    closings = tracer.closings(period)
    if reported_on or any(closings[:-1]):
        return Periodicity(traced.warmup_rounds, period, period, len(closings))
    # The smallest divisor of the period after which the same state is seen again.
    unit = next(
        n
        for n in range(1, period + 1)
        if period % n == 0 and (n == period or seen[-1 - n] == seen[-1])
    )
    return Periodicity(traced.warmup_rounds, period, unit, len(tracer.closings(unit)))


@dataclass
class Segment:
    """A part of a run as a function of arrays, and what tracing it once found to be static."""

    run: Callable[[Sequence[Array], list[Array]], tuple[list[Array], list[Tally]]]
    """Takes the values of `numbers` first; if it gets none of them, they are constants."""
    numbers: tuple[Number, ...]
    """The fractional numbers among the settings that its functions read."""
    after: Structure
    """The structure of the state afterwards."""
    updates: Newest
    """By learner: how many updates it makes."""
    counts: Counts
    """What the nodes count."""
    rows: int
    """How many Rows close."""


class _Start(NamedTuple):
    """The state in which repeating units begin, without its arrays."""

    structure: Structure
    newest: Newest
    reporting: Any
    """The state of the reporting operator."""
    counts: Counts


class _UnitFacts(NamedTuple):
    """What tracing one repeating unit found to be static."""

    updates: Newest
    sources: list[Any]
    """The nodes from which items reached the reporting operator, in order."""
    counts: Counts


class Tracing:
    """Makes programs of the rounds of a schedule."""

    def __init__(self, graph: Graph, place: ProgramPlace, schedule: Schedule) -> None:
        self.place = place
        self.schedule = schedule
        self.state = State(graph, place, schedule)
        self.reporting: Unit = next(
            unit for loop in schedule.loops for unit in loop.units.values() if unit.op.reports
        )
        self.loop = next(loop for loop in schedule.loops if self.reporting.name in loop.units)

    def rounds(self, count: int) -> list[Tally]:
        """Run `count` rounds, one after another, and return what closed."""
        return [tally for _ in range(count) for tally in self.schedule.round()]

    def units(self, count: int, rounds: int) -> list[Tally]:
        """Run `count` repeating units of `rounds` rounds each as one scan, and return what closed.

        Only then does the reporting operator take all items that reached it.

        Raises:
            GraphError: the graph does not repeat itself in a program, or a row closes before the
                last item.
        """
        if count == 1:
            return self.rounds(rounds)
        ledger = self.place.ledger
        arrays, structure, newest = self.state.get()
        start = _Start(structure, newest, self.reporting.state, counted(ledger))
        # `jax.lax.scan` may trace its body more than once: each trace starts from the same counts,
        # and the facts of the last one hold.
        facts: list[_UnitFacts] = []
        unit = partial(self._unit, rounds, start, facts)
        arrays, items = jax.lax.scan(unit, strong(arrays), None, length=count)
        one = facts[-1]
        # The unit was traced once; it counts as often as it runs.
        back_to(ledger, start.counts)
        add(ledger, one.counts, count)
        self.state.put(arrays, structure, later(newest, one.updates, count))
        self.reporting.state = start.reporting
        return self._report(count, one.sources, items)

    def _unit(
        self,
        rounds: int,
        start: _Start,
        facts: list[_UnitFacts],
        arrays: list[Array],
        _: None,
    ) -> tuple[list[Array], list[Any]]:
        """Run one repeating unit: the body of the scan.

        Returns:
            The arrays of the state, and the items that reached the reporting operator. What is
            static is appended to `facts`.
        """
        ledger = self.place.ledger
        back_to(ledger, start.counts)
        self.state.put(arrays, start.structure, start.newest)
        # What the reporting operator holds is no part of the unit: it takes the items only later.
        self.reporting.state = None
        received: list[tuple[Any, Any]] = []
        with self._collected(received):
            self.rounds(rounds)
        self.reporting.state = start.reporting
        after, structure, newest = self.state.get()
        # A scan needs a carry of the same structure after each unit.
        if structure != start.structure:
            raise GraphError(
                f"{self.loop.graph} does not repeat itself every {rounds} rounds in a program; "
                f"{differing(start.structure, structure)}"
            )
        facts.append(
            _UnitFacts(
                later(newest, start.newest, -1),
                [source for source, _ in received],
                since(start.counts, counted(ledger)),
            )
        )
        return strong(after), [jax.tree.map(jnp.asarray, item) for _, item in received]

    def _report(self, count: int, sources: list[Any], items: list[Any]) -> list[Tally]:
        """Give the reporting operator the items of all units, in order, and return what closed."""
        rows: list[Tally] = []
        for i in range(count):
            for source, item in zip(sources, items, strict=True):
                # A row that closes before the last item would report the resources as they are
                # after all units, not after its own. The abstract trace found none.
                if rows:
                    raise GraphError(
                        "closes a row in a program sooner than in its plan; let what it counts not "
                        "depend on values",
                        f"{self.loop.graph}.{self.reporting.name}",
                    )
                of_unit = jax.tree.map(lambda x, i=i: x[i], item)
                self.loop.enter(self.reporting, of_unit, source, rows)
        return rows

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
        facts: list[Any] = []

        def traced(
            number: Callable[[Number], Any], arrays: list[Array]
        ) -> tuple[list[Array], list[Tally]]:
            back_to(ledger, before)
            # Versions start at 0, so that those found afterwards are the numbers of updates.
            self.state.put(arrays, structure, {})
            with self.place.traced(number):
                rows = work()
            after, structure_after, updates = self.state.get()
            facts[:] = [structure_after, updates, since(before, counted(ledger)), len(rows)]
            return strong(after), jax.tree.map(jnp.asarray, rows)

        # A dictionary keeps the order in which they are met, which is that of every trace.
        found: dict[Number, Array] = {}

        # One tracer stands for all numbers, of which it is not known yet how many there are.
        def first(stand_in: Array, arrays: list[Array]) -> Any:
            if not inputs:
                return traced(value_of, arrays)
            return traced(lambda number: found.setdefault(number, stand_in), arrays)

        # Nothing is computed: this only fills `facts` and `found`.
        jax.eval_shape(first, 1.0, list(arrays))
        numbers = tuple(found)

        def run(values: Sequence[Array], arrays: list[Array]) -> tuple[list[Array], list[Tally]]:
            if not values:
                return traced(value_of, arrays)
            given = dict(zip(numbers, values, strict=True))
            return traced(given.__getitem__, arrays)

        return Segment(run, numbers, *facts)
