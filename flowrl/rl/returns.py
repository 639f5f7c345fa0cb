"""Returns and advantages of ONE stream of steps, ``[T]``; callers `vmap` over columns.

Streams have the layout of Gymnasium's NEXT_STEP mode: the row after an episode's last step is
masked and holds the episode's final observation, which is kept for bootstrapping.
"""

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
    """Return the generalised advantage estimates of a stream (Schulman et al. 2016, equation 16).

    The row after an episode's last step holds its final observation, so ``value_t[t + 1]`` is the
    value to bootstrap from after a truncation; after a termination that value is 0. Advantages at
    masked rows mean nothing.

    Args:
        reward_t: ``[T]``.
        value_t: ``[T]``, the value of each row's observation.
        value_end: scalar, the value of the observation after the last row.
        terminated_t: ``[T]`` bool, the step ended its episode.
        truncated_t: ``[T]`` bool, the step cut its episode short.
        gamma: discount per step.
        gae_lambda: the weight of longer estimates; 1 gives discounted returns minus values, 0
            one-step differences.

    Returns:
        ``[T]`` advantages.
    """
    value_tp1 = jnp.append(value_t[1:], value_end)
    delta_t = reward_t + gamma * value_tp1 * (1.0 - terminated_t) - value_t
    # Both kinds of end cut the sum of errors; only a termination also cuts the bootstrapping.
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
    """Return V-trace targets and advantages (Espeholt et al. 2018, equation 1, section 4.2).

    Args:
        log_ratio_t: ``[T]``, the logarithm of the importance ratio: the log-probability of the
            action under the policy in training, less that under the behaviour policy.
        reward_t: ``[T]``.
        value_t: ``[T]``, the value of each row's observation.
        value_end: scalar, the value of the observation after the last row.
        terminated_t: ``[T]`` bool, the step ended its episode.
        truncated_t: ``[T]`` bool, the step cut its episode short.
        valid_t: ``[T]`` bool, False at the masked row after an episode's end; the target of such a
            row is its value.
        gamma: discount per step.
        vtrace_lambda: the weight of longer traces.
        rho_clip: the largest importance ratio of a step's own error. It decides towards which
            policy's values the targets lean.
        c_clip: the largest importance ratio by which later errors pass back through a step. It
            decides how fast the targets lean.

    Returns:
        ``[T]`` targets of the values, and ``[T]`` advantages of the actions, weighed by the clipped
        ratio.
    """
    # A ratio of 0 at masked rows makes their own errors 0 and stops those of the next episode.
    ratio_t = jnp.where(valid_t, jnp.exp(jnp.where(valid_t, log_ratio_t, 0.0)), 0.0)
    rho_t = jnp.minimum(ratio_t, rho_clip)
    value_tp1 = jnp.append(value_t[1:], value_end)
    discount_t = gamma * (1.0 - terminated_t)
    delta_t = rho_t * (reward_t + discount_t * value_tp1 - value_t)
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
    return target_t, rho_t * (reward_t + discount_t * target_tp1 - value_t)


def n_step_returns(
    reward_t: Array,
    value_tp1: Array,
    terminated_t: Array,
    truncated_t: Array,
    gamma: float,
    n_step: int,
) -> Array:
    """Return the n-step returns of a stream (Sutton and Barto 2018, equation 7.1).

    A return ends with its episode and with the stream, where it is bootstrapped from the value of
    the observation that it led to; after a termination, from 0.

    Args:
        reward_t: ``[T]``.
        value_tp1: ``[T]``, the value of the observation after each row.
        terminated_t: ``[T]`` bool, the step ended its episode.
        truncated_t: ``[T]`` bool, the step cut its episode short.
        gamma: discount per step.
        n_step: steps of a return, at most.

    Returns:
        ``[T]`` returns; those of masked rows mean nothing.
    """
    # Each pass lengthens every return by one step, except where its episode or the stream ends.
    last_t, discount_t = (terminated_t | truncated_t).at[-1].set(True), gamma * (1.0 - terminated_t)
    return_t = reward_t + discount_t * value_tp1
    for _ in range(n_step - 1):
        further_t = jnp.append(return_t[1:], 0.0)
        return_t = reward_t + discount_t * jnp.where(last_t, value_tp1, further_t)
    return return_t


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
    """Return the absolute n-step errors of a stream's actions (Horgan et al. 2018, algorithm 1).

    An error is the difference between the n-step return and the value of the action that was taken.
    A return ends with its episode and with the stream, where it is bootstrapped from the highest
    value of the observation; after a termination, from 0.

    Args:
        value_t: ``[T + 1, n]``, the values of n actions at each row's observation and at the one
            after the last row.
        action_t: ``[T]``, the index of the action taken.
        reward_t: ``[T]``.
        terminated_t: ``[T]`` bool, the step ended its episode.
        truncated_t: ``[T]`` bool, the step cut its episode short.
        valid_t: ``[T]`` bool, False at the masked row after an episode's end.
        gamma: discount per step.
        n_step: steps of a return, at most.

    Returns:
        ``[T]`` errors, never below 0, and 0 at rows that are not valid.
    """
    best_tp1 = value_t[1:].max(-1)
    return_t = n_step_returns(reward_t, best_tp1, terminated_t, truncated_t, gamma, n_step)
    taken_t = jnp.take_along_axis(value_t[:-1], action_t[:, None].astype(jnp.int32), 1)[:, 0]
    return jnp.where(valid_t, jnp.abs(return_t - taken_t), 0.0)
