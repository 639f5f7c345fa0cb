"""Whole episodes played with the likeliest actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import jax
import numpy as np

from flowrl.errors import EnvironmentFailed
from flowrl.resources.environments import Guard, Make, env_name, make_env
from flowrl.rl.policies import Memory, Network

Array = np.ndarray[Any, Any]


def play(
    env: Make, net: Network, weights: Any, episodes: int, seed: int, wrappers: tuple[Callable[[Any], Any], ...], settings: Mapping[str, Any]
) -> Array:
    """The returns ``[episodes]`` of whole episodes played with the likeliest actions, one environment after another.

    Raises:
        EnvironmentFailed: the environment raised, or broke its declared shape or type.
    """
    made = make_env(env, wrappers, settings)
    if not isinstance(made, gym.Env):
        made.close()
        raise EnvironmentFailed(f"{env_name(env)} makes a vector of environments; evaluation needs single ones")
    one = Guard(made, 0, env_name(env))
    weights = jax.device_put(weights)
    fresh = net.memory(weights, 1)
    returns = np.zeros(episodes)
    try:
        for episode in range(episodes):
            obs, over, memory = one.reset(seed=seed + episode)[0], False, fresh
            while not over:
                packed, carry = net.jitted_act(weights, np.asarray(obs, net.spaces.obs_dtype)[None], None, memory)
                memory = Memory(carry, np.zeros(1, bool)) if net.recurrent else memory
                obs, reward, terminated, truncated, _ = one.step(net.head.to_env(net.unpack(np.asarray(packed))[0])[0])
                returns[episode] += float(reward)
                over = terminated or truncated
    finally:
        one.close()
    return returns
