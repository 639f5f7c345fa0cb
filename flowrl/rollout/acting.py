"""`Acting`: a policy that acts in the columns of a runner, and fills their rollouts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import numpy as np

from flowrl.core.clock import CONCAT, INFERENCE, WEIGHTS
from flowrl.core.compiled import jitted
from flowrl.core.items import Batch, read_only
from flowrl.core.keeping import Keeping, into, leaves
from flowrl.core.mesh import on_one
from flowrl.core.metrics import summed
from flowrl.envs.gym_envs import env_name
from flowrl.errors import EnvError
from flowrl.graph.graph import Chain
from flowrl.graph.site import alone
from flowrl.rl.jitted_acting import jitted_act, jitted_noise
from flowrl.rl.policies import Memory, Network, Weights, network
from flowrl.rollout.counters import Counters, Skipped
from flowrl.rollout.finite import (
    Place,
    all_finite,
    check_allowed,
    first_not_finite,
    not_finite_error,
)
from flowrl.rollout.local_chain import Local
from flowrl.rollout.reward_scale import RewardScale
from flowrl.rollout.sample import Episodes, Sample, numbers, seed_of

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = np.ndarray[Any, Any]
Act = Callable[..., Any]
NOISE_TURNS = 32
"""The turns whose noise is drawn in one call, at the least: a call costs more than the noise."""
COMPILING = Lock()
"""Held by the runner of a process that acts for the first time.

