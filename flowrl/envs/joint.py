"""Makers of environments of several agents in which the agents share something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym

from flowrl.envs.agents import Agents, Maker
from flowrl.envs.gym_envs import Make, env_name, make_env
from flowrl.envs.joint_env import JointEnv
from flowrl.envs.stated import StatedAgents
from flowrl.errors import SettingError


@dataclass(frozen=True)
class Joint(Maker):
    """Makes one environment of a team: its agents act at once, as one agent, for one reward.

    It is made of an environment of several agents that have equal spaces and Discrete actions. An
    observation is a Dict: ``agents [n, d]``, the flat observations of the n agents
    (`gymnasium.spaces.flatten`: choices become one-hot); ``state [s]``, the environment's global
    state where it has a ``state_space`` and a ``state()``, else the joined observations; and
    ``action_mask [n, k]``, where the agents' observations hold masks. An action is MultiDiscrete, a
    choice for each agent.

    Args:
        env: environment of several agents, as runners take it: an id such as
            ``pettingzoo:mpe2.simple_spread_v3``, or a function or class that makes one.
        reward: ``sum`` of the agents' rewards, or their ``mean``, which suits environments that
            give every agent the reward of the whole team (default ``sum``).
        state: whether observations hold the global state (default True).

    >>> import flowrl as fl
    >>> env = fl.envs.Joint("pettingzoo:mpe2.simple_spread_v3")()
    >>> env.observation_space["agents"].shape, env.observation_space["state"].shape
    ((3, 18), (54,))
    >>> env.action_space
    MultiDiscrete([5 5 5])
    """

    env: Make
    reward: Literal["sum", "mean"] = "sum"
    state: bool = True

    def __post_init__(self) -> None:
        if self.reward not in ("sum", "mean"):
            raise SettingError(f"reward must be 'sum' or 'mean', got {self.reward!r}")

    def name(self) -> str:
        """Return what the environment is called in texts."""
        return f"{env_name(self.env)} as one agent"

    def __call__(self, **settings: Any) -> gym.Env[Any, Any]:
        """Make the environment.

        Args:
            **settings: keyword arguments for making the environment of several agents.

        Raises:
            SettingError: it has but one agent, agents have different spaces, or actions that are
                not Discrete.
        """
        inner = _several(self.env, settings)
        return JointEnv(inner, env_name(self.env), mean=self.reward == "mean", state=self.state)


@dataclass(frozen=True)
class WithState(Maker):
    """Makes an environment of several agents that see the global state beside what is their own.

    An agent's observation is then a Dict: ``own``, what it sees; ``state [s]``, the environment's
    global state where it has a ``state_space`` and a ``state()``, else the newest observations of
    all agents, joined; and its ``action_mask``, where it has one. `fl.networks.CentralCritic` acts
    by ``own`` alone.

    Args:
        env: environment of several agents, as runners take it.
    """

    env: Make

    def name(self) -> str:
        """Return what the environment is called in texts."""
        return f"{env_name(self.env)} with its state"

    def __call__(self, **settings: Any) -> Agents:
        """Make the environment.

        Args:
            **settings: keyword arguments for making the environment of several agents.

        Raises:
            SettingError: it has but one agent.
        """
        return StatedAgents(_several(self.env, settings), env_name(self.env))


def _several(env: Make, settings: dict[str, Any]) -> Agents:
    """Make an environment of several agents.

    Raises:
        SettingError: it has but one agent.
    """
    made = make_env(env, 1, (), settings)
    if isinstance(made, Agents):
        return made
    made.close()
    raise SettingError(
        f"{env_name(env)} has but one agent; name an environment of several, such as "
        "pettingzoo:mpe2.simple_spread_v3"
    )
