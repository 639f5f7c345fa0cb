"""Whole episodes played with a policy, greedily or with actions that are drawn from it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from flowrl.core.compiled import jitted
from flowrl.envs.gym_envs import Make, autoreset_mode, env_name, guarded, make_env
from flowrl.errors import EnvironmentFailed, SettingError, raised
from flowrl.rl.explore import Explore
from flowrl.rl.policies import SAMPLED, Memory, Network, jitted_act

Array = np.ndarray[Any, Any]

MAX_STEPS = 30_000
"""The steps after which an evaluated episode is cut, so that an environment without an end does not play for ever.

It is above the longest limit in common use, that of Atari games, which is 27,000 steps (108,000 frames).
"""
CHUNK = 64
"""Steps whose random numbers are drawn by one call."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The episodes of an evaluation. It counts as the array of their returns: it has their `mean` and so on, and NumPy takes it for them.

    Args:
        returns: ``float64[episodes]``, the sums of rewards.
        lengths: ``int64[episodes]``, in steps.
        cut: ``bool[episodes]``: the episode had not ended after `max_steps`, so its return is the return until then.
        digests: ``uint64[episodes]``, of all observations and rewards: episodes with equal ones are copies of each other.
        max_steps: of an episode.
        sampled: actions were drawn by chance, not chosen greedily.
    """

    returns: Array
    lengths: Array
    cut: Array
    digests: Array
    max_steps: int = MAX_STEPS
    sampled: bool = False

    @staticmethod
    def join(parts: Sequence[Evaluation]) -> Evaluation:
        """The episodes of several evaluations as those of one."""
        names = ("returns", "lengths", "cut", "digests")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return Evaluation(**joined, max_steps=parts[0].max_steps, sampled=parts[0].sampled)

    @staticmethod
    def empty(episodes: int, max_steps: int = MAX_STEPS, sampled: bool = False) -> Evaluation:
        """Episodes that are still to be played."""
        returns, lengths, digests = (
            np.zeros(episodes),
            np.zeros(episodes, np.int64),
            np.zeros(episodes, np.uint64),
        )
        return Evaluation(returns, lengths, np.zeros(episodes, bool), digests, max_steps, sampled)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.returns, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.returns)

    def __getitem__(self, index: Any) -> Any:
        return self.returns[index]

    def __iter__(self) -> Iterator[float]:
        return iter(self.returns.tolist())

    def mean(self) -> float:
        """The mean of the returns."""
        return float(self.returns.mean())

    def std(self) -> float:
        """Their standard deviation."""
        return float(self.returns.std())

    def min(self) -> float:
        """The smallest of them."""
        return float(self.returns.min())

    def max(self) -> float:
        """The largest of them."""
        return float(self.returns.max())

    @property
    def different_returns(self) -> int:
        """How many different returns there are."""
        return len(np.unique(self.returns))

    @property
    def different(self) -> int:
        """How many different episodes there are: the others are copies of these, in every observation and reward."""
        return len(np.unique(self.digests))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the mean must know: how many episodes were cut, and how many are copies."""
        notes, count, cut = [], len(self), int(self.cut.sum())
        if cut:
            text = f"{cut} of {count} episode{'s' * (count > 1)} did not end within {self.max_steps:,} steps and {'was' if cut == 1 else 'were'} cut"
            notes.append(
                f"{text}; the return is that of the steps until then (max_steps raises the bound)"
            )
        if self.different < count:
            text = (
                f"only {self.different} of the {count} episodes differ in any observation or reward"
            )
            if not self.sampled:
                text += ", and copies are no further samples: where the environment starts in few ways, greedy=False (--sampled) plays each differently"
            notes.append(text)
        return tuple(notes)

    def __str__(self) -> str:
        count, returns = len(self), self.different_returns
        head = (
            f"{count} episodes, {returns} different return{'s' * (returns > 1)}"
            if count > 1
            else "1 episode"
        )
        return f"{head}: mean {self.mean():.1f}, std {self.std():.1f}, min {self.min():.1f}, max {self.max():.1f}"


