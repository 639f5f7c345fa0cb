"""Stock networks of cooperating agents: action values that are mixed, and a central critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowrl.errors import PolicyError
from flowrl.rl.actions import head
from flowrl.rl.layers import Heads, Trunk, check_widths, encoder
from flowrl.rl.value_networks import QNetwork, uniform

Array = Any
TEAM = "take fl.envs.Joint(env), which makes a team one agent"
STATED = "take fl.envs.WithState(env), which adds the global state to what each agent sees"
"""The ways out where observations lack a part."""


class MonotonicMixer(nnx.Module):
    """Mixer of QMIX (Rashid et al. 2018, figure 2): it never falls where an agent's value rises.

    Its weights come from the global state by hypernetworks, and are made positive by their absolute
    values, so the best joint action is each agent's own best one (equation 4).

    Args:
        agents: the number n of agents.
        state: the numbers of the global state.
        width: the width of the mixer's layer.
        hidden: the width of the hypernetworks' layer.
        rngs: the random keys of the initial weights.
    """

    def __init__(self, agents: int, state: int, width: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        def hyper(outputs: int, width: int) -> nnx.Sequential:
            first, second = uniform(state, width, rngs=rngs), uniform(width, outputs, rngs=rngs)
            return nnx.Sequential(first, jax.nn.relu, second)

        self.agents, self.width = agents, width
        self.first, self.first_offset = (
            hyper(agents * width, hidden),
            uniform(state, width, rngs=rngs),
        )
        self.second, self.second_offset = hyper(width, hidden), hyper(1, width)

    def __call__(self, values: Array, state: Array) -> Array:
        """Return the team's values ``[N]`` of ``values [N, n]`` in the states ``[N, s]``."""
        first = jnp.abs(self.first(state)).reshape(-1, self.agents, self.width)
        mixed = jnp.einsum("bn,bnw->bw", values, first) + self.first_offset(state)
        second = jnp.abs(self.second(state))
        total: Array = (jax.nn.elu(mixed) * second).sum(-1) + self.second_offset(state)[:, 0]
        return total


class TeamQNetwork(nnx.Module):
    """Action values of a team: one network for all agents, and a mixer of the values they choose.

    It is for observations and actions of `fl.envs.Joint`. An agent's values come from its own
    observation and its number, one-hot. ``mix(obs, values)`` makes the team's value of them: their
    sum (VDN, Sunehag et al. 2017), or that of a monotonic network of the global state (QMIX, Rashid
    et al. 2018).

    Args:
        obs_space: observation space of the team: a Dict with ``agents`` and, for a monotonic mixer,
            ``state``.
        action_space: action space of the team: MultiDiscrete, with equally many choices for each
            agent.
        mixer: ``sum`` or ``monotonic`` (default ``sum``).
        hidden: widths of the fully connected layers of an agent (default (64, 64)).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``relu``).
        dueling: whether to compute the value of the observation and the advantages of actions
            separately (Wang et al. 2016, equation 9) (default False).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`)
            (default False).
        mixing: width of the monotonic mixer's layer (default 32).
        hyper_hidden: width of the layer of its hypernetworks (default 64).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: the spaces are not those of a team, or the mixer is unknown.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        mixer: Literal["sum", "monotonic"] = "sum",
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        dueling: bool = False,
        normalize: bool = False,
        mixing: int = 32,
        hyper_hidden: int = 64,
        rngs: nnx.Rngs,
    ) -> None:
        if mixer not in ("sum", "monotonic"):
            raise PolicyError(f"mixer must be sum or monotonic, got {mixer!r}")
        self.agents, choices, seen = _team(obs_space, action_space)
        self.encoder = encoder(seen, normalize=normalize, rngs=rngs)
        # One agent alone needs no number.
        inputs = self.encoder.size // self.agents + (self.agents if self.agents > 1 else 0)
        self.each = QNetwork(
            gym.spaces.Box(-np.inf, np.inf, (inputs,)),
            gym.spaces.Discrete(choices),
            hidden=hidden,
            activation=activation,
            dueling=dueling,
            rngs=rngs,
        )
        self.state: Any = nnx.data(None)
        self.mixer: Any = nnx.data(None)
        if mixer == "monotonic":
            state = _part(obs_space, "state", "a monotonic mixer")
            self.state = encoder(state, normalize=normalize, rngs=rngs)
            size = self.state.size
            self.mixer = MonotonicMixer(self.agents, size, mixing, hyper_hidden, rngs=rngs)

    def __call__(self, obs: Any) -> tuple[Array, Array]:
        """Return action values ``[N, n k]`` of n agents, and the value ``[N]`` of the best ones."""
        x = self.encoder(obs["agents"])
        count = x.shape[0]
        x = x.reshape(count, self.agents, -1)
        if self.agents > 1:
            numbers = jnp.broadcast_to(jnp.eye(self.agents), (count, self.agents, self.agents))
            x = jnp.concatenate([x, numbers], axis=-1)
        values, best = self.each(x.reshape(count * self.agents, -1))
        total = self.mix(obs, best.reshape(count, self.agents))
        return values.reshape(count, -1), total

    def mix(self, obs: Any, values: Array) -> Array:
        """Return the team's values ``[N]`` of the agents' values ``[N, n]``."""
        if self.mixer is None:
            return values.sum(-1)
        total: Array = self.mixer(values, self.state(obs["state"]))
        return total


def _team(obs: gym.Space[Any], action: gym.Space[Any]) -> tuple[int, int, gym.Space[Any]]:
    """Return the number of agents, of each one's choices, and the space of their observations."""
    seen = _part(obs, "agents", "TeamQNetwork")
    sizes = head(action).sizes
    if head(action).kind != "multi_categorical" or len(set(sizes)) > 1:
        raise PolicyError(
            f"TeamQNetwork has values for the choices of equal agents, not for {action}; {TEAM}"
        )
    if seen.shape is None or len(seen.shape) != 2 or seen.shape[0] != len(sizes):
        raise PolicyError(
            f"TeamQNetwork reads a row for each of {len(sizes)} agents, not {seen}; {TEAM}"
        )
    return len(sizes), sizes[0], seen


