"""Returns and advantages of ONE stream of steps, ``[T]``. Callers `vmap` over columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def gae(reward_t: Array, value_t: Array, value_end: Array, terminated_t: Array, truncated_t: Array, gamma: float, lam: float) -> Array:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16) of a stream in NEXT_STEP form.

    The row behind an episode's last step holds its final observation, so ``value_t[t + 1]`` is the value to bootstrap
    from after a truncation; after a termination it is 0. Advantages at such invalid rows mean nothing.

    Args:
        reward_t: ``[T]``.
        value_t: ``[T]``, the value of each row's observation.
        value_end: scalar, the value of the observation behind the last row.
        terminated_t: ``[T]`` bool, the step ended its episode.
        truncated_t: ``[T]`` bool, the step cut its episode short.
        gamma: discount.
        lam: the weight of longer estimates; 1 gives discounted returns minus values, 0 one-step differences.

    Returns:
        ``[T]`` advantages.
    """
    value_tp1 = jnp.append(value_t[1:], value_end)
    delta_t = reward_t + gamma * value_tp1 * (1.0 - terminated_t) - value_t
    keep_t = gamma * lam * (1.0 - (terminated_t | truncated_t))

    def back(advantage: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, keep = row
        advantage = delta + keep * advantage
        return advantage, advantage

    _, advantage_t = jax.lax.scan(back, jnp.zeros_like(value_end), (delta_t, keep_t), reverse=True)
    return advantage_t
