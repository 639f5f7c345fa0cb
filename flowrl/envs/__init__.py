"""Environments of Gymnasium, and environments written in JAX."""

from flowrl.envs.jax_envs import JaxEnv
from flowrl.envs.seats import SwapSeats

__all__ = ["JaxEnv", "SwapSeats"]
