"""Environments of Gymnasium, and environments written in JAX."""

from flowrl.envs.jax_envs import JaxEnv

__all__ = ["JaxEnv"]
