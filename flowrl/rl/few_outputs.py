"""Products of layers with few outputs, in the form that XLA computes fast on CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any
MOST = 4
"""The outputs up to which a product a column is faster.

With 2 outputs a layer took 0.6 to 0.7 of the time of one product, its gradients included, and with
4 outputs 0.6 to 1.0; with 6 there was no gain, and with more a loss (32 to 2,048 rows of 64 and of
256 numbers, one thread and two).
"""


def dot_general(x: Array, weights: Array, dimensions: Any, **others: Any) -> Array:
    """Do as `jax.lax.dot_general` does for a linear layer, of which few outputs are faster.

    The gradient of weights ``[F, outputs]`` is a product of transposed rows. XLA computes it for 2
    to 4 outputs ten times as slowly on CPUs as it does for one, for which there is a way of its
    own. So each output is a product of its own there, but for a single row, whose product with the
    weights is of that kind already.

    Args:
        x: rows ``[..., F]``.
        weights: ``[F, outputs]``.
        dimensions: as of `jax.lax.dot_general`; the last axis of `x` with the first of `weights`.
        **others: further arguments of `jax.lax.dot_general`.

    Returns:
        ``[..., outputs]``.
    """
    outputs = weights.shape[1]
    # In an export the number of rows is a symbol, which equals no number.
    single = all(rows == 1 for rows in x.shape[:-1])
    if jax.default_backend() != "cpu" or single or not 2 <= outputs <= MOST:
        return lax.dot_general(x, weights, dimensions, **others)
    columns = [lax.dot_general(x, weights[:, i], dimensions, **others) for i in range(outputs)]
    return jnp.stack(columns, axis=-1)
