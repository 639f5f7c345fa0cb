"""`play`: whole episodes with a policy, greedily or with actions sampled from it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from flowrl.core.compiled import jitted
from flowrl.core.row_json import plain_number
from flowrl.core.texts import decimal, plural
from flowrl.envs.gym_envs import Make, autoreset_mode, env_name, guarded, make_env, one_agent
from flowrl.envs.masks import as_declared
from flowrl.errors import EnvError, SettingError, raised
from flowrl.rl.explore import Explore
from flowrl.rl.jitted_acting import jitted_act
from flowrl.rl.policies import SAMPLED, Memory, Network
from flowrl.rl.spaces import ACTION_MASK
from flowrl.rollout.steps_taken import StepsTaken
from flowrl.rollout.vector_checks import VectorChecks

Array = np.ndarray[Any, Any]

MAX_STEPS = 30_000
"""The steps after which an evaluated episode is cut, so that it does not go on for ever.

They are above the longest limit in common use, that of Atari games, which is 27,000 steps (108,000
frames).
"""
CHUNK = 64
"""The number of steps whose random numbers are drawn by one call."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The episodes of an evaluation.

    It counts as the array of their returns: it has their `mean` and so on, and NumPy takes it for
    them.

    Args:
        returns: ``float64[episodes]``, the sums of rewards.
        lengths: ``int64[episodes]``, in steps.
        cut: ``bool[episodes]``: the episode had not ended after `max_steps`, so its return is the
            return until then.
        digests: ``uint64[episodes]``, of all observations and rewards: episodes with equal ones are
            copies of each other.
        max_steps: steps after which an episode was cut (default 30_000).
        sampled: whether actions were those of the stochastic policy, not greedy (default False).
    """

    returns: Array
    lengths: Array
    cut: Array
    digests: Array
    max_steps: int = MAX_STEPS
    sampled: bool = False

    @staticmethod
    def join(parts: Sequence[Evaluation]) -> Evaluation:
        """Return the episodes of several evaluations as those of one."""
        names = ("returns", "lengths", "cut", "digests")
        joined = {}
        for name in names:
            joined[name] = np.concatenate([getattr(part, name) for part in parts])
        return Evaluation(**joined, max_steps=parts[0].max_steps, sampled=parts[0].sampled)

    @staticmethod
    def empty(episodes: int, max_steps: int = MAX_STEPS, sampled: bool = False) -> Evaluation:
        """Return an evaluation whose episodes are still to be played."""
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
        """Return the mean of the returns."""
        return float(self.returns.mean())

    def std(self) -> float:
        """Return the standard deviation of the returns."""
        return float(self.returns.std())

    def min(self) -> float:
        """Return the smallest return."""
        return float(self.returns.min())

    def max(self) -> float:
        """Return the largest return."""
        return float(self.returns.max())

    @property
    def different_returns(self) -> int:
        """The number of different returns."""
        return len(np.unique(self.returns))

    @property
    def different(self) -> int:
        """The number of different episodes.

        The others are copies of these, in every observation and reward.
        """
        return len(np.unique(self.digests))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how many episodes were cut or are copies of others, if any are."""
        notes, count, cut = [], len(self), int(self.cut.sum())
        if cut:
            were = "was" if cut == 1 else "were"
            notes.append(
                f"{cut} of {count} {plural(count, 'episode')} did not end within "
                f"{self.max_steps:,} steps and {were} cut; the return is that of the steps until "
                "then (max_steps raises the bound)"
            )
        if self.different < count:
            note = (
                f"only {self.different} of the {count} episodes differ in any observation or reward"
            )
            # A greedy policy in an environment without chance plays the same episode again.
            if not self.sampled:
                note += (
                    ", and copies are no further samples: where the environment starts in few "
                    "ways, greedy=False (--sampled) plays each differently"
                )
            notes.append(note)
        return tuple(notes)

    def plain(self) -> dict[str, Any]:
        """Return all that is known of the episodes as plain values, for JSON.

        Infinite returns are texts and NaN is None, as in rows.jsonl.
        """
        summary = {"mean": self.mean(), "std": self.std(), "min": self.min(), "max": self.max()}
        return {
            "episodes": len(self),
            "max_steps": self.max_steps,
            **{name: plain_number(x) for name, x in summary.items()},
            "cut_episodes": int(self.cut.sum()),
            "different_episodes": self.different,
            "returns": [plain_number(x) for x in self],
            "lengths": self.lengths.tolist(),
            "cut": self.cut.tolist(),
        }

    def __str__(self) -> str:
        count, returns = len(self), self.different_returns
        head = (
            f"{count} episodes, {returns} different {plural(returns, 'return')}"
            if count > 1
            else "1 episode"
        )
        found = {"mean": self.mean(), "std": self.std(), "min": self.min(), "max": self.max()}
        return f"{head}: {', '.join(f'{name} {decimal(x)}' for name, x in found.items())}"


