"""A team as one agent: an environment of several agents whose actions are taken together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym
import numpy as np

from flowrl.envs.agents import Agents, Turn, unknown_agent
from flowrl.envs.global_state import GlobalState, flat_of
from flowrl.errors import EnvError, SettingError
from flowrl.rl.spaces import ACTION_MASK, Spaces

AGENTS, STATE = "agents", "state"
"""The keys of the agents' observations and of the global state."""


class JointEnv(gym.Env[Any, Any]):
    """One environment whose actions are those of all agents, and whose reward is the team's.

    Observations are a Dict of the agents' flat observations ``agents [n, d]``, the global state
    ``state [s]`` and, where agents have one, their masks ``action_mask [n, k]``. An action is a
    choice for each agent, ``[n]``.

    Args:
        inner: the environment of several agents.
        label: what it is called, for errors.
        mean: whether the reward is the mean of the agents' rewards, and not their sum.
        state: whether observations hold the global state.

    Raises:
        SettingError: agents have different spaces, or actions that are not one of n.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, inner: Agents, label: str, *, mean: bool, state: bool) -> None:
        self.inner, self.label = inner, label
        self._known = frozenset(inner.names)
        self.share = 1 / len(inner.names) if mean else 1.0
        self.spaces = _common_spaces(inner, label)
        self.state = GlobalState(inner, label) if state else None
        self.masked = self.spaces.seen is not self.spaces.obs
        n, action = len(inner.names), cast("gym.spaces.Discrete[Any]", self.spaces.action)
        starts, choices = [int(action.start)] * n, [int(action.n)] * n
        self.action_space = gym.spaces.MultiDiscrete(choices, start=starts)
        flat = flat_of(self.spaces.seen, label)
        low, high = np.stack([flat.low] * n), np.stack([flat.high] * n)
        parts: dict[str, gym.Space[Any]] = {AGENTS: gym.spaces.Box(low, high, dtype=low.dtype.type)}
        if self.state is not None:
            parts[STATE] = self.state.space
        if self.masked:
            parts[ACTION_MASK] = gym.spaces.Box(0, 1, (n, choices[0]), np.int8)
        self.observation_space = gym.spaces.Dict(parts)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Raises:
            EnvError: some agents do not act at first.
        """
        turn = self.inner.reset(seed)
        self._check_all_act(turn)
        return self._seen(turn.obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step by a choice for each agent, ``[n]``.

        The episode is terminated where it is for all agents; if some were truncated it is that, for
        theirs would have gone on.

        Raises:
            EnvError: agents take turns, or the episode ended for some of them only.
        """
        turn = self.inner.step(dict(zip(self.inner.names, np.asarray(action), strict=True)))
        if wrong := unknown_agent(turn, self._known):
            raise EnvError(f"{self.label}: {wrong}")
        reward = self.share * sum(float(x) for x in turn.reward.values())
        if not turn.ended:
            self._check_all_act(turn)
            return self._seen(turn.obs), reward, False, False, {}
        if going_on := [name for name in self.inner.names if name not in turn.ended]:
            raise EnvError(
                f"{self.label}: the episode of {', '.join(turn.ended)} ended, and that of "
                f"{', '.join(going_on)} did not; a team that acts as one agent needs one episode "
                "for all. Train them as several agents: fl.multi_ppo(env)"
            )
        terminated = all(end.terminated for end in turn.ended.values())
        final = {name: end.obs for name, end in turn.ended.items()}
        return self._seen(final), reward, terminated, not terminated, {}

    def close(self) -> None:
        """Close the environment."""
        self.inner.close()

    def _check_all_act(self, turn: Turn) -> None:
        if idle := [name for name in self.inner.names if name not in turn.obs]:
            raise EnvError(
                f"{self.label}: {', '.join(idle)} did not act where {', '.join(turn.obs) or 'none'}"
                " did; a team that acts as one agent needs agents that all act in every step. Train"
                " those that take turns, or come and go, as several agents: fl.multi_ppo(env)"
            )

    def _seen(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the team's observation of its agents' observations, by their names."""
        each = [obs[name] for name in self.inner.names]
        seen = self.spaces.seen
        flat = [gym.spaces.flatten(seen, self.spaces.without_mask(one)) for one in each]
        found: dict[str, Any] = {AGENTS: np.stack(flat)}
        if self.state is not None:
            found[STATE] = self.state.of(obs)
        if self.masked:
            found[ACTION_MASK] = np.stack([np.asarray(one[ACTION_MASK], np.int8) for one in each])
        return found


def _common_spaces(inner: Agents, label: str) -> Spaces:
    """Return the spaces that all agents have.

    Raises:
        SettingError: they have different ones, or actions that are not one of n.
    """
    first, *others = inner.names
    spaces = Spaces(*inner.spaces_of(first))
    for name in others:
        own = Spaces(*inner.spaces_of(name))
        if own != spaces:
            raise SettingError(
                f"{first} and {name} of {label} have different spaces, {spaces} and {own}, but a "
                "team that acts as one agent needs equal ones; pad them by a wrapper, or train the "
                'agents apart: fl.multi_ppo(env, policies="separate")'
            )
    if not isinstance(spaces.action, gym.spaces.Discrete):
        raise SettingError(
            f"agents of {label} act in {spaces.action}, but a team that acts as one agent needs "
            "actions that are Discrete; train them as several agents: fl.multi_ppo(env)"
        )
    return spaces
