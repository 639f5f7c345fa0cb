"""Loops over rows: one write a step for all small arrays, where each write is a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Rows = dict[str, Array]
WIDEST = 1024
"""Numbers of a row, up to which an array is packed. Rows of 400 numbers gained, and a large one
costs more to copy than a write does."""


def scan_rows(
    step: Callable[[Any, Any], tuple[Any, Rows]], carry: Any, xs: Any
) -> tuple[Any, Rows]:
    """Do as `jax.lax.scan` does, in the way that is faster on this device.

    On a GPU each array that a step writes is a kernel of its own, which takes much of the time of
    a rollout of small environments. On CPUs packed rows were as fast as others, or slower.

    Args:
        step: from what is carried and a slice of `xs` to what is carried next and rows
            ``[B, ...]`` by name.
        carry: what is carried.
        xs: what the steps take, ``[T, ...]``.

    Returns:
        What is carried at the end, and the rows by name, ``[T, B, ...]``.
    """
    scan = jax.lax.scan if jax.default_backend() == "cpu" else packed_scan
    return scan(step, carry, xs)


def packed_scan(
    step: Callable[[Any, Any], tuple[Any, Rows]], carry: Any, xs: Any
) -> tuple[Any, Rows]:
    """Do as `scan_rows` does, with one write a step for all small arrays.

    The rows come back bit for bit. Gradients don't pass.
    """
    packing = Packing({})

    def packed_step(carry: Any, x: Any) -> tuple[Any, tuple[Array, Rows]]:
        nonlocal packing
        carry, rows = step(carry, x)
        small = {name: x for name, x in rows.items() if _is_small(x)}
        packing = Packing({name: (x.shape[1:], x.dtype) for name, x in small.items()})
        others = {name: x for name, x in rows.items() if name not in small}
        return carry, (packing.packed(small), others)

    carry, (words, others) = jax.lax.scan(packed_step, carry, xs)
    return carry, {**others, **packing.unpacked(words)}


@dataclass(frozen=True)
class Packing:
    """How rows of several arrays lie side by side as 32-bit words.

    Args:
        rows: by name, the shape and the type of a row.
    """

    rows: dict[str, tuple[tuple[int, ...], Any]]

    def packed(self, rows: Rows) -> Array:
        """Return rows ``[B, ...]`` by name as ``uint32[B, words]``."""
        return jnp.concatenate([_words(rows[name]) for name in self.rows], axis=1)

    def unpacked(self, words: Array) -> Rows:
        """Return the rows ``[T, B, ...]`` by name that lie in ``uint32[T, B, words]``."""
        found, start = {}, 0
        for name, (shape, dtype) in self.rows.items():
            end = start + math.prod(shape)
            part = words[..., start:end].reshape(*words.shape[:-1], *shape)
            # A flag is a word, too.
            is_flag = jnp.issubdtype(dtype, jnp.bool_)
            found[name] = part != 0 if is_flag else jax.lax.bitcast_convert_type(part, dtype)
            start = end
        return found


def _words(x: Array) -> Array:
    flat = x.reshape(len(x), -1)
    if jnp.issubdtype(x.dtype, jnp.bool_):
        return flat.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(flat, jnp.uint32)


def _is_small(x: Array) -> bool:
    in_words = jnp.issubdtype(x.dtype, jnp.bool_) or x.dtype.itemsize == 4
    return bool(in_words) and math.prod(x.shape[1:]) <= WIDEST
