"""Evolution strategies as pure functions: noise from seeds, fitness shaping, and the loss.

A perturbation is ``params + scale * noise(seed)``, and its mirror image has the opposite scale.
Only seeds, scales and returns travel: the noise is made again where weights are perturbed and where
the gradient is estimated, by one function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.rl.losses import Bound, Loss, Metrics
from flowrl.rl.masked import mean
from flowrl.rl.philox import philox

Array = Any
Params = Mapping[str, Array]
AT_ONCE = 16
"""The perturbations whose noise an estimate holds in memory at the same time."""


def seeds_of(key: Array, turn: Array, *, pairs: int) -> Array:
    """Return the seeds ``uint32[pairs]`` of the mirrored pairs of one turn.

    Args:
        key: random key of all turns.
        turn: number of the turn.
        pairs: number of pairs.
    """
    return jax.random.bits(jax.random.fold_in(key, turn), (pairs,), jnp.uint32)


def noise(seed: Array, params: Params) -> dict[str, Array]:
    """Return standard normal noise of the shapes of the parameters.

    Args:
        seed: ``uint32[]``.
        params: arrays by name, of which only shapes and types are used.
    """
    # One call for all of them: what makes normal numbers takes XLA long to compile. Philox makes
    # them in half the time of JAX's default on one device, and a seed has as many bits as its key.
    key = jax.random.key(seed, impl=philox())
    flat = jax.random.normal(key, (sum(x.size for x in params.values()),), jnp.float32)
    made, start = {}, 0
    for name, x in sorted(params.items()):
        made[name] = flat[start : start + x.size].reshape(x.shape).astype(x.dtype)
        start += x.size
    return made


def perturbed(params: Params, seed: Array, scale: Array) -> dict[str, Array]:
    """Return ``params + scale * noise(seed)`` (Salimans et al. 2017, algorithm 1, line 5).

    Args:
        params: arrays by name.
        seed: ``uint32[]``.
        scale: ``float32[]``, the standard deviation of the perturbation; minus that of its mirror
            image.
    """
    added = noise(seed, params)
    return {name: x + scale.astype(x.dtype) * added[name] for name, x in params.items()}


def weighted_noise(seeds: Array, weights: Array, params: Params) -> dict[str, Array]:
    """Return the sum of ``weights[i] * noise(seeds[i])``, of the shapes of the parameters.

    At most `AT_ONCE` noises are in memory at the same time.

    Args:
        seeds: ``uint32[n]``.
        weights: ``float32[n]``.
        params: arrays by name, of which only shapes and types are used.
    """
    count = seeds.shape[0]
    lines = -(-count // AT_ONCE)
    # What fills up the last line has weight 0, but its noise is made all the same: so lines are no
    # longer than they have to be.
    length = -(-count // lines)
    filling = (0, lines * length - count)
    seeds, weights = (jnp.pad(x, filling).reshape(lines, length) for x in (seeds, weights))

    def line(total: dict[str, Array], of_line: tuple[Array, Array]) -> tuple[Any, None]:
        line_seeds, line_weights = of_line
        made = jax.vmap(noise, (0, None))(line_seeds, params)
        added = {
            name: jnp.tensordot(line_weights.astype(x.dtype), x, 1) for name, x in made.items()
        }
        return {name: x + added[name] for name, x in total.items()}, None

    zeros = {name: jnp.zeros_like(x) for name, x in params.items()}
    return jax.lax.scan(line, zeros, (seeds, weights))[0]


def centred_ranks(returns: Array) -> Array:
    """Return the ranks of all returns, scaled to [-0.5, 0.5] (Salimans et al. 2017, section 2.1).

    Equal returns have equal ranks: the mean of those that they take together.

    Args:
        returns: of any shape, at least two of them.
    """
    flat = returns.reshape(-1)
    in_order = jnp.sort(flat)
    below, up_to = (jnp.searchsorted(in_order, flat, side=side) for side in ("left", "right"))
    ranks = (below + up_to - 1) / 2
    return (ranks / (flat.size - 1) - 0.5).astype(jnp.float32).reshape(returns.shape)


def top_directions(returns: Array, scale: Array, *, top: int) -> Array:
    """Return the utilities by which `EvolutionLoss` estimates the step of ARS.

    Mania et al. (2018), algorithm 2, lines 6 and 7: of all directions those count whose better
    return is among the `top` highest, and the step is ``sum((r_plus - r_minus) * noise) /
    (top * deviation)``, by the standard deviation of the returns that count.

    Args:
        returns: ``float32[2, pairs]``, those of the mirror images in the second row.
        scale: ``float32[2, pairs]``, the signed scale of the noise.
        top: number of directions that count.
    """
    best = jnp.argsort(-jnp.max(returns, axis=0), stable=True)[:top]
    counted = returns[:, best]
    # Where all returns are equal so are those of each pair, and the step is 0 however it is scaled.
    deviation = jnp.maximum(jnp.std(counted), 1e-8)
    # The mean cancels out between the two of a pair; without it rounding is finer.
    centred = (returns - jnp.mean(counted)) / deviation
    counts = jnp.zeros(returns.shape[1], bool).at[best].set(True)
    # The estimate divides by the scale, and is a mean over all rows; the step of ARS is neither.
    return jnp.where(counts, centred * jnp.abs(scale) * returns.size / top, 0.0)


@dataclass(frozen=True)
class EvolutionLoss(Loss):
    """Evolution strategies: the gradient of smoothed utilities (Salimans et al. 2017, equation 1).

    Its gradient is that of minus the expected utility under Gaussian perturbations of the weights,
    ``-mean(utility * noise / sigma)`` over the perturbations of a batch, with the noise made again
    from its seed. The number that it reports as ``loss`` is minus the mean return of the
    perturbations. It has no settings: the batch says what was perturbed, and how.
    """

    needs: ClassVar[tuple[str, ...]] = ("noise_seed", "noise_scale", "return", "utility")
    on_policy: ClassVar[bool] = True
    # Columns are pairs, whose noise is made once.
    sequences: ClassVar[bool] = True

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return minus the mean return, with the gradient of the utilities, and no metrics."""
        scale, valid = batch["noise_scale"], batch["valid"]
        rows = jnp.where(valid, batch["utility"] / scale, 0.0)
        weights = jnp.sum(rows, axis=0) / jnp.maximum(jnp.sum(valid), 1)
        estimate = weighted_noise(batch["noise_seed"][0], weights, params)
        # The product's gradient by the parameters is the estimate itself.
        product = sum(
            jnp.vdot(x, jax.lax.stop_gradient(estimate[name])) for name, x in params.items()
        )
        returned = mean(batch["return"], valid)
        return jax.lax.stop_gradient(product - returned) - product, {}
