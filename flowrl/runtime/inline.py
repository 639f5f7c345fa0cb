"""`InlineSite`: where functions become part of an XLA program that is being traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.arguments import Values, substituted, with_numbers
from flowrl.core.compiled import check_pure, exactly, generalised
from flowrl.core.metrics import Metered
from flowrl.errors import GraphError, a
from flowrl.graph.protocols import Handle
from flowrl.graph.site import HereSite, Place
from flowrl.runtime.counted import back_to, counted
from flowrl.runtime.packing import taken_out

Array = Any


class Number(NamedTuple):
    """A fractional number that a function of a program gets."""

    node: str
    """The node at work."""
    function: str
    """The name of the function."""
    path: str
    """Where the number is among what the function gets."""
    value: float


class Unmetered(Metered):
    """The metrics of a program, in which operators can't measure anything."""

    def add(self, name: str, value: Any, by: str = "") -> None:
        """Refuse the metric.

        Raises:
            GraphError: always, with the way out.
        """
        raise GraphError(
            f"reports the metric '{name}' by ctx.metric, which a program can't; let the loss "
            "return it among its metrics"
        )


class InlineSite(HereSite):
    """Runs functions inline, on tracers, while a program is being traced."""

    def __init__(self, place: Place, name: str, seed: int) -> None:
        super().__init__(place, name, seed)
        self.swept = Values()
        """By name: the settings of which each of many runs has its own value."""

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Call a pure function inline; where nothing is being traced, compile it by itself."""
        # With a sweep settings are tracers of `jax.vmap`, even where no program is traced.
        if not (cast("ProgramPlace", self.place).number or self.swept):
            # Nothing is donated: `Fused.arrays` holds the same arrays until the round has ended.
            return super().run(fn, *args, **static)
        check_pure(fn)
        place, function = cast("ProgramPlace", self.place), getattr(fn, "__func__", fn)
        name = getattr(function, "__qualname__", "")
        read = partial(self._read, name)
        args = tuple(read(value, f"{i}") for i, value in enumerate(taken_out(args)))
        if self.swept:
            # Settings are tracers, with which no function is compiled. A method's are the fields of
            # its owner.
            own = () if function is fn else (read(fn.__self__, "self"),)  # type: ignore[attr-defined]
            return function(*own, *args, **{key: read(x, key) for key, x in static.items()})
        settings = tuple(static.items())
        # What was traced of a function once, for the plan or in this process's other programs, need
        # not be traced again.
        if place.number is value_of or (found := generalised(fn, donate, *settings)) is None:
            return exactly(fn, donate, *settings)(*args)
        run, numbers = found
        given = tuple(self._of_program(name, path, x) for path, x in numbers.items())
        return run.run(given, *args)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function of items as it is."""
        return super().call(fn, *taken_out(args))

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Return whether a predicate holds."""
        return super().test(fn, *taken_out(args))

    def _of_program(self, function: str, path: str, number: float) -> Any:
        """Return what stands in the program for a number that a function gets."""
        place = cast("ProgramPlace", self.place)
        of_program = place.number or value_of
        return of_program(Number(place.ledger.at.node, function, path, number))

    def _read(self, function: str, value: Any, path: str) -> Any:
        """Return what a function gets, with what is no constant of the program in its place."""
        if self.swept:
            value = substituted(value, self.swept)
        # A step may pass several of its fields as one tuple.
        if isinstance(value, tuple) and any(type(x) is float for x in value):
            return tuple(self._read(function, x, f"{path}.{i}") for i, x in enumerate(value))
        return with_numbers(value, path, partial(self._of_program, function))

    def when(self, due: Any, handle: Handle, call: Callable[[], None]) -> None:
        """Call what changes a resource's state if it is due.

        Where only the running program knows `due`, the program computes both states and keeps the
        one that applies.

        Raises:
            GraphError: the call changes the tree structure of the state, or a leaf of it that is no
                array of JAX.
        """
        if not isinstance(due, jax.core.Tracer):
            super().when(due, handle, call)
            return
        counts = counted(self.place.ledger)
        leaves, structure = jax.tree.flatten(handle.state)

        def state_with(arrays: dict[int, Array]) -> Any:
            return jax.tree.unflatten(structure, [arrays.get(i, x) for i, x in enumerate(leaves)])

        def changed(arrays: dict[int, Array]) -> dict[int, Array]:
            handle.state = state_with(arrays)
            call()
            new_structure: Any = jax.tree.structure(handle.state)
            if new_structure != structure:
                raise GraphError(
                    f"what {self.name or 'a verb'} holds gets another tree structure when it is due"
                )
            new_leaves = jax.tree_util.tree_flatten_with_path(handle.state)[0]
            for i, (path, new) in enumerate(new_leaves):
                if i not in arrays:
                    _check_unchanged(jax.tree_util.keystr(path), leaves[i], new)
            return {i: new_leaves[i][1] for i in arrays}

        # Only arrays go through the branch; other leaves, such as numbers of Python, must stay.
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        handle.state = state_with(jax.lax.cond(due, changed, lambda arrays: arrays, arrays))
        # Whether the call takes place is unknown here, so what it counted does not count.
        back_to(self.place.ledger, counts)

    @property
    def seed(self) -> Any:
        """The run's own seed, of which each of many runs has another."""
        return cast("ProgramPlace", self.place).seed

    @seed.setter
    def seed(self, seed: Any) -> None:
        cast("ProgramPlace", self.place).seed = seed

    @property
    def devices(self) -> int:
        """How many devices share a function: one for many runs, which are themselves split."""
        return 1 if cast("ProgramPlace", self.place).many else super().devices

    @property
    def metrics(self) -> Metered:
        """The metrics, which refuse every value."""
        return Unmetered()

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Any:
        """Refuse workers.

        Raises:
            GraphError: always, with the way out.
        """
        raise GraphError(
            "the xla runtime takes environments written in JAX, such as gymnax:CartPole-v1, and no "
            "scripted policies; what is written in Python can't be compiled: take another runtime"
        )

    def seconds(self) -> float:
        """Refuse to return the time.

        Raises:
            GraphError: always, with the way out.
        """
        raise GraphError("looks at the clock, which a program can't; count items or steps")


