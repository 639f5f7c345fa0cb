"""`Runner`: a vector of environments and a copy of the weights; samples rollouts on demand."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from flowrl.core.clock import CONCAT, EVALUATION, INFERENCE, START, STEP, WEIGHTS, here
from flowrl.core.compiled import jitted
from flowrl.core.items import Batch, read_only
from flowrl.core.keeping import Keeping, into, leaves, writable
from flowrl.core.mesh import on_one
from flowrl.core.metrics import summed
from flowrl.envs.gym_envs import env_name
from flowrl.errors import EnvError
from flowrl.graph.graph import Chain
from flowrl.graph.site import alone
from flowrl.rl.policies import Memory, Network, Weights, jitted_act, jitted_noise, network
from flowrl.rollout.columns import column_of, copies, write
from flowrl.rollout.counters import Counters, Skipped
from flowrl.rollout.environments import Environments
from flowrl.rollout.evaluation import MAX_STEPS, Evaluation, play
from flowrl.rollout.finite import all_finite, check_allowed, first_not_finite, not_finite_error
from flowrl.rollout.local_chain import Local
from flowrl.rollout.reward_scale import RewardScale
from flowrl.rollout.sample import Episodes, Sample, numbers, seed_of

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = np.ndarray[Any, Any]


Act = Callable[..., Any]
COMPILING = Lock()
"""Held by the runner of a process that acts for the first time.

