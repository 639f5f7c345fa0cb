"""Stock networks of action values that remember, built from spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax.numpy as jnp
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.actions import head
from flowrl.rl.images import NOT_NORMALIZED, Images, shows_images
from flowrl.rl.layers import Trunk, check_widths, encoder
from flowrl.rl.networks import CELLS, initial_carry_of
from flowrl.rl.value_networks import uniform

Array = Any


class RecurrentQNetwork(nnx.Module):
    """Network of action values with an LSTM or GRU (Kapturowski et al. 2019, figure 1).

    It is for environments of which one observation does not show the whole state. Images of bytes
    that are large enough go through the convolutions of Mnih et al. (2015), all else through fully
    connected layers; then come the cell and the action values. Unlike in the paper the cell does
    not see the last action and reward: an environment's observations may hold them.

    Args:
        obs_space: observation space of the environment.
        action_space: action space of the environment, which must be one of n actions.
        hidden: widths of the fully connected layers before the cell; after convolutions there is
            one such layer, of the last of these widths (default (64,)).
        cell: ``lstm`` or ``gru`` (default ``lstm``).
        size: width of the cell (default 64).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``relu``).
        dueling: whether to compute the value of the observation and the advantages of actions
            separately (Wang et al. 2016, equation 9) (default False).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`); not
            for images that go through convolutions (default False).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: actions are not one of n, the cell is of another kind, or `normalize` is set
            for images.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64,),
        cell: str = "lstm",
        size: int = 64,
        activation: str = "relu",
        dueling: bool = False,
        normalize: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        actions = head(action_space)
        if actions.kind != "categorical":
            raise PolicyError(
                f"RecurrentQNetwork has a value for each of n actions, not for {action_space}; "
                "take RNN with VTraceLoss (fl.impala) for others"
            )
        if cell not in CELLS:
            raise PolicyError(f"cell must be one of {', '.join(CELLS)}, got {cell!r}")
        check_widths(hidden)
        if shows_images(obs_space):
            if normalize:
                raise PolicyError(f"RecurrentQNetwork {NOT_NORMALIZED}")
            self.encoder: nnx.Module = Images(obs_space, hidden=hidden[-1], rngs=rngs)
            self.trunk = None
        else:
            flat = encoder(obs_space, normalize=normalize, rngs=rngs)
            self.encoder = flat
            self.trunk = Trunk(flat.size, hidden, activation, linear=uniform, rngs=rngs)
        self.size = size
        self.cell = CELLS[cell](hidden[-1], size, rngs=rngs)
        self.advantage = uniform(size, actions.outputs, rngs=rngs)
        self.value = uniform(size, 1, rngs=rngs) if dueling else None

    def initial_carry(self, n: int) -> Any:
        """Return zeros ``[n, size]``, or a pair of them for an LSTM."""
        return initial_carry_of(self.cell, n, self.size)

    def __call__(self, obs: Array, carry: Any) -> tuple[Array, Array, Any]:
        """Return the outputs of one step, and the carry after it.

        These are action values ``[N, n]`` of ``obs [N, ...]``, and the highest of them ``[N]``.
        """
        x = self.encoder(obs)
        x = x if self.trunk is None else self.trunk(x)
        carry, x = self.cell(carry, x)
        values = self.advantage(x)
        if self.value is not None:
            # Without subtracting the mean, value and advantages could shift against each other.
            values = self.value(x) + values - values.mean(-1, keepdims=True)
        return values, jnp.max(values, -1), carry
