"""Networks for learning from a dataset alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax.numpy as jnp
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.actions import head
from flowrl.rl.layers import Trunk, check_widths, encoder_of_any
from flowrl.rl.value_networks import uniform

Array = Any


class IQLNetwork(nnx.Module):
    """Gaussian policy, a value and two critics (Kostrikov et al. 2022, appendix).

    The mean of an action is in [-1, 1] where the action space has finite bounds; its deviation is a
    parameter, the same for all observations.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment, which must be a Box of floats.
        hidden: widths of the layers of the policy, of the value and of each critic (default (256,
            256)).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``relu``).
        log_std: initial logarithm of the standard deviation of actions (default 0.0).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`)
            (default False).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: actions are not in a Box.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        log_std: float = 0.0,
        normalize: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        actions = head(action_space)
        if not actions.continuous:
            raise PolicyError(
                f"IQLNetwork is for actions in a Box, not {action_space}; "
                "take MLP with MARWILLoss (fl.marwil) for choices"
            )
        check_widths(hidden)
        self.encoder = encoder_of_any(obs_space, "IQLNetwork", normalize=normalize, rngs=rngs)

        def trunk(inputs: int) -> Trunk:
            return Trunk(inputs, hidden, activation, linear=uniform, rngs=rngs)

        self.bounded = actions.bounded
        self.actor = trunk(self.encoder.size)
        self.mean = uniform(hidden[-1], actions.width, rngs=rngs)
        self.log_std = nnx.Param(jnp.full((actions.width,), log_std))
        self.state = trunk(self.encoder.size)
        self.value = uniform(hidden[-1], 1, rngs=rngs)
        self.critics = nnx.List([trunk(self.encoder.size + actions.width) for _ in range(2)])
        self.values = nnx.List([uniform(hidden[-1], 1, rngs=rngs) for _ in range(2)])

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Return means and log-deviations ``[N, 2 d]`` of ``obs [N, ...]``, and values ``[N]``."""
        x = self.encoder(obs)
        mean = self.mean(self.actor(x))
        mean = jnp.tanh(mean) if self.bounded else mean
        log_std = jnp.broadcast_to(jnp.clip(self.log_std[...], -5, 2), mean.shape)
        return jnp.concatenate([mean, log_std], axis=-1), self.value(self.state(x))[:, 0]

    def critic(self, obs: Array, action: Array) -> Array:
        """Return the values ``[2, N]`` that both critics give to actions ``[N, d]``."""
        x = jnp.concatenate([self.encoder(obs), action], axis=-1)
        return jnp.stack(
            [value(trunk(x))[:, 0] for trunk, value in zip(self.critics, self.values, strict=True)]
        )
