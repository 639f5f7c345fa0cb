"""Episode statistics as pure functions: what runners in JAX gather between two Rows."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from flowrl.rollout.handle import RECENT

Array = Any
State = dict[str, Any]


def no_episodes() -> State:
    """Return the statistics before anything happened."""
    return {
        "returns": jnp.zeros(RECENT, jnp.float32),
        "lengths": jnp.zeros(RECENT, jnp.int32),
        "episodes_ever": jnp.int32(0),
        "env_steps": jnp.int32(0),
        "episodes": jnp.int32(0),
    }


def with_episodes(statistics: State, ended: State, steps: Array) -> State:
    """Return the statistics with a rollout counted in.

    The newest `RECENT` episodes are kept, in a ring.

    Args:
        statistics: those before.
        ended: what ended in the rollout: flags ``over``, ``return`` and ``length``, ``[T, B]``.
        steps: how many steps were taken.
    """
    over = ended["over"].reshape(-1)
    number = jnp.sum(over, dtype=jnp.int32)
    ever = statistics["episodes_ever"]
    # How many episodes end at a place or after it: 1 for the last. Older ones find no place.
    from_here = jnp.cumsum(over[::-1], dtype=jnp.int32)[::-1]
    place = jnp.where(over & (from_here <= RECENT), (ever + number - from_here) % RECENT, RECENT)
    returns, lengths = (ended[name].reshape(-1) for name in ("return", "length"))
    return {
        "returns": statistics["returns"].at[place].set(returns, mode="drop"),
        "lengths": statistics["lengths"].at[place].set(lengths, mode="drop"),
        "episodes_ever": ever + number,
        "env_steps": statistics["env_steps"] + steps,
        "episodes": statistics["episodes"] + number,
    }


def reported(statistics: State) -> tuple[State, State]:
    """Return what the next Row reports, and the statistics that remain afterwards."""
    known = jnp.arange(RECENT) < statistics["episodes_ever"]
    count = jnp.sum(known)
    means = {}
    for name in ("return", "length"):
        total = jnp.sum(jnp.where(known, statistics[f"{name}s"], 0))
        means[f"{name}_mean"] = jnp.where(count > 0, total / count, math.nan)
    # These are counted from one Row to the next.
    counted = {name: statistics[name] for name in ("env_steps", "episodes")}
    return {**counted, **means}, {**statistics, **dict.fromkeys(counted, jnp.int32(0))}


def by_runner(x: Array, envs: int) -> Array:
    """Return an array ``[T, runners x envs]`` as ``[runners, T x envs]``."""
    steps = x.shape[0]
    return jnp.moveaxis(x.reshape(steps, -1, envs), 1, 0).reshape(-1, steps * envs)
