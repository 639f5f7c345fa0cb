"""`XlaRuntime`: environment, policy, operators and update as one XLA program."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.clock import OTHER, START, UPDATE, By, Clock
from flowrl.core.compiled import programs
from flowrl.core.events import OperatorRan, Stream, Tap, Updating
from flowrl.core.items import Tally
from flowrl.core.mesh import split
from flowrl.errors import CheckError, FlowrlError, GraphError, SettingError, line_of, raised
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Loop
from flowrl.graph.plan import Plan
from flowrl.graph.stages import Channel, Make, Schedule, loops_of
from flowrl.graph.versions import later
from flowrl.runtime.base import Session
from flowrl.runtime.counted import add
from flowrl.runtime.fused import (
    UNROLLED,
    InlineSite,
    ProgramPlace,
    Rhythm,
    Segment,
    Tracing,
    Uneven,
    differing,
    rhythm,
    strong,
)
from flowrl.runtime.members import MemberRows, Members, Sweep, swept_graph, swept_names

Array = Any
MOST = 256
"""Rows in a chunk, at most."""
SECONDS = 0.5
"""That a chunk takes, about: so often are there rows, and so soon an interrupt is heeded."""


class Fused:
    """Runs a graph as a program of its steady period, which goes on in chunks; what comes before goes function by function."""

    def __init__(
        self,
        graph: Graph,
        make: Make,
        place: ProgramPlace,
        members: Members,
        best: Callable[[], int],
        beat: Rhythm,
        chunk: int | None,
    ) -> None:
        self.graph = graph
        self.place = place
        self.place.many = members.many
        self.members = members
        self.best = best
        """Of many: which one to show."""
        self.rhythm = beat
        self.size = chunk
        self.clock = Clock("outside")
        self.clocks = {"this process": self.clock}
        self.next = 1
        """How many periods the next chunk is to have."""
        self.compiled: Any = None
        self.period: Segment | None = None
        self.left = beat.warmup
        """Rounds before the steady period."""
        with By(self.clock), START:
            self._open(make)
            if not self.left:
                self._trace()

    def _open(self, make: Make) -> None:
        def start(seed: Array, swept: Mapping[str, Array]) -> list[Array]:
            self.place.begin(seed, swept)
            self.tracing = Tracing(self.graph, self.place, Schedule(self.graph, make))
            arrays, self.form, self.newest = self.tracing.state.get()
            return strong(arrays)

        def starts(seeds: Array, swept: Mapping[str, Array]) -> list[Array]:
            """The first arrays: of one run, or of many along a new first axis."""
            arrays = jax.vmap(start)(seeds, swept) if self.members.many else start(seeds, swept)
            flags = self.tracing.state.shared_out()
            return [
                split(x, 0) if self.members.many or flag else split(x, x.ndim)
                for x, flag in zip(arrays, flags, strict=True)
            ]

        self.arrays = starts(*self.members.inputs())
        self._show()

    def _trace(self) -> None:
        """See what the steady period is."""
        beat, form = self.rhythm, self.form
        one = (
            [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.arrays]
            if self.members.many
            else self.arrays
        )
        with self.tracing.apart(), self.place.stream.muted():
            try:
                self.period = self.tracing.segment(
                    form, one, lambda: self.tracing.beats(beat.period // beat.beat, beat.beat)
                )
            except Uneven:
                if beat.period > UNROLLED:
                    raise GraphError(too_long(beat.period), self.graph.name) from None
                self.period = self.tracing.segment(
                    form, one, lambda: self.tracing.rounds(beat.period)
                )
        if self.period.after != form:
            where = differing(form, self.period.after)
            raise GraphError(
                f"its program does not come back to the state from which it started: {where}",
                self.graph.name,
            )
        if unread := sorted(set(self.place.site.swept) - self.place.site.swept.read):
            raise SettingError(
                f"sweep: {', '.join(unread)} shapes the program and is no number in it; run its values one by one",
                self.graph.name,
            )

    def _show(self) -> None:
        """Let the handles hold what there is now; of many, that of the best."""
        arrays = [x[self.best()] for x in self.arrays] if self.members.many else self.arrays
        self.tracing.state.put(arrays, self.form, self.newest)

    @property
    def loops(self) -> list[Loop]:
        """By stage."""
        return self.tracing.schedule.loops

    @property
    def channels(self) -> dict[str, Channel]:
        """By queue."""
        return self.tracing.schedule.channels

    def stages(self) -> dict[str, tuple[str, ...]]:
        """None: a program has no parts whose time could be told apart."""
        return {"this process": ()}

    def wait(self) -> None:
        """Nothing goes on meanwhile."""

    @contextmanager
    def still(self) -> Iterator[None]:
        """While no program runs, as ever between rounds."""
        if self.members.many and self.place.handles:  # they are open
            self._show()
        yield

    def close(self) -> None:
        """Nothing to end."""

    def round(self, most: float) -> list[Tally]:
        """What comes before the steady period; then chunk after chunk."""
        with By(self.clock):
            return self._warmup() if self.left else self._chunk(most)

    def _warmup(self) -> list[Tally]:
        """A round before the steady period, function by function."""
        seen: list[Any] = []

        def one(arrays: list[Array]) -> tuple[list[Array], list[Tally]]:
            self.tracing.state.put(arrays, self.form, self.newest)
            tallies = self.tracing.rounds(1)
            after, *seen[:] = self.tracing.state.get()
            return strong(after), jax.tree.map(jnp.asarray, tallies)

        with OTHER:
            self.arrays, tallies = (jax.vmap(one) if self.members.many else one)(self.arrays)
        self.form, self.newest = seen
        self._show()
        self.left -= 1
        return list(jax.device_get(tallies))

    def _program(self) -> tuple[Segment, Any]:
        if self.period is None:
            with START:
                self._trace()
        period = cast("Segment", self.period)
        if self.compiled is None:
            with START, self.tracing.apart():
                self.arrays = [
                    jnp.array(x) for x in self.arrays
                ]  # copies, for two may be the same one, and the program takes them for its own
                self.compiled = programs.get(self._key(), partial(self._compile, period))
        return period, self.compiled

    def _key(self) -> Any:
        """What the compiled program depends on: one of another seed with an equal key is the same program.

        The graph's text distinguishes fields that Python takes for equal, such as 1 and 1.0. Where an operator or resource is no frozen
        value, its fields may have changed since: then the key is a list, which is none, so that the program is compiled each time.
        """
        parts = (*(node.op for node in self.graph.nodes), *self.graph.resources.values())
        if not all(is_dataclass(part) and part.__dataclass_params__.frozen for part in parts):
            return []
        arrays = tuple((x.shape, str(x.dtype), x.sharding) for x in self.arrays)
        swept = tuple(sorted(self.members.values[0].items()))
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        steady = self.rhythm, self.form, arrays, self.members.many, swept, self.size or MOST
        return self.graph, str(self.graph), precision, *steady

    def _compile(self, period: Segment) -> Any:
        # Arrays come out laid out over the devices as they went in, or the next chunk could not take them.
        laid_out = (
            (None, [x.sharding for x in self.arrays], None)
            if jax.local_device_count() > 1
            else None
        )
        program = jax.jit(
            partial(chunk, period, self.members.many, self.size or MOST),
            donate_argnums=0,
            out_shardings=laid_out,
        )
        return program.lower(self.arrays, np.int32(1)).compile()

    def _chunk(self, most: float) -> list[Tally]:
        period, compiled = self._program()
        periods = self.size or math.ceil(min(self.next, most / period.rows, MOST))
        began = time.perf_counter()
        with UPDATE:
            done, self.arrays, buffers = compiled(
                self.arrays, np.int32(periods)
            )  # it took the old ones for its own
            done, buffers = int(done), jax.device_get(buffers)
        add(self.place.ledger, period.counts, done)
        self.newest = later(self.newest, period.updates, done)
        if not self.members.many:
            self._show()
        each = (time.perf_counter() - began) / max(done, 1)
        self.next = max(1, min(int(SECONDS / each), 4 * self.next))
        return [jax.tree.map(lambda x, i=i: x[i], tally) for i in range(done) for tally in buffers]


def chunk(
    period: Segment, many: bool, most: int, arrays: list[Array], periods: Array
) -> tuple[Array, list[Array], Any]:
    """Up to so many periods, and what their clock closed ``[most, ...]``; none behind one with an update that is not finite."""
    run = jax.vmap(period.run) if many else period.run
    buffers = jax.tree.map(
        lambda x: jnp.zeros((most, *x.shape), x.dtype), jax.eval_shape(run, arrays)[1]
    )

    def go_on(carry: Any) -> Array:
        return (carry[0] < periods) & ~carry[3]

    def one(carry: Any) -> Any:
        i, arrays, buffers, _ = carry
        arrays, tallies = run(arrays)
        buffers = jax.tree.map(
            lambda whole, x: jax.lax.dynamic_update_index_in_dim(whole, x, i, 0), buffers, tallies
        )
        return i + 1, arrays, buffers, jnp.any(_bad(tallies))

    done, arrays, buffers, _ = jax.lax.while_loop(
        go_on, one, (jnp.int32(0), arrays, buffers, jnp.bool_(False))
    )
    return done, arrays, buffers


def _bad(tallies: list[Tally]) -> Array:
    return jnp.stack(
        [
            jnp.any(u.metrics.values[..., u.metrics.names.index("bad")] > 0)
            for t in tallies
            for u in t.updates
        ]
        or [jnp.bool_(False)]
    )


def too_long(rounds: int) -> str:
    """What is said of a period that is not spelled out."""
    return f"it repeats itself only after {rounds} rounds, and a program spells out {UNROLLED} at most; let its rates divide one another"


def refused(plan: Plan) -> list[tuple[str, str]]:
    """What of a graph can't be part of a program: pairs of (node or resource, why and what to do). Nothing is compiled."""
    graph, problems = plan.graph, []
    ran: set[str] = set()
    stream = Stream([Tap(lambda event: ran.add(event.node), OperatorRan)])
    place = ProgramPlace(graph.name, graph.resources, 0, InlineSite, plan.found.totals, stream)

    def failed(node: str, error: Exception) -> None:
        problems.append(
            (
                node,
                f"{error.message}{line_of(error)}"
                if isinstance(error, FlowrlError)
                else _told(error),
            )
        )

    def some(seed: Array, swept: dict[str, Array]) -> None:
        place.begin(seed, swept)
        make = partial(loops_of, graph, place.handles, place.site_of, place.ledger, failed=failed)
        schedule = Schedule(graph, make)
        with place.traced():
            for _ in range(UNROLLED):
                if problems or len(ran) == len(graph.nodes):
                    return
                schedule.round()

    try:
        jax.eval_shape(some, jnp.uint32(0), dict.fromkeys(swept_names(graph), jnp.float32(0)))
    except Exception as error:  # noqa: BLE001 - told on
        failed(place.ledger.at.node or place.opening, error)
    return problems


