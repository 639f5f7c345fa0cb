"""One runner at work: a vector of environments, a copy of the weights, fragments on demand."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from flowrl.core.clock import CONCAT, EVALUATION, INFERENCE, RESET, START, STEP, WEIGHTS, here
from flowrl.core.compiled import jitted
from flowrl.core.items import Batch, read_only
from flowrl.core.mesh import on_one
from flowrl.core.metrics import summed
from flowrl.envs.gym_envs import env_name, make_vector
from flowrl.errors import EnvironmentFailed, raised
from flowrl.graph.graph import Chain
from flowrl.graph.site import alone
from flowrl.rl.policies import Memory, Network, Weights, jitted_act, jitted_noise, network
from flowrl.rollout.evaluation import MAX_STEPS, Evaluation, play
from flowrl.rollout.infos import Infos
from flowrl.rollout.local_chain import Local
from flowrl.rollout.reward_scale import RewardScale
from flowrl.rollout.sample import Episodes, Sample, numbers, seed_of

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = np.ndarray[Any, Any]


Act = Callable[..., Any]
COMPILING = Lock()
"""Held by the runner of a process that acts for the first time: what it compiles serves the others."""


def _sent(x: Any) -> Any:
    """As it is sent: arrays of NumPy that nobody may write to."""
    return read_only(np.asarray(x)) if isinstance(x, jax.Array | np.ndarray) else x


def _here(x: Any) -> jax.Array:
    """An array on one device: a runner acts there alone, even if several share the learner's updates."""
    return on_one(x) if isinstance(x, jax.Array) else jax.numpy.asarray(x)


