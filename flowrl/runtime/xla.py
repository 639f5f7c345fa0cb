"""`XlaRuntime`: environment, policy, operators and update as one XLA program."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.clock import START, UPDATE, By, Clock
from flowrl.errors import CheckError, FlowrlError, GraphError, SettingError, raised
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Hook, Loop
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Handle
from flowrl.graph.site import Place
from flowrl.graph.stages import Channel, Make, Schedule, loops_of
from flowrl.graph.trace import Rhythm, rhythm
from flowrl.items import Tally
from flowrl.runtime.base import Session
from flowrl.runtime.fused import UNROLLED, InlineSite, Segment, Tracing, Uneven, add

Array = Any
MOST = 256
"""Rows in a chunk, at most."""
SECONDS = 0.5
"""That a chunk takes, about: so often are there rows, and so soon an interrupt is heeded."""


class ProgramPlace(Place):
    """Resources that are opened within a program."""

    def open(self) -> dict[str, Handle]:
        """None yet; `begin` opens them."""
        return self.handles

    def begin(self, seed: Array) -> None:
        """Open them, by a seed that may be a tracer."""
        self.handles.clear()
        self.site.seed = seed
        super().open()


class Fused:
    """Runs a graph as programs: one for what it does before it repeats itself, and one of its steady period, which goes on in chunks of rows."""

    def __init__(self, graph: Graph, make: Make, place: ProgramPlace, seed: int, beat: Rhythm, chunk: int | None) -> None:
        self.graph = graph
        self.place = place
        self.rhythm = beat
        self.size = chunk
        self.clock = Clock("outside")
        self.clocks = {"this process": self.clock}
        with By(self.clock), START:
            self._open(make, seed)
        self.warm = beat.warmup == 0
        self.rows = 1
        """The next chunk's."""
        self.compiled: Any = None

    def _open(self, make: Make, seed: int) -> None:
        def start(seed: Array) -> list[Array]:
            self.place.begin(seed)
            self.tracing = Tracing(self.place, Schedule(self.graph, make))
            arrays, self.form, self.newest = self.tracing.state.get()
            return arrays

        self._put(jax.jit(start)(np.uint32(seed)))

    def _put(self, arrays: list[Array]) -> None:
        self.arrays = arrays
        self.tracing.state.put(arrays, self.form, self.newest)

    @property
    def loops(self) -> list[Loop]:
        """By stage."""
        return self.tracing.schedule.loops

    @property
    def channels(self) -> dict[str, Channel]:
        """By queue."""
        return self.tracing.schedule.channels

    def wait(self) -> None:
        """Nothing goes on meanwhile."""

    @contextmanager
    def still(self) -> Iterator[None]:
        """While no program runs, as ever between rounds."""
        yield

    def close(self) -> None:
        """Nothing to end."""

    def round(self, most: float) -> list[Tally]:
        """What comes before the steady period; then chunk after chunk."""
        with By(self.clock):
            return self._chunk(most) if self.warm else self._warmup()

    def _warmup(self) -> list[Tally]:
        beat = self.rhythm

        def work() -> list[Tally]:
            return [*self.tracing.rounds(beat.settled), *self._beats(beat.warmup - beat.settled)]

        with START, self.tracing.apart():
            segment = self.tracing.segment(self.form, self.arrays, work)
            program = jax.jit(segment.run, donate_argnums=0).lower(self.arrays).compile()
        with UPDATE:
            arrays, tallies = program(self.arrays)
            tallies = jax.device_get(tallies)
        self._past(segment, 1, arrays)
        self.warm = True
        return list(tallies)

    def _beats(self, rounds: int) -> list[Tally]:
        return self.tracing.beats(rounds // self.rhythm.beat, self.rhythm.beat) if rounds else []

    def _past(self, segment: Segment, times: int, arrays: list[Array]) -> None:
        """A segment was run so many times."""
        add(self.place.ledger, segment.counts, times)
        self.form, self.newest = segment.after, self.newest + times * segment.updates
        self._put(arrays)

    def _chunk(self, most: float) -> list[Tally]:
        if self.compiled is None:
            with START, self.tracing.apart():
                self._compile()
        wanted = math.ceil(most / self.period.rows)
        periods = self.size or max(1, min(self.rows, wanted, MOST))
        began = time.perf_counter()
        with UPDATE:
            done, arrays, buffers = self.compiled(self.arrays, np.int32(periods))
            done, buffers = int(done), jax.device_get(buffers)
        self._past(self.period, done, arrays)
        each = (time.perf_counter() - began) / max(done, 1)
        self.rows = max(1, min(int(SECONDS / each), 4 * self.rows))
        return [jax.tree.map(lambda x, i=i: x[i], tally) for i in range(done) for tally in buffers]

    def _compile(self) -> None:
        try:
            self.period = self.tracing.segment(self.form, self.arrays, lambda: self._beats(self.rhythm.period))
        except Uneven:
            if self.rhythm.period > UNROLLED:
                raise GraphError(too_long(self.rhythm.period), self.graph.name) from None
            self.period = self.tracing.segment(self.form, self.arrays, lambda: self.tracing.rounds(self.rhythm.period))
        if self.period.after != self.form:
            raise GraphError("its program does not come back to the state from which it started", self.graph.name)
        program = jax.jit(partial(chunk, self.period, self.size or MOST), donate_argnums=0)
        self.compiled = program.lower(self.arrays, np.int32(1)).compile()


def chunk(period: Segment, most: int, arrays: list[Array], periods: Array) -> tuple[Array, list[Array], Any]:
    """Up to so many periods, and what their clock closed ``[most, ...]``; none behind one with an update that is not finite."""
    tallies = jax.eval_shape(period.run, arrays)[1]
    buffers = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), tallies)

    def go_on(carry: Any) -> Array:
        return (carry[0] < periods) & ~carry[3]

    def one(carry: Any) -> Any:
        i, arrays, buffers, _ = carry
        arrays, tallies = period.run(arrays)
        buffers = jax.tree.map(lambda whole, x: jax.lax.dynamic_update_index_in_dim(whole, x, i, 0), buffers, tallies)
        return i + 1, arrays, buffers, jnp.any(_bad(tallies))

    done, arrays, buffers, _ = jax.lax.while_loop(go_on, one, (jnp.int32(0), arrays, buffers, jnp.bool_(False)))
    return done, arrays, buffers