def refuse(plan: Plan) -> None:
    """Raise what `refused` finds.

    Raises:
        CheckError: a part of the graph can't be traced.
    """
    if problems := refused(plan):
        raise CheckError(
            plan.graph.name, [f"{plan.graph.name}.{node}: {text}" for node, text in problems]
        )


def _told(error: Exception) -> str:
    if isinstance(
        error,
        jax.errors.ConcretizationTypeError
        | jax.errors.TracerArrayConversionError
        | jax.errors.NonConcreteBooleanIndexError,
    ):
        way = "in a program it sees no values: compute with jax.numpy, and choose by jnp.where or jax.lax.cond"
        text, _, line = raised(error).rpartition(" (")
        return f"{text.splitlines()[0]} ({line}; {way}"
    return raised(error)


def fusable(plan: Plan) -> Rhythm:
    """How a graph repeats itself.

    Raises:
        CheckError: it does not, or not soon enough.
    """
    name = plan.graph.name
    found = rhythm(plan.graph, plan.found)
    if found is None and plan.found.restless:
        way = "a program has one that counts as a NumPy number: begin with np.float32(0) or np.int32(0)"
        restless = plan.found.restless.items()
        raise CheckError(
            name,
            [
                f"{name}.{node}: its state{text} is a Python number that never repeats itself; {way}"
                for node, text in restless
            ],
        )
    if found is None:
        raise CheckError(name, [f"{name}: no steady period was found, of which a program is made"])
    if found.beat > UNROLLED:
        raise CheckError(name, [f"{name}: {too_long(found.beat)}"])
    return found


