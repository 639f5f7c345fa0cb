"""Environments for tests: one whose every number is known beforehand, and some that fail."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Clockwork(gym.Env):
    """Observes [episode, step]; each step is worth `episode + 1`. Episode k has `lengths[k % n]` steps and is cut short if k is odd."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lengths=(3, 2, 5, 1)):
        self.lengths = lengths
        self.episode = -1

    def _obs(self):
        return np.array([self.episode, self.time], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.time += 1
        over = self.time == self.lengths[self.episode % len(self.lengths)]
        cut = self.episode % 2 == 1
        return self._obs(), float(self.episode + 1), over and not cut, over and cut, {}


class Faulty(Clockwork):
    """Goes wrong at a given step of its life, in a given way."""

    def __init__(self, at=5, how="raise"):
        super().__init__((4,))
        self.at, self.how, self.life = at, how, 0

    def reset(self, *, seed=None, options=None):
        if self.how == "raise in reset" and self.life >= self.at:
            raise OSError("the simulator is gone")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.life += 1
        obs, reward, terminated, truncated, info = super().step(action)
        if self.life == self.at:
            match self.how:
                case "raise":
                    raise ZeroDivisionError("a joint broke")
                case "nan obs":
                    obs = obs * np.nan
                case "nan reward":
                    reward = float("nan")
                case "shape":
                    obs = np.zeros(3, np.float32)
                case "dtype":
                    obs = np.array(["a", "b"])
                case "four values":
                    return obs, reward, terminated, info
                case "exit":
                    os._exit(7)
                case "sleep":
                    time.sleep(60)
        return obs, reward, terminated, truncated, info


def vector_of(mode, lengths_by_env):
    return SyncVectorEnv([lambda k=k: Clockwork(k) for k in lengths_by_env], autoreset_mode=AutoresetMode(mode))


LENGTHS = ((3, 2, 5, 1), (1, 1, 2), (7, 4), (40,))


def next_step():
    return vector_of("NextStep", LENGTHS)


def same_step():
    return vector_of("SameStep", LENGTHS)


def disabled():
    return vector_of("Disabled", LENGTHS)


def silent():
    vector = vector_of("NextStep", LENGTHS)
    del vector.metadata["autoreset_mode"]
    return vector
