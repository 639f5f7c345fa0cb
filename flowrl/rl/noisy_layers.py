"""Noisy layers: weights with learned deviations, whose noise comes from the caller by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.philox import philox

Array = Any


class RowNoise:
    """Factorised noise of each row, for one layer after another.

    Args:
        bits: random ``uint32[N, 2]``; all noise of a row comes from the first of its two.
        call: number of this call of the module among those that share `bits`.

    Raises:
        PolicyError: they are of the rows of sequences ``[T, B]``.
    """

    def __init__(self, bits: Array, call: int) -> None:
        if bits.ndim != 2:
            raise PolicyError(
                "noisy layers take noise for the rows of a batch of single steps, but the loss or "
                "the recurrent policy takes whole sequences; take layers without noise there, and "
                "explore by EpsilonGreedy"
            )
        self.rows, self.call = bits[:, :1], call
        self.layers = 0
        """Layers that got their noise; each has noise of its own by its number."""

    def of_next_layer(self, inputs: int, outputs: int) -> tuple[Array, Array]:
        """Return the noise ``[N, inputs]`` and ``[N, outputs]`` of a layer's two sides.

        It is ``sign(x) sqrt(|x|)`` of standard normals x (Fortunato et al. 2018, section 3).
        """
        self.layers += 1
        # Each row has its own key: its noise does not depend on how rows are split up. By JAX's
        # default generator, noise took half of a program of `rainbow`; Philox and the loop below
        # take a third of that.
        number = jnp.uint32(self.call << 16 | self.layers)
        keys = jax.random.wrap_key_data(self.rows ^ number, impl=philox())

        def of_row(key: Array) -> Array:
            normals = jax.random.normal(key, (inputs + outputs,), jnp.float32)
            return jnp.sign(normals) * jnp.sqrt(jnp.abs(normals))

        # XLA would make the noise once more for each use of it, forwards and backwards, but what a
        # loop has made it keeps: hence the loop, of two steps where the rows are even.
        made = jax.lax.map(of_row, keys, batch_size=max(1, len(self.rows) // 2))
        left, right = jnp.split(made, [inputs], axis=-1)
        return left, right


NOISE: ContextVar[RowNoise | None] = ContextVar("NOISE", default=None)
"""The noise of the rows that layers are called on now; None: they take their mean weights."""


@contextmanager
def noise_of_rows(bits: Array | None, call: int = 0) -> Iterator[None]:
    """Let every `NoisyLinear` take noise, each row by its own bits.

    Args:
        bits: random ``uint32[N, 2]`` of the N rows that a module is called on; None: no noise.
        call: number of this call among those with the same bits, each of which has other noise.
    """
    token = NOISE.set(None if bits is None else RowNoise(bits, call))
    try:
        yield
    finally:
        NOISE.reset(token)


class NoisyLinear(nnx.Module):
    """Linear layer whose weights are noisy, with learned deviations (Fortunato et al. 2018).

    Its noise is factorised (section 3.1, equations 10 and 11), and every row of a batch has noise
    of its own. In an update it is new for each call of the policy by the loss; where runners
    explore by `NoisyWeights` it is new for each step. Anywhere else the layer takes the means of
    its weights, as in greedy actions.

    Args:
        inputs: numbers that the layer reads.
        outputs: numbers that it returns.
        deviation: initial deviation of the weights, times the square root of `inputs`
            (default 0.5).
        rngs: random keys of the initial weights.
    """

    def __init__(
        self, inputs: int, outputs: int, *, deviation: float = 0.5, rngs: nnx.Rngs
    ) -> None:
        bound = inputs**-0.5

        def within(shape: tuple[int, ...]) -> Array:
            return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)

        self.kernel = nnx.Param(within((inputs, outputs)))
        self.bias = nnx.Param(within((outputs,)))
        self.kernel_deviation = nnx.Param(jnp.full((inputs, outputs), deviation * bound))
        self.bias_deviation = nnx.Param(jnp.full((outputs,), deviation * bound))

    def __call__(self, x: Array) -> Array:
        """Return ``[N, outputs]`` of ``x [N, inputs]``.

        Raises:
            PolicyError: there is noise for another number of rows.
        """
        y = x @ self.kernel[...] + self.bias[...]
        noise = NOISE.get()
        if noise is None:
            return y
        if x.shape[:-1] != noise.rows.shape[:1]:
            raise PolicyError(
                f"noisy layers are called on rows {x.shape[:-1]}, but the batch has noise for "
                f"{noise.rows.shape[:1]}, one of each row; call the policy on obs or next_obs as "
                "they are, by a loss of single steps"
            )
        left, right = noise.of_next_layer(*self.kernel.shape)
        # This is the product with kernel + deviation * outer(left, right), of each row its own.
        return y + right * ((x * left) @ self.kernel_deviation[...] + self.bias_deviation[...])