def noise_of(seeds: Any, first: Any, *, net: Network, explore: Explore) -> Any:
    """The noise ``[CHUNK, n, ...]`` of the next steps of n episodes, by the seeds ``uint32[n]`` of these and the number of the first step.

    Each step of each episode has a random key of its own, so an episode is the same however many are played beside it.
    """

    def draw(seed: Any, step: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return explore.noise(net.head, key, 1, jnp.float32(0), jnp.zeros(1, jnp.int32), 1)[0]

    steps = first + jnp.arange(CHUNK, dtype=jnp.uint32)
    return jax.vmap(lambda step: jax.vmap(lambda seed: draw(seed, step))(seeds))(steps)


class _Player:
    """Plays rounds of episodes, one in each environment of a vector, all of which begin together."""

    def __init__(
        self,
        env: Make,
        vector: VectorEnv[Any, Any, Any],
        net: Network,
        weights: Any,
        explore: Explore | None,
    ) -> None:
        self.env = env
        self.vector = vector
        self.net = net
        self.weights = jax.device_put(weights)
        self.fresh = net.memory(self.weights, vector.num_envs)
        self.act = jitted_act(net, explore or SAMPLED)
        self.draws = (
            None if explore is None else jitted(noise_of, (), ("net", net), ("explore", explore))
        )
        self.mode = autoreset_mode(vector, env) if vector.num_envs > 1 else AutoresetMode.NEXT_STEP

    def call(self, verb: str, *args: Any, **named: Any) -> Any:
        """Call the vector; what it raises names it."""
        try:
            return getattr(self.vector, verb)(*args, **named)
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise EnvironmentFailed(
                f"{env_name(self.env)} raised in {verb}: {raised(error)}"
            ) from error

    def round(self, found: Evaluation, first: int, seed: int) -> None:
        """Play the episodes from number `first` on, of which environment i plays number i, and fill them in.

        A column counts until its first end. It goes on until the others have ended, but that is nobody's: to take what ends first
        would prefer short episodes.
        """
        count = self.vector.num_envs
        obs = self.call("reset", seed=seed + first)[0]
        seeds = np.array([(seed + first + i) % 2**32 for i in range(count)], np.uint32)
        live = np.arange(first, first + count) < len(found)
        memory, noise = self.fresh, None
        sums = [hashlib.blake2b(digest_size=8) for _ in range(count)]
        for step in range(found.max_steps):
            if self.draws is not None:
                if step % CHUNK == 0:
                    drawn = np.asarray(self.draws(seeds, np.uint32(step)))
                noise = drawn[step % CHUNK]
            obs = np.asarray(obs, self.net.spaces.obs_dtype)
            packed, carry = self.act(self.weights, obs, noise, memory)
            if self.net.recurrent:
                memory = Memory(carry, np.zeros(count, bool))
            action = self.net.head.to_env(self.net.unpack(np.asarray(packed))[0])
            playing = np.flatnonzero(live)
            for i in playing:
                sums[i].update(obs[i].tobytes())
            obs, reward, terminated, truncated, _ = self.call("step", action)
            for i in playing:
                sums[i].update(np.float64(reward[i]).tobytes())
            found.returns[first + playing] += reward[playing]
            found.lengths[first + playing] += 1
            ended = np.asarray(terminated | truncated, bool)
            live &= ~ended
            if not live.any():
                break
            if self.mode is AutoresetMode.DISABLED and ended.any():
                obs = self.call("reset", options={"reset_mask": ended})[0]
        found.cut[first + np.flatnonzero(live)] = True
        mine = range(min(count, len(found) - first))
        found.digests[first : first + len(mine)] = [int.from_bytes(sums[i].digest()) for i in mine]


def play(
    env: Make,
    net: Network,
    weights: Any,
    episodes: int,
    seed: int,
    wrappers: tuple[Callable[[Any], Any], ...],
    settings: Mapping[str, Any],
    *,
    explore: Explore | None = None,
    max_steps: int = MAX_STEPS,
) -> Evaluation:
    """Play whole episodes, in what runners sample from; episode number i begins with the seed `seed` + i.

    Args:
        env: the environment, or a function that makes a vector, whose columns then play side by side.
        net: the policy.
        weights: its weights.
        episodes: how many.
        seed: of the first episode.
        wrappers: put around the environment.
        settings: for making it.
        explore: how actions are drawn; None for the greedy ones.
        max_steps: of an episode, which is cut after so many.

    Raises:
        SettingError: `episodes` or `max_steps` is below 1.
        EnvironmentFailed: the environment raised, or broke its declared shape or type.
    """
    if episodes < 1 or max_steps < 1:
        raise SettingError(
            f"episodes and max_steps must be at least 1, got episodes={episodes}, max_steps={max_steps}"
        )
    made = make_env(env, 1, wrappers, settings)
    vector = made if isinstance(made, VectorEnv) else guarded(env, [made])
    found = Evaluation.empty(episodes, max_steps, explore is not None)
    try:
        player = _Player(env, vector, net, weights, explore)
        for first in range(0, episodes, vector.num_envs):
            player.round(found, first, seed)
    finally:
        vector.close()
    return found
