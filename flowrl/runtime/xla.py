"""`XlaRuntime`: environment, policy, operators and update as one XLA program."""

from __future__ import annotations

import itertools
import math
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.clock import OTHER, START, UPDATE, By, Clock
from flowrl.core.compiled import program_of
from flowrl.core.events import Stream, Updating
from flowrl.core.items import Tally
from flowrl.core.mesh import split
from flowrl.errors import CheckError, GraphError, SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.stages import Make, Schedule, Turns
from flowrl.graph.versions import later
from flowrl.runtime.base import Session, check_positive
from flowrl.runtime.counted import add
from flowrl.runtime.fusable import NOT_TRACEABLE, described, fusable, refuse
from flowrl.runtime.fused import Program, Segment, Tracing, chunk
from flowrl.runtime.inline import InlineSite, ProgramPlace
from flowrl.runtime.members import MemberRows, Members, Sweep, swept_graph, swept_numbers
from flowrl.runtime.periodicity import Periodicity, Section
from flowrl.runtime.state import Structure, differing, strong

Array = Any
MOST = 256
"""Turns of a section in a chunk at most, where `XlaRuntime.chunk` gives no number."""
SECONDS = 0.5
"""About how long a chunk takes: rows come this often, and an interrupt is heeded this soon."""


class Fused(Turns):
    """Runs a graph as programs of its steady period, which go on in chunks.

    Each section of the period is one program. The rounds before the steady period run function by
    function.
    """

    lasting = ("warmup_left", "section", "turn")
    # The state of many runs is kept as arrays beside that of the best one, which handles show.
    remade = (
        *Turns.remade, "graph", "place", "members", "best", "periodicity", "chunk_size",
        "programs", "segments", "tracing", "arrays", "structure", "newest",
    )  # fmt: skip

    def __init__(
        self,
        graph: Graph,
        make: Make,
        place: ProgramPlace,
        members: Members,
        best: Callable[[], int],
        periodicity: Periodicity,
        chunk: int | None,
    ) -> None:
        """Open the resources, and trace the period unless other rounds come before it.

        Args:
            graph: what to run.
            make: makes the loops of its stages.
            place: where its resources are opened.
            members: which runs there are.
            best: returns which of many runs to show.
            periodicity: how the graph repeats itself.
            chunk: turns of a section in a chunk; None for as many as take about `SECONDS`.
        """
        self.graph = graph
        self.place = place
        self.place.many = members.many
        self.members = members
        self.best = best
        self.periodicity = periodicity
        self.chunk_size = chunk
        self.clock = Clock("outside")
        self.clocks = {"this process": self.clock}
        self.section, self.turn = 0, 0
        """The section of the steady period that is next, and how often it ran already."""
        self.segments: list[tuple[Section, Segment]] = []
        """What was traced: a section once for each state from which it does something else."""
        self.programs: dict[int, Program] = {}
        """What was compiled, by the identity of its segment."""
        self.warmup_left = periodicity.warmup
        """Rounds that still come before the steady period."""
        with By(self.clock), START:
            self._open(make)
            if not self.warmup_left:
                self._trace()

    def _open(self, make: Make) -> None:
        """Open the resources of all runs, and keep the first arrays of their states."""

        def start(seed: Array, swept: Mapping[str, Array]) -> list[Array]:
            self.place.begin(seed, swept)
            schedule = Schedule(self.graph, make)
            self.tracing = Tracing(self.graph, self.place, schedule)
            self.loops, self.channels = schedule.loops, schedule.channels
            arrays, self.structure, self.newest = self.tracing.state.get()
            return strong(arrays)

        many = self.members.many
        seeds, swept = self.members.inputs()
        self.arrays = self._laid_out(jax.vmap(start)(seeds, swept) if many else start(seeds, swept))
        self._show()

    def _laid_out(self, arrays: list[Array]) -> list[Array]:
        """Return the arrays of the state, split over the devices.

        Many runs have a new first axis, along which they are split. Of one run only arrays with an
        axis of environments are split; the others get a copy on each device.
        """
        flags, many = self.tracing.state.environment_axes(), self.members.many
        # An array has no axis `x.ndim`: split along that, each device gets a copy.
        return [
            split(x, 0) if many or of_environments else split(x, x.ndim)
            for x, of_environments in zip(arrays, flags, strict=True)
        ]

    def _trace(self) -> None:
        """Trace the steady period, from where it is.

        Raises:
            CheckError: an operator can't be traced. `refused` does not see one that runs only after
                a long warm-up.
            GraphError: a section does not end in the state that it, or the next one, begins with.
            SettingError: a swept setting is not read as a number.
        """
        structure, sections = self.structure, self.periodicity.sections
        arrays = (
            [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.arrays]
            if self.members.many
            else self.arrays
        )
        done = self.turn
        for section in (*sections[self.section :], *sections[: self.section]):
            times, done = section.times - done, 0
            made = self._traced(section, structure, times)
            if made is None:
                made = self._segment(section, structure, arrays)
                self.segments.append((section, made))
            structure = self._later(structure, made, times)
            arrays = made.arrays
        structure = self._later(structure, self.segments[0][1], self.turn)
        if (structure, structure.filled) != (self.structure, self.structure.filled):
            raise self._comes_not_back(self.structure, structure)
        # A setting that Python read as a plain number had the first run's value in all runs.
        if unread := sorted(set(swept_numbers(self.graph)) - self.place.site.swept.read):
            raise SettingError(
                f"sweep: {', '.join(unread)} shapes the program and is no number in it; run its "
                "values one by one, or sweep other settings of that name by their whole paths",
                self.graph.name,
            )

    def _segment(self, section: Section, structure: Structure, arrays: list[Any]) -> Segment:
        """Return a section as a function of arrays.

        Args:
            section: the section.
            structure: of the state in which it begins.
            arrays: of the state of one run.
        """
        work = partial(self.tracing.section, section.stretches)

        def traced(inputs: bool) -> Segment:
            with self.tracing.apart(), self.place.stream.muted():
                return self.tracing.segment(structure, arrays, work, inputs)

        try:
            try:
                return traced(inputs=True)
            except BdbQuit:
                raise
            except Exception:  # noqa: BLE001 - if it is an operator's own it comes again below
                # Python may decide by a number, which is then a constant, as all others are.
                return traced(inputs=False)
        except NOT_TRACEABLE as error:
            node = f"{self.graph.name}.{self.place.ledger.at.node}"
            raise CheckError(self.graph.name, [f"{node}: {described(error)}"]) from error

    def _traced(self, section: Section, structure: Structure, times: int) -> Segment | None:
        """Return what was traced of a section, if it does the same from a state."""
        for same, made in self.segments:
            if same == section and structure.later(made.before, made.after, times):
                return made
        return None

    def _later(self, structure: Structure, made: Segment, times: int) -> Structure:
        """Return the structure after a segment ran so many times, or raise an error."""
        if (later := structure.later(made.before, made.after, times)) is None:
            became = structure if structure != made.before else made.after
            raise self._comes_not_back(made.before, became)
        return later

    def _comes_not_back(self, before: Structure, after: Structure) -> GraphError:
        what = "its program does not come back to the state from which it started"
        return GraphError(f"{what}: {differing(before, after)}", self.graph.name)

    def keep(self) -> Any:
        """Return what lasts: of many runs the arrays of all of them, too."""
        return {**super().keep(), "many": self.arrays if self.members.many else None}

    def take(self, state: Any) -> None:
        """Go on with the state that all resources took."""
        # Older runs have kept no section: they had one.
        super().take({"section": 0, "turn": 0, **state})
        # The program carries these on, which may be plain numbers of the run that is shown.
        self.place.seed, swept = jnp.asarray(self.place.seed), self.place.site.swept
        swept.update({name: jnp.asarray(value) for name, value in swept.items()})
        arrays, self.structure, self.newest = self.tracing.state.get()
        if self.members.many:
            arrays = state["many"]
        self.arrays = self._laid_out(strong(arrays))
        self._forget()
        self._show()

    def change(self, work: Callable[[], None]) -> None:
        """Change the states of all runs before the first round."""
        seen: list[Any] = []

        def one_run(arrays: list[Array]) -> list[Array]:
            self.tracing.state.put(arrays, self.structure, self.newest)
            work()
            after, structure, newest = self.tracing.state.get()
            seen[:] = structure, newest
            return strong(after)

        changed = (jax.vmap(one_run) if self.members.many else one_run)(self.arrays)
        self.arrays = self._laid_out(changed)
        if seen[0] != self.structure:
            self._forget()
        self.structure, self.newest = seen
        self._show()

    def _forget(self) -> None:
        """Let the programs be traced from the present state."""
        self.segments.clear()
        self.programs.clear()

    def _show(self) -> None:
        """Let the handles hold the present state; of many runs that of the best."""
        arrays = [x[self.best()] for x in self.arrays] if self.members.many else self.arrays
        self.tracing.state.put(arrays, self.structure, self.newest)

    def stages(self) -> dict[str, tuple[str, ...]]:
        """Return no nodes: the time of a program can't be divided among its parts."""
        return {"this process": ()}

    def wait(self) -> None:
        """Return at once: nothing goes on meanwhile."""

    @contextmanager
    def still(self) -> Iterator[bool]:
        """Yield while no program runs, which is always so between rounds."""
        # A chunk of many runs does not show its state by itself. There are handles once it is open.
        if self.members.many and self.place.handles:
            self._show()
        yield True

    def close(self) -> None:
        """Return at once: there is nothing to end."""

    def round(self, most: float) -> list[Tally]:
        """Run one round before the steady period, or one chunk of it, and return what closed."""
        with By(self.clock):
            return self._warmup() if self.warmup_left else self._chunk(most)

    def _warmup(self) -> list[Tally]:
        """Run a round before the steady period, function by function."""
        with OTHER:
            tallies = self._round_of_many() if self.members.many else self.tracing.rounds(1)
        self.warmup_left -= 1
        if not self.members.many and not self.warmup_left:
            # Until now the state was in the handles alone: to take it apart takes longer than a
            # round where many updates wait for their row.
            arrays, self.structure, self.newest = self.tracing.state.get()
            self.arrays = strong(arrays)
            self._show()
        return list(jax.device_get(tallies))

    def _round_of_many(self) -> list[Tally]:
        """Run a round of all runs."""
        seen: list[Any] = []

        def one_round(arrays: list[Array]) -> tuple[list[Array], list[Tally]]:
            self.tracing.state.put(arrays, self.structure, self.newest)
            tallies = self.tracing.rounds(1)
            # Structure and versions are static: they leave on the side, past `jax.vmap`.
            after, structure, newest = self.tracing.state.get()
            seen[:] = structure, newest
            return strong(after), jax.tree.map(jnp.asarray, tallies)

        self.arrays, tallies = jax.vmap(one_round)(self.arrays)
        self.structure, self.newest = seen
        self._show()
        return tallies

    def _program(self, section: Section) -> Program:
        """Return the program of a section from the present state; it is compiled when it is due.

        Raises:
            GraphError: the section was not traced from such a state.
        """
        if not self.segments:
            with START:
                self._trace()
        segment = self._traced(section, self.structure, section.times - self.turn)
        if segment is None:
            raise self._comes_not_back(self.segments[0][1].before, self.structure)
        if id(segment) not in self.programs:
            with START, self.tracing.apart():
                # The program reuses the memory of its arguments, so no two may be the same array.
                self.arrays = [jnp.array(x) for x in self.arrays]
                key, lower = self._key(section, segment), partial(self._lower, segment)
                compiled, takes_numbers = program_of(key, self._layout(), lower)
                numbers = segment.values() if takes_numbers else []
            self.programs[id(segment)] = Program(segment, compiled, numbers)
        return self.programs[id(segment)]

    def _layout(self) -> tuple[tuple[Any, ...], ...]:
        """Return, by array of the state, its shape, its type and how it is split over devices."""
        return tuple((x.shape, str(x.dtype), x.sharding) for x in self.arrays)

    def _key(self, section: Section, segment: Segment) -> Any:
        """Return all that a program is made from: equal keys mean the same program.

        The seed is no part of it. The graph's text distinguishes fields that Python takes for
        equal, such as 1 and 1.0. Where an operator or resource is no frozen value, its fields may
        have changed since: then the key is a list, which can't be hashed, so that the program is
        made each time.
        """
        parts = (*(node.op for node in self.graph.nodes), *self.graph.resources.values())
        if not all(is_dataclass(part) and part.__dataclass_params__.frozen for part in parts):
            return []
        # What Python reads as a plain number is the first run's value, a constant in the program.
        swept = tuple(sorted(self.members.values[0].items()))
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        size = self.chunk_size or MOST
        before, many = segment.before, self.members.many
        steady = section.stretches, before, before.filled, self._layout(), many, swept, size
        return self.graph, str(self.graph), precision, segment.numbers, *steady

    def _lower(self, segment: Segment, takes_numbers: bool) -> Any:
        """Return the program as JAX gives it to XLA.

        Args:
            segment: a section of the steady period.
            takes_numbers: whether it takes the numbers among settings, or has them as constants.
        """
        # Arrays leave the program laid out over the devices as they entered it, or the next chunk
        # could not take them.
        recurs = segment.before == segment.after
        laid_out = (
            (None, [x.sharding for x in self.arrays], None)
            if jax.local_device_count() > 1 and recurs
            else None
        )
        # What is not used is kept as well, so that the text says which input is which.
        program = jax.jit(
            partial(chunk, segment, self.members.many, self.chunk_size or MOST),
            donate_argnums=0,
            out_shardings=laid_out,
            keep_unused=True,
        )
        numbers = segment.values() if takes_numbers else []
        return program.lower(self.arrays, np.int32(1), numbers)

    def _chunk(self, most: float) -> list[Tally]:
        """Run a chunk of a section, and return what closed.

        Args:
            most: how many rows are still wanted.
        """
        section = self.periodicity.sections[self.section]
        program = self._program(section)
        segment = program.segment
        wanted = math.ceil(min(program.turns, most / segment.rows if segment.rows else MOST, MOST))
        turns = self.chunk_size or wanted
        if len(self.periodicity.sections) > 1:
            turns = min(turns, section.times - self.turn)
        began = time.perf_counter()
        with UPDATE:
            # The program reuses the memory of the old arrays.
            takes = self.arrays, np.int32(turns), program.numbers
            done, self.arrays, rows = program.compiled(*takes)
            done, rows = int(done), jax.device_get(rows)
        add(self.place.ledger, segment.counts, done)
        self.newest = later(self.newest, segment.updates, done)
        self.structure = self._later(self.structure, segment, done)
        self.turn += done
        if self.turn >= section.times:
            self.section, self.turn = (self.section + 1) % len(self.periodicity.sections), 0
        if segment.before != segment.after:
            self._show()
            self.arrays = self._laid_out(self.arrays)
        # Of many runs the state is shown when somebody asks: the best one is known only then.
        if not self.members.many:
            self._show()
        seconds_each = (time.perf_counter() - began) / max(done, 1)
        # A chunk is at most four times the last one, since the time of a short one says little
        # about a long one.
        program.turns = max(1, min(int(SECONDS / seconds_each), 4 * program.turns))
        # Of many runs the first axis is that of the runs.
        runs = (slice(None),) * self.members.many

        def closed(i: int) -> list[Tally]:
            return list(segment.packing.unpacked(lambda n, index: rows[n][(i, *runs, *index)]))

        return list(itertools.chain.from_iterable(map(closed, range(done))))


