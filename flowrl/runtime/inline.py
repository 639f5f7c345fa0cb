"""`InlineSite`: where functions become part of an XLA program that is being traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.arguments import Values, substituted
from flowrl.core.compiled import check_pure
from flowrl.core.metrics import Metered
from flowrl.errors import GraphError, a
from flowrl.graph.protocols import Handle
from flowrl.graph.site import HereSite, Place
from flowrl.runtime.counted import back_to, counted

Array = Any


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
        if not (cast("ProgramPlace", self.place).tracing or self.swept):
            # Nothing is donated: `Fused.arrays` holds the same arrays until the round has ended.
            return super().run(fn, *args, **static)
        check_pure(fn)
        if self.swept:
            args = tuple(substituted(value, self.swept) for value in args)
            static = {name: substituted(value, self.swept) for name, value in static.items()}
            # A method's settings are the fields of its owner.
            if (owner := getattr(fn, "__self__", None)) is not None:
                fn = getattr(substituted(owner, self.swept), fn.__name__)
        return fn(*args, **static)

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
            "its environment is no part of a program; take one written in JAX, such as "
            "gymnax:CartPole-v1"
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


class ProgramPlace(Place):
    """The resources of a run whose rounds become a program.

    They are opened for a seed that may be a tracer.
    """

    site: InlineSite
    tracing = False
    """Whether a program is being traced."""
    many = False
    """Whether the program is of many runs at once."""
    seed: Array = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Make all that runs meanwhile part of a program."""
        before, self.tracing = self.tracing, True
        try:
            yield
        finally:
            self.tracing = before

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
