"""Stock actor-critic networks, built from spaces.

A user's own NNX module can take their place; it needs no base class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import jax.numpy as jnp
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.actions import head
from flowrl.rl.images import CHANNELS, KERNELS, STRIDES, Images
from flowrl.rl.layers import Heads, Trunk, encoder

Array = Any


def action_outputs(space: gym.Space[Any]) -> int:
    """Return how many numbers a policy must output per observation for this action space.

    >>> import gymnasium as gym
    >>> action_outputs(gym.spaces.Discrete(4)), action_outputs(gym.spaces.Box(-1, 1, (3,)))
    (4, 6)
    """
    return head(space).outputs


class MLP(nnx.Module):
    """Fully connected actor and critic, with a trunk each or a shared one.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment.
        hidden: widths of the layers of each trunk (default (64, 64)).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``tanh``).
        shared: whether actor and critic share one trunk (default False).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`)
            (default False).
        log_std: initial logarithm of the standard deviation of Gaussian actions (default 0.0).
        rngs: random keys of the initial weights.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        shared: bool = False,
        normalize: bool = False,
        log_std: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.encoder = encoder(obs_space, normalize=normalize, rngs=rngs)
        self.actor = Trunk(self.encoder.size, hidden, activation, rngs=rngs)
        self.critic = None if shared else Trunk(self.encoder.size, hidden, activation, rngs=rngs)
        # Without layers the heads read the observation itself.
        width = hidden[-1] if hidden else self.encoder.size
        self.heads = Heads(width, width, action_space, log_std, rngs=rngs)

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Return action outputs ``[N, outputs]`` and values ``[N]`` of ``obs [N, ...]``."""
        x = self.encoder(obs)
        actor = self.actor(x)
        return self.heads(actor, actor if self.critic is None else self.critic(x))


CELLS: dict[str, Callable[..., Any]] = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}
"""The recurrent cells that networks take by name."""


def initial_carry_of(cell: nnx.Module, n: int, size: int) -> Any:
    """Return the carry ``[n, size]`` of zeros with which a cell begins; a pair for an LSTM."""
    # An LSTM carries a cell state beside its output.
    zeros = jnp.zeros((n, size))
    return (zeros, zeros) if isinstance(cell, nnx.OptimizedLSTMCell) else zeros


class Recall(nnx.Module):
    """Fully connected layers, then a recurrent cell.

    Args:
        inputs: numbers that the first layer reads.
        hidden: the widths of the layers before the cell.
        cell: lstm or gru.
        size: the width of the cell.
        activation: tanh, relu, silu or gelu.
        rngs: the random keys of the initial weights.

    Raises:
        PolicyError: the cell is neither.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        cell: str,
        size: int,
        activation: str,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        if cell not in CELLS:
            raise PolicyError(f"cell must be one of {', '.join(CELLS)}, got {cell!r}")
        self.trunk = Trunk(inputs, hidden, activation, rngs=rngs)
        self.size = size
        self.cell = CELLS[cell](hidden[-1] if hidden else inputs, size, rngs=rngs)

    def initial_carry(self, n: int) -> Any:
        """Return zeros ``[n, size]``, or a pair of them for an LSTM."""
        return initial_carry_of(self.cell, n, self.size)

    def __call__(self, x: Array, carry: Any) -> tuple[Array, Any]:
        """Return features ``[N, size]`` of ``x [N, inputs]``, and the carry after the step."""
        carry, x = self.cell(carry, self.trunk(x))
        return x, carry


class RNN(nnx.Module):
    """Recurrent actor-critic: fully connected layers, then an LSTM or GRU.

    It is for environments of which one observation does not show the whole state.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment.
        hidden: widths of the layers before the cell (default (64,)).
        cell: ``lstm`` or ``gru`` (default ``lstm``).
        size: width of the cell (default 64).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``tanh``).
        shared: whether actor and critic share trunk and cell (default False).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`)
            (default False).
        log_std: initial logarithm of the standard deviation of Gaussian actions (default 0.0).
        rngs: random keys of the initial weights.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64,),
        cell: str = "lstm",
        size: int = 64,
        activation: str = "tanh",
        shared: bool = False,
        normalize: bool = False,
        log_std: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.encoder = encoder(obs_space, normalize=normalize, rngs=rngs)
        self.actor = Recall(self.encoder.size, hidden, cell, size, activation, rngs=rngs)
        self.critic = (
            None if shared else Recall(self.encoder.size, hidden, cell, size, activation, rngs=rngs)
        )
        self.heads = Heads(size, size, action_space, log_std, rngs=rngs)

    def initial_carry(self, n: int) -> Any:
        """Return zeros for n environments: the actor's, and the critic's if it has its own cell."""
        critic_carry = () if self.critic is None else self.critic.initial_carry(n)
        return self.actor.initial_carry(n), critic_carry

    def __call__(self, obs: Array, carry: Any) -> tuple[Array, Array, Any]:
        """Return the outputs of one step, and the carry after it.

        These are action outputs ``[N, outputs]`` and values ``[N]`` of ``obs [N, ...]``.
        """
        x = self.encoder(obs)
        actor, actor_carry = self.actor(x, carry[0])
        critic, critic_carry = (actor, ()) if self.critic is None else self.critic(x, carry[1])
        return *self.heads(actor, critic), (actor_carry, critic_carry)


class CNN(nnx.Module):
    """Convolutional network of Mnih et al. (2015) for images, shared by actor and critic.

    Images are ``[H, W, C]``, or ``[C, H, W]`` where the first axis is the smallest; bytes are
    divided by 255.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment.
        channels: number of filters of each convolution (default (32, 64, 64)).
        kernels: sizes of the convolutions in pixels (default (8, 4, 3)).
        strides: strides of the convolutions in pixels (default (4, 2, 1)).
        hidden: width of the fully connected layer after them (default 512).
        log_std: initial logarithm of the standard deviation of Gaussian actions (default 0.0).
        rngs: random keys of the initial weights.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        channels: Sequence[int] = CHANNELS,
        kernels: Sequence[int] = KERNELS,
        strides: Sequence[int] = STRIDES,
        hidden: int = 512,
        log_std: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.trunk = Images(
            obs_space, channels=channels, kernels=kernels, strides=strides, hidden=hidden, rngs=rngs
        )
        self.heads = Heads(hidden, hidden, action_space, log_std, rngs=rngs)

    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Return action outputs ``[N, outputs]`` and values ``[N]`` of ``obs [N, ...]``."""
        x = self.trunk(obs)
        return self.heads(x, x)
