"""Runners over an environment written in JAX, in one process: pure functions of arrays, so that a runtime may fuse them with all else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.items import Batch
from flowrl.envs.jax_envs import JaxEnv, advance, begin
from flowrl.errors import GraphError
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Site
from flowrl.rl.policies import Memory, Network, Weights, merge_moments, network
from flowrl.rollout.evaluation import MAX_STEPS
from flowrl.rollout.handle import EVALUATED, RECENT, RunnersHandle, allowed_requests, part_of
from flowrl.rollout.local_chain import Local

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = Any
State = dict[str, Any]
NONE = -(2**30)
"""The number of no environment."""


@lru_cache(maxsize=64)
def core_of(spec: Runners) -> Core:
    """The core for these settings: one and the same for equal ones, so that what was compiled for one run serves the next."""
    return Core(spec)


def _broken(seen: dict[int, Array]) -> Array:
    """The first column of arrays ``[T, B, ...]`` with a NaN or infinity, and the rows gone then; far below 0 if there is none.

    `seen`: the arrays, by the rows that are gone at their first one. A maximum takes both along.
    """
    floats = {ahead: x for ahead, x in seen.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    broken = ~jnp.isfinite(
        sum(jnp.max(jnp.abs(x), axis=[i for i in range(x.ndim) if i != 1]) for x in floats.values())
    )
    column = jnp.argmax(broken)
    bad = {
        ahead: ~jnp.isfinite(x[:, column]).reshape(x.shape[0], -1).all(axis=1)
        for ahead, x in floats.items()
    }
    rows = [
        jnp.where(jnp.any(at), jnp.argmax(at) + ahead, jnp.iinfo(jnp.int32).max)
        for ahead, at in bad.items()
    ]
    return jnp.where(jnp.any(broken), jnp.stack([column, jnp.min(jnp.stack(rows))]), NONE).astype(
        jnp.int32
    )


@dataclass(frozen=True)
class Core:
    """The pure functions of runners. Columns of arrays are environments, those of the first runner first."""

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
    def carry(self) -> Any:
        """The form of the policy's carry for all environments."""
        net, n = self.network, self.spec.num_runners * self.spec.envs_per_runner
        return jax.eval_shape(lambda: net.memory(net.init(jax.random.key(0)), n).carry)

    def start(self, key: Array) -> State:
        """All environments at their beginning. Every runner has a random key of its own and counts its fragments."""
        runners, envs = self.spec.num_runners, self.spec.envs_per_runner
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(runners))
        bits = jax.vmap(lambda k: jax.random.bits(k, (envs, 2)))(keys).reshape(-1, 2)
        states, obs = begin(self.env, bits)
        zeros = jnp.zeros(runners * envs, jnp.float32)
        return {
            "columns": {
                "state": states,
                "obs": obs.astype(self.spec.spaces().obs_dtype),
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
                "moments": tuple(jnp.full(runners, x, jnp.float32) for x in (0.0, 1.0, 1e-4)),
            },
        }

    def roll(
        self, work: State, weights: Weights, *, first: int, count: int
    ) -> tuple[State, dict[str, Array], dict[str, Array], dict[str, Array]]:
        """A fragment of `count` runners from the first on.

        Returns:
            What they go on from, the data ``[T, B]`` and columns ``[B]`` of a batch, and what ended: flags, returns and lengths
            ``[T, B]``; and of an environment that gave NaN or infinity the number, the runner's, and the rows gone then, below 0 if none did.
        """
        spec, envs = self.spec, self.spec.envs_per_runner
        all_of_them = count == spec.num_runners
        runners = (
            work["runners"]
            if all_of_them
            else jax.tree.map(lambda x: x[first : first + count], work["runners"])
        )
        mine = slice(first * envs, (first + count) * envs)
        columns = (
            work["columns"] if all_of_them else jax.tree.map(lambda x: x[mine], work["columns"])
        )
        before = self.network.begin(weights, Memory(columns["carry"], columns["reset"]))
        step, turn = self._step(weights), runners["turn"]
        after, rows = jax.lax.scan(step, columns, self._random(runners, first))
        ended = {k: rows.pop(k) for k in ("over", "return", "length")}
        broken, at = _broken(
            {1: rows["reward"], 0: rows["obs"], spec.rollout_length: after["obs"][None]}
        )
        gone = jnp.repeat((turn * spec.rollout_length).astype(jnp.int32), envs)
        ended["broken"] = jnp.stack(
            [first * envs + broken, first + broken // envs, gone[broken] + at]
        )
        runners, rows = self._scaled({**runners, "turn": runners["turn"] + 1}, rows)
        if spec.clip_rewards is not None:
            rows["reward"] = jnp.clip(rows["reward"], -spec.clip_rewards, spec.clip_rewards)
        if not all_of_them:
            after = jax.tree.map(
                lambda whole, part: whole.at[mine].set(part), work["columns"], after
            )
            runners = jax.tree.map(
                lambda whole, part: whole.at[first : first + count].set(part),
                work["runners"],
                runners,
            )
        last = after["obs"] if all_of_them else after["obs"][mine]
        return (
            {"columns": after, "runners": runners},
            rows,
            {"bootstrap_obs": last, "first": gone, **before},
            ended,
        )

    def _random(self, runners: State, first: int) -> tuple[Array, Array]:
        """All that a fragment draws: noise for actions ``[T, B, ...]`` and bits for environments ``[T, B, 2, 2]``."""
        steps, envs = self.spec.rollout_length, self.spec.envs_per_runner

        def one(data: Array, turn: Array, first: Array) -> tuple[Array, Array]:
            key = jax.random.fold_in(jax.random.wrap_key_data(data), turn)
            act, world = jax.random.split(key)
            step = (
                turn * steps + jnp.repeat(jnp.arange(steps, dtype=jnp.uint32), envs)
            ) * jnp.float32(envs * self.spec.num_runners)
            env = jnp.tile(first + jnp.arange(envs), steps)
            noise = self.spec.explore.noise(
                self.network.head, act, steps * envs, step, env, envs * self.spec.num_runners
            )
            return noise.reshape(steps, envs, *noise.shape[1:]), jax.random.bits(
                world, (steps, envs, 2, 2)
            )

        firsts = envs * (first + jnp.arange(runners["turn"].shape[0]))
        if runners["turn"].shape[0] == 1:
            return one(runners["key"][0], runners["turn"][0], firsts[0])
        noise, bits = jax.vmap(one)(runners["key"], runners["turn"], firsts)
        return tuple(jnp.moveaxis(x, 0, 1).reshape(steps, -1, *x.shape[3:]) for x in (noise, bits))  # type: ignore[return-value]

    def _step(self, weights: Weights) -> Any:
        net, env, dtype, scales, explore = (
            self.network,
            self.env,
            self.spec.spaces().obs_dtype,
            self.spec.normalize_rewards,
            self.spec.explore,
        )

        def step(now: State, random: tuple[Array, Array]) -> tuple[State, dict[str, Array]]:
            packed, carry = net.act(
                weights, now["obs"], random[0], Memory(now["carry"], now["reset"]), explore
            )
            action, logp, value = net.unpack(packed)
            state, obs, reward, terminated, truncated = advance(
                env, now["state"], now["done"], net.head.to_env(action), random[1]
            )
            over, valid = terminated | truncated, ~now["done"]
            returned, length = now["return"] + reward, now["length"] + valid
            discounted = (
                now["discounted"] * scales + reward if scales is not None else now["discounted"]
            )
            row = {
                "obs": now["obs"],
                "action": action,
                "logp": logp,
                "value": value,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "valid": valid,
                "over": over,
                "return": returned,
                "length": length,
                **({"discounted": discounted} if scales is not None else {}),
            }
            after = {
                "state": state,
                "obs": obs.astype(dtype),
                "done": over,
                "reset": now["done"],
                "carry": carry,
                "return": jnp.where(over, 0.0, returned),
                "length": jnp.where(over, 0, length),
                "discounted": jnp.where(over, 0.0, discounted),
            }
            return after, row

        return step

    def _scaled(self, runners: State, rows: dict[str, Array]) -> tuple[State, dict[str, Array]]:
        """Rewards by the running deviation of each runner's discounted returns, as `RewardScale` does it."""
        if self.spec.normalize_rewards is None:
            return runners, rows
        envs = self.spec.envs_per_runner
        seen, valid = (
            jnp.moveaxis(x.reshape(x.shape[0], -1, envs), 1, 0).reshape(-1, x.shape[0] * envs)
            for x in (rows.pop("discounted"), rows["valid"])
        )
        moments = jax.vmap(merge_moments)(runners["moments"], seen, valid)
        return {**runners, "moments": moments}, {
            **rows,
            "reward": rows["reward"] / jnp.sqrt(jnp.repeat(moments[1], envs) + 1e-8),
        }

    def nothing(self) -> State:
        """What there is to tell before anything happened."""
        return {
            "returns": jnp.zeros(RECENT, jnp.float32),
            "lengths": jnp.zeros(RECENT, jnp.int32),
            "ever": jnp.int32(0),
            "env_steps": jnp.int32(0),
            "episodes": jnp.int32(0),
            "broken": jnp.full(3, NONE, jnp.int32),
        }

    def note(self, told: State, ended: dict[str, Array], valid: Array) -> State:
        """Count a fragment in: the newest `RECENT` episodes are kept, in a ring."""
        over = ended["over"].reshape(-1)
        number = jnp.sum(over, dtype=jnp.int32)
        behind = jnp.cumsum(over[::-1], dtype=jnp.int32)[::-1]  # of the last one 1
        place = jnp.where(
            over & (behind <= RECENT), (told["ever"] + number - behind) % RECENT, RECENT
        )
        return {
            "returns": told["returns"].at[place].set(ended["return"].reshape(-1), mode="drop"),
            "lengths": told["lengths"].at[place].set(ended["length"].reshape(-1), mode="drop"),
            "ever": told["ever"] + number,
            "env_steps": told["env_steps"] + jnp.sum(valid, dtype=jnp.int32),
            "episodes": told["episodes"] + number,
            "broken": jnp.where(told["broken"][0] < 0, ended["broken"], told["broken"]),
        }

    def tell(self, told: State) -> tuple[State, State]:
        """What a Row is told, and what is left to tell."""
        there = jnp.arange(RECENT) < told["ever"]
        count = jnp.sum(there)
        means = {
            f"{k}_mean": jnp.where(
                count > 0, jnp.sum(jnp.where(there, told[f"{k}s"], 0)) / count, math.nan
            )
            for k in ("return", "length")
        }
        since = {name: told[name] for name in ("env_steps", "episodes", "broken")}
        return {**since, **means}, {**told, **{name: self.nothing()[name] for name in since}}

    def evaluate(
        self, weights: Weights, key: Array, *, episodes: int, max_steps: int
    ) -> dict[str, Array]:
        """Play whole episodes with the greedy actions, all at once, each of at most `max_steps`."""
        net, env, dtype = self.network, self.env, self.spec.spaces().obs_dtype
        states, obs = begin(env, jax.random.bits(key, (episodes, 2)))
        memory = net.memory(weights, episodes)

        def step(now: State) -> State:
            packed, carry = net.act(weights, now["obs"].astype(dtype), None, now["memory"])
            bits = jax.random.bits(jax.random.fold_in(key, now["step"]), (episodes, 2, 2))
            action = net.head.to_env(net.unpack(packed)[0])
            state, obs, reward, terminated, truncated = advance(
                env, now["state"], now["over"], action, bits
            )
            return {
                "state": state,
                "obs": obs,
                "memory": Memory(carry, now["over"]) if net.recurrent else memory,
                "return": now["return"] + reward,  # 0 where the episode is over
                "over": now["over"] | terminated | truncated,
                "step": now["step"] + 1,
            }

        zeros = jnp.zeros(episodes, jnp.float32)
        first = {
            "state": states,
            "obs": obs,
            "memory": memory,
            "return": zeros,
            "over": zeros > 0,
            "step": jnp.uint32(0),
        }
        last = jax.lax.while_loop(
            lambda now: ~jnp.all(now["over"]) & (now["step"] < max_steps), step, first
        )
        found = [getattr(jnp, name)(last["return"]) for name in ("mean", "std", "min", "max")]
        return dict(zip(EVALUATED, [*found, jnp.sum(~last["over"])], strict=True))


class JaxRunners(RunnersHandle):
    """Runners over an environment written in JAX at work. What is asked for is sampled at once.

    `state` holds: ``work``, what the environments go on from; ``told``, what the next Row is told; ``published``, the weights that a runner may
    still use, the newest last; ``uses``, by runner which of them; ``going``, the fragments that were asked for and not taken, the oldest first;
    ``order``, the runners, first who was not asked for the longest time; ``paced``, where requests are, how many fragments came: a part of what makes
    the next updates, and the version behind those that are whole.
    """

    spread: ClassVar[tuple[str, ...]] = ("work",)

    def __init__(self, spec: Runners, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.core = core_of(spec)
        self.spaces = spec.spaces()
        self.environments = spec.num_runners * spec.envs_per_runner
        self.local: Local | None = None
        self.chain: Chain | None = None
        self.paced: tuple[int, Fraction] | None = None
        self.state: State = {
            "work": site.run(self.core.start, site.key("start")),
            "told": site.run(self.core.nothing),
            "evaluated": {},
            "published": [],
            "uses": [0] * spec.num_runners,
            "going": [],
            "order": list(range(spec.num_runners)),
            "paced": {},
        }

    def close(self) -> None:
        """Nothing to let go of."""

    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Use them from now on. What is sampled with them waits for them by itself."""
        told = range(self.spec.num_runners) if to is None else np.unique(to).tolist()
        published = [*self.state["published"], {"weights": weights, "version": version}]
        uses = [
            len(published) - 1 if i in told else use for i, use in enumerate(self.state["uses"])
        ]
        kept = sorted({*uses, len(published) - 1})
        self.state = {
            **self.state,
            "published": [published[i] for i in kept],
            "uses": [kept.index(use) for use in uses],
        }
        self._published(weights, version, wait)

    def localize(self, chain: Chain) -> None:
        """From now on every fragment goes through these operators."""
        if self.chain not in (None, chain):
            raise GraphError(
                "other operators of this graph sample from the same runners with another local=...; give each runners of its own"
            )
        self.chain, self.local = chain, Local(chain, self.core.network, self.site)

    def may(self, min_fraction: float = 0.0) -> bool:
        """Whether enough may be asked, or were already."""
        return len(self.state["going"]) + self._allowed() >= part_of(
            self.spec.num_runners, min_fraction
        )

    def pace(self, max_lag: int, updates: Fraction) -> None:
        """Heed it from the next request on."""
        self.paced = (max_lag, updates)
        self.state = {**self.state, "paced": {"phase": 0, "version": np.int32(0)}}

    def _allowed(self) -> float:
        """How many samples more may be asked for."""
        if self.paced is None:
            return math.inf
        asked = [int(item["version"]) for item in self.state["going"]]
        due = [int(self.state["published"][use]["version"]) for use in self.state["uses"]]
        done = self.state["paced"]
        return allowed_requests(
            *self.paced, min([*asked, *due]) - int(done["version"]), done["phase"] + len(asked)
        )

    def collect(self, min_fraction: float = 1.0) -> Batch:
        """Ask the idle ones, take enough of those that were asked first, join in the order of the runners."""
        self._start()
        whole = (
            self.local is None
            and not self.state["going"]
            and self._allowed() == math.inf
            and len(set(self.state["uses"])) == 1
        )
        if whole and part_of(self.spec.num_runners, min_fraction) == self.spec.num_runners:
            self._ask(0, self.spec.num_runners)
            return self._taken(1, self.spec.num_runners)
        self._fill(1)
        return self._taken(part_of(self.spec.num_runners, min_fraction))

    def next(self, in_flight: int = 2) -> Batch:
        """Ask again whoever has less than so many requests, and take the oldest."""
        self._start()
        self._fill(in_flight)
        return self._taken(1)

    def _fill(self, in_flight: int) -> None:
        most = self._allowed()
        for level in range(in_flight):
            for runner in self.state["order"]:
                if (
                    sum(going["runner"] == runner for going in self.state["going"]) <= level
                    and most > 0
                ):
                    self._ask(runner, 1)
                    most -= 1

    def _ask(self, first: int, count: int) -> None:
        """Sample a fragment from each of so many runners, as one."""
        used = self.state["published"][self.state["uses"][first]]
        work, data, columns, ended = self.site.run(
            self.core.roll, self.state["work"], used["weights"], first=first, count=count
        )
        envs = self.spec.envs_per_runner
        columns = {
            **columns,
            "version": np.full(count * envs, used["version"], np.int32),
            "producer": np.repeat(np.arange(first, first + count, dtype=np.int32), envs),
            "env": np.arange(first * envs, (first + count) * envs, dtype=np.int32),
        }
        batch, asked = Batch(data, columns), range(first, first + count)
        batch = batch if self.local is None else self.local(used["weights"], batch)
        going = {
            "runner": first,
            "version": used["version"],
            "batch": batch,
            "ended": ended,
            "valid": data["valid"],
        }
        order = [*(i for i in self.state["order"] if i not in asked), *asked]
        self.state = {
            **self.state,
            "work": work,
            "going": [*self.state["going"], going],
            "order": order,
        }

    def _taken(self, items: int, runners: int = 1) -> Batch:
        came, going = self.state["going"][:items], self.state["going"][items:]
        told = self.state["told"]
        for item in came:
            told = self.site.run(self.core.note, told, item["ended"], item["valid"])
        batch = Batch.join(
            [item["batch"] for item in sorted(came, key=lambda item: item["runner"])]
        )
        self.state = {**self.state, "told": told, "going": going, "paced": self._counted(items)}
        self.site.count(requests=items * runners, sampled_steps=batch.steps, outstanding=len(going))
        return batch

    def _counted(self, items: int) -> State:
        done: State = self.state["paced"]
        if self.paced is None:
            return done
        whole, phase = divmod(done["phase"] + items, self.paced[1].denominator)
        return {
            "phase": phase,
            "version": np.int32(done["version"] + whole * self.paced[1].numerator),
        }

    def episodes(self) -> dict[str, Any]:
        """Drain what gathered."""
        told, left = self.site.run(self.core.tell, self.state["told"])
        told = {**told, **self.state["evaluated"]}
        self.state = {**self.state, "told": left, "evaluated": {}}
        return told

    def evaluate(self, episodes: int, seed: int, max_steps: int = MAX_STEPS) -> dict[str, float]:
        """Play all episodes at once with the newest weights."""
        self._start()
        newest, key = (
            self.state["published"][-1]["weights"],
            jax.random.fold_in(jax.random.key(seed), 0),
        )
        found: dict[str, Any] = self.site.run(
            self.core.evaluate, newest, key, episodes=episodes, max_steps=max_steps
        )
        self.state = {**self.state, "evaluated": found}
        self.site.count(evaluations=1, evaluated_episodes=episodes)
        return found

    def _start(self) -> None:
        """First weights of their own, where no learner gave them any."""
        if not self.state["published"]:
            self.publish(
                self.site.run(self.core.network.init, self.site.key("weights")), np.int32(0)
            )