@dataclass(frozen=True)
class XlaRuntime:
    """The whole graph as one XLA program, for environments written in JAX.

    Args:
        chunk: turns of a program (a period or, where that has several programs, one run of one of
            them) before it returns rows; None: about half a second (default None). A run stops at
            the end of a chunk: at a goal, Ctrl-C, and an update that is not finite.
        seeds: number of runs that go on at once, of consecutive seeds from the run's seed on; None:
            one run that is not mapped (default None).
        sweep: settings of which the runs have different values, each with all seeds; None: no sweep
            (default None).
        threads: as of `LocalRuntime` (default None).

    Raises:
        SettingError: `chunk`, `seeds` or `threads` is no whole number of at least 1.

    Environments, or many runs, are split over all devices of the process. On CPUs these are as many
    as XLA is configured for: for many runs,
    ``XLA_FLAGS=--xla_force_host_platform_device_count=8`` makes each of 8 cores one device
    (`flowrl run --seeds` sets that).
    """

    chunk: int | None = None
    seeds: int | None = None
    sweep: Sweep | None = field(default=None, metadata={"read": Sweep.read})
    threads: int | None = None

    def __post_init__(self) -> None:
        check_positive("chunk", self.chunk)
        check_positive("seeds", self.seeds)
        check_positive("threads", self.threads)

    def open(self, plan: Plan, seed: int, stream: Stream | None = None) -> Session:
        """Open the resources, and trace the steady period unless other rounds come before it.

        Then it is traced with its first chunk.

        Raises:
            CheckError: a part of the graph can't be traced.
            GraphError: the period does not end in the state that it began with.
            SettingError: what is swept is no setting of the graph that a program may have as an
                input, or an observer wants each update.
        """
        if stream is not None and stream.wants(Updating):
            raise SettingError(
                "in the xla runtime an update is a part of the program, so that it can't be "
                "recorded; take the local runtime, which does the same",
                plan.graph.name,
            )
        plan = Plan(swept_graph(plan.graph, self.sweep), plan.found)
        graph, members = plan.graph, Members.of(seed, self.seeds, self.sweep)
        place = ProgramPlace(
            graph.name, graph.resources, seed, InlineSite, plan.found.totals, stream
        )
        rows = (
            MemberRows(graph.name, time.perf_counter(), members, plan.learners)
            if members.many
            else None
        )
        try:
            periodicity = fusable(plan)
            # With a warm-up the period is traced only after it, so problems would show late.
            if periodicity.warmup:
                refuse(plan)
            best = (lambda: rows.best) if rows else (lambda: 0)

            def turns(graph: Graph, make: Make) -> Fused:
                return Fused(graph, make, place, members, best, periodicity, self.chunk)

            session = Session(plan, place, turns, rows=rows, threads=self.threads)
        except BdbQuit:
            raise
        except Exception:
            # What can't be traced is raised by node, all of it at once; else the error itself.
            refuse(plan)
            raise
        return session
