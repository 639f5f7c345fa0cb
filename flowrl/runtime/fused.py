"""A graph as programs: rounds of its stages traced with everything inline, and what they go on from as one carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.compiled import check_pure
from flowrl.core.items import Tally
from flowrl.core.metrics import Metered
from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Unit
from flowrl.graph.protocols import Handle
from flowrl.graph.site import HereSite, Place
from flowrl.graph.stages import Schedule
from flowrl.graph.trace import Trace, Tracer, is_counter
from flowrl.graph.versions import Clocks, Newest, is_version, later
from flowrl.runtime.counted import Counts, add, back_to, counted, since
from flowrl.runtime.members import Values, substituted

Array = Any
UNROLLED = 64
"""Rounds that a program may spell out one by one: the time to compile it grows with them."""


@dataclass(frozen=True)
class Rhythm:
    """In rounds of the stages, how a graph repeats itself."""

    warmup: int
    """Rounds before the first that ends in a state which recurs with a Row."""
    period: int
    """Rounds from there to the next."""
    beat: int
    """Rounds in which all but the clock's own state repeats itself: of these a period is made."""


class Beats(Tracer):
    """An abstract trace that notes what is static between rounds, but for the clock."""

    counters = False

    def __init__(self, graph: Graph, found: Trace) -> None:
        super().__init__(graph, found.totals)
        self.seen: list[Any] = []

    def between(self, schedule: Schedule) -> None:
        """Note it."""
        self.seen.append(self.signature(schedule, clock=False))


def rhythm(graph: Graph, found: Trace) -> Rhythm | None:
    """The rhythm of a graph whose trace found a steady period; None if there is none."""
    if found.problems or found.opaque or not found.rows:
        return None
    tracer = Beats(graph, found)
    again, seen = tracer.run(), tracer.seen
    if not again.exact:
        return None
    end = again.passes
    period = end - again.warmup_rounds
    beat = next(
        n
        for n in range(1, period + 1)
        if period % n == 0 and (n == period or seen[-1 - n] == seen[-1])
    )
    return Rhythm(again.warmup_rounds, period, beat)


class Unmetered(Metered):
    """Nothing is measured in a program."""

    def add(self, name: str, value: Any, by: str = "") -> None:
        """Refuse.

        Raises:
            GraphError: with the way out.
        """
        raise GraphError(
            f"tells the metric '{name}' by ctx.metric, which a program can't; let the loss return it among its metrics"
        )


class InlineSite(HereSite):
    """Functions on tracers, inline."""

    def __init__(self, place: Place, name: str, seed: int) -> None:
        super().__init__(place, name, seed)
        self.swept = Values()
        """What each of many runs has another value of."""

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Call it. Where a program is being traced what it does becomes part of that; if not, it is compiled by itself."""
        if not (cast("ProgramPlace", self.place).tracing or self.swept):
            return super().run(fn, *args, **static)
        check_pure(fn)
        if self.swept:
            static = {name: substituted(value, self.swept) for name, value in static.items()}
            if (owner := getattr(fn, "__self__", None)) is not None:
                fn = getattr(substituted(owner, self.swept), fn.__name__)
        return fn(*args, **static)

    def when(self, due: Any, handle: Handle, call: Callable[[], None]) -> None:
        """Where only the program knows, what the resource holds becomes what it would be, or stays."""
        if not isinstance(due, jax.core.Tracer):
            super().when(due, handle, call)
            return
        counts = counted(self.place.ledger)
        before, form = jax.tree.flatten(handle.state)

        def holding(arrays: dict[int, Array]) -> Any:
            return jax.tree.unflatten(form, [arrays.get(i, x) for i, x in enumerate(before)])

        def changed(arrays: dict[int, Array]) -> dict[int, Array]:
            handle.state = holding(arrays)
            call()
            after, other = jax.tree.flatten(handle.state)
            if str(other) != str(form):
                raise GraphError(
                    f"what {self.name or 'a verb'} holds takes another form when it is due"
                )
            return {i: after[i] for i in arrays}

        arrays = {i: x for i, x in enumerate(before) if isinstance(x, jax.Array)}
        handle.state = holding(jax.lax.cond(due, changed, lambda arrays: arrays, arrays))
        back_to(self.place.ledger, counts)

    @property
    def devices(self) -> int:
        """One for many runs at once, which are themselves split over the devices; else all."""
        return 1 if cast("ProgramPlace", self.place).many else super().devices

    @property
    def metrics(self) -> Metered:
        """None."""
        return Unmetered()

    def key(self, *folds: int | str) -> Any:
        """A key of the run's own seed, which many runs have one each of."""
        self.seed = cast("ProgramPlace", self.place).seed
        return super().key(*folds)

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Any:
        """Refuse them.

        Raises:
            GraphError: with the way out.
        """
        raise GraphError(
            "its environment is no part of a program; take one written in JAX, such as gymnax:CartPole-v1"
        )

    def seconds(self) -> float:
        """Refuse.

        Raises:
            GraphError: with the way out.
        """
        raise GraphError("looks at the clock, which a program can't; count items or steps")


