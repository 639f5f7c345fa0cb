"""The global state of an environment of several agents, as one row of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np

from flowrl.envs.agents import Agents
from flowrl.errors import SettingError
from flowrl.rl.spaces import Spaces

Array = np.ndarray[Any, Any]


class GlobalState:
    """Reads the global state of an environment: its own, or the joined observations of all agents.

    The joined observations are without masks, and each is the newest that the agent saw in this
    episode; of an agent that saw none yet there are zeros.

    Args:
        agents: the environment.
        label: what it is called, for errors.

    Raises:
        SettingError: a space is of a kind that has no fixed number of numbers.
    """

    def __init__(self, agents: Agents, label: str) -> None:
        self.agents = agents
        self.own = agents.state_space
        self.seen = {name: Spaces(*agents.spaces_of(name)) for name in agents.names}
        self.newest: dict[str, Array] = {}
        if self.own is not None:
            self.space = flat_of(self.own, label)
            return
        parts = [flat_of(spaces.seen, label) for spaces in self.seen.values()]
        low = np.concatenate([part.low for part in parts])
        high = np.concatenate([part.high for part in parts])
        self.space = gym.spaces.Box(low, high, dtype=low.dtype.type)

    def begin(self) -> None:
        """Begin an episode, in which nobody saw anything yet."""
        self.newest = {}

    def of(self, obs: Mapping[str, Any]) -> Array:
        """Return the global state ``[s]`` now that agents saw `obs`, by their names."""
        if self.own is not None:
            state: Array = np.asarray(gym.spaces.flatten(self.own, self.agents.state()))
            return state.astype(self.space.dtype, copy=False)
        for name, one in obs.items():
            spaces = self.seen[name]
            flat = gym.spaces.flatten(spaces.seen, spaces.without_mask(one))
            self.newest[name] = np.asarray(flat)
        return np.concatenate([self._newest_of(name) for name in self.seen]).astype(
            self.space.dtype, copy=False
        )

    def _newest_of(self, name: str) -> Array:
        if name in self.newest:
            return self.newest[name]
        return np.zeros(gym.spaces.flatdim(self.seen[name].seen), self.space.dtype)


def flat_of(space: gym.Space[Any], label: str) -> gym.spaces.Box:
    """Return the Box of flat values of a space; choices become one-hot.

    Raises:
        SettingError: values of the space have no fixed number of numbers.
    """
    with suppress(NotImplementedError):
        flat = gym.spaces.flatten_space(space)
        if isinstance(flat, gym.spaces.Box) and len(flat.shape) == 1:
            return flat
    raise SettingError(
        f"{label}: what is seen in {space} is no row of numbers; make it a Box, Discrete, "
        "MultiDiscrete, MultiBinary, or a Dict or Tuple of these by a wrapper"
    )
