"""Environments of several agents, on which `bench/learn_agents.py` trains."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class TwoSteps:
    """The two-step game of Rashid et al. (2018, section 5): 8 is the best return.

    In the first step the first agent alone decides which matrix game comes: 2A, which pays 7
    whatever is done, or 2B, which pays 0, 1, 1 or 8. An additive value can't hold 2B's rewards.
    """

    possible_agents = ("one", "two")
    PAYS = (np.full((2, 2), 7.0), np.array([[0.0, 1.0], [1.0, 8.0]]))
    state_space = gym.spaces.Box(0, 1, (3,), np.float32)

    def __init__(self) -> None:
        self.agents = list(self.possible_agents)
        self.place = 0

    def observation_space(self, agent: str) -> Any:
        return self.state_space

    def action_space(self, agent: str) -> Any:
        return gym.spaces.Discrete(2)

    def state(self) -> Any:
        return np.eye(3, dtype=np.float32)[self.place]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents, self.place = list(self.possible_agents), 0
        return self.seen(), {}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        one, two = (actions[name] for name in self.possible_agents)
        over = self.place > 0
        reward = self.PAYS[self.place - 1][one, two] if over else 0.0
        if over:
            self.agents = []
        else:
            self.place = 1 + int(one)
        ended = dict.fromkeys(self.possible_agents, over)
        going_on = dict.fromkeys(self.possible_agents, False)
        # Each agent gets half, so that the team's sum is what the paper's matrix says.
        return self.seen(), dict.fromkeys(self.possible_agents, reward / 2), ended, going_on, {}

    def seen(self) -> Any:
        return dict.fromkeys(self.possible_agents, self.state())

    def close(self) -> None:
        pass


class TwoCartPoles:
    """Two CartPoles; an agent whose pole fell comes back a step later."""

    possible_agents = ("red", "blue")

    def __init__(self) -> None:
        self.poles = gym.make_vec("CartPole-v1", 2, "sync")
        self.agents = list(self.possible_agents)

    def observation_space(self, agent: str) -> Any:
        return self.poles.single_observation_space

    def action_space(self, agent: str) -> Any:
        return self.poles.single_action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents = list(self.possible_agents)
        return self.named(self.poles.reset(seed=seed)[0]), {}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        *found, _ = self.poles.step([actions.get(name, 0) for name in self.possible_agents])
        obs, reward, fell, cut = map(self.named, found)
        self.agents = [name for name in self.possible_agents if not (fell[name] or cut[name])]
        return obs, reward, fell, cut, {}

    def named(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def close(self) -> None:
        self.poles.close()
