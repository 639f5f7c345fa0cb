"""A graph as programs: rounds of its stages traced with everything inline, and what they go on from as one carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.errors import FlowrlError, GraphError
from flowrl.graph.loop import Ledger, Unit
from flowrl.graph.site import HereSite, Place, check_pure
from flowrl.graph.stages import Schedule
from flowrl.graph.trace import VERSION, Rhythm
from flowrl.items import Tally

Array = Any
UNROLLED = 64
"""Rounds that a program may spell out one by one: the time to compile it grows with them."""


class InlineSite(HereSite):
    """Functions on tracers, inline."""

    def run(self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any) -> Any:
        """Call it; what it does becomes part of the program."""
        check_pure(fn)
        return fn(*args, **static)

    def workers(self, count: int, make: Callable[[int, int], Any], twin: Callable[[int, int], Any]) -> Any:
        """Refuse them.

        Raises:
            GraphError: with the way out.
        """
        raise GraphError("its environment is no part of a program; take one written in JAX, such as gymnax:CartPole-v1")

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
    static: tuple[Hashable, ...]
    """By leaf: its age, if it is a version; its value, if it is no array of JAX; else its shape and type."""


class State:
    """The state of a graph at work, its operators', resources' and queues': taken apart and put together."""

    def __init__(self, place: Place, schedule: Schedule) -> None:
        self.place = place
        self.schedule = schedule

    def _tree(self) -> Any:
        handles = {name: handle.state for name, handle in self.place.handles.items()}
        return [loop.states for loop in self.schedule.loops], handles, {n: list(c.items) for n, c in self.schedule.channels.items()}

    def get(self) -> tuple[list[Array], Form, int]:
        """The arrays, what is static, and the newest version."""
        paths, tree = jax.tree_util.tree_flatten_with_path(self._tree())
        versions = [np.asarray(x) for path, x in paths if _is_version(path, x)]
        newest = max((int(v.max()) for v in versions), default=0)
        arrays, static = [], []
        for path, x in paths:
            if _is_version(path, x):
                static.append(("age", _value(newest - np.asarray(x))))
            elif isinstance(x, jax.Array):
                arrays.append(x)
                static.append(("array", x.shape, str(x.dtype)))
            else:
                static.append(("value", _value(x)))
        return arrays, Form(tree, tuple(static)), newest

    def put(self, arrays: Sequence[Array], form: Form, newest: int) -> None:
        """Take up where another one was."""
        left = iter(arrays)
        leaves = []
        for kind, *value in form.static:
            if kind == "array":
                leaves.append(next(left))
            else:
                leaves.append(_back(value[0]) if kind == "value" else (newest - _back(value[0])).astype(np.int32)[()])
        loops, handles, channels = jax.tree.unflatten(form.tree, leaves)
        for loop, states in zip(self.schedule.loops, loops, strict=True):
            loop.states = states
        for name, state in handles.items():
            self.place.handles[name].state = state
        for name, items in channels.items():
            self.schedule.channels[name].items.clear()
            self.schedule.channels[name].items.extend(items)


def _is_version(path: Any, x: Any) -> bool:
    return str(path[-1:]) == VERSION and isinstance(x, np.ndarray | np.generic)


def _value(x: Any) -> Hashable:
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray | np.generic) else x


def _back(value: Any) -> Any:
    if not (isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes)):
        return value
    return np.frombuffer(value[2], value[0]).reshape(value[1])[()]


Counts = dict[str, dict[Any, Any]]
COUNTED = ("put", "got", "put_steps", "got_steps", "dropped", "dropped_steps")


def counted(ledger: Ledger) -> Counts:
    """A copy of all that a ledger counts."""
    return {**{name: Counter(getattr(ledger, name)) for name in COUNTED}, "counts": {k: Counter(c) for k, c in ledger.counts.items()}}


def since(before: Counts, after: Counts) -> Counts:
    """What was counted between the two."""
    plain: Counts = {name: Counter({k: n - before[name][k] for k, n in after[name].items()}) for name in COUNTED}
    return plain | {"counts": {k: Counter({n: x - before["counts"].get(k, Counter())[n] for n, x in c.items()}) for k, c in after["counts"].items()}}


