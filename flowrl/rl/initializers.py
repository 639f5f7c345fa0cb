"""Initial weights of stock networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx

from flowrl.rl.few_outputs import dot_general


@cache
def orthogonal_weights(gain: float) -> Callable[..., Any]:
    """Return an initializer of orthogonal weights (Saxe et al., 2014).

    It is compiled as a function of its own, so that JAX traces the many steps of orthogonalization
    once for each shape and not with every layer of every network.

    Args:
        gain: the factor by which the weights are multiplied.
    """
    # After the random key come the shape and the type, which are static.
    return jax.jit(nnx.initializers.orthogonal(gain), static_argnums=(1, 2, 3))


def orthogonal(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a linear layer with orthogonal initial weights of gain sqrt(2), and offsets of 0."""
    init = orthogonal_weights(np.sqrt(2))
    return nnx.Linear(inputs, outputs, kernel_init=init, dot_general=dot_general, rngs=rngs)
