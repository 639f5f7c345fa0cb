"""Returns and advantages of ONE stream of steps, ``[T]``. Callers `vmap` over columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def gae(
    reward_t: Array,
    value_t: Array,
    value_end: Array,
    terminated_t: Array,
    truncated_t: Array,
    gamma: float,
    gae_lambda: float,
) -> Array:
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
        gae_lambda: the weight of longer estimates; 1 gives discounted returns minus values, 0 one-step differences.

    Returns:
        ``[T]`` advantages.
    """
    value_tp1 = jnp.append(value_t[1:], value_end)
    delta_t = reward_t + gamma * value_tp1 * (1.0 - terminated_t) - value_t
    keep_t = gamma * gae_lambda * (1.0 - (terminated_t | truncated_t))

    def back(advantage: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, keep = row
        advantage = delta + keep * advantage
        return advantage, advantage

    _, advantage_t = jax.lax.scan(back, jnp.zeros_like(value_end), (delta_t, keep_t), reverse=True)
    return advantage_t


def vtrace(
    log_ratio_t: Array,
    reward_t: Array,
    value_t: Array,
    value_end: Array,
    terminated_t: Array,
    truncated_t: Array,
    valid_t: Array,
    gamma: float,
    vtrace_lambda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Array, Array]:
    """V-trace targets and advantages (Espeholt et al. 2018, equation 1 and section 4.2) of a stream in NEXT_STEP form.

    Args:
        log_ratio_t: ``[T]``, log-probability of the action by the policy in training, less that by the one that acted.
        reward_t: ``[T]``.
        value_t: ``[T]``, the value of each row's observation.
        value_end: scalar, the value of the observation behind the last row.
        terminated_t: ``[T]`` bool, the step ended its episode.
        truncated_t: ``[T]`` bool, the step cut its episode short.
        valid_t: ``[T]`` bool; a row behind an episode's end is none, and its target is its value.
        gamma: discount.
        vtrace_lambda: the weight of longer traces.
        rho_clip: the largest weight of a step's own error: towards which policy's values the targets lean.
        c_clip: the largest weight of what comes behind a step: how fast they lean.

    Returns:
        ``[T]`` targets of the values, and ``[T]`` advantages of the actions, weighed by the clipped ratio.
    """
    ratio_t = jnp.where(valid_t, jnp.exp(jnp.where(valid_t, log_ratio_t, 0.0)), 0.0)
    rho_t = jnp.minimum(ratio_t, rho_clip)
    value_tp1 = jnp.append(value_t[1:], value_end)
    on_t = gamma * (1.0 - terminated_t)
    delta_t = rho_t * (reward_t + on_t * value_tp1 - value_t)
    keep_t = (
        gamma * vtrace_lambda * jnp.minimum(ratio_t, c_clip) * (1.0 - (terminated_t | truncated_t))
    )

    def back(error: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, keep = row
        error = delta + keep * error
        return error, error

    _, error_t = jax.lax.scan(back, jnp.zeros_like(value_end), (delta_t, keep_t), reverse=True)
    target_t = value_t + error_t
    target_tp1 = jnp.append(target_t[1:], value_end)
    return target_t, rho_t * (reward_t + on_t * target_tp1 - value_t)


def td_errors(
    value_t: Array,
    action_t: Array,
    reward_t: Array,
    terminated_t: Array,
    truncated_t: Array,
    valid_t: Array,
    gamma: float,
    n_step: int,
) -> Array:
    """How far n-step returns of a stream in NEXT_STEP form are from the values of the actions that were taken (Horgan et al. 2018, algorithm 1).

    A return ends with its episode and with the stream, and goes on from the highest value of the observation there; after a termination, from 0.

    Args:
        value_t: ``[T + 1, n]``, the values of n actions at each row's observation and at the one behind.
        action_t: ``[T]``.
        reward_t: ``[T]``.
        terminated_t: ``[T]`` bool.
        truncated_t: ``[T]`` bool.
        valid_t: ``[T]`` bool.
        gamma: discount.
        n_step: steps of a return, at most.

    Returns:
        ``[T]``, never below 0, and 0 at rows that are not valid.
    """
    best_tp1, discount_t = value_t[1:].max(-1), gamma * (1.0 - terminated_t)
    last_t = (terminated_t | truncated_t).at[-1].set(True)
    return_t = reward_t + discount_t * best_tp1
    for _ in range(n_step - 1):
        return_t = reward_t + discount_t * jnp.where(
            last_t, best_tp1, jnp.append(return_t[1:], 0.0)
        )
    taken_t = jnp.take_along_axis(value_t[:-1], action_t[:, None].astype(jnp.int32), 1)[:, 0]
    return jnp.where(valid_t, jnp.abs(return_t - taken_t), 0.0)