def _check_unchanged(where: str, old: Any, new: Any) -> None:
    """Refuse a change of a leaf that is no array, which a branch of a program can't make."""
    if new is old or (type(new) is type(old) and np.array_equal(new, old)):
        return
    raise GraphError(
        f"a verb changes the state{where}, {a(old)} and no array of JAX, where only the running "
        "program knows whether the verb is due; let it be an array from the beginning, such as "
        "jnp.int32(0), or decide by what is known before the run"
    )


def value_of(number: Number) -> float:
    """Return the value of a number, so that it is a constant of the program."""
    return number.value


class ProgramPlace(Place):
    """The resources of a run whose rounds become a program.

    They are opened for a seed that may be a tracer.
    """

    remade = (*Place.remade, "number", "many", "seed")
    site: InlineSite
    number: Callable[[Number], Any] | None = None
    """While a program is being traced: returns what stands for a number in it."""
    many = False
    """Whether the program is of many runs at once."""
    seed: Array = 0

    @contextmanager
    def traced(self, number: Callable[[Number], Any] = value_of) -> Iterator[None]:
        """Make all that runs meanwhile part of a program.

        Args:
            number: returns what stands for a number in it: an input of the program, or the number
                itself, which is then a constant of the program (default the number itself).
        """
        before, self.number = self.number, number
        try:
            yield
        finally:
            self.number = before

    def open(self) -> dict[str, Handle]:
        """Return the handles, of which there are none until `begin` opens them."""
        return self.handles

    def begin(self, seed: Array, swept: Mapping[str, Array]) -> None:
        """Open the resources.

        Args:
            seed: the run's seed; it may be a tracer.
            swept: the values of swept settings by name; they may be tracers.
        """
        self.handles.clear()
        # The seed is part of what the program carries on: one program then serves every seed.
        self.seed = jnp.asarray(seed)
        self.site.swept.update(swept)
        super().open()
