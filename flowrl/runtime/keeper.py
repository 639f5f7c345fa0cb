"""What runs in an actor that a resource or a stage has of its own: functions, and what they give as long as it is needed."""

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
from flowrl.runtime.driver import DriverContext, from_driver, on_this_node, problem_of


@dataclass(frozen=True)
class At:
    """In a message: an array that is kept there under a number, or (below 0) that comes with the message."""

    number: int
    leaf: int


@dataclass(frozen=True)
class Joint:
    """In a message: arrays to be joined."""

    parts: tuple[Any, ...]
    axis: int


@dataclass(frozen=True)
class Hole:
    """In an answer: where an array stood that stays."""

    leaf: int
    shape: tuple[int, ...]
    dtype: Any


def dig(tree: Any, least: int = 0) -> tuple[Any, list[Any]]:
    """A tree whose arrays of at least so many axes are holes; and these arrays."""
    arrays: list[Any] = []

    def hole(x: Any) -> Any:
        if not isinstance(x, np.ndarray | jax.Array) or x.ndim < least:
            return x
        arrays.append(x)
        return Hole(len(arrays) - 1, x.shape, x.dtype)

    return jax.tree.map(hole, tree), arrays


class Keeper:
    """There: runs functions, and keeps what they give until it is told that nobody needs it any more."""

    def __init__(self, context: DriverContext) -> None:
        began = perf_counter()
        self.problem = problem_of(context.enter)
        self.kept: dict[int, Any] = {}
        """By number: arrays, or the error that was raised in their place."""
        self.programs: dict[int, Any] = {}
        self.clock = Clock("waiting", began)
        self.clock.move(perf_counter() - began, "waiting", "start")

    def run(
        self,
        number: int,
        dropped: Sequence[int],
        leaves: Sequence[Any],
        program: int,
        code: bytes | None,
        *sent: Packed,
    ) -> None:
        """Run a compiled function and keep its arrays."""
        self._keep(
            number,
            dropped,
            lambda: jax.block_until_ready(
                jax.tree.leaves(self._program(program, code)(*self._resolved(leaves, sent)))
            ),
        )

    def call(
        self, number: int, dropped: Sequence[int], leaves: Sequence[Any], code: bytes, *sent: Packed
    ) -> Any:
        """Call a user's function, and keep the arrays of what it returns. The rest is returned."""
        rest = None

        def call() -> list[Any]:
            nonlocal rest
            fn, tree = from_driver(code)
            rest, arrays = dig(
                fn(*jax.tree.unflatten(jax.tree.structure(tree), self._resolved(leaves, sent)))
            )
            return arrays

        self._keep(number, dropped, call)
        return rest

    def make(self, dropped: Sequence[int], tree: Any, *sent: Packed) -> Any:
        """A tree with arrays in the place of their addresses; packed, if it is a list."""
        with By(self.clock), TRANSFER:
            leaves, form = jax.tree.flatten(tree)
            arrays = [
                np.asarray(x) if isinstance(x, jax.Array) else x
                for x in self._resolved(leaves, sent)
            ]
            self._drop(dropped)
            return Packed(arrays) if isinstance(tree, list) else jax.tree.unflatten(form, arrays)

    def devices(self) -> int:
        """How many devices this process has."""
        return jax.local_device_count()

    def spent(self) -> Reading:
        """The seconds of this process by kind of work."""
        return self.clock.reading()

    def _keep(self, number: int, dropped: Sequence[int], make: Callable[[], list[Any]]) -> None:
        with By(self.clock), UPDATE:
            try:
                with on_this_node(self.problem):
                    self.kept[number] = make()
            except Exception as error:
                self.kept[number] = error
                raise
            finally:
                self._drop(dropped)

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.kept.pop(number, None)

    def _program(self, number: int, code: bytes | None) -> Callable[..., Any]:
        if code is not None:
            fn, donate, static, tree = from_driver(code)
            form, run = jax.tree.structure(tree), jitted(fn, donate, *static)
            self.programs[number] = lambda *leaves: run(*jax.tree.unflatten(form, leaves))
        program: Callable[..., Any] = self.programs[number]
        return program

    def _resolved(self, leaves: Sequence[Any], sent: Sequence[Packed]) -> list[Any]:
        return [self._resolve(x, sent) for x in leaves]

    def _resolve(self, x: Any, sent: Sequence[Packed]) -> Any:
        if isinstance(x, Joint):
            with CONCAT:
                return np.concatenate([self._resolve(part, sent) for part in x.parts], x.axis)
        if not isinstance(x, At):
            return x
        arrays = self.kept[x.number] if x.number >= 0 else sent[~x.number]
        if isinstance(arrays, Exception):
            raise arrays
        return arrays[x.leaf]