def _bad(tallies: list[Tally]) -> Array:
    return jnp.stack([jnp.any(u.metrics.values[..., u.metrics.names.index("bad")] > 0) for t in tallies for u in t.updates] or [jnp.bool_(False)])


def too_long(rounds: int) -> str:
    """What is said of a period that is not spelled out."""
    return f"it repeats itself only after {rounds} rounds, and a program spells out {UNROLLED} at most; let its rates divide one another"


def refused(plan: Plan) -> list[tuple[str, str]]:
    """What of a graph can't be part of a program: pairs of (node or resource, why and what to do). Nothing is compiled."""
    graph, problems = plan.graph, []
    place = ProgramPlace(graph.name, graph.resources, 0, InlineSite, plan.found.totals)
    ran: set[str] = set()

    def failed(node: str, error: Exception) -> None:
        problems.append((node, error.message if isinstance(error, FlowrlError) else _told(error)))

    def some() -> None:
        place.begin(jnp.uint32(0))
        make = partial(loops_of, graph, place.handles, place.site_of, place.ledger, hook=lambda node, *_: ran.add(node), failed=failed)
        schedule = Schedule(graph, make)
        for _ in range(UNROLLED):
            if problems or len(ran) == len(graph.nodes):
                return
            schedule.round()

    try:
        jax.eval_shape(some)
    except FlowrlError as error:
        problems.append((place.ledger.at.node or place.opening, error.message))
    return problems


def _told(error: Exception) -> str:
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError | jax.errors.NonConcreteBooleanIndexError):
        way = "in a program it sees no values: compute with jax.numpy, and choose by jnp.where or jax.lax.cond"
        return f"{raised(error).split(chr(10))[0]}; {way}"
    return raised(error)


def fusable(plan: Plan) -> Rhythm:
    """How a graph repeats itself, if all of it can be a program.

    Raises:
        CheckError: it can't, and why.
    """
    name = plan.graph.name
    if problems := refused(plan):
        raise CheckError(name, [f"{name}.{node}: {text}" for node, text in problems])
    found = rhythm(plan.graph, plan.found)
    if found is None:
        raise CheckError(name, [f"{name}: no steady period was found, of which a program is made"])
    if max(found.settled, found.beat) > UNROLLED:
        raise CheckError(name, [f"{name}: {too_long(max(found.settled, found.beat))}"])
    return found


@dataclass(frozen=True)
class XlaRuntime:
    """The whole graph as one XLA program, for environments written in JAX.

    Args:
        chunk: periods of the plan (a Row, where it says no more) that the program runs before it gives their rows; None for as many as take
            about half a second. A run stops at the end of one: with a goal, Ctrl-C, and an update that is not finite.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise SettingError(f"chunk must be at least 1 or None, got {self.chunk}")

    def open(self, plan: Plan, seed: int, hook: Hook | None = None) -> Session:
        """Make the programs.

        Raises:
            CheckError: a part of the graph can't be traced.
        """
        found = fusable(plan)
        graph = plan.graph
        place = ProgramPlace(graph.name, graph.resources, seed, InlineSite, plan.found.totals)
        return Session(plan, place, partial(Fused, place=place, seed=seed, beat=found, chunk=self.chunk), hook)
