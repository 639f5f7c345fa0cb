"""Environments of `make learn` whose observations have several parts, or whose actions a mask."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class StrictTaxi(gym.Wrapper[Any, Any, Any, Any]):
    """Taxi that raises at an action that its ``info["action_mask"]`` rules out."""

    def __init__(self) -> None:
        super().__init__(gym.make("Taxi-v4"))
        self.mask: Any = None

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**how)
        self.mask = info["action_mask"]
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if not self.mask[action]:
            raise ValueError(f"action {action} is ruled out by the mask {self.mask}")
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.mask = info["action_mask"]
        return obs, reward, terminated, truncated, info


class PartedCartPole(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose observation is a Dict, and whose actions change sides from episode to episode.

    Its parts are the cart's two numbers, the pole's two numbers, and which side action 0 pushes to;
    a policy that leaves one of them out can't balance the pole.
    """

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        two = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(
            {"cart": two, "pole": two, "swapped": gym.spaces.Discrete(2)}
        )
        self.swapped = 0

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**how)
        self.swapped = int(self.np_random.integers(2))
        return self.parts(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        pushed = 1 - action if self.swapped else action
        obs, reward, terminated, truncated, info = self.env.step(pushed)
        return self.parts(obs), reward, terminated, truncated, info

    def parts(self, obs: Any) -> dict[str, Any]:
        return {"cart": obs[:2], "pole": obs[2:], "swapped": self.swapped}


class HiddenVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole that shows positions and angles alone: a policy has to remember to see them move."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[[0, 2]]
