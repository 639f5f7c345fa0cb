"""Environments written in JAX, and what makes environments of several agents into others."""

from flowrl.envs.jax_envs import JaxEnv
from flowrl.envs.joint import Joint, WithState

__all__ = ["JaxEnv", "Joint", "WithState"]
