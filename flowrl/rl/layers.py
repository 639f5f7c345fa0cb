"""Parts of which stock networks are made: encoder of observations, fully connected trunk, heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.spaces import head

Array = Any
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
"""The activations that networks take by name."""


class Encoder(nnx.Module):
    """Layer that makes flat floats ``[N, size]`` of observations.

    Box and MultiBinary stay as they are; Discrete and MultiDiscrete become one-hot.

    Args:
        space: the observation space.
        normalize: shift and scale observations by running moments (`RunningNorm`).

    Raises:
        PolicyError: the space is of another kind, or `normalize` is set for a one-hot one.
    """

    def __init__(self, space: gym.Space[Any], *, normalize: bool) -> None:
        self.sizes: tuple[int, ...] = ()
        self.starts: tuple[int, ...] = ()
        if isinstance(space, gym.spaces.Discrete):
            self.sizes, self.starts = (int(space.n),), (int(space.start),)
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.sizes = tuple(int(n) for n in space.nvec)
            self.starts = tuple(int(start) for start in space.start)
        elif not isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
            raise PolicyError(
                "MLP reads Box, Discrete, MultiDiscrete and MultiBinary observations, "
                f"not {space}; wrap the environment with gymnasium.wrappers.FlattenObservation"
            )
        if normalize and self.sizes:
            raise PolicyError(
                f"observations of {space} are read one-hot, "
                "which running moments do not improve; leave normalize out"
            )
        self.size = sum(self.sizes) or int(np.prod(space.shape or ()))
        self.norm = RunningNorm(space.shape or ()) if normalize else None

    def __call__(self, obs: Array) -> Array:
        """Return floats ``[N, size]`` for ``obs [N, ...]``."""
        if self.sizes:
            # Discrete has no axis of its own, MultiDiscrete has one.
            parts = obs.reshape(obs.shape[0], -1)
            one_hot = [
                jax.nn.one_hot(parts[:, i] - self.starts[i], n) for i, n in enumerate(self.sizes)
            ]
            return jnp.concatenate(one_hot, axis=-1)
        x = obs.astype(jnp.float32)
        if self.norm is not None:
            x = self.norm(x)
        return x.reshape(obs.shape[0], -1)


def orthogonal(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a linear layer with orthogonal initial weights of gain sqrt(2), and offsets of 0."""
    return nnx.Linear(
        inputs, outputs, kernel_init=nnx.initializers.orthogonal(np.sqrt(2)), rngs=rngs
    )


class Trunk(nnx.Module):
    """Fully connected layers, each followed by the activation.

    Args:
        size: numbers that the first layer reads.
        hidden: the widths of the layers.
        activation: tanh, relu, silu or gelu.
        linear: makes a layer from its inputs and outputs; by default `orthogonal`.
        rngs: the random keys of the initial weights.

    Raises:
        PolicyError: the activation is none of these.
    """

    def __init__(
        self,
        size: int,
        hidden: Sequence[int],
        activation: str,
        *,
        linear: Callable[..., nnx.Linear] = orthogonal,
        rngs: nnx.Rngs,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise PolicyError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        self.activation = activation
        # Each layer reads what the one before it returns, so there is one input more than widths.
        pairs = zip((size, *hidden), hidden, strict=False)
        self.layers = nnx.List([linear(inputs, outputs, rngs=rngs) for inputs, outputs in pairs])

    def __call__(self, x: Array) -> Array:
        """Return features ``[N, hidden[-1]]`` of ``x [N, size]``."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


class Heads(nnx.Module):
    """The last layers of an actor-critic, from features to action outputs and the value.

    The log-deviations of Gaussian actions are parameters of their own, the same for every
    observation.

    Args:
        actor: the number of features for the action outputs.
        critic: the number of features for the value.
        space: the action space.
        log_std: the initial log-deviation of Gaussian actions.
        rngs: the random keys of the initial weights.
    """

    def __init__(
        self, actor: int, critic: int, space: gym.Space[Any], log_std: float, *, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.orthogonal
        out = head(space)
        gaussian = out.kind == "gaussian"
        outputs = out.width if gaussian else out.outputs
        # Small weights of the action outputs make the first policy almost independent of obs.
        self.action = nnx.Linear(actor, outputs, kernel_init=init(0.01), rngs=rngs)
        self.value = nnx.Linear(critic, 1, kernel_init=init(1.0), rngs=rngs)
        self.log_std = nnx.Param(jnp.full((out.width,), log_std)) if gaussian else None

    def __call__(self, actor: Array, critic: Array) -> tuple[Array, Array]:
        """Return action outputs ``[N, outputs]`` and values ``[N]`` from the features of each."""
        outputs = self.action(actor)
        if self.log_std is not None:
            # A policy outputs mean and log-deviation side by side.
            log_std = jnp.broadcast_to(self.log_std[...], outputs.shape)
            outputs = jnp.concatenate([outputs, log_std], axis=-1)
        return outputs, self.value(critic)[:, 0]