What it compiles serves the other runners of the process.
"""


def _on_one_device(weights: Weights) -> Weights:
    """Return weights on one device, where the runner acts even if several share the updates."""
    alone = jax.local_device_count() == 1
    if alone and all(isinstance(x, jax.Array) for part in weights for x in part.values()):
        return weights
    moved: Weights = jax.tree.map(
        lambda x: on_one(x) if isinstance(x, jax.Array) else jax.numpy.asarray(x), weights
    )
    return moved


def _sendable(x: Any) -> Any:
    """Return a value as it is sent: arrays as read-only arrays of NumPy."""
    return read_only(np.asarray(x)) if isinstance(x, jax.Array | np.ndarray) else x


class Acting(Keeping):
    """A policy that acts in the columns of a runner, by a copy of the weights.

    It decides for all columns at once; which of them take the actions is the runner's to say.

    Args:
        spec: the settings of the runners, of which `envs_per_runner` are the columns.
        name: the name by which its random numbers differ from those of others.
        seed: the run's.
        index: the number of its runner.
        restart_count: how often that was restarted.
    """

    lasting: ClassVar[tuple[str, ...]] = (
        "obs", "seed", "noise", "noise_from", "key", "turn", "version", "scale",
    )  # fmt: skip
    # Its next request carries its weights, and `localize` is called before that.
    remade: ClassVar[tuple[str, ...]] = (
        "spec", "index", "label", "spaces", "env", "network", "explore", "act", "begin",
        "make_noise", "weights", "local", "memory", "counters",
    )  # fmt: skip

    def __init__(
        self, spec: Runners, name: str, seed: int, index: int, restart_count: int = 0
    ) -> None:
        self.spec = spec
        self.index = index
        self.label = f"{name}, runner {index}"
        self.spaces = spec.spaces()
        self.obs: dict[str, Array] = {}
        """The observations to act on next, by the names of their fields."""
        self.env = numbers(index, spec.envs_per_runner)
        self.seed = seed_of(seed, name, index, restart_count)
        """The seed of the environments, of which number i is reset with this seed + i."""
        self.network: Network = network(spec.policy, spec.spaces())
        self.explore = spec.explore_of("")
        self.act: Act = jitted_act(self.network, self.explore)
        self.begin = jitted(self.network.begin, ())
        self.make_noise = jitted_noise(
            self.network,
            max(NOISE_TURNS, spec.rollout_length),
            spec.num_runners * spec.envs_per_runner,
            self.explore,
        )
        self.noise: Array = np.empty(0)
        """The noise of several turns' actions, ``[turns, envs_per_runner, ...]``."""
        self.noise_from = 0
        """The first of these turns."""
        # Plain numbers, because a typed key keeps JAX from dispatching a call the fast way.
        self.key = jax.random.key_data(_key_of(seed, name, index, restart_count))
        self.turn = 0
        """The steps that it acted so far, those of the runners whose place it took among them."""
        self.weights: Weights | None = None
        self.version = 0
        self.scale = (
            RewardScale(spec.envs_per_runner, spec.normalize_rewards)
            if spec.normalize_rewards is not None
            else None
        )
        self.local: Local | None = None

    def start(self) -> None:
        """Begin with no memory and no steps. The first request always carries weights."""
        columns = self.spec.envs_per_runner
        self.memory = self.network.memory(cast("Weights", self.weights), columns)
        self.counters = Counters(columns)

    def compile(self) -> None:
        """Compile the policy: the first runner of a process does, the others find it done."""
        with COMPILING:
            self._decide_on(self.obs, self._noise()[0])

    def keep_columns(self) -> dict[str, Any]:
        """Return what the columns remember and have counted since `start`."""
        return {"memory": leaves(self.memory), "counters": self.counters.keep()}

    def take_columns(self, kept: dict[str, Any], lost: Array) -> None:
        """Go on from what was kept of the columns, but in those ``bool[B]`` that were reset."""
        memory = into(self.memory, kept["memory"], f"{self.label}, its recurrent state")
        recurs = self.network.recurrent
        self.memory = Memory(memory.carry, memory.reset | lost) if recurs else memory
        self.counters.take(kept["counters"])
        self.counters.begin_again(lost)
        if self.scale is not None:
            self.scale.returns[lost] = 0.0

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout through these operators before it is sent."""
        self.local = Local(chain, self.network, alone(self.label, self.spec, self.seed))

    def go_on(self, turn: int) -> None:
        """Explore like a runner that has acted so many steps, whose place this one takes."""
        self.turn = turn

    def use(self, published: tuple[Weights, Any] | None) -> None:
        """Use these weights from now on.

        Args:
            published: the weights and their policy version; None to go on with those at hand.
        """
        if published is not None:
            with WEIGHTS:
                self.weights = _on_one_device(published[0])
                self.version = int(published[1])

    def _empty(self, steps: int) -> dict[str, Array]:
        """Return the arrays of a rollout, which are still to be filled."""
        rows, spaces = (steps, self.spec.envs_per_runner), self.spaces
        return {
            **{part.name: np.empty((*rows, *part.shape), part.dtype) for part in spaces.parts},
            "packed": np.empty((*rows, max(1, spaces.head.width) + 2), np.float32),
            "reward": np.empty(rows, np.float32),
            "terminated": np.empty(rows, bool),
            "truncated": np.empty(rows, bool),
            "valid": np.empty(rows, bool),
        }

    def _carry(self) -> dict[str, Array]:
        """Return the carry before the rollout's first row, as columns."""
        if not self.network.recurrent:
            return {}
        return {k: np.asarray(x) for k, x in self.begin(self.weights, self.memory).items()}

    def _decide(self) -> Array:
        """Act on the newest observations.

        The caller notes in `memory` where the next ones begin an episode.
        """
        packed, carry = self._decide_on(self.obs, self._noise_of_turn())
        if self.network.recurrent:
            self.memory = Memory(carry, np.zeros(self.spec.envs_per_runner, bool))
        return packed

    def _noise_of_turn(self) -> Array:
        """Return the noise of the next actions, and count them."""
        if not self.noise_from <= self.turn < self.noise_from + len(self.noise):
            self.noise, self.noise_from = self._noise(), self.turn
        noise: Array = self.noise[self.turn - self.noise_from]
        self.turn += 1
        return noise

    def _noise(self) -> Array:
        """Return the noise of the next turns."""
        with INFERENCE:
            return np.asarray(self.make_noise(self.key, np.uint32(self.turn), self.env))

    def _decide_on(self, obs: dict[str, Array], noise: Array) -> tuple[Array, Any]:
        """Return packed actions, log-probabilities and values, and the carry afterwards."""
        memory = (self.memory,) if self.network.recurrent else ()
        with INFERENCE:
            packed, carry = self.act(self.weights, self.spaces.tree(obs), noise, *memory)
            return np.asarray(packed), carry

    @CONCAT
    def _finish(
        self,
        data: dict[str, Array],
        last: dict[str, Array],
        carry: dict[str, Array],
        skipped: list[Skipped],
    ) -> Sample:
        """Make a sample of a filled rollout, and count it.

        Args:
            data: the arrays of the rollout, ``[T, B, ...]``.
            last: the observations ``[B, ...]`` after it, by the names of their fields.
            carry: the columns of the policy's carry before it.
            skipped: the steps that were taken after it.

        Raises:
            EnvError: an observation or a reward is not finite, or no action was allowed.
        """
        if not all_finite(data, last, skipped):
            raise self._not_finite(data, last, skipped)
        check_allowed(self.spaces, data, self.counters, self._place)
        action, logp, value = self.network.unpack(data.pop("packed"))
        # A masked row has no reward and ends nothing.
        for name in ("reward", "terminated", "truncated"):
            data[name] *= data["valid"]
        # Episodes are counted with the rewards of the environment, before these are scaled.
        episodes = self._episodes(data, skipped)
        if self.scale is not None:
            self.scale.observe(data, skipped)
            data["reward"] = self.scale(data["reward"])
        if self.spec.clip_rewards is not None:
            bound = self.spec.clip_rewards
            np.clip(data["reward"], -bound, bound, out=data["reward"])
        seen = {f"bootstrap_{name}": x for name, x in last.items()}
        columns = {**seen, **self._identity(), **carry}
        self.counters.add(data["valid"], skipped)
        batch = Batch({**data, "action": action, "logp": logp, "value": value}, columns)
        return Sample(batch, episodes)

    def _episodes(self, data: dict[str, Array], skipped: list[Skipped]) -> Episodes:
        """Return the episodes that ended in a rollout."""
        return self.counters.episodes(data, skipped)

    def sent(self, sample: Sample) -> Sample:
        """Return a sample as it is sent, after the operators at the sampler."""
        batch = sample.batch if self.local is None else self.local(self.weights, sample.batch)
        return Sample(jax.tree.map(_sendable, batch), self._measured(sample.episodes), self.turn)

    def _measured(self, episodes: Episodes) -> Episodes:
        """Add what operators at the sampler did since the last rollout."""
        metrics = summed(self.local.metrics.drain()) if self.local is not None else {}
        return replace(episodes, metrics=metrics) if metrics else episodes

    def _identity(self) -> dict[str, Array]:
        """Return the columns that say by which weights and environments a rollout came to be."""
        envs = self.spec.envs_per_runner
        return {
            "version": np.full(envs, self.version, np.int32),
            "producer": np.full(envs, self.index, np.int32),
            "env": self.env,
            "first": self.counters.rows.copy(),
        }

    def _not_finite(
        self, data: dict[str, Array], last: dict[str, Array], skipped: list[Skipped]
    ) -> EnvError:
        found = first_not_finite(data, last, skipped)
        place = self._place(found.env)
        return not_finite_error(found, data, self.counters, skipped, place, self.seed)

    def _place(self, column: int) -> Place:
        """Return which environment a column stands for."""
        return Place(env_name(self.spec.env), column, int(self.env[column]))


def key_of(seed: Any, name: str) -> jax.Array:
    """Return the random key by which runners act, each with its number folded in."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))


def _key_of(seed: int, name: str, index: int, restart_count: int) -> jax.Array:
    """Return the random key by which a runner acts; a restarted one gets another."""
    key = jax.random.fold_in(key_of(seed, name), index)
    return jax.random.fold_in(key, restart_count) if restart_count else key