@dataclass(frozen=True)
class Form:
    """What is static about the state of a graph at work. Versions count by their age."""

    tree: Any
    static: tuple[tuple[Any, ...], ...]
    """By leaf, of which kind it is, and: learner and age of a version; the value of what else is no array of JAX; shape and type of an array."""


class ProgramPlace(Place):
    """Resources that are opened within a program."""

    site: InlineSite
    tracing = False
    """Whether a program is being traced."""
    many = False
    """Whether it is of many runs at once."""
    seed: Array = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Meanwhile what runs becomes part of a program."""
        before, self.tracing = self.tracing, True
        try:
            yield
        finally:
            self.tracing = before

    def open(self) -> dict[str, Handle]:
        """None yet; `begin` opens them."""
        return self.handles

    def begin(self, seed: Array, swept: Mapping[str, Array]) -> None:
        """Open them, by a seed and values of what is swept that may be tracers."""
        self.handles.clear()
        self.seed = jnp.asarray(seed)  # part of the carry: one program then serves every seed
        self.site.swept.update(swept)
        super().open()


class State:
    """The state of a graph at work, its operators', resources' and queues': taken apart and put together."""

    def __init__(self, graph: Graph, place: ProgramPlace, schedule: Schedule) -> None:
        self.place = place
        self.schedule = schedule
        self.clocks = Clocks(graph, place.handles)

    def _tree(self) -> Any:
        handles = {name: handle.state for name, handle in self.place.handles.items()}
        queues = {name: list(channel.items) for name, channel in self.schedule.channels.items()}
        return (
            [loop.states for loop in self.schedule.loops],
            handles,
            queues,
            dict(self.place.site.swept),
            self.place.seed,
        )

    def shared_out(self) -> list[bool]:
        """By array: whether its first axis is one of environments, which may be split over devices."""
        paths = [
            path
            for path, x in jax.tree_util.tree_flatten_with_path(self._tree())[0]
            if isinstance(x, jax.Array) or is_counter(path, x)
        ]
        parts = [
            tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path[:3])
            for path in paths
        ]
        return [
            part[0] == 1 and part[2] in self.place.handles[str(part[1])].spread for part in parts
        ]

    def get(self) -> tuple[list[Array], Form, Newest]:
        """The arrays, what is static, and the newest versions."""
        paths, tree = jax.tree_util.tree_flatten_with_path(self._tree())
        newest = self.clocks.newest(paths)
        arrays: list[Array] = []
        static: list[tuple[Any, ...]] = []
        for path, x in paths:
            if is_counter(path, x):
                x = jnp.asarray(x)  # noqa: PLW2901
            if is_version(path, x):
                learner = self.clocks.of(path)
                static.append(("age", learner, _value(newest[learner] - np.asarray(x))))
            elif isinstance(x, jax.Array):
                arrays.append(x)
                static.append(("array", x.shape, str(x.dtype)))
            else:
                static.append(("value", _value(x)))
        return arrays, Form(tree, tuple(static)), newest

    def put(self, arrays: Sequence[Array], form: Form, newest: Newest) -> None:
        """Take up where another one was."""
        left = iter(arrays)
        leaves = []
        for kind, *value in form.static:
            if kind == "array":
                leaves.append(next(left))
            elif kind == "value":
                leaves.append(_back(value[0]))
            else:
                learner, age = value
                leaves.append((newest.get(learner, 0) - _back(age)).astype(np.int32)[()])
        loops, handles, channels, swept, self.place.seed = jax.tree.unflatten(form.tree, leaves)
        self.place.site.swept.update(swept)
        for loop, states in zip(self.schedule.loops, loops, strict=True):
            loop.states = states
        for name, state in handles.items():
            self.place.handles[name].state = state
        for name, items in channels.items():
            self.schedule.channels[name].items.clear()
            self.schedule.channels[name].items.extend(items)


def _value(x: Any) -> Any:
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray | np.generic) else x


def _back(value: Any) -> Any:
    if not (isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes)):
        return value
    return np.frombuffer(value[2], value[0]).reshape(value[1])[()]


@dataclass
class Segment:
    """A part of a run as a function of arrays, and what is static about it, which is known once it was traced."""

    run: Callable[[list[Array]], tuple[list[Array], list[Tally]]]
    after: Form
    updates: Newest
    """By which the newest version of each learner rises."""
    counts: Counts
    rows: int


