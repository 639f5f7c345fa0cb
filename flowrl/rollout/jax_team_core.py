"""`TeamCore`: sampling in environments of several agents in JAX, as pure functions of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from flowrl.core.broken import LATE, LEFT, NOBODY, NONE, NOT_FINITE
from flowrl.envs.jax_agents import JaxAgents, advance_agents, begin_agents, names_of_agents
from flowrl.envs.jax_envs import where_rows
from flowrl.rl.policies import Weights
from flowrl.rollout.jax_core import first_broken, misfits
from flowrl.rollout.jax_part import JaxPart
from flowrl.rollout.jax_statistics import no_episodes, reported, with_episodes
from flowrl.rollout.jax_team_evaluation import evaluated

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = Any
State = dict[str, Any]


@lru_cache(maxsize=64)
def team_core_of(spec: Runners) -> TeamCore:
    """Return the core for these settings, one and the same for equal settings."""
    return TeamCore(spec)


@dataclass(frozen=True)
class TeamCore:
    """The pure functions of runners over an environment of several agents written in JAX.

    Args:
        spec: the settings of the runners.
    """

    spec: Runners

    @cached_property
    def env(self) -> JaxAgents:
        """One environment."""
        return cast("JaxAgents", self.spec.jax_env)

    @cached_property
    def parts(self) -> dict[str, JaxPart]:
        """The policies by name."""
        agents = self.spec.agents
        return {name: JaxPart(spec, agents[name]) for name, spec in self.spec.by_policy.items()}

    def start(self, keys: Mapping[str, Array], env_key: Array) -> State:
        """Return the state in which all environments begin an episode.

        Every runner has random keys of its own, and counts its turns and its rollouts.

        Args:
            keys: by policy: the random key of its actions.
            env_key: random key of the environments.
        """
        runners, envs = self.spec.num_runners, self.spec.envs_per_runner

        def each(key: Array) -> Array:
            return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(runners))

        env_keys = each(env_key)
        bits = jax.vmap(lambda key: jax.random.bits(key, (envs, 2)))(env_keys)
        turns = begin_agents(self.env, bits.reshape(-1, 2))
        # A count of nearly 0 lets the first rollout replace the other two.
        moments = tuple(jnp.full(runners, x, jnp.float32) for x in (0.0, 1.0, 1e-4))
        return {
            "states": turns.state,
            "columns": {name: part.start(turns) for name, part in self.parts.items()},
            "runners": {
                "keys": {name: jax.random.key_data(each(key)) for name, key in keys.items()},
                "env_key": jax.random.key_data(env_keys),
                "turn": jnp.zeros(runners, jnp.uint32),
                "rollouts": jnp.zeros(runners, jnp.int32),
                # By how much the policy versions rose since the last rollout.
                "rises": {name: jnp.zeros(runners, jnp.int32) for name in self.parts},
                "moments": dict.fromkeys(self.parts, moments),
            },
        }

    # -- sampling a rollout

    def roll(
        self,
        work: State,
        weights: Mapping[str, Weights],
        first: Array | int = 0,
        *,
        count: int,
    ) -> tuple[State, State, State, State]:
        """Sample a rollout of each of some runners, side by side.

        Args:
            work: the state of all environments and runners.
            weights: by policy.
            first: the number of the first runner; an argument, so that one compiled program serves
                every runner (default 0).
            count: how many runners from there on.

        Returns:
            The state afterwards; by policy, the data ``[T, B]`` and columns ``[B]`` of a batch; and
            what happened: ``env_steps``, the first thing that went wrong (``broken``), and by
            policy what ended (``of``).
        """
        own = self._part(work, first, count)
        runners, envs = own["runners"], count * self.spec.envs_per_runner
        parts = {
            name: part.begin_rollout(own["columns"][name], weights[name], runners["rises"][name])
            for name, part in self.parts.items()
        }
        now = {
            "states": own["states"],
            "parts": parts,
            "turn": runners["turn"],
            "running": ~self._blocked(parts),
            "env_steps": jnp.int32(0),
            "broken": jnp.full(5, NONE, jnp.int32),
        }
        now = jax.lax.while_loop(
            lambda now: jnp.any(now["running"]),
            lambda now: self._turn(now, weights, runners, first),
            {**now, "running": now["running"] & jnp.ones(envs, bool)},
        )
        columns, batches, batch_columns, ended = {}, {}, {}, {}
        moments, broken = {}, now["broken"]
        first_rows = runners["rollouts"] * self.spec.rollout_length
        for name, part in self.parts.items():
            after, data, seen = part.finish(now["parts"][name], weights[name])
            # Rewards are checked as the environment gave them, before they are scaled and clipped.
            found = self._not_finite(part, data, after["obs"], first, first_rows)
            broken = jnp.where(broken[0] < 0, found, broken)
            columns[name], ended[name], discounted = part.episodes(after, data)
            moments[name], batches[name] = part.learned(runners["moments"][name], data, discounted)
            rows = jnp.repeat(first_rows, part.spec.envs_per_runner)
            batch_columns[name] = {**seen, "first": rows}
        after = {
            "states": now["states"],
            "columns": columns,
            "runners": {
                **runners,
                "turn": now["turn"],
                "rollouts": runners["rollouts"] + 1,
                "rises": jax.tree.map(jnp.zeros_like, runners["rises"]),
                "moments": moments,
            },
        }
        happened = {"env_steps": now["env_steps"], "broken": broken, "of": ended}
        return self._whole(work, after, first, count), batches, batch_columns, happened

    def _sizes(self, count: int) -> State:
        """Return how many rows of each part of the state belong to so many runners."""
        of_policy = {name: count * part.spec.envs_per_runner for name, part in self.parts.items()}
        return {
            "states": count * self.spec.envs_per_runner,
            "columns": of_policy,
            "runners": count,
        }

    def _part(self, work: State, first: Array | int, count: int) -> State:
        """Return the state of `count` runners from the first on."""
        # Slices of everything would only copy it.
        if count == self.spec.num_runners:
            return work
        cut = jax.lax.dynamic_slice_in_dim
        one, size = self._sizes(1), self._sizes(count)

        def part(x: State, start: int, rows: int) -> State:
            found: State = jax.tree.map(lambda y: cut(y, first * start, rows), x)
            return found

        return {
            "states": part(work["states"], one["states"], size["states"]),
            "columns": {
                name: part(x, one["columns"][name], size["columns"][name])
                for name, x in work["columns"].items()
            },
            "runners": part(work["runners"], 1, count),
        }

    def _whole(self, work: State, own: State, first: Array | int, count: int) -> State:
        """Return the state of all with a part of it replaced: the inverse of `_part`."""
        if count == self.spec.num_runners:
            return own
        put, one = jax.lax.dynamic_update_slice_in_dim, self._sizes(1)

        def whole(x: State, new: State, start: int) -> State:
            found: State = jax.tree.map(lambda y, z: put(y, z, first * start, 0), x, new)
            return found

        return {
            "states": whole(work["states"], own["states"], one["states"]),
            "columns": {
                name: whole(x, own["columns"][name], one["columns"][name])
                for name, x in work["columns"].items()
            },
            "runners": whole(work["runners"], own["runners"], 1),
        }

    def _blocked(self, parts: Mapping[str, State]) -> Array:
        """Return the environments ``bool[E]`` of which a column is full and must go on."""
        return self._any(part.blocked(parts[name]) for name, part in self.parts.items())

    def _any(self, flags: Iterable[Array]) -> Array:
        return jnp.stack(list(flags)).any(axis=0)

    def _turn(
        self, now: State, weights: Mapping[str, Weights], runners: State, first: Array | int
    ) -> State:
        """Let the agents act whose turn it is, and step the environments that go on."""
        running, parts, envs = now["running"], now["parts"], self.spec.envs_per_runner
        # Where nobody acts, the environment is reset in place of a step.
        resets = ~self._any(
            part.of_env(parts[name]["acting"]).any(axis=1) for name, part in self.parts.items()
        )
        decided, actions = {}, {}
        for name, part in self.parts.items():
            noise = self._noise(part, runners["keys"][name], now["turn"], first)
            decided[name], by_agent = part.decide(parts[name], running, noise, weights[name])
            actions.update(by_agent)

        def bits(key: Array, turn: Array) -> Array:
            return jax.random.bits(
                jax.random.fold_in(jax.random.wrap_key_data(key), turn), (envs, 2, 2)
            )

        random = jax.vmap(bits)(runners["env_key"], now["turn"]).reshape(-1, 2, 2)
        turns = advance_agents(self.env, now["states"], resets, actions, random)
        seen, late = {}, {}
        for name, part in self.parts.items():
            seen[name], late[name] = part.see(decided[name], turns, running, resets)
        nobody = running & ~jnp.stack(list(turns.acts.values())).any(axis=0)
        broken = self._wrong(now["broken"], seen, late, nobody & resets, nobody, runners, first)
        states = jax.tree.map(
            lambda new, old: where_rows(running, new, old), turns.state, now["states"]
        )
        acted = running.reshape(-1, envs).any(axis=1)
        return {
            "states": states,
            "parts": seen,
            "turn": now["turn"] + acted.astype(jnp.uint32),
            # What nobody acts in after its reset would go on for ever.
            "running": running & ~self._blocked(seen) & ~(nobody & resets),
            "env_steps": now["env_steps"] + jnp.sum(running & ~resets, dtype=jnp.int32),
            "broken": broken,
        }

    def _noise(self, part: JaxPart, keys: Array, turn: Array, first: Array | int) -> Array:
        """Return the noise ``[B, ...]`` of one turn of some runners."""
        columns = part.spec.envs_per_runner

        def of_one(key: Array, number: Array, runner: Array) -> Array:
            noise: Array = part.network.noise(
                key,
                number,
                runner * columns + jnp.arange(columns, dtype=jnp.int32),
                steps=1,
                envs=self.spec.num_runners * columns,
                explore=part.spec.explore_of(""),
            )[0]
            return noise

        noise = jax.vmap(of_one)(keys, turn, first + jnp.arange(len(turn), dtype=jnp.int32))
        return noise.reshape(-1, *noise.shape[2:])

    # -- what went wrong

    def _wrong(
        self,
        broken: Array,
        seen: Mapping[str, State],
        late: Mapping[str, Array],
        silent: Array,
        nobody: Array,
        runners: State,
        first: Array | int,
    ) -> Array:
        """Return what was wrong before, or else what is wrong with this turn."""
        first_rows = runners["rollouts"] * self.spec.rollout_length
        for name, part in self.parts.items():
            now = seen[name]
            for what, flags in (
                (LATE, late[name]),
                (LEFT, part.by_column(nobody) & now["open"]),
            ):
                column = jnp.argmax(flags)
                found = self._numbers(part, what, column, now["row"][column], first, first_rows)
                broken = jnp.where((broken[0] < 0) & jnp.any(flags), found, broken)
        env = first * self.spec.envs_per_runner + jnp.argmax(silent)
        runner = first + jnp.argmax(silent) // self.spec.envs_per_runner
        found = jnp.stack([jnp.int32(NOBODY), env, jnp.int32(0), runner, jnp.int32(0)])
        return jnp.where((broken[0] < 0) & jnp.any(silent), found, broken).astype(jnp.int32)

    def _not_finite(
        self,
        part: JaxPart,
        data: State,
        last: Mapping[str, Array],
        first: Array | int,
        first_rows: Array,
    ) -> Array:
        """Return the first number of a rollout that is not finite, as `Broken` has it.

        So is the first turn at which a mask allows no action, and the first observation that is
        none of its space's choices.
        """
        # An observation came before the turn of its row, a reward with it.
        seen = [(1, data["reward"]), *((0, data[name]) for name in last)]
        seen += [(self.spec.rollout_length, x[None]) for x in last.values()]
        seen += misfits(part.spec.spaces(), data, last, data["valid"])
        column, row = first_broken(seen)
        found = self._numbers(part, NOT_FINITE, jnp.maximum(column, 0), row, first, first_rows)
        return jnp.where(column < 0, NONE, found).astype(jnp.int32)

    def _numbers(
        self,
        part: JaxPart,
        what: int,
        column: Array,
        row: Array,
        first: Array | int,
        first_rows: Array,
    ) -> Array:
        """Return what is wrong in a column at a row, as `Broken` has it."""
        several, columns = len(part.agents), part.spec.envs_per_runner
        names = names_of_agents(self.env)
        agents = jnp.array([names.index(agent) for agent in part.agents], jnp.int32)
        numbers = [
            jnp.int32(what),
            first * self.spec.envs_per_runner + column // several,
            agents[column % several],
            first + column // columns,
            first_rows[column // columns] + row,
        ]
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers])

    # -- evaluation

    def evaluate(
        self, weights: Mapping[str, Weights], key: Array, *, episodes: int, max_steps: int
    ) -> dict[str, Array]:
        """Play whole episodes greedily, as `evaluated` says.

        Args:
            weights: by policy.
            key: random key of the environments.
            episodes: how many.
            max_steps: after so many steps an episode is cut.
        """
        return evaluated(self.env, self.parts, weights, key, episodes, max_steps)

    # -- statistics of episodes

    def no_statistics(self) -> State:
        """Return the statistics before anything happened."""
        return {
            "all": no_episodes(),
            "of": {name: no_episodes() for name in self.parts if name},
            # Steps of environments; those of agents are counted with the episodes.
            "env_steps": jnp.int32(0),
            "broken": jnp.full(5, NONE, jnp.int32),
        }

    def note(self, statistics: State, happened: State, valid: Mapping[str, Array]) -> State:
        """Return the statistics with a rollout counted in.

        Args:
            statistics: those before.
            happened: what happened in the rollout, as `roll` returns it.
            valid: by policy: ``bool[T, B]``, which rows are turns.
        """
        everyone, of = statistics["all"], dict(statistics["of"])
        for name, ended in happened["of"].items():
            steps = jnp.sum(valid[name], dtype=jnp.int32)
            everyone = with_episodes(everyone, ended, steps)
            if name:
                of[name] = with_episodes(of[name], ended, steps)
        broken = statistics["broken"]
        return {
            "all": everyone,
            "of": of,
            "env_steps": statistics["env_steps"] + happened["env_steps"],
            "broken": jnp.where(broken[0] < 0, happened["broken"], broken),
        }

    def report(self, statistics: State) -> tuple[State, State]:
        """Return what the next Row reports, and the statistics that remain afterwards."""
        nothing = self.no_statistics()
        report, everyone = reported(statistics["all"])
        since_last = {"agent_steps": report["env_steps"]}
        of = {}
        for name, each in statistics["of"].items():
            of_one, of[name] = reported(each)
            since_last[f"agent_steps/{name}"] = of_one["env_steps"]
            since_last[f"episodes/{name}"] = of_one["episodes"]
            for mean in ("return_mean", "length_mean"):
                report[f"{mean}/{name}"] = of_one[mean]
        found = {
            **report,
            "env_steps": statistics["env_steps"],
            "since_last": since_last,
            "broken": statistics["broken"],
        }
        kept = {name: nothing[name] for name in ("env_steps", "broken")}
        return found, {"all": everyone, "of": of, **kept}


def risen(rises: Array, by: Array) -> Array:
    """Return by how much policy versions rose in all, ``int32[runners]``."""
    return rises + by
