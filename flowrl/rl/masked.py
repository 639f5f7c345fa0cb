"""Statistics over the valid rows of a batch, of which masked rows are no part."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from flowrl.core.mesh import mean_of_devices

Array = Any


def mean(x: Array, weight: Array) -> Array:
    """Return the mean of `x` weighed by `weight`; 0 where all weights are 0.

    Args:
        x: numbers ``[N]`` or ``[T, B]``; those of weight 0 may be NaN.
        weight: weights of the same shape, such as the field ``valid`` of a batch.

    Returns:
        A scalar.
    """
    w = weight.astype(jnp.float32)
    total = jnp.sum(w)
    # A masked number may be NaN, and NaN times 0 is NaN: it is replaced before it is weighed.
    return jnp.sum(jnp.where(w > 0, x, 0.0) * w) / jnp.where(total > 0, total, 1.0)


def standardized(x: Array, valid: Array) -> Array:
    """Return `x` shifted and scaled to mean 0 and variance 1 over the valid rows, 0 at the others.

    Devices that share the rows use the moments over all of them.
    """

    def over_all(x: Array) -> Array:
        return mean_of_devices(mean(x, valid), jnp.sum(valid))

    centred = x - over_all(x)
    return jnp.where(valid, centred / jnp.sqrt(over_all(centred**2) + 1e-8), 0.0)
