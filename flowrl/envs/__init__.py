"""Environments written in JAX, and what makes environments of several agents into others."""

from flowrl.envs.jax_agents import JaxAgents
from flowrl.envs.jax_envs import JaxEnv
from flowrl.envs.joint import Joint, WithState
from flowrl.envs.seats import SwapSeats

__all__ = ["JaxAgents", "JaxEnv", "Joint", "SwapSeats", "WithState"]
