"""What runs in a process of a resource or stage: functions, and the arrays they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax
import numpy as np

from flowrl.core.clock import CONCAT, TRANSFER, UPDATE, By, Clock, Reading
from flowrl.core.compiled import jitted
from flowrl.core.items import Packed
from flowrl.core.mesh import on_one
from flowrl.errors import FlowrlError
from flowrl.runtime.driver import DriverContext, from_driver, on_this_node, problem_of


@dataclass(frozen=True)
class At:
    """In a message: the address of an array.

    Args:
        number: from 0, under which the keeper has the array; below 0, ``~number`` is the index
            among the packed arrays that come with the message.
        leaf: its index among the arrays there.
    """

    number: int
    leaf: int


@dataclass(frozen=True)
class Joint:
    """In a message: arrays that are to be joined.

    Args:
        parts: the arrays, or their addresses.
        axis: the axis along which they are joined.
        lengths: of each of them along it.
    """

    parts: tuple[Any, ...]
    axis: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Hole:
    """In a reply: the place of an array that stays in the keeper's process or the object store.

    Args:
        leaf: its index among these arrays.
        shape: of the array.
        dtype: of the array.
    """

    leaf: int
    shape: tuple[int, ...]
    dtype: Any


def dig(tree: Any, least: int = 0) -> tuple[Any, list[Any]]:
    """Take the arrays out of a tree.

    Args:
        tree: a pytree.
        least: arrays of fewer axes stay in it.

    Returns:
        The tree with holes in the place of the arrays, and the arrays.
    """
    arrays: list[Any] = []

    def hole(x: Any) -> Any:
        if not isinstance(x, np.ndarray | jax.Array) or x.ndim < least:
            return x
        arrays.append(x)
        return Hole(len(arrays) - 1, x.shape, x.dtype)

    return jax.tree.map(hole, tree), arrays


def _as_numpy(x: Any) -> Any:
    """Return an array as it travels: one of NumPy, and of random keys their numbers."""
    if not isinstance(x, jax.Array):
        return x
    x = on_one(x)
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


class Keeper:
    """Runs functions in its process, and keeps the arrays they return while they are needed."""

    def __init__(self, context: DriverContext) -> None:
        began = perf_counter()
        self.context = context
        self.problem: FlowrlError | None = None
        """What was wrong from the beginning; None if nothing was."""
        self.begin()
        self.kept: dict[int, Any] = {}
        """By number: arrays, or the error that was raised in their place."""
        self.programs: dict[int, Any] = {}
        self.clock = Clock("waiting", began)
        self.clock.move(perf_counter() - began, "waiting", "start")

    def begin(self) -> None:
        """Take over what only the driver's process knows."""
        self.problem = problem_of(self.context.enter)

    def run(
        self,
        number: int,
        dropped: Sequence[int],
        leaves: Sequence[Any],
        program: int,
        code: bytes | None,
        *sent: Packed,
    ) -> None:
        """Run a compiled function and keep its arrays.

        Args:
            number: under which to keep them.
            dropped: numbers under which nothing needs to be kept any more.
            leaves: the arguments, or their addresses.
            program: the function's number.
            code: the function, pickled, with its first call.
            sent: packed arrays to which addresses refer.
        """
        # Waiting for the arrays here lets an error of theirs be kept, and raised, in their place.
        self._keep(
            number,
            dropped,
            lambda: jax.block_until_ready(
                self._laid_out(self._program(program, code)(*self._resolved(leaves, sent)))
            ),
        )

    def call(
        self, number: int, dropped: Sequence[int], leaves: Sequence[Any], code: bytes, *sent: Packed
    ) -> Any:
        """Call a user's function and keep the arrays of its result.

        Args:
            number: under which to keep them.
            dropped: numbers under which nothing needs to be kept any more.
            leaves: the arguments, or their addresses.
            code: the function, pickled.
            sent: packed arrays to which addresses refer.

        Returns:
            The result with holes in the place of its arrays.
        """
        result = None

        def call() -> list[Any]:
            nonlocal result
            fn, tree = from_driver(code)
            args = jax.tree.unflatten(jax.tree.structure(tree), self._values(leaves, sent))
            result, arrays = dig(fn(*args))
            return arrays

        self._keep(number, dropped, call)
        return result

    def make(self, dropped: Sequence[int], tree: Any, *sent: Packed) -> Any:
        """Return a tree with arrays in the place of their addresses; packed, if it is a list.

        Args:
            dropped: numbers under which nothing needs to be kept any more.
            tree: a pytree of addresses and values.
            sent: packed arrays to which addresses refer.
        """
        with By(self.clock), TRANSFER:
            leaves, structure = jax.tree.flatten(tree)
            # Arrays leave the process as NumPy's.
            arrays = [_as_numpy(x) for x in self._values(leaves, sent)]
            self._drop(dropped)
            # A list is what `Kept.store` and `PlacedSite.settle` ask for: only arrays, whose places
            # the driver knows, so they travel as one buffer. Any other tree is weights for runners,
            # which need its structure.
            if isinstance(tree, list):
                return Packed(arrays)
            return jax.tree.unflatten(structure, arrays)

    def devices(self) -> int:
        """Return how many devices this process has, or all of its group together."""
        return jax.device_count()

    def spent(self) -> Reading:
        """Return the seconds of this process by kind of work."""
        return self.clock.reading()

    def _keep(self, number: int, dropped: Sequence[int], make: Callable[[], list[Any]]) -> None:
        """Keep what `make` returns, or the error that it raises."""
        with By(self.clock), UPDATE:
            try:
                # What was wrong from the beginning is raised by each call.
                with on_this_node(self.problem):
                    self.kept[number] = make()
            except Exception as error:
                # Functions of these arrays that were submitted already raise it as well.
                self.kept[number] = error
                raise
            finally:
                self._drop(dropped)

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.kept.pop(number, None)

    def _program(self, number: int, code: bytes | None) -> Callable[..., Any]:
        """Return a compiled function of leaves by its number; `code` comes with its first call."""
        if code is not None:
            # The tree holds the numbers of the leaves: only its structure matters.
            fn, donate, static, tree = from_driver(code)
            structure, run = jax.tree.structure(tree), jitted(fn, donate, *static)
            self.programs[number] = lambda *leaves: run(*jax.tree.unflatten(structure, leaves))
        program: Callable[..., Any] = self.programs[number]
        return program

    def _joined(self, joint: Joint, sent: Sequence[Packed]) -> Any:
        """Return arrays joined."""
        return np.concatenate([self._resolve(part, sent) for part in joint.parts], joint.axis)

    def _laid_out(self, outputs: Any) -> list[jax.Array]:
        """Return the arrays of a function's outputs as they are kept."""
        return jax.tree.leaves(outputs)

    def _values(self, leaves: Sequence[Any], sent: Sequence[Packed]) -> list[Any]:
        """Return the leaves as `_resolved` does, to look at the values of the arrays."""
        return self._resolved(leaves, sent)

    def _resolved(self, leaves: Sequence[Any], sent: Sequence[Packed]) -> list[Any]:
        """Return the leaves with arrays in the place of their addresses."""
        return [self._resolve(x, sent) for x in leaves]

    def _resolve(self, x: Any, sent: Sequence[Packed]) -> Any:
        if isinstance(x, Joint):
            with CONCAT:
                return self._joined(x, sent)
        if not isinstance(x, At):
            return x
        # Numbers below 0 are for arrays that came with the message.
        arrays = self.kept[x.number] if x.number >= 0 else sent[~x.number]
        if isinstance(arrays, Exception):
            raise arrays
        return arrays[x.leaf]
