"""`SwapSeats`: a wrapper by which a policy plays every seat of a game, another one by chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from flowrl.envs.agents import Agents, Turn, agents_of
from flowrl.envs.jax_agents import HostAgents, JaxAgents
from flowrl.errors import SettingError, a


@dataclass(frozen=True)
class SwapSeats:
    """Give the agents of an environment new names, in an order that each reset draws again.

    With the names ``learner`` and ``opponent`` the learner plays each seat of a game in half of the
    episodes. It is an entry of ``wrappers=`` of `Runners`; the agents of a `Team` are then those
    with the new names. The order comes from the seed of the environment, so a run repeats it, and
    snapshots keep it.

    Args:
        names: a name for each agent (default ``("learner", "opponent")``).

    Raises:
        SettingError: a name comes twice; or, when it is put around an environment, that has another
            number of agents, or agents with different spaces.
    """

    names: tuple[str, ...] = ("learner", "opponent")

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise SettingError(f"names must differ from one another, got {self.names}")

    def __call__(self, env: Any) -> Agents:
        """Return the environment of several agents with its seats swapped at each reset."""
        # What swaps the seats is no pure function, so one in JAX is stepped on the host.
        inner = HostAgents(env) if isinstance(env, JaxAgents) else agents_of(env)
        if inner is None:
            raise SettingError(f"SwapSeats needs an environment of several agents, got {a(env)}")
        if len(inner.names) != len(self.names):
            raise SettingError(
                f"SwapSeats has the names {', '.join(self.names)} for {len(inner.names)} agents "
                f"({', '.join(inner.names)}); give it as many: fl.envs.SwapSeats(names=(...))"
            )
        first = inner.spaces_of(inner.names[0])
        for agent in inner.names:
            if inner.spaces_of(agent) != first:
                raise SettingError(
                    f"SwapSeats lets each policy play every seat, but the spaces of "
                    f"{inner.names[0]} and {agent} differ: {first} and {inner.spaces_of(agent)}"
                )
        return _Swapped(inner, tuple(self.names))


class _Swapped(Agents):
    """An environment whose agents have other names in each episode.

    Args:
        inner: the environment.
        names: the new names.
    """

    def __init__(self, inner: Agents, names: tuple[str, ...]) -> None:
        self.inner = inner
        self.names = names
        # A generator among the attributes is what `RetracedAgents` keeps and sets again.
        self.random = np.random.default_rng()
        self.seats = dict(zip(names, inner.names, strict=True))
        """By new name: the agent."""

    def spaces_of(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent's observations and actions, which all agents share."""
        return self.inner.spaces_of(self.seats[agent])

    def reset(self, seed: int | None = None) -> Turn:
        """Begin an episode, with the seats in a random order."""
        if seed is not None:
            # The environment itself gets the seed, too, and must not draw the same numbers.
            self.random = np.random.default_rng([seed, len(self.names)])
        order = self.random.permutation(len(self.names))
        self.seats = {name: self.inner.names[i] for name, i in zip(self.names, order, strict=True)}
        return self._renamed(self.inner.reset(seed))

    def step(self, actions: Mapping[str, Any]) -> Turn:
        """Take a step by the actions of the agents that act."""
        acts = {self.seats[name]: action for name, action in actions.items()}
        return self._renamed(self.inner.step(acts))

    def close(self) -> None:
        """Close the environment."""
        self.inner.close()

    def _renamed(self, turn: Turn) -> Turn:
        """Return a turn by the new names of its agents, in the order of the environment's."""
        names = {agent: name for name, agent in self.seats.items()}

        def by_name(of: Mapping[str, Any]) -> dict[str, Any]:
            # An agent that nobody knows is reported under its own name.
            return {names.get(agent, agent): value for agent, value in of.items()}

        return Turn(by_name(turn.obs), by_name(turn.reward), by_name(turn.ended))