def add(ledger: Ledger, counts: Counts, times: int) -> None:
    """Count so many times what was counted once."""
    for name in COUNTED:
        for k, n in counts[name].items():
            getattr(ledger, name)[k] += times * n
    for k, c in counts["counts"].items():
        for n, x in c.items():
            ledger.counts[k][n] += times * x


def back_to(ledger: Ledger, counts: Counts) -> None:
    """Forget what was counted since."""
    add(ledger, since(counts, counted(ledger)), -1)


@dataclass
class Segment:
    """A part of a run as a function of arrays, and what is static about it, which is known once it was traced."""

    run: Callable[[list[Array]], tuple[list[Array], list[Tally]]]
    after: Form
    updates: int
    """By which the newest version rises."""
    counts: Counts
    rows: int


class Tracing:
    """Makes programs of the rounds of a schedule."""

    def __init__(self, place: Place, schedule: Schedule) -> None:
        self.place = place
        self.schedule = schedule
        self.state = State(place, schedule)
        self.clock: Unit = next(unit for loop in schedule.loops for unit in loop.units.values() if unit.op.clock)
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
        clock_before, rows = self.clock.state, []
        ledger, before = self.place.ledger, counted(self.place.ledger)
        seen: list[Any] = []

        def beat(arrays: list[Array], _: None) -> tuple[list[Array], list[Any]]:
            back_to(ledger, before)
            self.state.put(arrays, form, newest)
            self.clock.state = None
            with self._collected(items := []):
                self.rounds(rounds)
            self.clock.state = clock_before
            after, again, now = self.state.get()
            if again != form:
                raise GraphError(f"{self.loop.graph} does not repeat itself every {rounds} rounds in a program; {_differing(form, again)}")
            seen[:] = [now - newest, [source for source, _ in items], since(before, counted(ledger))]
            return _strong(after), [jax.tree.map(jnp.asarray, item) for _, item in items]

        arrays, items = jax.lax.scan(beat, _strong(arrays), None, length=count)
        risen, sources, counts = seen
        back_to(ledger, before)
        add(ledger, counts, count)
        self.state.put(arrays, form, newest + count * risen)
        self.clock.state = clock_before
        for i in range(count):
            for source, item in zip(sources, items, strict=True):
                if rows:
                    raise Uneven
                self.loop._push(self.clock, jax.tree.map(lambda x, i=i: x[i], item), source, rows)
        return rows

    @contextmanager
    def _collected(self, items: list[tuple[Any, Any]]) -> Iterator[None]:
        """Meanwhile what reaches the clock is only noted."""
        step = self.clock.step

        def note(state: Any, item: Any, ctx: Any) -> Iterator[Any]:
            items.append((ctx.source, item))
            yield from ()

        self.clock.step = note  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            self.clock.step = step  # type: ignore[method-assign]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Tracing leaves nothing behind: neither counts nor tracers."""
        before, (arrays, form, newest) = counted(self.place.ledger), self.state.get()
        try:
            yield
        finally:
            back_to(self.place.ledger, before)
            self.state.put(arrays, form, newest)

    def segment(self, form: Form, arrays: Sequence[Array], work: Callable[[], list[Tally]]) -> Segment:
        """Some work from a state on, traced once to see what becomes of it."""
        ledger, before = self.place.ledger, counted(self.place.ledger)
        seen: list[Any] = []

        def run(arrays: list[Array]) -> tuple[list[Array], list[Tally]]:
            back_to(ledger, before)
            self.state.put(arrays, form, 0)
            rows = work()
            after, again, newest = self.state.get()
            seen[:] = [again, newest, since(before, counted(ledger)), len(rows)]
            return _strong(after), jax.tree.map(jnp.asarray, rows)

        jax.eval_shape(run, list(arrays))
        return Segment(run, *seen)


class Uneven(GraphError):
    """A row closes within a beat."""

    def __init__(self) -> None:
        super().__init__("a row closes within a beat")


def _strong(arrays: Sequence[Array]) -> list[Array]:
    """Arrays of no weak type, as a loop carries them."""
    return [jax.lax.convert_element_type(x, x.dtype) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]


def _differing(a: Form, b: Form) -> str:
    if a.tree != b.tree:
        return "what its operators hold has another form"
    at = next(i for i, (x, y) in enumerate(zip(a.static, b.static, strict=True)) if x != y)
    return f"leaf {at} of its state was {a.static[at][:2]} and became {b.static[at][:2]}"