class Tracing:
    """Makes programs of the rounds of a schedule."""

    def __init__(self, graph: Graph, place: ProgramPlace, schedule: Schedule) -> None:
        self.place = place
        self.schedule = schedule
        self.state = State(graph, place, schedule)
        self.clock: Unit = next(
            unit for loop in schedule.loops for unit in loop.units.values() if unit.op.reports
        )
        self.loop = next(loop for loop in schedule.loops if self.clock.name in loop.units)

    def rounds(self, count: int) -> list[Tally]:
        """So many rounds, one after another."""
        return [tally for _ in range(count) for tally in self.schedule.round()]

    def beats(self, count: int, rounds: int) -> list[Tally]:
        """So many times so many rounds as one scan, and only then the clock over all that reached it.

        Raises:
            Uneven: the clock closes a row before the last of it.
        """
        if count == 1:
            return self.rounds(rounds)
        if self.clock.behind or self.clock.outlets:
            raise Uneven
        arrays, form, newest = self.state.get()
        clock_before = self.clock.state
        rows: list[Tally] = []
        ledger, before = self.place.ledger, counted(self.place.ledger)
        seen: list[Any] = []

        def beat(arrays: list[Array], _: None) -> tuple[list[Array], list[Any]]:
            back_to(ledger, before)
            self.state.put(arrays, form, newest)
            self.clock.state = None
            items: list[tuple[Any, Any]] = []
            with self._collected(items):
                self.rounds(rounds)
            self.clock.state = clock_before
            after, again, now = self.state.get()
            if again != form:
                raise GraphError(
                    f"{self.loop.graph} does not repeat itself every {rounds} rounds in a program; {differing(form, again)}"
                )
            seen[:] = [
                later(now, newest, -1),
                [source for source, _ in items],
                since(before, counted(ledger)),
            ]
            return strong(after), [jax.tree.map(jnp.asarray, item) for _, item in items]

        arrays, items = jax.lax.scan(beat, strong(arrays), None, length=count)
        risen, sources, counts = seen
        back_to(ledger, before)
        add(ledger, counts, count)
        self.state.put(arrays, form, later(newest, risen, count))
        self.clock.state = clock_before
        for i in range(count):
            for source, item in zip(sources, items, strict=True):
                if rows:
                    raise Uneven
                self.loop.enter(self.clock, jax.tree.map(lambda x, i=i: x[i], item), source, rows)
        return rows

    @contextmanager
    def _collected(self, items: list[tuple[Any, Any]]) -> Iterator[None]:
        """Meanwhile what reaches the clock is only noted."""
        step = self.clock.step

        def note(state: Any, item: Any, ctx: Any) -> Iterator[Any]:  # noqa: ARG001
            items.append((ctx.source, item))
            yield from ()

        self.clock.step = note
        try:
            yield
        finally:
            self.clock.step = step

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Tracing leaves nothing behind: neither counts nor tracers."""
        before, (arrays, form, newest) = counted(self.place.ledger), self.state.get()
        try:
            yield
        finally:
            back_to(self.place.ledger, before)
            self.state.put(arrays, form, newest)

    def segment(
        self, form: Form, arrays: Sequence[Array], work: Callable[[], list[Tally]]
    ) -> Segment:
        """Some work from a state on, traced once to see what becomes of it."""
        ledger, before = self.place.ledger, counted(self.place.ledger)
        seen: list[Any] = []

        def run(arrays: list[Array]) -> tuple[list[Array], list[Tally]]:
            back_to(ledger, before)
            self.state.put(arrays, form, {})
            with self.place.traced():
                rows = work()
            after, again, newest = self.state.get()
            seen[:] = [again, newest, since(before, counted(ledger)), len(rows)]
            return strong(after), jax.tree.map(jnp.asarray, rows)

        jax.eval_shape(run, list(arrays))
        return Segment(run, *seen)


class Uneven(GraphError):
    """A row closes within a beat."""

    def __init__(self) -> None:
        super().__init__("a row closes within a beat")


def strong(arrays: Sequence[Array]) -> list[Array]:
    """Arrays of no weak type, as a loop carries them."""
    return [
        jax.lax.convert_element_type(x, x.dtype)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
        for x in arrays
    ]


def differing(a: Form, b: Form) -> str:
    """Say where the state of a graph became another one, of two that are not equal."""
    if a.tree != b.tree:
        return "what its operators hold has another form"
    at = next(i for i, (x, y) in enumerate(zip(a.static, b.static, strict=True)) if x != y)
    path = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(a.tree, range(len(a.static))))[
        0
    ][at][0]
    # First come the operators' states, by stage and node, and then those of resources and queues, by name.
    name, rest = (path[2], path[3:]) if path[0].idx == 0 else (path[1], path[2:])
    was, became = (_leaf(form.static[at]) for form in (a, b))
    way = (
        "; an array in a state is one of JAX from the beginning, such as jnp.zeros(3)"
        if a.static[at][0] != b.static[at][0]
        else ""
    )
    return f"{name.key}{jax.tree_util.keystr(rest)} was {was} and became {became}{way}"


def _leaf(static: tuple[Any, ...]) -> str:
    kind, fact = static[:2]
    facts = (
        fact[:2] if kind == "value" and isinstance(fact, tuple) else [fact]
    )  # of an array of NumPy type and shape, but not its bytes
    return " ".join(map(str, [kind, *facts]))