def noise_of(seeds: Any, first: Any, *, net: Network, explore: Explore) -> Any:
    """Return the noise ``[CHUNK, n, ...]`` of the next steps of n episodes.

    Each step of each episode has a random key of its own, so an episode is the same however many
    are played beside it.

    Args:
        seeds: of the episodes, ``uint32[n]``.
        first: the number of the first step.
        net: the policy.
        explore: how actions are picked.
    """

    def noise(seed: Any, step: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), step)
        # Step and environment are 0, for what evaluations explore by (`Sampled`, or a constant
        # epsilon) depends on neither.
        return explore.noise(net.head, key, 1, jnp.float32(0), jnp.zeros(1, jnp.int32), 1)[0]

    steps = first + jnp.arange(CHUNK, dtype=jnp.uint32)
    return jax.vmap(lambda step: jax.vmap(lambda seed: noise(seed, step))(seeds))(steps)


class _Player:
    """Plays rounds of episodes, one in each environment of a vector.

    The episodes of a round all begin together.

    Args:
        env: the environment, which errors name.
        vector: the environments.
        net: the policy.
        weights: its weights.
        explore: how actions are picked; None for the greedy ones.
    """

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
        self.noise_of_chunk = (
            None if explore is None else jitted(noise_of, (), ("net", net), ("explore", explore))
        )
        self.chunk: Array = np.empty(0)
        """The noise of the steps from the last multiple of `CHUNK` on."""
        # A single environment is not played on after its end, so its mode does not matter.
        self.mode = autoreset_mode(vector, env) if vector.num_envs > 1 else AutoresetMode.NEXT_STEP
        self.taken = StepsTaken(vector.num_envs, self.mode)
        self.checks = VectorChecks(env_name(env), net.spaces, vector.num_envs)

    @contextmanager
    def _within(self, verb: str) -> Iterator[None]:
        """Name the environment and its step in whatever it raises within the context."""
        try:
            yield
        except EnvError as error:
            self.taken.located(error)
            raise
        except Exception as error:
            name = env_name(self.env)
            raise self.taken.located(
                EnvError(f"{name} raised in {verb}: {raised(error)}")
            ) from error

    def _reset(self, which: Array | None = None, **how: Any) -> dict[str, Array]:
        """Reset all environments, or those ``bool[B]``, and return the observations of all."""
        self.taken.reset(which)
        with self._within("reset"):
            obs, _ = self.checks.values(self.vector.reset(**how), "reset")
            return self.checks.obs(obs, "reset")

    def _step(self, action: Any) -> tuple[dict[str, Array], Array, Array]:
        """Step all environments; return observations to act on, rewards, and whose episode ended.

        Other modes than DISABLED reset by themselves.
        """
        checks, taken = self.checks, self.taken
        taken.step()
        with self._within("step"):
            found = checks.values(self.vector.step(action), "step")
            obs, reward, *flags, _ = found
            reward = checks.rewards(reward)
            terminated = checks.flags("terminated", flags[0])
            truncated = checks.flags("truncated", flags[1])
            seen = checks.obs(obs, "step")
        ended = np.asarray(terminated | truncated, bool)
        taken.took(ended)
        if self.mode is AutoresetMode.SAME_STEP:
            taken.begun_again()
        return seen, reward, ended

    def _check_allowed(self, seen: Mapping[str, Array], playing: Array) -> None:
        """Raise an error if a mask allows no action where one of the environments `playing` acts.

        Raises:
            EnvError: with the environment and its step.
        """
        nothing = self.net.spaces.nothing_allowed(seen)
        if nothing is None or not nothing[playing].any():
            return
        name, wrong = env_name(self.env), int(playing[nothing[playing]][0])
        raise self.taken.located(
            EnvError(
                f"environment {wrong} of {name} allows no action: its {ACTION_MASK} is 0 for every "
                "choice; let it allow one, or end the episode",
                what=name,
                within=wrong,
                field=ACTION_MASK,
            )
        )

    def round(self, found: Evaluation, first: int, seed: int) -> None:
        """Play the episodes from number `first` on, and write them into `found`.

        Environment i plays the episode with number `first` + i. A column counts until its first
        end. It goes on until the others have ended, but those steps count for nothing: to take what
        ends first would prefer short episodes.

        Args:
            found: the evaluation, of which the episodes are a part.
            first: the number of the first episode.
            seed: that of the evaluation.
        """
        count = self.vector.num_envs
        seen = self._reset(seed=seed + first)
        seeds = np.array([(seed + first + i) % 2**32 for i in range(count)], np.uint32)
        # The last round may have more environments than there are episodes left.
        live = np.arange(first, first + count) < len(found)
        memory, spaces = self.fresh, self.net.spaces
        digests = [hashlib.blake2b(digest_size=8) for _ in range(count)]
        for step in range(found.max_steps):
            playing = np.flatnonzero(live)
            self._check_allowed(seen, playing)
            packed, carry = self.act(
                self.weights, spaces.tree(seen), self._noise(seeds, step), memory
            )
            if self.net.recurrent:
                memory = Memory(carry, np.zeros(count, bool))
            action = self.net.head.to_env(self.net.unpack(np.asarray(packed))[0])
            # By digests of all that the policy saw and got, copies of an episode are found.
            for i in playing:
                for x in seen.values():
                    digests[i].update(x[i].tobytes())
            seen, reward, ended = self._step(action)
            for i in playing:
                digests[i].update(np.float64(reward[i]).tobytes())
            found.returns[first + playing] += reward[playing]
            found.lengths[first + playing] += 1
            live &= ~ended
            if not live.any():
                break
            # Other modes reset by themselves.
            if self.mode is AutoresetMode.DISABLED and ended.any():
                seen = self._reset(ended, options={"reset_mask": ended})
        found.cut[first + np.flatnonzero(live)] = True
        for column in range(min(count, len(found) - first)):
            found.digests[first + column] = int.from_bytes(digests[column].digest())

    def _noise(self, seeds: Array, step: int) -> Any:
        """Return the noise of a step of a round, or None for greedy actions."""
        if self.noise_of_chunk is None:
            return None
        if step % CHUNK == 0:
            self.chunk = np.asarray(self.noise_of_chunk(seeds, np.uint32(step)))
        return self.chunk[step % CHUNK]