What it compiles serves the other runners of the process.
"""


def _sendable(x: Any) -> Any:
    """Return a value as it is sent: arrays as read-only arrays of NumPy."""
    return read_only(np.asarray(x)) if isinstance(x, jax.Array | np.ndarray) else x


def _on_one_device(x: Any) -> jax.Array:
    """Return an array on one device, where the runner acts even if several share the updates."""
    return on_one(x) if isinstance(x, jax.Array) else jax.numpy.asarray(x)


class Runner(Keeping):
    """Samples rollouts from its own environments, with the weights that it was given last.

    Args:
        spec: the settings of the runners.
        name: the name of the runners in the graph.
        seed: the run's.
        index: the number of this runner.
        restart_count: how often it was restarted.
    """

    lasting = ("facts", "obs", "seed", "noise", "key", "turn", "version", "scale")
    # Its next request carries its weights, and `localize` is called before that. What begins with
    # the first rollout is kept apart, and goes on from `_resumed`.
    remade = (
        "spec", "index", "label", "spaces", "env", "network", "act", "begin", "make_noise",
        "weights", "local", "environments", "_started", "_resumed", "reset_environments",
        "done", "memory", "counters",
    )  # fmt: skip

    def __init__(
        self, spec: Runners, name: str, seed: int, index: int, restart_count: int = 0
    ) -> None:
        self.spec = spec
        self.index = index
        self.label = f"{name}, runner {index}"
        self.facts = {"resource": name, "runner": index, "restart_count": restart_count}
        self.spaces = spec.spaces()
        self.environments = Environments(spec, self.spaces)
        self.obs: dict[str, Array] = {}
        """The observations to act on next, by the names of their fields."""
        self.env = numbers(index, spec.envs_per_runner)
        self.seed = seed_of(seed, name, index, restart_count)

        self.network: Network = network(spec.policy, spec.spaces())
        self.act: Act = jitted_act(self.network, spec.explore)
        self.begin = jitted(self.network.begin, ())
        self.make_noise = jitted_noise(
            self.network, spec.rollout_length, spec.num_runners * spec.envs_per_runner, spec.explore
        )
        self.noise: Array = np.empty(0)
        """The noise of a whole rollout's actions, ``[rollout_length, envs_per_runner, ...]``."""
        # Plain numbers, because a typed key keeps JAX from dispatching a call the fast way.
        self.key = jax.random.key_data(_key_of(seed, name, index, restart_count))
        self.turn = 0
        """The steps that the runner acted so far."""
        self.weights: Weights | None = None
        self.version = 0
        self.scale = (
            RewardScale(spec.envs_per_runner, spec.normalize_rewards)
            if spec.normalize_rewards is not None
            else None
        )
        self.local: Local | None = None
        self._started = False
        self.reset_environments = 0
        """Environments that could not be brought back, until the next rollout says so."""
        self._resumed: dict[str, Any] | None = None
        """What was kept of its environments and episodes, until they begin."""

    def close(self) -> None:
        """Close the environments."""
        self.environments.close()

    @property
    def vector(self) -> Any:
        """The environments, made at first use."""
        return self.environments.vector

    def keep(self) -> Any:
        """Return what lasts: the environments too, if they have begun."""
        if not self._started:
            return {**super().keep(), "begun": self._resumed}
        begun = {
            "environments": self.environments.keep(),
            "done": self.done,
            "memory": leaves(self.memory),
            "counters": self.counters.keep(),
        }
        return {**super().keep(), "begun": begun}

    def take(self, state: Any) -> None:
        """Go on from what was kept, once the next request brings weights."""
        state = writable(state)
        super().take({name: state[name] for name in self.lasting})
        self._resumed = state["begun"]

    def _start(self) -> None:
        """Reset the environments for the first time, and compile the policy."""
        if self._started:
            return
        envs = self.spec.envs_per_runner
        self.environments.begin()
        # The first request to a runner always carries weights.
        self.memory = self.network.memory(cast("Weights", self.weights), envs)
        self.counters = Counters(envs)
        if self._resumed is None:
            self.obs = self.environments.reset(seed=self.seed)
            self.done = np.zeros(envs, bool)
        else:
            self._go_on_from(self._resumed)
        # The first runner of a process compiles, and the others then find it done.
        with COMPILING:
            self._decide_on(self.obs, self._noise()[0])
        self._started = True

    def _go_on_from(self, begun: dict[str, Any]) -> None:
        """Bring environments and episodes back to where they were."""
        # Those that are reset begin another episode than any before.
        seed = (self.seed + self.turn) % 2**31
        lost = self.environments.bring_back(begun["environments"], seed, self.obs)
        self.done = begun["done"] & ~lost
        memory = into(self.memory, begun["memory"], f"{self.label}, its recurrent state")
        recurs = self.network.recurrent
        self.memory = Memory(memory.carry, memory.reset | lost) if recurs else memory
        self.counters.take(begun["counters"])
        self.counters.begin_again(lost)
        self.reset_environments = int(lost.sum())
        self._resumed = None

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout through these operators before it is sent."""
        self.local = Local(chain, self.network, alone(self.label, self.spec))

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
                self.weights = jax.tree.map(_on_one_device, published[0])
                self.version = int(published[1])

    def sample(self, published: tuple[Weights, Any] | None) -> Sample:
        """Return the next rollout ``[rollout_length, envs_per_runner]`` and its episodes.

        Args:
            published: weights to act with and their policy version; None for those at hand.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
        """
        self.use(published)
        try:
            with START:
                self._start()
            with STEP:
                sample = (
                    self._fill_next_step()
                    if self.environments.mode is AutoresetMode.NEXT_STEP
                    else self._fill_same_step()
                )
        except EnvError as error:
            self._locate(error)
            raise
        with CONCAT:
            batch = sample.batch if self.local is None else self.local(self.weights, sample.batch)
            here().mark("returned", "")
            return Sample(jax.tree.map(_sendable, batch), self._measured(sample.episodes))

    def _locate(self, error: EnvError) -> None:
        """Add to an error whose environment failed, and how it was seeded."""
        error.message = f"{self.label}: {error.message}"
        if (within := error.facts.get("within")) is not None:
            error.facts["env"] = int(self.env[within])
            # Only of Gymnasium's own vector is it known that number i is seeded with seed + i.
            if isinstance(self.vector, SyncVectorEnv):
                error.facts["seed"] = self.seed + within
        error.facts = {**self.facts, "runner_seed": self.seed, **error.facts}

    def _measured(self, episodes: Episodes) -> Episodes:
        """Add what environments and operators at the sampler did since the last rollout."""
        if self.reset_environments:
            episodes = replace(episodes, reset=self.reset_environments)
            self.reset_environments = 0
        metrics = summed(self.local.metrics.drain()) if self.local is not None else {}
        of_infos, other_keys = self.environments.measured()
        if not (metrics or of_infos or other_keys):
            return episodes
        return replace(episodes, metrics={**metrics, **of_infos}, infos=other_keys)

    def evaluate(
        self,
        published: tuple[Weights, Any] | None,
        episodes: int,
        seed: int,
        max_steps: int = MAX_STEPS,
    ) -> Evaluation:
        """Play whole episodes greedily, in environments made for them.

        Args:
            published: weights to act with and their policy version; None for those at hand.
            episodes: how many.
            seed: of the first episode.
            max_steps: after so many steps an episode is cut.
        """
        self.use(published)
        spec = self.spec
        with EVALUATION:
            return play(
                spec.env,
                self.network,
                self.weights,
                episodes,
                seed,
                spec.wrappers,
                spec.env_settings,
                max_steps=max_steps,
            )

    # -- filling a rollout

    def _fill_next_step(self) -> Sample:
        """Sample from environments whose reset takes a step of its own, which is a masked row."""
        steps = self.spec.rollout_length
        data, carry = self._empty(steps), self._carry()
        acts, reward, terminated, truncated, valid = (
            data[k] for k in ("packed", "reward", "terminated", "truncated", "valid")
        )
        valid[0] = ~self.done
        for t in range(steps):
            packed = self._decide()
            for name, x in self.obs.items():
                data[name][t] = x
            acts[t] = packed
            self.obs, reward[t], terminated[t], truncated[t], _ = self._step(packed)
            if self.network.recurrent:
                # `done` is still that of the step before: the row after an end is masked, and only
                # the row after that begins an episode with a new carry.
                self.memory = Memory(self.memory.carry, self.done)
                self.done = terminated[t] | truncated[t]
        # The row after an end is the reset, so it is no step.
        np.logical_not(terminated[:-1] | truncated[:-1], out=valid[1:])
        self.done = terminated[-1] | truncated[-1]
        return self._finish(data, copies(self.obs), carry, [])

    def _fill_same_step(self) -> Sample:
        """Sample in the other two autoreset modes, and bring the rollout to that of NEXT_STEP.

        Each column gets a masked row of its own for a final observation. A column in which more
        episodes end is full sooner; the steps that it then takes while others fill up are skipped.
        """
        steps, envs = self.spec.rollout_length, self.spec.envs_per_runner
        data, carry = self._empty(steps), self._carry()
        data["valid"][:] = False
        row, last = np.zeros(envs, int), copies(self.obs)
        skipped: list[Skipped] = []
        while (row < steps).any():
            packed = self._decide()
            unfilled = np.flatnonzero(row < steps)
            # The step of a column that was full before is in no rollout. Its observation is copied
            # first, for a vector may write the next one to the same place.
            full = np.flatnonzero(row >= steps)
            acted_on = [column_of(self.obs, column) for column in full.tolist()]
            at = (row[unfilled], unfilled)
            write(data, at, self.obs, packed=packed)
            data["valid"][at] = True
            obs, reward, terminated, truncated, final = self._step(packed)
            write(data, at, {}, reward=reward, terminated=terminated, truncated=truncated)
            over = terminated | truncated
            led_to = [column_of(final, column) for column in full.tolist()]
            skipped.extend(map(Skipped, full.tolist(), reward[full], over[full], acted_on, led_to))
            row[unfilled] += 1
            for name, x in last.items():
                x[unfilled] = final[name][unfilled]
            self.obs = obs
            # A final observation gets a masked row, unless it comes after the last row.
            ended = unfilled[over[unfilled] & (row[unfilled] < steps)]
            if len(ended):
                self._write_final_obs(data, (row[ended], ended), final)
                row[ended] += 1
                for name, x in last.items():
                    x[ended] = obs[name][ended]
            self.memory = Memory(self.memory.carry, over) if self.network.recurrent else self.memory
        sample = self._finish(data, last, carry, skipped)
        # An episode that ended with the last row has no masked row: its final observation is
        # `bootstrap_obs`. Its place is counted all the same, so that a replay does not put the
        # first observation of the next episode there.
        self.counters.rows += data["terminated"][-1] | data["truncated"][-1]
        return sample

    def _write_final_obs(
        self, data: dict[str, Array], at: tuple[Array, Array], final: dict[str, Array]
    ) -> None:
        """Write masked rows with final observations, and what the policy would do there.

        Args:
            data: the rollout.
            at: the rows and their columns.
            final: the observations ``[B, ...]`` that the last step led to.
        """
        # Any noise will do, for this action is never taken: only the value counts.
        packed, _ = self._decide_on(final, self.noise[0])
        write(data, at, final, packed=packed)
        data["reward"][at], data["terminated"][at], data["truncated"][at] = 0.0, False, False

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
        at = self.turn % self.spec.rollout_length
        if at == 0:
            self.noise = self._noise()
        self.turn += 1
        packed, carry = self._decide_on(self.obs, self.noise[at])
        if self.network.recurrent:
            self.memory = Memory(carry, np.zeros(self.spec.envs_per_runner, bool))
        return packed

    def _noise(self) -> Array:
        """Return the noise of the next steps, as many as a rollout has."""
        with INFERENCE:
            return np.asarray(self.make_noise(self.key, np.uint32(self.turn), self.env))

    def _decide_on(self, obs: dict[str, Array], noise: Array) -> tuple[Array, Any]:
        """Return packed actions, log-probabilities and values, and the carry afterwards."""
        memory = (self.memory,) if self.network.recurrent else ()
        with INFERENCE:
            packed, carry = self.act(self.weights, self.spaces.tree(obs), noise, *memory)
            return np.asarray(packed), carry

    def _step(
        self, packed: Array
    ) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Array]]:
        """Step all environments by packed actions; what it returns is that of `Environments`."""
        return self.environments.step(self.network.head.to_env(self.network.unpack(packed)[0]))

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
        check_allowed(self.spaces, data, env_name(self.spec.env))
        action, logp, value = self.network.unpack(data.pop("packed"))
        # A masked row has no reward and ends nothing.
        for name in ("reward", "terminated", "truncated"):
            data[name] *= data["valid"]
        # Episodes are counted with the rewards of the environment, before these are scaled.
        episodes = self.counters.episodes(data, skipped)
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
        return not_finite_error(
            found,
            data,
            self.counters,
            skipped,
            env_name=env_name(self.spec.env),
            env_number=self.env[found.env],
            seed=self.seed,
        )


def _key_of(seed: int, name: str, index: int, restart_count: int) -> jax.Array:
    """Return the random key by which a runner acts; a restarted one gets another."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    key = jax.random.fold_in(key, index)
    return jax.random.fold_in(key, restart_count) if restart_count else key