def told(plan: Plan) -> tuple[bool, str]:
    """Whether a plan can be one program; and in words: what can't and why, or what is spelled out, and what many runs at once would cost."""
    problems = refused(plan)
    if problems:
        wide = max(len(node) for node, _ in problems)
        fine = [n.name for n in plan.graph.nodes if n.name not in dict(problems)]
        lines = [
            "xla: no program",
            *(f"  {node:<{wide}}  {text}" for node, text in problems),
            f"  nothing else was found in {', '.join(fine)}",
        ]
        return False, "\n".join(lines) + "\n"
    try:
        beat = fusable(plan)
    except CheckError as error:
        return (
            False,
            f"xla: no program: {'; '.join(p.partition(': ')[2] for p in error.problems)}\n",
        )
    times = f", {beat.period // beat.beat} times over" if beat.period > beat.beat else ""
    before = f", after {beat.warmup} that come before" if beat.warmup else ""
    lines = [
        f"xla: one program of all {len(plan.graph.nodes)} operators; it spells out {beat.beat} round{'s' * (beat.beat > 1)}{times}{before}"
    ]
    for name in plan.graph.resources:
        if any(
            traffic.counts.get(name, Counter())["most_gradient_steps"]
            for traffic in plan.found.steady.values()
        ):
            lines.append(
                f"     many runs at once: {name} computes the gradient steps, too, that target_kl would save one alone"
            )
    return True, "\n".join(lines) + "\n"


