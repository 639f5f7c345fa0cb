"""Random orders of rows, by the sort that XLA does fast on CPUs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def permutation(key: Array, count: int) -> Array:
    """Return the numbers from 0 to `count` - 1 in a random order, ``int32[count]``.

    On CPUs XLA sorts one array of whole numbers about five times as fast as pairs of a key and a
    value, which `jax.random.permutation` sorts. So each number becomes the lower bits of a random
    word there, and words are sorted, as often as `rounds` says.

    Args:
        key: a random key.
        count: how many numbers, at least 1 and at most 2^24.
    """
    if jax.default_backend() != "cpu":
        return jax.random.permutation(key, count)
    order = jnp.arange(count, dtype=jnp.uint32)
    mask = jnp.uint32((1 << _bits(count)) - 1)
    for one in jax.random.split(key, rounds(count)):
        places = jnp.arange(count, dtype=jnp.uint32)
        words = jnp.sort(jax.random.bits(one, (count,)) & ~mask | places)
        order = order[words & mask]
    return order.astype(jnp.int32)


def rounds(count: int) -> int:
    """Return how often words are sorted for a random order of so many numbers.

    Two of them stay in the order that they had if all their random bits are equal. There are enough
    bits that of 8 orders at most one has such a pair, on average.
    """
    return max(1, math.ceil((2 * math.log2(count) + 2) / (32 - _bits(count))))


def _bits(count: int) -> int:
    """Return the bits that the numbers below `count` have."""
    return (count - 1).bit_length()
