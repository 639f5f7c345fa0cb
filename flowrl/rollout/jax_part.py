"""`JaxPart`: what `Part` does, as pure functions, in environments of several agents in JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from flowrl.core.trees import fields_of
from flowrl.envs.jax_agents import Turns
from flowrl.envs.jax_envs import where_rows
from flowrl.rl.normalizing import merge_moments
from flowrl.rl.policies import Memory, Network, Weights, network
from flowrl.rl.spaces import Spaces
from flowrl.rollout.jax_statistics import by_runner

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = Any
State = dict[str, Any]
FLAGS = ("terminated", "truncated", "valid")


@dataclass(frozen=True)
class JaxPart:
    """A policy that acts for its agents, each a column of its rollouts, when it is their turn.

    The rules are those of `Part`, whose docstring says what a row is and where rollouts end.
    Columns are in the order of the runners, of their environments, and of the agents of each.

    Args:
        spec: the settings of runners whose `envs_per_runner` are the columns of one runner.
        agents: the agents of one environment for which the policy acts.
    """

    spec: Runners
    agents: tuple[str, ...]

    @cached_property
    def network(self) -> Network:
        """The policy, made for the spaces."""
        return network(self.spec.policy, self.spec.spaces())

    @property
    def spaces(self) -> Spaces:
        """The spaces of each agent."""
        return self.spec.spaces()

    @property
    def width(self) -> int:
        """How many numbers a packed action has, with its log-probability and its value."""
        return max(1, self.spaces.head.width) + 2

    def start(self, turns: Turns) -> State:
        """Return the columns before the first turns of some environments."""
        acting = self.joined(turns.acts)
        count, no = len(acting), jnp.zeros_like(acting)
        zeros, memory = jnp.zeros(count, jnp.float32), self._no_memory(count)
        # An agent that has not come yet has an observation too, so that masks allow every action.
        nothing = {p.name: jnp.full((count, *p.shape), p.one, p.dtype) for p in self.spaces.parts}
        return {
            "obs": self.seen(turns, acting, nothing),
            # Whose turn it is.
            "acting": acting,
            # Whose last turn has rewards still to come.
            "open": no,
            # The reward since each agent's last turn.
            "gained": zeros,
            # The reward before each column's open turn, where that is the first of its episode.
            "early": zeros,
            # Whose episode ended, and has no masked row with its final observation yet.
            "ended": no,
            # Whose episode ended, and who has not acted since.
            "over": no,
            # The packed actions of the turns that were open when the last rollout ended.
            "held": jnp.zeros((count, self.width), jnp.float32),
            # By how many policy versions these turns are older than the last rollout's.
            "older": jnp.zeros(count, jnp.int32),
            "memory": memory,
            # What the policy remembered before each agent's last turn.
            "before": memory,
            # Sums over the episode that goes on.
            "return": zeros,
            "length": zeros.astype(jnp.int32),
            "discounted": zeros,
        }

    def _no_memory(self, count: int) -> Memory:
        """Return the memory of columns in which an episode begins; empty unless recurrent."""
        net = self.network
        if not net.recurrent:
            return Memory()
        initial = jax.eval_shape(lambda: net.memory(net.init(jax.random.key(0)), count).carry)
        # Where an episode begins, the network takes its initial carry in place of this one.
        carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), initial)
        return Memory(carry, jnp.ones(count, bool))

    # -- a rollout

    def begin_rollout(self, columns: State, weights: Weights, rise: Array) -> State:
        """Begin a rollout, with the turns that were open at the end of the last one.

        Args:
            columns: what `start` or `finish` returned.
            weights: of the policy.
            rise: ``int32[runners]``, by how much the policy version rose since the last rollout.

        Returns:
            The columns with the arrays of the rollout beside them.
        """
        steps, is_open = self.spec.rollout_length, columns["open"]
        count = len(is_open)
        rises = jnp.repeat(rise, count // len(rise))
        shapes = {
            **{part.name: (part.shape, part.dtype) for part in self.spaces.parts},
            "packed": ((self.width,), jnp.float32),
            "reward": ((), jnp.float32),
            **dict.fromkeys(FLAGS, ((), bool)),
            # What the environments gave by row, in which episodes are counted.
            "earned": ((), jnp.float32),
        }
        data = {
            name: jnp.zeros((steps, count, *shape), dtype)
            for name, (shape, dtype) in shapes.items()
        }
        row = jnp.zeros(count, jnp.int32)
        # What these agents saw is still the newest that they saw.
        held = {**columns["obs"], "packed": columns["held"], "valid": is_open}
        # The first row may be a turn that was taken before.
        remembered = _chosen(is_open, columns["before"], columns["memory"])
        return {
            **columns,
            "data": self._written(data, row, is_open, held),
            # The next row to be written.
            "row": row + is_open,
            "older": jnp.where(is_open, columns["older"] + rises, 0).astype(jnp.int32),
            "begins": self.network.begin(weights, remembered),
        }

    def _written(self, data: State, row: Array, which: Array, fields: Mapping[str, Array]) -> State:
        """Return the rollout with these fields in a row of each of the columns ``bool[B]``."""
        # What has an index beyond the last row is not written.
        at = jnp.where(which, row, self.spec.rollout_length), jnp.arange(len(row))
        written = {name: data[name].at[at].set(x, mode="drop") for name, x in fields.items()}
        return {**data, **written}

    def of_env(self, x: Array) -> Array:
        """Return values of columns ``[B, ...]`` by environment and agent."""
        return x.reshape(-1, len(self.agents), *x.shape[1:])

    def by_column(self, x: Array) -> Array:
        """Return values of environments ``[E]`` by column."""
        return jnp.repeat(x, len(self.agents))

    def blocked(self, now: State) -> Array:
        """Return the environments ``bool[E]`` of which a column is full and must go on."""
        full = (now["acting"] | now["ended"]) & (now["row"] == self.spec.rollout_length)
        return self.of_env(full).any(axis=1)

    def decide(
        self, now: State, running: Array, noise: Array, weights: Weights
    ) -> tuple[State, dict[str, Any]]:
        """Write a row for each agent whose turn it is.

        Args:
            now: the columns and their rollout.
            running: ``bool[E]``, the environments that go on.
            noise: ``[B, ...]``, which picks the actions.
            weights: of the policy.

        Returns:
            The columns and their rollout, and by agent the actions ``[E, ...]``, which are zeros
            where it does not act.
        """
        goes_on = self.by_column(running)
        acts, final = now["acting"] & goes_on, now["ended"] & goes_on
        packed, carry, by_agent = self.act(now, acts, noise, weights)
        fields = {**now["obs"], "packed": packed, "valid": acts}
        after = {
            **now,
            "data": self._written(now["data"], now["row"], acts | final, fields),
            "row": now["row"] + (acts | final),
            # After a final observation an episode begins.
            "memory": self.remembered(now, acts, carry, final),
            "before": _chosen(acts, now["memory"], now["before"]),
            # What an agent gained before its first turn is in its episode's return, and in no row.
            "early": jnp.where(acts, now["gained"], now["early"]),
            "gained": jnp.where(acts, 0.0, now["gained"]),
            "open": now["open"] | acts,
            "ended": now["ended"] & ~final,
        }
        return after, by_agent

    def act(
        self, now: State, acts: Array, noise: Array | None, weights: Weights
    ) -> tuple[Array, Any, dict[str, Any]]:
        """Act on the newest observations.

        Args:
            now: the columns.
            acts: ``bool[B]``, whose turn it is.
            noise: ``[B, ...]``, which picks the actions; None for greedy ones.
            weights: of the policy.

        Returns:
            What `Network.act` returns, and by agent the actions ``[E, ...]``, which are zeros where
            it is not its turn.
        """
        net, obs = self.network, self.spaces.tree(now["obs"])
        packed, carry = net.act(weights, obs, noise, now["memory"], self.spec.explore_of(""))
        action = net.head.to_env(net.unpack(packed)[0])
        action = jax.tree.map(lambda x: where_rows(acts, x, jnp.zeros_like(x)), action)
        by_agent = {}
        for i, agent in enumerate(self.agents):
            by_agent[agent] = jax.tree.map(lambda x, i=i: self.of_env(x)[:, i], action)
        return packed, carry, by_agent

    def remembered(self, now: State, acts: Array, carry: Any, begins: Array) -> Memory:
        """Return the memory after a step: who does not act remembers what it did.

        Args:
            now: the columns before the step.
            acts: ``bool[B]``, who acted.
            carry: the policy's carry afterwards.
            begins: ``bool[B]``, whose next turn begins an episode.
        """
        before: Memory = now["memory"]
        if not self.network.recurrent:
            return before
        new = _chosen(acts, Memory(carry, jnp.zeros_like(acts)), before)
        return Memory(new.carry, new.reset | begins)

    def see(self, now: State, turns: Turns, running: Array, resets: Array) -> tuple[State, Array]:
        """Take what a step gave: rewards, and the turns that end with it.

        Args:
            now: the columns and their rollout.
            turns: what the environments returned.
            running: ``bool[E]``, those that were stepped.
            resets: ``bool[E]``, those that began an episode in place of the step.

        Returns:
            The columns and their rollout, and ``bool[B]``, who got a reward though its episode is
            over.
        """
        goes_on, begins = self.by_column(running), self.by_column(running & resets)
        given = {
            name: jnp.where(goes_on, self.joined(getattr(turns, name)), 0)
            for name in ("reward", "terminated", "truncated")
        }
        terminated, truncated = given["terminated"] > 0, given["truncated"] > 0
        acting = jnp.where(goes_on, self.joined(turns.acts), now["acting"])
        over = terminated | truncated
        gained = now["gained"] + given["reward"]
        closes = now["open"] & goes_on & (over | acting)
        fields = {
            "reward": gained,
            "earned": gained + now["early"],
            "terminated": terminated,
            "truncated": truncated,
        }
        has_ended = now["over"] & ~begins
        late = goes_on & (given["reward"] != 0) & has_ended & ~acting
        after = {
            **now,
            "obs": self.seen(turns, goes_on & (acting | over), now["obs"]),
            "data": self._written(now["data"], now["row"] - 1, closes, fields),
            "acting": acting,
            # An episode that ended before the agent's first turn is in no row and no return.
            "gained": jnp.where(closes | over, 0.0, gained),
            "open": now["open"] & ~closes,
            "ended": jnp.where(closes, over, now["ended"]),
            "over": jnp.where(goes_on, (has_ended & ~acting) | over, now["over"]),
        }
        return after, late

    def seen(self, turns: Turns, which: Array, before: dict[str, Array]) -> dict[str, Array]:
        """Return the newest observations: new ones in the columns ``bool[B]`` that see some."""
        by_agent = {agent: fields_of("obs", turns.obs[agent]) for agent in self.agents}
        found = {}
        for name, x in before.items():
            new = self.joined({agent: fields[name] for agent, fields in by_agent.items()})
            found[name] = where_rows(which, new, x)
        return found

    def joined(self, by_agent: Mapping[str, Array]) -> Array:
        """Return values of environments by agent, ``[E, ...]`` each, by column."""
        x = jnp.stack([by_agent[agent] for agent in self.agents], axis=1)
        return x.reshape(-1, *x.shape[2:])

    def finish(self, now: State, weights: Weights) -> tuple[State, State, State]:
        """End the rollout, once no environment goes on.

        Returns:
            The columns afterwards; the data of the rollout, ``[T, B, ...]``, in which actions are
            packed and rewards are the environments'; and the columns of its batch.
        """
        data, is_open = now["data"], now["open"]
        # An open turn leaves this rollout, and its observation is the one to bootstrap from.
        row = now["row"] - is_open
        at = jnp.maximum(row, 0), jnp.arange(len(row))
        held = jnp.where(is_open[:, None], data["packed"][at], now["held"])
        data = {**data, "valid": data["valid"].at[at].set(data["valid"][at] & ~is_open)}
        # One that was open before this rollout is still the first row; a column that is left
        # without a row is nobody's data.
        older = {"held": jnp.where(row == 0, now["older"], 0)}
        older["rollout"] = jnp.where(row == 0, 0, now["older"])
        data, now = self._filled(data, {**now, "row": row}, held, weights)
        for name in ("reward", "terminated", "truncated"):
            data[name] = data[name] * data["valid"]
        columns = {
            **{f"bootstrap_{name}": x for name, x in now["obs"].items()},
            "older": older["rollout"],
            "cut": data["cut"].any(axis=0),
            **now["begins"],
        }
        left = ("data", "row", "begins")
        after = {name: x for name, x in now.items() if name not in left}
        return {**after, "held": held, "older": older["held"]}, data, columns

    def _filled(
        self, data: State, now: State, held: Array, weights: Weights
    ) -> tuple[State, State]:
        """Return the rollout with masked rows where columns have fewer, and the columns.

        The rollout's ``cut`` says after which rows it ends though the episode goes on.
        """
        steps, row = self.spec.rollout_length, now["row"]
        net, obs = self.network, now["obs"]
        packed, _ = net.act(weights, self.spaces.tree(obs), None, now["memory"])
        # A policy that remembers has seen an open turn's observation already.
        packed = jnp.where(now["open"][:, None], held, packed)
        masked = jnp.arange(steps)[:, None] >= row

        def fill(x: Array, last: Array) -> Array:
            which = masked.reshape(*masked.shape, *[1] * (x.ndim - 2))
            return jnp.where(which, last[None], x)

        filled = {name: fill(data[name], x) for name, x in {**obs, "packed": packed}.items()}
        short = row < steps
        # A final observation is in the first of these rows, so the next turn begins an episode.
        begins = short & now["ended"]
        memory = now["memory"]
        if net.recurrent:
            memory = Memory(memory.carry, memory.reset | begins)
        before = jnp.maximum(row - 1, 0), jnp.arange(len(row))
        over = data["terminated"][before] | data["truncated"][before]
        ends = short & (row > 0) & data["valid"][before] & ~over
        cut = jnp.zeros_like(data["valid"]).at[before].set(ends)
        after = {**now, "memory": memory, "ended": now["ended"] & ~begins}
        return {**data, **filled, "cut": cut}, after

    # -- episodes and rewards

    def episodes(self, columns: State, data: State) -> tuple[State, State, Array]:
        """Return the columns and the episodes that ended, with the sums over each so far.

        Returns:
            The columns afterwards; flags, returns and lengths ``[T, B]`` of what ended; and the
            discounted returns ``[T, B]``, by which rewards are scaled.
        """
        gamma = self.spec.normalize_rewards or 0.0

        def one(sums: tuple[Array, ...], x: tuple[Array, ...]) -> Any:
            earned, reward, valid, over = x
            returned, length = sums[0] + earned, sums[1] + valid
            discounted = jnp.where(valid, sums[2] * gamma + reward, sums[2])
            after = [jnp.where(over, 0, sum_) for sum_ in (returned, length, discounted)]
            return tuple(after), (returned, length, discounted)

        over = data["terminated"] | data["truncated"]
        names = ("return", "length", "discounted")
        rows = data["earned"], data["reward"], data["valid"], over
        sums, (returned, length, discounted) = jax.lax.scan(
            one, tuple(columns[name] for name in names), rows
        )
        ended = {"over": over, "return": returned, "length": length}
        return {**columns, **dict(zip(names, sums, strict=True))}, ended, discounted

    def learned(self, moments: Any, data: State, discounted: Array) -> tuple[Any, dict[str, Array]]:
        """Return the moments of rewards, and the data of a batch, with rewards to learn from."""
        reward, envs = data["reward"], self.spec.envs_per_runner
        if self.spec.normalize_rewards is not None:
            moments = jax.vmap(merge_moments)(
                moments, by_runner(discounted, envs), by_runner(data["valid"], envs)
            )
            reward = reward / jnp.sqrt(jnp.repeat(moments[1], envs) + 1e-8)
        if self.spec.clip_rewards is not None:
            reward = jnp.clip(reward, -self.spec.clip_rewards, self.spec.clip_rewards)
        action, logp, value = self.network.unpack(data["packed"])
        batch = {
            **{part.name: data[part.name] for part in self.spaces.parts},
            "reward": reward,
            "terminated": data["terminated"],
            # A cut ends no episode, so it is marked after episodes were counted.
            "truncated": data["truncated"] | data["cut"],
            "valid": data["valid"],
            "action": action,
            "logp": logp,
            "value": value,
        }
        return moments, batch


def _chosen(which: Array, one: Memory, other: Memory) -> Memory:
    """Return the memory of one for the columns ``bool[B]``, and of the other for the rest."""
    found: Memory = jax.tree.map(lambda x, y: where_rows(which, x, y), one, other)
    return found