@dataclass(frozen=True)
class XlaRuntime:
    """The whole graph as one XLA program, for environments written in JAX.

    Args:
        chunk: periods of the plan (a Row, where it says no more) that the program runs before it gives their rows; None for as many as take
            about half a second. A run stops at the end of one: with a goal, Ctrl-C, and an update that is not finite.
        seeds: as many runs at once, of the seeds from the run's on; None for one that is not mapped.
        sweep: settings of which they have different values, each with all seeds.

    Environments, or many runs, are split over all devices of the process. On CPUs these are as many as XLA is told: for many runs,
    ``XLA_FLAGS=--xla_force_host_platform_device_count=8`` makes each of 8 cores one (`flowrl run --seeds` sees to that).
    """

    chunk: int | None = None
    seeds: int | None = None
    sweep: Sweep | None = None

    def __post_init__(self) -> None:
        for name in ("chunk", "seeds"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SettingError(f"{name} must be at least 1 or None, got {value}")

    def open(self, plan: Plan, seed: int, stream: Stream | None = None) -> Session:
        """Make the programs.

        Raises:
            CheckError: a part of the graph can't be traced.
            SettingError: what is swept is no setting of the graph that a program may have as an input, or an observer wants each update.
        """
        if stream is not None and stream.wants(Updating):
            raise SettingError(
                "in the xla runtime an update is a part of the program, so that it can't be recorded; take the local runtime, which does the same",
                plan.graph.name,
            )
        plan = Plan(swept_graph(plan.graph, self.sweep), plan.found)
        graph, members = plan.graph, Members.of(seed, self.seeds, self.sweep)
        place = ProgramPlace(
            graph.name, graph.resources, seed, InlineSite, plan.found.totals, stream
        )
        rows = MemberRows(graph.name, time.perf_counter(), members) if members.many else None
        try:
            beat = fusable(plan)
            if beat.warmup:
                refuse(plan)  # its first rounds would not tell
            best = (lambda: rows.best) if rows else (lambda: 0)

            def turns(graph: Graph, make: Make) -> Fused:
                return Fused(graph, make, place, members, best, beat, self.chunk)

            session = Session(plan, place, turns, rows=rows)
        except Exception:
            refuse(plan)  # tells of all at once, and by node
            raise
        return session
