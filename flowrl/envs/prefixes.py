"""What stands before the colon of an id: whose environments written in JAX they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowrl.envs.jax_agents import JaxAgents, JaxmarlEnv
from flowrl.envs.jax_envs import BraxEnv, GymnaxEnv, JaxEnv

ADAPTERS: Mapping[str, Callable[..., JaxEnv | JaxAgents]] = {
    "gymnax": GymnaxEnv,
    "brax": BraxEnv,
    "jaxmarl": JaxmarlEnv,
}
"""The adapters by what stands before the colon of an id."""