def check_counts(episodes: Any, max_steps: Any) -> None:
    """Refuse numbers of episodes and of their most steps that are no whole ones of at least 1.

    Raises:
        SettingError: one is.
    """
    if not all(isinstance(x, int | np.integer) and x >= 1 for x in (episodes, max_steps)):
        raise SettingError(
            "episodes and max_steps must be whole numbers of at least 1, got "
            f"episodes={episodes!r}, max_steps={max_steps!r}"
        )


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
    """Play whole episodes, in the kind of environment that runners sample from.

    Args:
        env: the environment, or a function that makes a vector, whose columns then play side by
            side.
        net: the policy.
        weights: its weights.
        episodes: how many.
        seed: of the first episode; episode number i begins with the seed `seed` + i.
        wrappers: put around the environment.
        settings: for making it.
        explore: how actions are picked; None for the greedy ones.
        max_steps: after so many steps an episode is cut.

    Raises:
        SettingError: `episodes` or `max_steps` is no whole number of at least 1.
        EnvError: the environment raised, or broke its declared shape or type.
    """
    check_counts(episodes, max_steps)
    # A single environment becomes a vector of one.
    made = one_agent(env, make_env(env, 1, wrappers, settings))
    if isinstance(made, VectorEnv):
        vector: VectorEnv[Any, Any, Any] = as_declared(made, net.spaces, env_name(env))
    else:
        vector = guarded(env, [made], net.spaces)
    found = Evaluation.empty(episodes, max_steps, explore is not None)
    try:
        player = _Player(env, vector, net, weights, explore)
        for first in range(0, episodes, vector.num_envs):
            player.round(found, first, seed)
    finally:
        vector.close()
    return found
