"""Stock networks of algorithms that learn action values, built from spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.networks import NOT_NORMALIZED, Encoder, Images, Trunk, shows_images
from flowrl.rl.spaces import head

Array = Any


def uniform(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A layer of initial weights and offsets within 1 / sqrt(inputs).

    What suits policies makes action values diverge: larger weights, and where observations are near 0 also offsets of 0, for a network of
    rectified layers without them is a cone, steep wherever it is high.
    """

    def within(key: Array, shape: tuple[int, ...], dtype: Any, **_: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return nnx.Linear(inputs, outputs, kernel_init=within, bias_init=within, rngs=rngs)


class QNetwork(nnx.Module):
    """A value for each of n actions, which are its action outputs; the value of an observation is the highest of them.

    Images of bytes that are large enough go through the convolutions of Mnih et al. (2015), all else through fully connected layers. Any
    images with 3 axes go through convolutions where `channels`, `kernels` or `strides` are given.

    Args:
        hidden: the widths of the fully connected layers; after convolutions there is one such layer, of the last of these widths.
        activation: tanh, relu, silu or gelu.
        dueling: the value of the observation and the advantages of actions apart (Wang et al. 2016, equation 9).
        normalize: shift and scale observations by running moments (`RunningNorm`); not for images that go through convolutions.
        channels: the filters of each convolution; None for (32, 64, 64).
        kernels: their sizes; None for (8, 4, 3).
        strides: their strides; None for (4, 2, 1).
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        dueling: bool = False,
        normalize: bool = False,
        channels: Sequence[int] | None = None,
        kernels: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        actions = head(action_space)
        if actions.kind != "categorical":
            raise PolicyError(
                f"QNetwork has a value for each of n actions, not for {action_space}; take SACNetwork for actions in a Box"
            )
        given = {
            k: v
            for k, v in (("channels", channels), ("kernels", kernels), ("strides", strides))
            if v is not None
        }
        width = hidden[-1]
        if given or shows_images(obs_space):
            if normalize:
                raise PolicyError(f"QNetwork {NOT_NORMALIZED}")
            self.encoder: nnx.Module = Images(obs_space, hidden=width, **given, rngs=rngs)
            self.trunk = None
        else:
            flat = Encoder(obs_space, normalize=normalize)
            self.encoder, self.trunk = (
                flat,
                Trunk(flat.size, hidden, activation, linear=uniform, rngs=rngs),
            )
        self.advantage = uniform(width, actions.outputs, rngs=rngs)
        self.value = uniform(width, 1, rngs=rngs) if dueling else None

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """``obs [N, ...]`` to action values ``[N, n]`` and the highest of them ``[N]``."""
        x = self.encoder(obs)
        x = x if self.trunk is None else self.trunk(x)
        values = self.advantage(x)
        if self.value is not None:
            values = self.value(x) + values - values.mean(-1, keepdims=True)
        return values, values.max(-1)


class SACNetwork(nnx.Module):
    """A squashed Gaussian policy, two critics of actions in [-1, 1], and the price of entropy (Haarnoja et al. 2018b).

    Args:
        hidden: the widths of the layers of the policy and of each critic.
        activation: tanh, relu, silu or gelu.
        alpha: the price at first.
    """

    squashed = True

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        alpha: float = 1.0,
        rngs: nnx.Rngs,
    ) -> None:
        actions = head(action_space)
        if not actions.continuous:
            raise PolicyError(
                f"SACNetwork is for actions in a Box, not {action_space}; take QNetwork for one of n actions"
            )
        self.encoder = Encoder(obs_space, normalize=False)
        self.actor = Trunk(self.encoder.size, hidden, activation, linear=uniform, rngs=rngs)
        self.action = uniform(hidden[-1], 2 * actions.width, rngs=rngs)
        self.critics = nnx.List(
            [
                Trunk(
                    self.encoder.size + actions.width, hidden, activation, linear=uniform, rngs=rngs
                )
                for _ in range(2)
            ]
        )
        self.values = nnx.List([uniform(hidden[-1], 1, rngs=rngs) for _ in range(2)])
        self.price = nnx.Param(jnp.log(jnp.float32(alpha)))

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """``obs [N, ...]`` to means and log-deviations ``[N, 2 d]``, and 0 for values ``[N]``, which nothing asks for."""
        mean, log_std = jnp.split(self.action(self.actor(self.encoder(obs))), 2, axis=-1)
        return jnp.concatenate([mean, jnp.clip(log_std, -20, 2)], axis=-1), jnp.zeros(obs.shape[0])

    def critic(self, obs: Array, action: Array) -> Array:
        """What both critics think of actions ``[N, d]`` in [-1, 1]: ``[2, N]``."""
        x = jnp.concatenate([self.encoder(obs), action], axis=-1)
        return jnp.stack(
            [value(trunk(x))[:, 0] for trunk, value in zip(self.critics, self.values, strict=True)]
        )

    def log_alpha(self) -> Array:
        """The logarithm of the price."""
        return self.price[...]
