"""How runners try out actions: settings of theirs that pick actions from a policy's distribution, with as much chance as they call for.

Noise for many steps is drawn at once and holds all chance there is, schedules included; picking is then a pure function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.errors import SettingError
from flowrl.rl.distributions import Distribution
from flowrl.rl.spaces import Head

Array = Any


class Explore(ABC):
    """A way to pick actions."""

    samples: ClassVar[bool] = False
    """Whether actions are drawn from the policy's own distribution, so that the recorded ``logp`` is the probability of drawing them.

    The recorded ``logp`` is always the policy's. An exploration that picks otherwise acts by another policy, the behaviour policy, whose
    probabilities nobody records, so losses that need them refuse it.
    """

    def noise(self, head: Head, key: Array, n: int, step: Array, env: Array, envs: int) -> Array:
        """What `pick` takes for one step of n environments.

        Args:
            head: of the policy.
            key: random.
            n: environments.
            step: that all environments of all runners have gone by now, about.
            env: their numbers ``[n]``.
            envs: of all runners.
        """
        return head.noise(key, n)

    @abstractmethod
    def pick(self, dist: Distribution, noise: Array) -> Array:
        """The actions for the distributions of n environments."""

    def check(self, head: Head) -> str:
        """What is wrong with using it for these actions; empty if nothing is."""
        return ""


@dataclass(frozen=True)
class Sampled(Explore):
    """Actions drawn from the policy's distribution."""

    samples: ClassVar[bool] = True

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """A sample."""
        return dist.sample(noise)


@dataclass(frozen=True)
class EpsilonGreedy(Explore):
    """The likeliest action, or with chance epsilon any one (Mnih et al. 2015). Epsilon falls from `start` to `end` over `steps`, in a line.

    With `spread` every environment has an epsilon of its own: number i of N has ``epsilon ** (1 + spread x i / (N - 1))`` (Horgan et al. 2018,
    section 4.1, where epsilon is 0.4 and the spread 7).

    Args:
        start: epsilon at first.
        end: epsilon at last.
        steps: of all environments of all runners together, over which it falls.
        spread: how differently environments explore; 0 for all alike.
    """

    start: float = 1.0
    end: float = 0.05
    steps: int = 10_000
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.start <= 1 and 0 <= self.end <= 1):
            raise SettingError(
                f"start and end must be from 0 to 1, got start={self.start}, end={self.end}"
            )
        if self.steps < 1 or self.spread < 0:
            raise SettingError(
                f"steps must be at least 1 and spread not negative, got steps={self.steps}, spread={self.spread}"
            )

    def check(self, head: Head) -> str:
        """Only for one of n actions."""
        return (
            ""
            if head.kind == "categorical"
            else "EpsilonGreedy picks one of n actions; take GaussianNoise or Sampled for others"
        )

    def epsilon(self, step: Array, env: Array, envs: int) -> Array:
        """Of environments, by their numbers."""
        epsilon = self.start + (self.end - self.start) * jnp.clip(step / self.steps, 0, 1)
        return epsilon ** (1 + self.spread * env / max(envs - 1, 1))

    def noise(self, head: Head, key: Array, n: int, step: Array, env: Array, envs: int) -> Array:
        """``[n, actions + 1]``: numbers of which the largest says which one, and below 0 where it is to be any."""
        each, whether = jax.random.split(key)
        below = jax.random.uniform(whether, (n, 1)) - self.epsilon(step, env, envs)[:, None]
        return jnp.concatenate([jax.random.uniform(each, (n, head.outputs)), below], axis=1)

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """The likeliest, or any."""
        return jnp.where(noise[:, -1] < 0, jnp.argmax(noise[:, :-1], axis=1), dist.mode())


@dataclass(frozen=True)
class GaussianNoise(Explore):
    """The likeliest action and normal noise around it (TD3, Fujimoto et al. 2018), within [-1, 1].

    Args:
        deviation: of the noise, where 1 is half the range of an action.
    """

    deviation: float = 0.1

    def __post_init__(self) -> None:
        if self.deviation < 0:
            raise SettingError(f"deviation must not be negative, got {self.deviation}")

    def check(self, head: Head) -> str:
        """Only for actions that are numbers, between finite bounds."""
        if not head.continuous:
            return "GaussianNoise is for actions in a Box; take EpsilonGreedy or Sampled for others"
        wide = "GaussianNoise keeps actions in [-1, 1], stretched over the bounds of the action space, but some of these are not finite"
        return (
            ""
            if head.bounded
            else f"{wide}; give it finite ones by a wrapper (gymnasium.wrappers.TransformAction), or take Sampled"
        )

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """The likeliest, moved."""
        return jnp.clip(dist.mode() + self.deviation * noise, -1, 1)
