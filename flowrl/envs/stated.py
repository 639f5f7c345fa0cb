"""Agents that see the global state of their environment beside what is their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym

from flowrl.envs.agents import Agents, End, Turn, unknown_agent
from flowrl.envs.global_state import GlobalState
from flowrl.errors import EnvError
from flowrl.rl.spaces import ACTION_MASK, Spaces

OWN, STATE = "own", "state"
"""The keys of what an agent sees itself, and of the global state."""


class StatedAgents(Agents):
    """Wraps an environment, and adds the global state to what each agent sees.

    Args:
        inner: the environment.
        label: what it is called, for errors.
    """

    def __init__(self, inner: Agents, label: str) -> None:
        self.inner, self.names, self.label = inner, inner.names, label
        self.global_state = GlobalState(inner, label)
        self.spaces = {name: Spaces(*inner.spaces_of(name)) for name in inner.names}

    def spaces_of(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent's observations, with the state, and of its actions."""
        spaces = self.spaces[agent]
        parts: dict[str, Any] = {OWN: spaces.seen, STATE: self.global_state.space}
        if spaces.seen is not spaces.obs:
            parts[ACTION_MASK] = cast("gym.spaces.Dict", spaces.obs)[ACTION_MASK]
        return gym.spaces.Dict(parts), spaces.action

    def reset(self, seed: int | None = None) -> Turn:
        """Begin an episode."""
        self.global_state.begin()
        return self._with_state(self.inner.reset(seed))

    def step(self, actions: Mapping[str, Any]) -> Turn:
        """Take a step by the actions of the agents that act."""
        return self._with_state(self.inner.step(actions))

    def close(self) -> None:
        """Close the environment."""
        self.inner.close()

    def _with_state(self, turn: Turn) -> Turn:
        """Return a turn in which agents see the state."""
        if wrong := unknown_agent(turn, self.spaces.keys()):
            raise EnvError(f"{self.label}: {wrong}")
        last = {name: end.obs for name, end in turn.ended.items()}
        state = self.global_state.of({**last, **turn.obs})

        def seen(name: str, obs: Any) -> dict[str, Any]:
            found = {OWN: self.spaces[name].without_mask(obs), STATE: state}
            if self.spaces[name].seen is not self.spaces[name].obs:
                found[ACTION_MASK] = obs[ACTION_MASK]
            return found

        ended = {
            name: End(end.terminated, end.truncated, seen(name, end.obs))
            for name, end in turn.ended.items()
        }
        return Turn({name: seen(name, obs) for name, obs in turn.obs.items()}, turn.reward, ended)
