"""Whether numbers in JAX are finite."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

Array = Any


def finite_along(x: Array, axes: tuple[int, ...] | None = None) -> Array:
    """Return whether all numbers along some axes of an array are finite.

    Args:
        x: numbers of a floating type.
        axes: the axes; None for all of them.

    Returns:
        A bool array of the other axes.
    """
    # A finite number times 0 is 0, and a sum takes NaN along. XLA's maximum does not: on CPUs it
    # leaves NaN out of arrays that are not small. To test each number takes longer.
    return jnp.isfinite(jnp.sum(x * 0, axis=axes))
