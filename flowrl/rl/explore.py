"""Exploration: settings of runners that pick actions from a policy's distribution.

Noise for many steps is drawn at once and holds everything that is random, schedules included;
picking an action is then a pure function of the distribution and the noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from flowrl.errors import SettingError
from flowrl.graph.settings import Settings, check_not_negative
from flowrl.rl.actions import RULED_OUT, Head
from flowrl.rl.distributions import Categorical, Distribution, MultiCategorical

Array = Any


class Explore(Settings, ABC):
    """Base class of explorations: frozen settings that choose actions from distributions."""

    samples: ClassVar[bool] = False
    """Whether actions are sampled from the policy's own distribution.

    The recorded ``logp`` is always that of the policy, so only then is it the log-probability of
    picking the action. Any other exploration makes a behaviour policy whose probabilities nobody
    records, so losses that need them refuse it.
    """
    noisy: ClassVar[bool] = False
    """Whether the noise of a step is for the policy's noisy layers: random ``uint32[n, 2]``."""

    def noise(self, head: Head, key: Array, n: int, step: Array, env: Array, envs: int) -> Array:
        """Return the noise that `pick` takes for one step of n environments.

        Args:
            head: the head of the policy.
            key: the random key of the step.
            n: the number of environments.
            step: the steps that all environments of all runners have taken so far, about: one
                number, or one for each environment ``[n]``.
            env: the environments' numbers ``[n]``, counted over all runners.
            envs: the number of environments of all runners.
        """
        return head.noise(key, n)

    @property
    def last(self) -> Explore:
        """The exploration that remains once the run has begun: this one, unless it says so."""
        return self

    def of_agents(self, agents: int) -> Explore:
        """Return this exploration for a policy that acts for several agents of an environment.

        The steps that `noise` gets count each of them, those of its settings are the environments'.
        """
        return self

    @abstractmethod
    def pick(self, dist: Distribution, noise: Array) -> Array:
        """Return the actions of n environments from their distributions."""

    def check(self, head: Head) -> str:
        """Return what is wrong with this exploration for such actions; empty if nothing is."""
        return ""


@dataclass(frozen=True)
class Sampled(Explore):
    """Stochastic policy, whose actions are sampled from its distribution; it has no settings."""

    samples: ClassVar[bool] = True

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """Return samples of the distributions."""
        return dist.sample(noise)


