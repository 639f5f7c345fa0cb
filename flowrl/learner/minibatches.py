"""How a batch is cut into minibatches, each of which several devices may share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flowrl.core.mesh import AXIS, number

Array = Any
Rows = dict[str, Array]


@dataclass(frozen=True)
class Minibatches:
    """The minibatches of a batch ``[steps, columns]``.

    Its rows are single steps, or whole columns where these must stay together. They lie in lines, side by side: a line holds the steps of all columns
    at one moment, or as many steps as a minibatch has where that is no multiple of the columns. Devices share each line evenly, so that each
    minibatch in order is made of the same rows, whatever the number of devices.

    Args:
        steps: T, in time.
        columns: B, side by side.
        size: steps of a minibatch; a divisor of T x B, and for whole columns a multiple of T.
        whole: whether columns stay whole.
        shuffle: whether the rows of a minibatch are drawn at random in every epoch, or taken in order. Each device draws from its own rows.
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
        """How many minibatches there are."""
        return self.steps * self.columns // self.size

    @property
    def rows(self) -> int:
        """Rows of a minibatch on one device."""
        return self.size // (self.steps if self.whole else 1) // self.shards

    @property
    def _drawn(self) -> bool:
        """Whether rows are drawn at random; the order within a single minibatch does not matter."""
        return self.shuffle and self.count > 1

    @property
    def _width(self) -> int:
        """Rows of a line, on all devices together."""
        if self.whole:
            return self.columns if self._drawn else self.columns // self.count
        if self.columns % self.shards == 0 and (self._drawn or self.size % self.columns == 0):
            return self.columns
        return self.steps * self.columns if self._drawn else self.size

    def laid_out(self, x: Array, *, time: bool = True) -> Array:
        """A field ``[T, B, ...]``, or a column ``[B, ...]`` if not `time`, as ``[count, lines, width, ...]``; without the count if rows are drawn.

        A column has no lines.
        """
        if self.whole and time and not self._drawn:
            cut = x.reshape(self.steps, self.count, self._width, *x.shape[2:])
            return jnp.moveaxis(cut, 1, 0)
        lines = (-1,) if time else ()
        minibatches = () if self._drawn else (self.count,)
        return x.reshape(*minibatches, *lines, self._width, *x.shape[1 + time :])

    def spec(self, *, time: bool = True) -> PartitionSpec:
        """How the devices share what is laid out."""
        return PartitionSpec(*[None] * (time + (not self._drawn)), AXIS)

    def on_this_device(self, x: Array) -> Array:
        """A laid out field as rows: ``[count, rows, ...]``, or ``[all rows, ...]`` if they are drawn; whole columns keep their axis of time."""
        if self.whole:
            return x
        kept = 0 if self._drawn else 1
        return x.reshape(*x.shape[:kept], -1, *x.shape[kept + 2 :])

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
            step: from what is carried and a minibatch to what is carried next and what is collected.
            carry: what is carried.
            fields: `on_this_device`.
            columns: laid out.
            key: random.

        Returns:
            What is carried, what was collected ``[count, ...]``, and the places of the rows that were drawn ``[count, rows]``, or None if in order.
        """
        if not self._drawn:
            parts = {**fields, **columns}
            if self.count > 1:
                return *jax.lax.scan(step, carry, parts), None
            carry, collected = step(carry, {k: x[0] for k, x in parts.items()})
            return carry, jax.tree.map(lambda x: x[None], collected), None
        axis = int(self.whole)
        every = self.rows * self.count
        order = jax.random.permutation(
            jax.random.fold_in(key, number()) if self.shards > 1 else key, every
        ).reshape(self.count, self.rows)

        def drawn(carry: Any, index: Array) -> tuple[Any, Any]:
            return step(
                carry,
                {k: x.take(index, axis) for k, x in fields.items()}
                | {k: x[index] for k, x in columns.items()},
            )

        return *jax.lax.scan(drawn, carry, order), order

    def as_laid_out(self, x: Array, order: Array | None) -> Array:
        """One number a row ``[count, rows]``, as an epoch collected it, laid out like the field that the rows came from."""
        if order is not None:
            x = jnp.zeros(order.size, x.dtype).at[order.reshape(-1)].set(x.reshape(-1))
        if self.whole:
            return x
        width = self._width // self.shards
        return x.reshape(-1, width) if self._drawn else x.reshape(self.count, -1, width)
