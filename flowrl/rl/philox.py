"""Random numbers by Philox 2x32, the same on one device, where JAX has it, and on several."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

Array = Any

MULTIPLIER = np.uint32(0xD256D193)
"""The multiplier of Philox 2x32-10 (Salmon et al. 2011)."""
ADDED = np.arange(10, dtype=np.uint32) * np.uint32(0x9E3779B9)
"""What each of its ten rounds adds to the key."""


def philox() -> Any:
    """Return the generator, for ``impl`` of `jax.random.key` and `jax.random.wrap_key_data`.

    A key is one word, of which Philox needs no more than that it differs from all others.
    """
    # JAX's own multiplies by jax.lax.mulhi, which does not compile for several devices. Ours makes
    # the same numbers, in up to twice the time.
    return "philox2x32" if jax.device_count() == 1 else ON_SEVERAL_DEVICES


def high_product(x: Array) -> Array:
    """Return the upper words of ``MULTIPLIER * x``, from products of half words."""
    high, low = np.uint32(MULTIPLIER >> 16), np.uint32(MULTIPLIER & 0xFFFF)
    x_high, x_low = x >> 16, x & 0xFFFF
    middle = x_low * high + (x_low * low >> 16)
    return x_high * high + (middle >> 16) + ((middle & 0xFFFF) + x_high * low >> 16)


def hashed(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Return the two words that a key makes of the two of a counter."""
    for added in ADDED:
        high, low = high_product(high) ^ low ^ (key + added), MULTIPLIER * high
    return high, low


def _counted(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return two words for each place of an array, of at most 2**32."""
    places = jnp.arange(prod(shape), dtype=jnp.uint32).reshape(shape)
    return hashed(key[0], jnp.zeros_like(places), places)


def _bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    if width != 32:
        raise NotImplementedError(f"{width} random bits; take 32")
    one, other = _counted(key, shape)
    return one ^ other


def _seeded(seed: Array) -> Array:
    return _folded(jnp.zeros(1, jnp.uint32), seed)


def _folded(key: Array, data: Array) -> Array:
    low = jnp.asarray(data).astype(jnp.uint32)
    return hashed(key[0], jnp.zeros_like(low), low)[0][None]


ON_SEVERAL_DEVICES = define_prng_impl(
    key_shape=(1,),
    seed=_seeded,
    split=lambda key, shape: _counted(key, shape)[0][..., None],
    random_bits=_bits,
    fold_in=_folded,
    name="philox2x32 on several devices",
    tag="philox",
)