@dataclass(frozen=True)
class EpsilonGreedy(Explore):
    """Epsilon-greedy exploration: the greedy action, or with probability epsilon a random one.

    Each part of an action of several choices, such as each agent's of a team, is random or greedy
    by itself.

    Epsilon falls linearly from `start` to `end` over `steps` (Mnih et al. 2015). With `spread`
    every environment has an epsilon of its own: number i of N has
    ``epsilon ** (1 + spread x i / (N - 1))`` (Horgan et al. 2018, section 4.1, where epsilon is 0.4
    and the spread 7).

    Args:
        start: probability of a random action at first, from 0 to 1 (default 1.0).
        end: probability of a random action at last, from 0 to 1 (default 0.05).
        steps: environment steps over which it falls, of all environments of all runners together
            (default 10_000).
        spread: how differently environments explore; 0: all alike (default 0.0).

    Raises:
        SettingError: one of these is out of its range.
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
        if self.steps < 1 or not self.spread >= 0:
            raise SettingError(
                "steps must be at least 1 and spread not negative, "
                f"got steps={self.steps}, spread={self.spread}"
            )

    @property
    def last(self) -> EpsilonGreedy:
        """The same with the epsilon that remains at last."""
        return replace(self, start=self.end)

    def of_agents(self, agents: int) -> EpsilonGreedy:
        """Return it for a policy that acts for several agents of an environment."""
        return replace(self, steps=self.steps * agents)

    def check(self, head: Head) -> str:
        """Return what is wrong unless all numbers of an action are choices."""
        if not head.reals:
            return ""
        return "EpsilonGreedy picks one of n actions; take GaussianNoise or Sampled for others"

    def epsilon(self, step: Array, env: Array, envs: int) -> Array:
        """Return the epsilon of environments at a step.

        Args:
            step: the steps that all environments of all runners have taken so far, about.
            env: the environments' numbers, counted over all runners.
            envs: the number of environments of all runners.
        """
        epsilon = self.start + (self.end - self.start) * jnp.clip(step / self.steps, 0, 1)
        # With one environment there is nothing to spread over, and no division by 0.
        return epsilon ** (1 + self.spread * env / max(envs - 1, 1))

    def noise(self, head: Head, key: Array, n: int, step: Array, env: Array, envs: int) -> Array:
        """Return the noise ``[n, choices + parts]`` of one step of n environments.

        Of the first numbers, the largest of each part's choices is its random action; the last
        numbers are below 0 for the parts that take it.
        """
        # Both decisions are made here, so that `pick` needs no random key.
        action_key, choice_key = jax.random.split(key)
        chances = jax.random.uniform(choice_key, (n, len(head.sizes)))
        exploring = chances - self.epsilon(step, env, envs)[:, None]
        return jnp.concatenate(
            [jax.random.uniform(action_key, (n, head.choices)), exploring], axis=1
        )

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """Return the greedy choice of each part, or the random one where the noise says so."""
        choices = cast("Categorical | MultiCategorical", dist)
        greedy, size = choices.mode(), choices.logits.shape[-1]
        # What a mask rules out is no random action, either.
        chances = jnp.where(choices.logits > RULED_OUT, noise[:, :size], -1)
        random = replace(choices, logits=chances).mode()
        return jnp.where(noise[:, size:].reshape(greedy.shape) < 0, random, greedy)


@dataclass(frozen=True)
class GaussianNoise(Explore):
    """Greedy action with normal noise added, clipped to [-1, 1] (TD3, Fujimoto et al. 2018).

    Args:
        deviation: standard deviation of the noise, where 1 is half the range of an action; at least
            0 (default 0.1).

    Raises:
        SettingError: the deviation is negative.
    """

    deviation: float = 0.1

    def __post_init__(self) -> None:
        check_not_negative(self, "deviation")

    def check(self, head: Head) -> str:
        """Return what is wrong unless actions are numbers between finite bounds."""
        return _unbounded("GaussianNoise", head)

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """Return the greedy action with the scaled noise added, clipped to [-1, 1]."""
        # Actions of the policy stand for [-1, 1]; beyond that the bounds would clip them.
        return jnp.clip(dist.mode() + self.deviation * noise, -1, 1)


@dataclass(frozen=True)
class RandomStart(Explore):
    """Uniformly random actions at first, and then those of another exploration.

    What a replay holds at first then covers all actions (Fujimoto et al. 2018, appendix C).

    Args:
        steps: environment steps whose actions are random, of all environments of all runners
            together, about.
        then: the exploration after them, such as `GaussianNoise` (default `Sampled`).

    Raises:
        SettingError: `steps` is below 0.
    """

    steps: int
    then: Explore = Sampled()

    def __post_init__(self) -> None:
        check_not_negative(self, "steps")

    @property
    def last(self) -> Explore:
        """The one that remains of the exploration after the random steps."""
        return self.then.last

    def of_agents(self, agents: int) -> RandomStart:
        """Return it for a policy that acts for several agents of an environment."""
        return replace(self, steps=self.steps * agents, then=self.then.of_agents(agents))

    def check(self, head: Head) -> str:
        """Return what is wrong unless actions are numbers between finite bounds."""
        if self.then.noisy:
            return f"RandomStart takes no {type(self.then).__name__}, whose noise is in the weights"
        return _unbounded("RandomStart", head) or self.then.check(head)

    def noise(self, head: Head, key: Array, n: int, step: Array, env: Array, envs: int) -> Array:
        """Return the noise ``[n, width + 1 + m]`` of one step of n environments.

        The first numbers are the random action, the next one is 1 where it is taken and else 0, and
        the m last ones are the noise of the other exploration.
        """
        random_key, key = jax.random.split(key)
        random = jax.random.uniform(random_key, (n, head.width), minval=-1, maxval=1)
        # Runners in JAX draw a whole rollout at once, whose rows are of different steps.
        taken = jnp.broadcast_to(step < self.steps, n)[:, None].astype(jnp.float32)
        return jnp.concatenate(
            [random, taken, self.then.noise(head, key, n, step, env, envs)], axis=1
        )

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """Return the random action where the noise says so, else that of the other exploration."""
        width = dist.mode().shape[-1]
        random, taken, rest = jnp.split(noise, [width, width + 1], axis=1)
        return jnp.where(taken > 0, random, self.then.pick(dist, rest))


def _unbounded(name: str, head: Head) -> str:
    """Return why an exploration can't act with such actions; empty for a Box of finite bounds."""
    if not head.continuous:
        return f"{name} is for actions in a Box; take EpsilonGreedy or Sampled for others"
    if head.bounded:
        return ""
    return (
        f"{name} keeps actions in [-1, 1], stretched over the bounds of the action "
        "space, but some of these are not finite; give it finite ones by a wrapper "
        "(gymnasium.wrappers.TransformAction), or take Sampled"
    )


@dataclass(frozen=True)
class NoisyWeights(Explore):
    """Greedy actions of a policy with noise in its weights (Fortunato et al. 2018).

    The policy has noisy layers (`fl.networks.NoisyLinear`), which learn how much noise there is.
    Each step of each environment has noise of its own. It has no settings.
    """

    noisy: ClassVar[bool] = True

    def noise(self, head: Head, key: Array, n: int, step: Array, env: Array, envs: int) -> Array:
        """Return random bits ``uint32[n, 2]``, from which all noise of an environment comes."""
        return jax.random.bits(key, (n, 2))

    def pick(self, dist: Distribution, noise: Array) -> Array:
        """Return the greedy action: the noise is in the distribution already."""
        return dist.mode()
