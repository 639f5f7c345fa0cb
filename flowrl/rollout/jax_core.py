"""`Core`: sampling in environments written in JAX, as pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from flowrl.core.broken import NONE
from flowrl.core.finite import finite_along
from flowrl.core.packed_scan import scan_rows
from flowrl.core.trees import fields_of
from flowrl.envs.jax_envs import JaxEnv, advance, advance_each, begin
from flowrl.rl.normalizing import merge_moments
from flowrl.rl.policies import Memory, Network, Weights, network
from flowrl.rollout.handle import EVALUATED
from flowrl.rollout.jax_statistics import by_runner, no_episodes, reported, with_episodes

if TYPE_CHECKING:
    from flowrl.rl.spaces import Spaces
    from flowrl.rollout.runners import Runners

Array = Any
State = dict[str, Any]


@lru_cache(maxsize=64)
def core_of(spec: Runners) -> Core:
    """Return the core for these settings.

    It is one and the same for equal settings, so that what was compiled for one run serves the
    next.
    """
    return Core(spec)


def first_broken(seen: Sequence[tuple[int, Array]]) -> Array:
    """Return the first column that holds a NaN or infinity, and the step of the first in it.

    Args:
        seen: arrays ``[T, B, ...]``, each after the number of steps that were taken when its
            first row came to be.

    Returns:
        ``int32[2]``: the column, and the steps that were taken by then; far below 0 if all numbers
        are finite.
    """
    floats = [(offset, x) for offset, x in seen if jnp.issubdtype(x.dtype, jnp.floating)]
    finite = [finite_along(x, (0, *range(2, x.ndim))) for _, x in floats]
    broken = ~jnp.stack(finite).all(axis=0)
    column = jnp.argmax(broken)
    steps = []
    for offset, x in floats:
        bad_rows = ~jnp.isfinite(x[:, column]).reshape(x.shape[0], -1).all(axis=1)
        first = jnp.argmax(bad_rows) + offset
        steps.append(jnp.where(jnp.any(bad_rows), first, jnp.iinfo(jnp.int32).max))
    found = jnp.stack([column, jnp.min(jnp.stack(steps))])
    return jnp.where(jnp.any(broken), found, NONE).astype(jnp.int32)


def misfits(
    spaces: Spaces, obs: Mapping[str, Array], last: Mapping[str, Array], valid: Array
) -> list[tuple[int, Array]]:
    """Return what `first_broken` takes to find what the spaces of an environment rule out.

    That is where a mask allows no action, and where an observation is none of the choices.

    Args:
        spaces: of the environment.
        obs: observations ``[T, B, ...]`` by name.
        last: those after the last row ``[B, ...]``.
        valid: ``[T, B]``, which rows are steps.
    """
    nothing, after = spaces.nothing_allowed(obs, jnp), {name: x[None] for name, x in last.items()}
    found = [
        (0, None if nothing is None else nothing & valid),
        (0, spaces.outside(obs)),
        (valid.shape[0], spaces.outside(after)),
    ]
    return [(offset, jnp.where(x, jnp.nan, 0.0)) for offset, x in found if x is not None]


@dataclass(frozen=True)
class Core:
    """The pure functions of runners over an environment written in JAX.

    Columns of arrays are environments, those of the first runner first.

    Args:
        spec: the settings of the runners.
    """

    spec: Runners

    @cached_property
    def env(self) -> JaxEnv:
        """One environment."""
        return cast("JaxEnv", self.spec.jax_env)

    @cached_property
    def network(self) -> Network:
        """The policy, made for the spaces."""
        return network(self.spec.policy, self.spec.spaces())

    @property
    def environments(self) -> int:
        """The number of environments of all runners."""
        return self.spec.num_runners * self.spec.envs_per_runner

    @property
    def carry(self) -> Any:
        """The shapes of the policy's carry for all environments, as a tree."""
        net = self.network

        def initial() -> Any:
            return net.memory(net.init(jax.random.key(0)), self.environments).carry

        return jax.eval_shape(initial)

    def start(self, key: Array) -> State:
        """Return the state in which all environments begin an episode.

        Every runner has a random key of its own and counts its rollouts.

        Args:
            key: random key of the runners.
        """
        runners, envs = self.spec.num_runners, self.spec.envs_per_runner
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(runners))
        bits = jax.vmap(lambda k: jax.random.bits(k, (envs, 2)))(keys).reshape(-1, 2)
        states, obs = begin(self.env, bits)
        zeros = jnp.zeros(runners * envs, jnp.float32)
        return {
            "columns": {
                "state": states,
                "obs": obs,
                "done": zeros > 0,
                "reset": zeros == 0,
                "carry": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.carry),
                "return": zeros,
                "length": zeros.astype(jnp.int32),
                "discounted": zeros,
            },
            "runners": {
                "key": jax.random.key_data(keys),
                "turn": jnp.zeros(runners, jnp.uint32),
                # Mean, variance and count; as the count is nearly 0, the first rollout replaces the
                # other two.
                "moments": tuple(jnp.full(runners, x, jnp.float32) for x in (0.0, 1.0, 1e-4)),
            },
        }

    # -- sampling a rollout

    def roll(
        self, work: State, weights: Weights, first: Array | int = 0, *, count: int
    ) -> tuple[State, dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Sample a rollout of each of some runners, side by side.

        Args:
            work: the state of all environments and runners.
            weights: of the policy.
            first: the number of the first runner; an argument, so that one compiled program serves
                every runner (default 0).
            count: how many runners from there on.

        Returns:
            The state afterwards; the data ``[T, B]`` and columns ``[B]`` of a batch; and what
            ended: flags, returns and lengths ``[T, B]``, and under ``broken``, of an environment
            that gave NaN or infinity, its number, its runner's, and the steps that it had taken by
            then with its resets, all below 0 if none did.
        """
        columns, runners = self._part(work, first, count)
        # A batch holds the carry from before its first row, for the learner to begin with.
        before = self.network.begin(weights, Memory(columns["carry"], columns["reset"]))
        random = self._random(runners, first)
        after, rows = scan_rows(self._step(weights), columns, random)
        # Found for all rows at once: each array that a step writes takes time in every step.
        over = rows["terminated"] | rows["truncated"]
        rows["valid"] = ~jnp.concatenate([columns["done"][None], over[:-1]])
        ended = {"over": over, "return": rows.pop("return"), "length": rows.pop("length")}
        rows_before = runners["turn"] * self.spec.rollout_length
        first_rows = jnp.repeat(rows_before.astype(jnp.int32), self.spec.envs_per_runner)
        # Rewards are checked as the environment gave them, before they are scaled and clipped.
        seen, last = fields_of("obs", rows.pop("obs")), fields_of("obs", after["obs"])
        ended["broken"] = self._broken(rows, seen, last, first, first_rows)
        runners, rows = self._scaled({**runners, "turn": runners["turn"] + 1}, rows)
        if self.spec.clip_rewards is not None:
            bound = self.spec.clip_rewards
            rows["reward"] = jnp.clip(rows["reward"], -bound, bound)
        last = fields_of("bootstrap_obs", after["obs"])
        batch_columns = {**last, "first": first_rows, **before}
        return (
            self._whole(work, after, runners, first, count),
            {**seen, **rows},
            batch_columns,
            ended,
        )

    def _part(self, work: State, first: Array | int, count: int) -> tuple[State, State]:
        """Return the columns and the runners' state of `count` runners from the first on."""
        # Slices of everything would only copy it.
        if count == self.spec.num_runners:
            return work["columns"], work["runners"]
        part, envs = jax.lax.dynamic_slice_in_dim, self.spec.envs_per_runner
        columns = jax.tree.map(lambda x: part(x, first * envs, count * envs), work["columns"])
        return columns, jax.tree.map(lambda x: part(x, first, count), work["runners"])

    def _whole(
        self, work: State, columns: State, runners: State, first: Array | int, count: int
    ) -> State:
        """Return the state of all with a part of it replaced: the inverse of `_part`."""
        if count == self.spec.num_runners:
            return {"columns": columns, "runners": runners}

        def replaced(whole: Any, part: Any, start: Array | int) -> Any:
            def put(x: Array, new: Array) -> Array:
                return jax.lax.dynamic_update_slice_in_dim(x, new, start, 0)

            return jax.tree.map(put, whole, part)

        return {
            "columns": replaced(work["columns"], columns, first * self.spec.envs_per_runner),
            "runners": replaced(work["runners"], runners, first),
        }

    def _broken(
        self,
        rows: State,
        obs: dict[str, Array],
        last_obs: dict[str, Array],
        first: Array | int,
        first_rows: Array,
    ) -> Array:
        """Return ``int32[3]``: environment, runner and steps of the first number not finite.

        So is the first step at which a mask allows no action, and the first observation that is
        none of its space's choices. An observation came before the step of its row, a reward with
        it.
        """
        envs, steps = self.spec.envs_per_runner, self.spec.rollout_length
        seen = [(1, rows["reward"]), *((0, x) for x in obs.values())]
        seen += [(steps, x[None]) for x in last_obs.values()]
        seen += misfits(self.spec.spaces(), obs, last_obs, rows["valid"])
        column, step = first_broken(seen)
        return jnp.stack([first * envs + column, first + column // envs, first_rows[column] + step])

    def _random(self, runners: State, first: Array | int) -> tuple[Array, Array]:
        """Return all random numbers of a rollout.

        Returns:
            Noise for actions ``[T, B, ...]`` and bits for environments ``[T, B, 2, 2]``: the data
            of two keys, one for the step and one for a reset.
        """
        count = runners["turn"].shape[0]
        first_envs = self.spec.envs_per_runner * (first + jnp.arange(count))
        # A single runner needs no axis of runners, along which numbers would have to be joined.
        if count == 1:
            return self._random_of_one(runners["key"][0], runners["turn"][0], first_envs[0])
        noise, bits = jax.vmap(self._random_of_one)(runners["key"], runners["turn"], first_envs)
        return _side_by_side(noise), _side_by_side(bits)

    def _random_of_one(self, data: Array, turn: Array, first_env: Array) -> tuple[Array, Array]:
        """Return one runner's random numbers, by the data of its key and its rollout's number."""
        steps, envs = self.spec.rollout_length, self.spec.envs_per_runner
        key = jax.random.fold_in(jax.random.wrap_key_data(data), turn)
        action_key, env_key = jax.random.split(key)
        rows = turn * steps + jnp.repeat(jnp.arange(steps, dtype=jnp.uint32), envs)
        # Explorations have schedules over the steps of all environments of all runners together.
        steps_of_all = rows * jnp.float32(self.environments)
        env = jnp.tile(first_env + jnp.arange(envs), steps)
        noise = self.spec.explore_of("").noise(
            self.network.head, action_key, steps * envs, steps_of_all, env, self.environments
        )
        bits = jax.random.bits(env_key, (steps, envs, 2, 2))
        return noise.reshape(steps, envs, *noise.shape[1:]), bits

    def _step(self, weights: Weights) -> Callable[..., tuple[State, dict[str, Array]]]:
        """Return the function that steps all environments once, as `jax.lax.scan` calls it."""
        net, env, explore = self.network, self.env, self.spec.explore_of("")

        def step(now: State, random: tuple[Array, Array]) -> tuple[State, dict[str, Array]]:
            noise, bits = random
            memory = Memory(now["carry"], now["reset"])
            packed, carry = net.act(weights, now["obs"], noise, memory, explore)
            action, logp, value = net.unpack(packed)
            # An environment that is done resets in place of a step: its row is masked.
            state, obs, reward, terminated, truncated = advance(
                env, now["state"], now["done"], net.head.to_env(action), bits
            )
            over, valid = terminated | truncated, ~now["done"]
            sums_of_row, sums_after = self._sums(now, reward, over, valid)
            row = {
                "obs": now["obs"],
                "action": action,
                "logp": logp,
                "value": value,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                **sums_of_row,
            }
            after = {
                "state": state,
                "obs": obs,
                "done": over,
                # After a reset comes the first observation of an episode, and with it a new carry.
                "reset": now["done"],
                "carry": carry,
                **sums_after,
            }
            return after, row

        return step

    def _sums(
        self, now: State, reward: Array, over: Array, valid: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the sums over episodes with this step, and those that the next step goes on from.

        They are returns, lengths and, where rewards are scaled, discounted returns.
        """
        gamma = self.spec.normalize_rewards
        returned, length = now["return"] + reward, now["length"] + valid
        with_step = {"return": returned, "length": length}
        discounted = now["discounted"]
        if gamma is not None:
            discounted = discounted * gamma + reward
            with_step["discounted"] = discounted
        after = {
            "return": jnp.where(over, 0.0, returned),
            "length": jnp.where(over, 0, length),
            "discounted": jnp.where(over, 0.0, discounted),
        }
        return with_step, after

    def _scaled(self, runners: State, rows: dict[str, Array]) -> tuple[State, dict[str, Array]]:
        """Divide rewards by the running deviation of each runner's discounted returns.

        `RewardScale` does the same for Gymnasium environments.
        """
        if self.spec.normalize_rewards is None:
            return runners, rows
        envs = self.spec.envs_per_runner
        returns = by_runner(rows.pop("discounted"), envs)
        moments = jax.vmap(merge_moments)(
            runners["moments"], returns, by_runner(rows["valid"], envs)
        )
        deviation = jnp.sqrt(jnp.repeat(moments[1], envs) + 1e-8)
        return {**runners, "moments": moments}, {**rows, "reward": rows["reward"] / deviation}

    # -- statistics of episodes

    def no_statistics(self) -> State:
        """Return the statistics before anything happened."""
        return {**no_episodes(), "broken": jnp.full(3, NONE, jnp.int32)}

    def note(self, statistics: State, ended: dict[str, Array], valid: Array) -> State:
        """Return the statistics with a rollout counted in.

        Args:
            statistics: those before.
            ended: what ended in the rollout, as `roll` returns it.
            valid: ``bool[T, B]``, which rows are steps.
        """
        broken = statistics["broken"]
        counted = with_episodes(statistics, ended, jnp.sum(valid, dtype=jnp.int32))
        return {**counted, "broken": jnp.where(broken[0] < 0, ended["broken"], broken)}

    def report(self, statistics: State) -> tuple[State, State]:
        """Return what the next Row reports, and the statistics that remain afterwards."""
        report, remaining = reported(statistics)
        nothing = self.no_statistics()["broken"]
        return {**report, "broken": statistics["broken"]}, {**remaining, "broken": nothing}

    # -- evaluation

    def evaluate(
        self, weights: Weights, key: Array, *, episodes: int, max_steps: int
    ) -> dict[str, Array]:
        """Play whole episodes with the greedy actions, all at once.

        Args:
            weights: of the policy.
            key: random key of the environments.
            episodes: how many.
            max_steps: after so many steps an episode is cut.

        Returns:
            Numbers by the names in `EVALUATED`.
        """
        states, obs = begin(self.env, jax.random.bits(key, (episodes, 2)))
        zeros = jnp.zeros(episodes, jnp.float32)
        first = {
            "state": states,
            "obs": obs,
            "memory": self.network.memory(weights, episodes),
            "return": zeros,
            "over": zeros > 0,
            "step": jnp.uint32(0),
        }
        last = jax.lax.while_loop(
            lambda now: ~jnp.all(now["over"]) & (now["step"] < max_steps),
            lambda now: self._greedy_step(weights, key, now),
            first,
        )
        found = [getattr(jnp, name)(last["return"]) for name in ("mean", "std", "min", "max")]
        return dict(zip(EVALUATED, [*found, jnp.sum(~last["over"])], strict=True))

    def _greedy_step(self, weights: Weights, key: Array, now: State) -> State:
        """Step the environments of an evaluation once."""
        net, episodes = self.network, now["over"].shape[0]
        packed, carry = net.act(weights, now["obs"], None, now["memory"])
        bits = jax.random.bits(jax.random.fold_in(key, now["step"]), (episodes, 2))
        action = net.head.to_env(net.unpack(packed)[0])
        state, obs, reward, over = advance_each(self.env, now["state"], now["over"], action, bits)
        return {
            "state": state,
            "obs": obs,
            "memory": Memory(carry, now["over"]) if net.recurrent else now["memory"],
            "return": now["return"] + reward,  # 0 where the episode is over
            "over": now["over"] | over,
            "step": now["step"] + 1,
        }


def _side_by_side(x: Array) -> Array:
    """Return an array ``[runners, T, envs, ...]`` as ``[T, runners x envs, ...]``."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
