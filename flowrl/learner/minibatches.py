"""How a batch is cut into minibatches, each of which several devices may share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flowrl.core.mesh import AXIS, number
from flowrl.core.permuting import permutation

Array = Any
Rows = dict[str, Array]


@dataclass(frozen=True)
class Minibatches:
    """The minibatches of a batch ``[steps, columns]``.

    Its rows are single steps, or whole columns where these must stay together. It is laid out in
    lines, as an array ``[..., lines, width]`` whose last axis the devices share evenly. In order, a
    minibatch is made of whole lines, so it has the same rows for any number of devices.

    A line normally holds all columns at one moment, so that each device keeps the environments that
    it has, where these are spread over devices. Where the devices can't share that evenly, or
    a minibatch in order would be no whole number of such lines, a line is a whole minibatch, or the
    whole batch if rows are shuffled. Of whole columns, a line holds those of a minibatch at one
    moment, or all if they are shuffled.

    Args:
        steps: T, in time.
        columns: B, side by side.
        size: steps of a minibatch; a divisor of T x B, and for whole columns a multiple of T.
        whole: whether columns stay whole.
        shuffle: whether the rows of a minibatch are picked at random in every epoch, or taken in
            order. Each device picks from its own rows.
        shards: devices that share each minibatch.
    """

    steps: int
    columns: int
    size: int
    whole: bool
    shuffle: bool
    shards: int = 1

    @property
    def count(self) -> int:
        """The number of minibatches."""
        return self.steps * self.columns // self.size

    @property
    def rows(self) -> int:
        """The rows of a minibatch on one device."""
        steps_per_row = self.steps if self.whole else 1
        return self.size // steps_per_row // self.shards

    @property
    def _shuffled(self) -> bool:
        """Whether rows are shuffled; the order within a single minibatch does not matter."""
        return self.shuffle and self.count > 1

    @property
    def _width(self) -> int:
        """The rows of a line, on all devices together."""
        if self.whole:
            return self.columns if self._shuffled else self.columns // self.count
        # A line of all columns must be shared evenly, and in order a minibatch is whole lines.
        if self.columns % self.shards == 0 and (self._shuffled or self.size % self.columns == 0):
            return self.columns
        return self.steps * self.columns if self._shuffled else self.size

    def laid_out(self, x: Array, *, time: bool = True) -> Array:
        """Return an array as ``[count, lines, width, ...]``, without the count if shuffled.

        Args:
            x: a field ``[T, B, ...]``, or a column ``[B, ...]`` if not `time`.
            time: whether `x` has an axis of time. A column has none, and no lines.
        """
        if self.whole and time and not self._shuffled:
            cut = x.reshape(self.steps, self.count, self._width, *x.shape[2:])
            return jnp.moveaxis(cut, 1, 0)
        lines = (-1,) if time else ()
        minibatches = () if self._shuffled else (self.count,)
        batch_axes = 2 if time else 1
        return x.reshape(*minibatches, *lines, self._width, *x.shape[batch_axes:])

    def spec(self, *, time: bool = True) -> PartitionSpec:
        """Return how the devices share an array that is laid out, with or without lines."""
        unshared: list[None] = []
        if not self._shuffled:
            unshared.append(None)
        if time:
            unshared.append(None)
        return PartitionSpec(*unshared, AXIS)

    def on_this_device(self, x: Array) -> Array:
        """Return this device's part of a field that is laid out, its lines joined to rows.

        These are ``[count, rows, ...]``, or ``[all rows, ...]`` if they are shuffled. Whole columns
        keep their axis of time.
        """
        if self.whole:
            return x
        leading = 0 if self._shuffled else 1
        return x.reshape(*x.shape[:leading], -1, *x.shape[leading + 2 :])

    def epoch(
        self,
        step: Callable[[Any, Rows], tuple[Any, Any]],
        carry: Any,
        fields: Rows,
        columns: Rows,
        key: Array,
    ) -> tuple[Any, Any, Array | None]:
        """Take every minibatch once.

        Args:
            step: from what is carried and a minibatch to what is carried next and what is
                collected.
            carry: what is carried.
            fields: as `on_this_device` gives them.
            columns: as `laid_out` gives them.
            key: a random key, from which the rows are shuffled.

        Returns:
            What is carried, what was collected ``[count, ...]``, and the indices of the rows that
            were picked ``[count, rows]``, or None if they were taken in order.
        """
        if not self._shuffled:
            return *self._in_order(step, carry, {**fields, **columns}), None
        field_axis = 1 if self.whole else 0  # after the axis of time, which whole columns keep
        order = self._order(key)

        def step_on(carry: Any, index: Array) -> tuple[Any, Any]:
            picked = {name: x.take(index, field_axis) for name, x in fields.items()}
            return step(carry, picked | {name: x[index] for name, x in columns.items()})

        return *jax.lax.scan(step_on, carry, order), order

    def _in_order(
        self, step: Callable[[Any, Rows], tuple[Any, Any]], carry: Any, rows: Rows
    ) -> tuple[Any, Any]:
        """Take the minibatches in order; return what is carried and what was collected."""
        if self.count > 1:
            return jax.lax.scan(step, carry, rows)
        # A single step runs without a loop, within which XLA is many times slower at convolutions.
        carry, collected = step(carry, {name: x[0] for name, x in rows.items()})
        return carry, jax.tree.map(lambda x: x[None], collected)

    def _order(self, key: Array) -> Array:
        """Return the shuffled indices of this device's rows, ``[count, rows]``."""
        # Devices share one key, but each shuffles in its own way.
        if self.shards > 1:
            key = jax.random.fold_in(key, number())
        return permutation(key, self.rows * self.count).reshape(self.count, self.rows)

    def as_laid_out(self, x: Array, order: Array | None) -> Array:
        """Return one number a row, laid out like the field that the rows came from.

        Args:
            x: the numbers as an epoch collected them, ``[count, rows]``.
            order: the indices of the rows, as `epoch` returned them.
        """
        if order is not None:
            x = jnp.zeros(order.size, x.dtype).at[order.reshape(-1)].set(x.reshape(-1))
        if self.whole:
            return x
        width = self._width // self.shards
        return x.reshape(-1, width) if self._shuffled else x.reshape(self.count, -1, width)