def _part(space: gym.Space[Any], key: str, reader: str, way: str = TEAM) -> gym.Space[Any]:
    """Return a part of observations.

    Raises:
        PolicyError: there is none of that key.
    """
    if isinstance(space, gym.spaces.Dict) and key in space.spaces:
        return space[key]
    raise PolicyError(
        f"{reader} reads the part '{key}' of observations, but they are {space}; {way}"
    )


class CentralCritic(nnx.Module):
    """Actor of what an agent sees itself, and critic of that and the global state (MAPPO).

    It is for observations of `fl.envs.WithState`. The critic is there in training alone: the
    actions of a trained policy depend on ``own`` only (Yu et al. 2022, section 3).

    Args:
        obs_space: observation space of an agent: a Dict with ``own`` and ``state``.
        action_space: action space of an agent.
        hidden: widths of the layers of actor and critic each (default (64, 64)).
        activation: ``tanh``, ``relu``, ``silu`` or ``gelu`` (default ``tanh``).
        normalize: whether to shift and scale observations by running moments (`RunningNorm`)
            (default False).
        log_std: initial logarithm of the standard deviation of Gaussian actions (default 0.0).
        rngs: random keys of the initial weights.

    Raises:
        PolicyError: observations have no such parts.
    """

    def __init__(
        self,
        obs_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        normalize: bool = False,
        log_std: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        check_widths(hidden)
        own, state = (_part(obs_space, key, "CentralCritic", STATED) for key in ("own", "state"))
        self.own = encoder(own, normalize=normalize, rngs=rngs)
        self.state = encoder(state, normalize=normalize, rngs=rngs)
        self.actor = Trunk(self.own.size, hidden, activation, rngs=rngs)
        self.critic = Trunk(self.own.size + self.state.size, hidden, activation, rngs=rngs)
        self.heads = Heads(hidden[-1], hidden[-1], action_space, log_std, rngs=rngs)

    def __call__(self, obs: Any) -> tuple[Array, Array]:
        """Return action outputs ``[N, outputs]`` and values ``[N]``."""
        own = self.own(obs["own"])
        both = jnp.concatenate([own, self.state(obs["state"])], axis=-1)
        return self.heads(self.actor(own), self.critic(both))
