"""Environments over any spaces, which refuse an action that is not in theirs or is ruled out."""

from __future__ import annotations

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import flowrl as fl
from flowrl.rl.actions import head

OBSERVATIONS = {
    "box": Box(-1, 1, (3,)),
    "float64 box of two axes": Box(-1, 1, (2, 2), np.float64),
    "integer box": Box(-5, 5, (2,), np.int64),
    "discrete": Discrete(4, start=-1),
    "multi-discrete": MultiDiscrete([3, 2], start=[4, -1]),
    "multi-binary": MultiBinary(3),
    "image": Box(0, 255, (1, 36, 36), np.uint8),
    "dict": Dict(place=Box(-1, 1, (2,)), goal=Discrete(3)),
    "tuple": Tuple([Box(-1, 1, (2,)), MultiBinary(2)]),
    "nested": Dict(arm=Tuple([Box(-1, 1, (2,), np.float64), Dict(on=Discrete(2))]), x=Box(0, 1)),
    "dict with an image": Dict(camera=Box(0, 255, (36, 36, 1), np.uint8), speed=Box(-9, 9, (1,))),
    "tuple of one": Tuple([Discrete(5)]),
}
ACTIONS = {
    "discrete": Discrete(4),
    "discrete from 2": Discrete(3, start=2),
    "multi-discrete": MultiDiscrete([[3, 2]], start=[[1, 0]]),
    "multi-binary": MultiBinary(3),
    "integer box": Box(-1, 2, (2,), np.int32),
    "tuple": Tuple([Discrete(2), Dict(a=MultiDiscrete([2, 3]))]),
    "dict": Dict(go=Discrete(3), push=Box(-2, 2, (2,)), lever=Tuple([Box(0, 1, (1,), np.float64)])),
    "box": Box(-2, 2, (2, 1)),
}
KEY = "action_mask"


def some_mask(rng, sizes):
    """A random mask that allows at least one choice of each number."""
    parts = [rng.random(n) < 0.5 for n in sizes]
    for part in parts:
        part[rng.integers(len(part))] = True
    return np.concatenate(parts).astype(np.int8)


def is_allowed(action_head, mask, action):
    """Whether a mask allows all choices of an action of the environment."""
    choices = []
    for part in action_head.parts:
        if part.discrete:
            x = action
            for step in part.path:
                x = x[step]
            choices += np.ravel(x).tolist()
    begins = np.cumsum((0, *action_head.sizes))
    at = [
        begin + choice - start
        for begin, choice, start in zip(begins, choices, action_head.start, strict=False)
    ]
    return all(mask[i] for i in at)


class Spaced(gym.Env):
    """Observes samples of its space, for episodes of 5 steps. The reward is 1 for an action whose
    first choice is even or whose first number is above 0."""

    def __init__(self, obs="box", action="discrete", mask=None):
        self.inner, self.action_space = OBSERVATIONS[obs], ACTIONS[action]
        self.head, self.mask_in = head(self.action_space), mask
        self.observation_space = self.inner
        if mask == "obs":
            shape = MultiBinary(self.head.choices)
            self.observation_space = Dict({"observation": self.inner, KEY: shape})

    def _seen(self):
        obs = self.inner.sample()
        if self.mask_in is None:
            return obs, {}
        # An environment may rule everything out at an episode's end, where nobody acts.
        over = self.age == 5
        self.mask = some_mask(self.np_random, self.head.sizes) * (not over)
        if self.mask_in == "obs":
            return {"observation": obs, KEY: self.mask}, {}
        return obs, {KEY: self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.inner.seed(seed)
        self.age = 0
        return self._seen()

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        if self.mask_in and not is_allowed(self.head, self.mask, action):
            raise ValueError(f"{action!r} is ruled out by {self.mask}")
        self.age += 1
        first = np.ravel(next(iter(jax.tree.leaves(action))))[0]
        reward = float(first % 2 == 0 if float(first).is_integer() else first > 0)
        obs, info = self._seen()
        return obs, reward, self.age == 5, False, info


class JaxSpaced(fl.envs.JaxEnv):
    """In JAX: observes a Dict with a mask; a ruled out action ends the episode with -100."""

    observation_space = Dict(
        observation=Dict(place=Box(-1, 1, (2,)), goal=Discrete(3)), action_mask=MultiBinary(4)
    )
    action_space = Dict(go=Discrete(4), push=Box(-2, 2, (2,)))

    def _seen(self, key, age):
        first, second = jax.random.split(key)
        mask = jax.random.bernoulli(first, 0.4, (4,)).at[age % 4].set(True).astype(jnp.int8)
        place = jax.random.uniform(second, (2,), minval=-1)
        goal = (age % 3).astype(jnp.int32)
        return mask, {"observation": {"place": place, "goal": goal}, "action_mask": mask}

    def reset(self, key):
        mask, obs = self._seen(key, jnp.int32(0))
        return {"mask": mask, "age": jnp.int32(0)}, obs

    def step(self, state, action, key):
        allowed = state["mask"][action["go"]] > 0
        reward = jnp.where(allowed, action["push"].sum(), -100.0)
        mask, obs = self._seen(key, state["age"] + 1)
        after = {"mask": mask, "age": state["age"] + 1}
        return after, obs, reward, ~allowed | (after["age"] == 7), jnp.bool_(False)
