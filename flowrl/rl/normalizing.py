"""Normalisation of observations and rewards by running moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flowrl.core.mesh import total

Array = Any
WEIGHT: ContextVar[Array | None] = ContextVar("WEIGHT", default=None)
"""How much each row counts that layers are called on now; None where they take nothing in."""


@contextmanager
def observing(weight: Array) -> Iterator[None]:
    """Let every `RunningNorm` take in what it is called on, each row by its ``weight [N]``."""
    token = WEIGHT.set(weight)
    try:
        yield
    finally:
        WEIGHT.reset(token)


class RunningNorm(nnx.Module):
    """Layer that shifts and scales observations to mean 0 and variance 1 by running moments.

    These are the moments of all observations that it was shown. They are no parameters: they change
    once per `learner.update`, by that batch, and are sent along with the weights.

    Args:
        shape: shape of one observation.
        clip: largest absolute value that the layer returns, in standard deviations (default 10.0).
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        self.clip = clip
        self.mean = nnx.BatchStat(jnp.zeros(shape))
        self.var = nnx.BatchStat(jnp.ones(shape))
        # A count above 0 keeps the first update from dividing by 0.
        self.count = nnx.BatchStat(jnp.float32(1e-4))

    def __call__(self, obs: Array) -> Array:
        """Return ``obs [N, *shape]`` shifted, scaled and clipped, of the same shape.

        Within `observing` the moments take the rows in first.
        """
        if (weight := WEIGHT.get()) is not None:
            moments = (self.mean[...], self.var[...], self.count[...])
            self.mean[...], self.var[...], self.count[...] = merge_moments(moments, obs, weight)
        scaled = (obs - self.mean[...]) / jnp.sqrt(self.var[...] + 1e-8)
        return jnp.clip(scaled, -self.clip, self.clip)


def merge_moments(
    moments: tuple[Array, Array, Array], x: Array, weight: Array
) -> tuple[Array, Array, Array]:
    """Return running moments after a batch (Chan et al. 1979, parallel moments).

    Args:
        moments: mean, variance and count so far.
        x: ``[N, ...]``; devices that share a batch each give their part.
        weight: ``[N]``, how much each row counts.

    Returns:
        Mean, variance and count, equal on all devices.
    """
    # A masked row may hold NaN, which a weight of 0 would not remove.
    w = weight.reshape((-1,) + (1,) * (x.ndim - 1)).astype(jnp.float32)
    x = jnp.where(w > 0, x, 0)
    n = total(jnp.sum(weight.astype(jnp.float32)))
    share = w / jnp.where(n > 0, n, 1)
    batch_mean = total(jnp.sum(x * share, axis=0))
    batch_var = total(jnp.sum((x - batch_mean) ** 2 * share, axis=0))
    return joined_moments(moments, (batch_mean, batch_var, n))


def joined_moments(
    moments: tuple[Array, Array, Array], more: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Return the moments of two sets of observations together (Chan et al. 1979).

    Args:
        moments: mean, variance and count of the first ones; the count is above 0.
        more: those of the others.
    """
    (mean, var, count), (other_mean, other_var, n) = moments, more
    new_count = count + n
    delta = other_mean - mean
    new_var = (var * count + other_var * n + delta**2 * count * n / new_count) / new_count
    return mean + delta * n / new_count, new_var, new_count


def discounted_sums(data: Mapping[str, Array], start: Array, gamma: float) -> tuple[Array, Array]:
    """Return the discounted sums of rewards since episodes began, by which rewards are scaled.

    They are the moving sums of Engstrom et al. (2020, section 3), not returns that follow a step.

    Args:
        data: a rollout's ``reward``, ``valid``, ``terminated`` and ``truncated``, ``[T, B]``.
        start: the sums before it ``[B]``.
        gamma: discount factor per environment step.

    Returns:
        The sums that the next rollout goes on from ``[B]``, and those after each step ``[T, B]``.
    """

    def step(sums: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, valid, over = row
        sums = jnp.where(valid, sums * gamma + reward, sums)
        return jnp.where(over, 0.0, sums), sums

    over = data["terminated"] | data["truncated"]
    end, sums = jax.lax.scan(step, start, (data["reward"], data["valid"], over))
    return end, sums
