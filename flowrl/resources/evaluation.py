"""Whole episodes played with the likeliest actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from gymnasium.vector import VectorEnv

from flowrl.errors import EnvironmentFailed, raised
from flowrl.resources.environments import Make, env_name, guarded, make_env
from flowrl.rl.policies import Memory, Network, jitted_act

Array = np.ndarray[Any, Any]


def play(
    env: Make, net: Network, weights: Any, episodes: int, seed: int, wrappers: tuple[Callable[[Any], Any], ...], settings: Mapping[str, Any]
) -> Array:
    """The returns ``[episodes]`` of whole episodes played with the likeliest actions, one after another, in what runners sample from.

    Raises:
        EnvironmentFailed: the environment raised, or broke its declared shape or type.
    """
    made = make_env(env, 1, wrappers, settings)
    vector = made if isinstance(made, VectorEnv) else guarded(env, [made])
    weights = jax.device_put(weights)
    fresh = net.memory(weights, 1)
    returns = np.zeros(episodes)

    def call(verb: str, *args: Any, **named: Any) -> Any:
        try:
            return getattr(vector, verb)(*args, **named)
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"{env_name(env)} raised in {verb}: {raised(error)}") from error

    try:
        if vector.num_envs != 1:
            raise EnvironmentFailed(f"{env_name(env)} makes a vector of environments; evaluation needs single ones")
        for episode in range(episodes):
            obs, over, memory = call("reset", seed=seed + episode)[0], False, fresh
            while not over:
                packed, carry = jitted_act(net)(weights, np.asarray(obs, net.spaces.obs_dtype), None, memory)
                memory = Memory(carry, np.zeros(1, bool)) if net.recurrent else memory
                obs, reward, terminated, truncated, _ = call("step", net.head.to_env(net.unpack(np.asarray(packed))[0]))
                returns[episode] += float(reward[0])
                over = bool(terminated[0] or truncated[0])
    finally:
        vector.close()
    return returns
