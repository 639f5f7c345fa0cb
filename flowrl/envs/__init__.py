"""Environments of Gymnasium, and environments written in JAX, of one agent or of several."""

from flowrl.envs.jax_agents import JaxAgents
from flowrl.envs.jax_envs import JaxEnv
from flowrl.envs.seats import SwapSeats

__all__ = ["JaxAgents", "JaxEnv", "SwapSeats"]
