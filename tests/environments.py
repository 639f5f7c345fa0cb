"""Environments for tests: one whose every number is known beforehand, and some that fail."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl


class Clockwork(gym.Env):
    """Observes [episode, step]; each step is worth `episode + 1`. Episode k has `lengths[k % n]`
    steps and is cut short if k is odd."""

    observation_space = gym.spaces.Box(0, 1e6, (2,), np.float32)
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


class Planted(Clockwork):
    """Gives a reward of NaN at one step of its life, if its first reset had one seed."""

    def __init__(self, at, seed, lengths=(3, 2, 5, 1)):
        super().__init__(lengths)
        self.at, self.seed, self.mine, self.life = at, seed, None, 0

    def reset(self, *, seed=None, options=None):
        self.mine = seed if self.mine is None else self.mine
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.life += 1
        obs, reward, terminated, truncated, info = super().step(action)
        return (
            obs,
            float("nan") if (self.life, self.mine) == (self.at, self.seed) else reward,
            terminated,
            truncated,
            info,
        )


def vector_of(mode, lengths_by_env):
    return SyncVectorEnv(
        [lambda k=k: Clockwork(k) for k in lengths_by_env], autoreset_mode=AutoresetMode(mode)
    )


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


class CutShort(gym.Env):
    """Observes 1, is worth 1 a step, and is cut short after 5 steps: with a discount of 0.9 every
    state is worth 10."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    age = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.age += 1
        return np.ones(1, np.float32), 1.0, False, self.age == 5, {}


def cut_short(mode="NextStep", envs=8):
    """A vector of `CutShort` that resets in one of Gymnasium's modes."""
    return SyncVectorEnv([CutShort] * envs, autoreset_mode=AutoresetMode(mode))


class TwoEnds(gym.Env):
    """Is worth 1 a step. Of its episodes, in turn, one is cut short after 5 steps that all look
    alike, and one terminates after 3 steps, whose number it observes."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    age = cut = 0

    def __init__(self, action_space):
        self.action_space = action_space

    def _obs(self):
        return np.float32([1, 0] if self.cut else [0, self.age / 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cut, self.age = not self.cut, 0
        return self._obs(), {}

    def step(self, action):
        self.age += 1
        return self._obs(), 1.0, not self.cut and self.age == 3, self.cut and self.age == 5, {}


def two_ends(mode="NextStep", real=False):
    """A vector of `TwoEnds` that resets in one of Gymnasium's modes; with choices or a number."""
    actions = gym.spaces.Box(-1, 1, (1,)) if real else gym.spaces.Discrete(2)
    return SyncVectorEnv([lambda: TwoEnds(actions)] * 4, autoreset_mode=AutoresetMode(mode))


class JaxCutShort(fl.envs.JaxEnv):
    """`CutShort` in JAX."""

    observation_space, action_space = CutShort.observation_space, CutShort.action_space

    def reset(self, key):
        return jnp.int32(0), jnp.ones(1)

    def step(self, state, action, key):
        return state + 1, jnp.ones(1), jnp.float32(1), jnp.bool_(False), state == 4


class Corridor(fl.envs.JaxEnv):
    """In JAX: walk right to the end, where the reward is 1. The observation is the place in [0, 1];
    cut short after 20 steps."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, nan_at=None):
        self.nan_at = nan_at

    def reset(self, key):
        # The bits of a key are random already, and to draw by it would take a tenth of a program.
        place = (jax.random.key_data(key)[1] % 3).astype(jnp.int32)
        return {"place": place, "age": jnp.int32(0)}, self.observe(place)

    def observe(self, place):
        return (place / 6)[None].astype(jnp.float32)

    def step(self, state, action, key):
        place, age = jnp.clip(state["place"] + 2 * action - 1, 0, 6), state["age"] + 1
        reward = jnp.float32(place == 6)
        if self.nan_at is not None:
            reward = jnp.where(age == self.nan_at, jnp.nan, reward)
        return {"place": place, "age": age}, self.observe(place), reward, place == 6, age >= 20