class Runner:
    """Samples fragments ``[fragment, envs]`` from its own environments with the weights that it was given last."""

    def __init__(
        self, spec: Runners, name: str, seed: int, index: int, restart_count: int = 0
    ) -> None:
        self.spec = spec
        self.index = index
        self.label = f"{name}, runner {index}"
        self.network: Network = network(spec.policy, spec.spaces())
        self.act: Act = jitted_act(self.network, spec.explore)
        self.draw = jitted_noise(
            self.network, spec.rollout_length, spec.num_runners * spec.envs_per_runner, spec.explore
        )
        self.env = numbers(index, spec.envs_per_runner)
        self.noise: Array = np.empty(0)
        self.begin = jitted(self.network.begin, ())
        self.spaces = spec.spaces()
        self.seed = seed_of(seed, name, index, restart_count)
        self.facts = {"resource": name, "runner": index, "incarnation": restart_count}
        self.key = jax.random.fold_in(
            jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode())), index
        )
        self.key = jax.random.fold_in(self.key, restart_count) if restart_count else self.key
        self.key = jax.random.key_data(self.key)  # typed keys cost a call of `act` a third more
        self.shape = (spec.envs_per_runner, *(self.spaces.obs.shape or ()))
        self.obs_dtype = self.spaces.obs_dtype
        self.turn = 0
        self.weights: Weights | None = None
        self.version = 0
        self.scale = (
            RewardScale(spec.envs_per_runner, spec.normalize_rewards)
            if spec.normalize_rewards
            else None
        )
        self._started = False
        self.local: Local | None = None
        self.infos: Infos | None = None

    def close(self) -> None:
        """Close the environments."""
        if "vector" in self.__dict__:  # made, be it that its first reset failed
            self.__dict__.pop(
                "vector"
            ).close()  # and let go of: those of Atari games end their threads only then

    @cached_property
    def vector(self) -> Any:
        """The environments, made at first use."""
        return make_vector(
            self.spec.env, self.spec.envs_per_runner, self.spec.wrappers, self.spec.env_settings
        )

    def _start(self) -> None:
        if self._started:
            return
        self.mode = AutoresetMode(self.vector.metadata["autoreset_mode"])
        if self.spec.metrics:
            self.infos = Infos(
                self.spec.metrics, self.spec.envs_per_runner, env_name(self.spec.env), self.mode
            )
        self.obs = self._reset(seed=self.seed)
        self.done = np.zeros(self.spec.envs_per_runner, bool)
        self.memory = (
            self.network.memory(self.weights, self.spec.envs_per_runner)
            if self.weights is not None
            else Memory()
        )
        self.sums = np.zeros((2, self.spec.envs_per_runner))
        self.gone = np.zeros(self.spec.envs_per_runner, np.int32)
        self.taken = np.zeros(
            self.spec.envs_per_runner, np.int64
        )  # of `gone` those that were steps, not resets or final observations
        with COMPILING:
            self._decide_on(self.obs, self._noise()[0])
        self._started = True

    def _reset(self, **how: Any) -> Array:
        try:
            with RESET:
                return self._checked(self.vector.reset(**how)[0], "reset")
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise EnvironmentFailed(
                f"{env_name(self.spec.env)} raised in reset: {raised(error)}"
            ) from error

    def localize(self, chain: Chain) -> None:
        """From now on every fragment goes through these operators before it is sent."""
        self.local = Local(chain, self.network, alone(self.label, self.spec))

    def go_on(self, turn: int) -> None:
        """Explore as one that has gone so many steps already: it takes the place of another."""
        self.turn = turn

    def take(self, published: tuple[Weights, Any] | None) -> None:
        """Use these weights from now on; None: go on with the ones at hand."""
        if published is not None:
            with WEIGHTS:
                self.weights = jax.tree.map(_here, published[0])
                self.version = int(published[1])

    def sample(self, published: tuple[Weights, Any] | None) -> Sample:
        """The next fragment, acting with `published` weights if there are any.

        Raises:
            EnvironmentFailed: an environment raised, gave NaN, or broke its declared shape or type.
        """
        self.take(published)
        try:
            with START:
                self._start()
            with STEP:
                sample = (
                    self._fill_next_step()
                    if self.mode is AutoresetMode.NEXT_STEP
                    else self._fill_same_step()
                )
        except EnvironmentFailed as error:
            error.message = f"{self.label}: {error.message}"
            if (within := error.facts.get("within")) is not None:
                error.facts["env"] = int(self.env[within])
                if isinstance(self.vector, SyncVectorEnv):
                    error.facts["seed"] = self.seed + within
            error.facts = {**self.facts, "runner_seed": self.seed, **error.facts}
            raise
        with CONCAT:
            batch = sample.batch if self.local is None else self.local(self.weights, sample.batch)
            here().mark("gave", "")
            return Sample(jax.tree.map(_sent, batch), self._measured(sample.episodes))

    def _measured(self, episodes: Episodes) -> Episodes:
        """With what the environments and the operators at the sampler told since the last fragment."""
        told = summed(self.local.metrics.drain()) if self.local is not None else {}
        if self.infos is None:
            return replace(episodes, metrics=told) if told else episodes
        return replace(
            episodes, metrics={**told, **self.infos.tell()}, infos=tuple(self.infos.known)
        )

    def evaluate(
        self,
        published: tuple[Weights, Any] | None,
        episodes: int,
        seed: int,
        max_steps: int = MAX_STEPS,
    ) -> Evaluation:
        """Play whole episodes greedily, in environments made for them."""
        self.take(published)
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

    # -- filling a fragment

    def _fill_next_step(self) -> Sample:
        steps = self.spec.rollout_length
        data, carry = self._empty(steps), self._carry()
        obs, acts, reward, terminated, truncated, valid = (
            data[k] for k in ("obs", "packed", "reward", "terminated", "truncated", "valid")
        )
        valid[0] = ~self.done
        for t in range(steps):
            packed = self._decide()
            obs[t], acts[t] = self.obs, packed
            self.obs, reward[t], terminated[t], truncated[t], _ = self._step(packed)
            if self.network.recurrent:
                self.memory = Memory(self.memory.carry, self.done)
                self.done = terminated[t] | truncated[t]
        np.logical_not(terminated[:-1] | truncated[:-1], out=valid[1:])
        self.done = terminated[-1] | truncated[-1]
        return self._finish(data, self.obs.copy(), carry, [])

    def _fill_same_step(self) -> Sample:
        """The other two autoreset modes, brought to NEXT_STEP: each column gets a masked row of its own for a final observation.

        A column in which more episodes end is full sooner; the steps that it then takes while others fill up are skipped.
        """
        steps, envs = self.spec.rollout_length, self.spec.envs_per_runner
        data, carry = self._empty(steps), self._carry()
        data["valid"][:] = False
        row, last = np.zeros(envs, int), np.empty_like(self.obs)
        skipped: list[tuple[int, float, bool]] = []
        while (row < steps).any():
            packed = self._decide()
            open_ = np.flatnonzero(row < steps)
            at = (row[open_], open_)
            for name, values in (("obs", self.obs), ("packed", packed)):
                data[name][at] = values[open_]
            data["valid"][at] = True
            obs, reward, terminated, truncated, final = self._step(packed)
            for name, values in (
                ("reward", reward),
                ("terminated", terminated),
                ("truncated", truncated),
            ):
                data[name][at] = values[open_]
            full = np.flatnonzero(row >= steps)
            skipped.extend(zip(full, reward[full], (terminated | truncated)[full], strict=True))
            row[open_] += 1
            last[open_] = final[open_]
            self.obs = obs
            over = terminated | truncated
            ended = open_[(terminated | truncated)[open_] & (row[open_] < steps)]
            if len(ended):
                at = (row[ended], ended)
                data["obs"][at] = final[ended]
                data["packed"][at] = self._decide_on(final, self.noise[0])[0][ended]
                data["reward"][at], data["terminated"][at], data["truncated"][at] = (
                    0.0,
                    False,
                    False,
                )
                row[ended] += 1
                last[ended] = obs[ended]
            self.memory = Memory(self.memory.carry, over) if self.network.recurrent else self.memory
        sample = self._finish(data, last, carry, skipped)
        # An episode that ended with the last row has no masked row: its final observation is `bootstrap_obs`. Its place is counted all the
        # same, so that a replay does not put the first observation of the next episode there.
        self.gone += data["terminated"][-1] | data["truncated"][-1]
        return sample

    def _empty(self, steps: int) -> dict[str, Array]:
        envs, spaces = self.spec.envs_per_runner, self.spaces
        return {
            "obs": np.empty((steps, envs, *(spaces.obs.shape or ())), spaces.obs_dtype),
            "packed": np.empty((steps, envs, max(1, spaces.head.width) + 2), np.float32),
            "reward": np.empty((steps, envs), np.float32),
            "terminated": np.empty((steps, envs), bool),
            "truncated": np.empty((steps, envs), bool),
            "valid": np.empty((steps, envs), bool),
        }

    def _carry(self) -> dict[str, Array]:
        """The carry before the fragment's first row, as columns."""
        if not self.network.recurrent:
            return {}
        return {k: np.asarray(x) for k, x in self.begin(self.weights, self.memory).items()}

    def _decide(self) -> Array:
        """Act on the newest observations. Where the next ones begin an episode is the caller's to note in `memory`."""
        at = self.turn % self.spec.rollout_length
        if at == 0:
            self.noise = self._noise()
        self.turn += 1
        packed, carry = self._decide_on(self.obs, self.noise[at])
        if self.network.recurrent:
            self.memory = Memory(carry, np.zeros(self.spec.envs_per_runner, bool))
        return packed

    def _noise(self) -> Array:
        """For the next steps, as many as a fragment has."""
        with INFERENCE:
            return np.asarray(self.draw(self.key, np.uint32(self.turn), self.env))

    def _decide_on(self, obs: Array, noise: Array) -> tuple[Array, Any]:
        memory = (self.memory,) if self.network.recurrent else ()
        with INFERENCE:
            packed, carry = self.act(self.weights, obs, noise, *memory)
            return np.asarray(packed), carry

    def _step(self, packed: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Step all environments: observations to act on, rewards, flags, and the observations that the steps led to."""
        action = self.network.head.to_env(self.network.unpack(packed)[0])
        try:
            obs, reward, terminated, truncated, info = self.vector.step(action)
            final = obs = self._checked(obs, "step")
            if self.infos is not None:
                self.infos.note(info, terminated | truncated)
            if self.mode is not AutoresetMode.NEXT_STEP and (ended := terminated | truncated).any():
                final = obs.copy()  # a vector may give the same array again
                if self.mode is AutoresetMode.SAME_STEP:
                    for i in np.flatnonzero(ended):
                        final[i] = info["final_obs"][i]
                else:
                    obs = self._reset(options={"reset_mask": ended})
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise EnvironmentFailed(
                f"{env_name(self.spec.env)} raised in step: {raised(error)}"
            ) from error
        return obs, reward, terminated, truncated, final

    def _checked(self, obs: Any, verb: str) -> Array:
        if obs.shape != self.shape:
            raise EnvironmentFailed(
                f"{env_name(self.spec.env)} returned observations of shape {list(obs.shape)} from {verb}, but its space declares "
                f"{list(self.shape)}; mend the environment or its space"
            )
        checked: Array = obs.astype(self.obs_dtype, copy=False)
        return checked

    def _finish(
        self,
        data: dict[str, Array],
        last: Array,
        carry: dict[str, Array],
        skipped: list[tuple[int, float, bool]],
    ) -> Sample:
        with CONCAT:
            return self._made(data, last, carry, skipped)

    def _made(
        self,
        data: dict[str, Array],
        last: Array,
        carry: dict[str, Array],
        skipped: list[tuple[int, float, bool]],
    ) -> Sample:
        self._check_finite(data, last, skipped)
        action, logp, value = self.network.unpack(data.pop("packed"))
        for name in ("reward", "terminated", "truncated"):
            data[name] *= data["valid"]
        episodes = self._episodes(data, skipped)
        if self.scale is not None:
            data["reward"] = self.scale(data, skipped)
        if self.spec.clip_rewards is not None:
            np.clip(
                data["reward"], -self.spec.clip_rewards, self.spec.clip_rewards, out=data["reward"]
            )
        columns = {
            "bootstrap_obs": last,
            "version": np.full(self.spec.envs_per_runner, self.version, np.int32),
            "producer": np.full(self.spec.envs_per_runner, self.index, np.int32),
            "env": self.env,
            "first": self.gone.copy(),
            **carry,
        }
        self.gone += self.spec.rollout_length
        self.taken += data["valid"].sum(axis=0)
        for count in (self.gone, self.taken):
            np.add.at(count, [b for b, _, _ in skipped], 1)
        batch = Batch({**data, "action": action, "logp": logp, "value": value}, columns)
        return Sample(batch, episodes)

    def _check_finite(
        self, data: dict[str, Array], last: Array, skipped: list[tuple[int, float, bool]]
    ) -> None:
        seen = (data["reward"], data["obs"], last, np.array([reward for _, reward, _ in skipped]))
        if not all(x.dtype.kind != "f" or np.isfinite(x).all() for x in seen):
            raise self._not_finite(data, last, skipped)

    def _not_finite(
        self, data: dict[str, Array], last: Array, skipped: list[tuple[int, float, bool]]
    ) -> EnvironmentFailed:
        """The error for the first number that is not finite: by the rows that were gone then, that of its step among them."""
        steps, valid, over = (
            self.spec.rollout_length,
            data["valid"],
            data["terminated"] | data["truncated"],
        )
        found: list[tuple[int, int, int, str, float]] = []
        for i, (b, x, _) in enumerate(skipped):
            if not np.isfinite(x):
                found.append(
                    (steps, int(b), [c for c, _, _ in skipped[: i + 1]].count(b), "reward", x)
                )
        for name, values, ahead in (
            ("reward", data["reward"], 1),
            ("obs", data["obs"], 0),
            ("obs", last[None], steps),
        ):
            if values.dtype.kind == "f":
                found += [
                    (int(p[0]) + ahead, int(p[1]), 0, name, values[tuple(p)])
                    for p in np.argwhere(~np.isfinite(values))
                ]
        rows, b, more, name, value = min(found, key=lambda x: (x[0], x[2]))
        before = rows - (not more)  # the rows in which an episode may have ended before
        ended = np.flatnonzero(over[: max(before, 0), b])
        since = (
            valid[ended[-1] + 1 : rows, b].sum()
            if len(ended)
            else self.sums[1, b] + valid[:rows, b].sum()
        )
        step = int(self.taken[b] + valid[:rows, b].sum() + more)
        reset = name == "obs" and (step == 0 or not valid[rows - 1, b])
        way = (
            f"in a reset, after its step {step:,}"
            if reset
            else f"at its step {step:,} since it was made, {int(since + more):,} of an episode"
        )
        at = "the end" if rows == steps and name == "obs" else f"step {rows - (name == 'reward')}"
        return EnvironmentFailed(
            f"environment {b} of {env_name(self.spec.env)} gave a {name} that is not finite, at {at} of the fragment: {value}, {way}; it is "
            f"environment {self.env[b]} over all runners, of a runner with the seed {self.seed}; mend it (a division by zero? an unbounded state?)",
            what=env_name(self.spec.env),
            within=b,
            field=name,
            value=str(value),
            step=step,
            episode_step=0 if reset else int(since + more),
            row=int(self.gone[b] + rows + more) - 1,
        )

    def _episodes(self, data: dict[str, Array], skipped: list[tuple[int, float, bool]]) -> Episodes:
        valid, done = data["valid"], data["terminated"] | data["truncated"]
        sums = np.cumsum([data["reward"], valid], axis=1, dtype=np.float64)
        base = np.zeros_like(self.sums)
        ended = []
        for t, b in np.argwhere(done):
            ended.append(self.sums[:, b] + sums[:, t, b] - base[:, b])
            self.sums[:, b] = 0
            base[:, b] = sums[:, t, b]
        self.sums += sums[:, -1] - base
        for b, reward, over in skipped:
            self.sums[:, b] += (reward, 1)
            if over:
                ended.append(self.sums[:, b].copy())
                self.sums[:, b] = 0
        returns, lengths = np.array(ended).reshape(-1, 2).T
        return Episodes(int(valid.sum()), returns, lengths, len(skipped))
