"""The functions of a replay on the device: pure ones of arrays, so that a runtime may fuse them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from flowrl.core.trees import names_of
from flowrl.replay.jax_sum_tree import empty_tree, find, set_weights
from flowrl.replay.sum_tree import scattered
from flowrl.rl.normalizing import discounted_sums, merge_moments

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = Any
State = dict[str, Any]
Fields = dict[str, Array]
Types = tuple[tuple[str, tuple[int, ...], str], ...]
"""Names, shapes and types of fields."""
MOST = 2**31 - 1
"""The most slots, so that an index of 32 bits reaches each."""
TRIES = 4
"""Slots picked at random for each transition; the first of them that may be sampled counts."""


@lru_cache(maxsize=64)
def core_of(spec: Replay, rows: int, envs: int, rollout_length: int = 1) -> Core:
    """Return the core for these settings.

    Equal settings share one core, so that what was compiled for one run serves the next.
    """
    return Core(spec, rows, envs, rollout_length)


@dataclass(frozen=True)
class Core:
    """The pure functions of a replay.

    It is a `Ring` on the device, with the same slots. Every rollout has the same length.

    Args:
        spec: the settings of the replay.
        rows: rows of each environment; a multiple of a rollout's, so that none is cut in two.
        envs: environments.
        rollout_length: rows of a rollout, where sequences begin (default 1).
    """

    spec: Replay
    rows: int
    envs: int
    rollout_length: int = 1

    @property
    def _whole(self) -> bool:
        """Whether it is sampled in sequences."""
        return self.spec.sequence_length is not None

    def empty(self, key: Array, *, fields: Types, carries: Types = ()) -> State:
        """Return the state of an empty replay.

        Args:
            key: the random key by which it samples.
            fields: names, shapes (of one row) and types of the fields to store.
            carries: those of the carry before each rollout, of which it stores one row for each.
        """
        rows, rollouts = (self.rows, self.envs), (self.rows // self.rollout_length, self.envs)
        data = {name: jnp.zeros((*rows, *shape), dtype) for name, shape, dtype in fields}
        data |= {name: jnp.zeros((*rollouts, *shape), dtype) for name, shape, dtype in carries}
        flags = {name: jnp.zeros(rows, bool) for name in ("over", "valid", "usable")}
        if self._whole:
            flags["begins"] = jnp.zeros(rows, bool)
        # By environment: `head` is the row after the newest, `count` the rows ever added, `due` the
        # number of the step with which it goes on. `turn` counts the samples taken.
        return {
            "data": data if self._whole else data | {"discount": jnp.zeros(rows)},
            **flags,
            "head": jnp.zeros(self.envs, jnp.int32),
            "count": jnp.zeros(self.envs, jnp.int32),
            "due": jnp.zeros(self.envs, jnp.int32),
            "key": jax.random.key_data(key),
            "turn": jnp.uint32(0),
            **(self._no_priorities(key) if self.spec.prioritized else {}),
            **(self._no_moments() if self.spec.normalize_rewards else {}),
        }

    def _no_moments(self) -> State:
        """Return the part of an empty state by which rewards are scaled."""
        # By environment the discounted return so far; of all of them mean, variance and count.
        moments = tuple(jnp.float32(x) for x in (0.0, 1.0, 1e-4))
        return {"returns": jnp.zeros(self.envs), "moments": moments}

    def _no_priorities(self, key: Array) -> State:
        """Return the part of an empty state by which rows are sampled by priority."""
        return {
            # Stamps count from a random origin on: priorities of rows of another replay then match
            # none of these rows.
            "origin": jax.random.randint(key, (), 0, 2**30),
            "stamp": jnp.zeros((self.rows, self.envs), jnp.int32),
            "highest": jnp.float32(1),
            "tree": empty_tree(self.rows * self.envs),
        }

    def add(self, state: State, data: Fields, end: Fields, first: Array, *, low: int) -> State:
        """Return the state with a rollout added.

        Args:
            state: of this replay.
            data: the fields of the rollout, ``[T, B, ...]``.
            end: the observations that it led to, ``[B, ...]``, by the names of their fields; and
                the carry before it, by the names of its columns.
            first: the numbers of its first steps, ``[B]``: where they go on from.
            low: the number of its first environment; the others follow, and have given as many
                rollouts as it has.
        """
        steps, columns = data["reward"].shape
        mine = slice(low, low + columns)
        interrupted = (state["count"][mine] > 0) & (state["due"][mine] != first)
        state = self._cut(state, mine, interrupted)
        head = state["head"][low]
        rows = (head + jnp.arange(-self.spec.reach, steps + 1)) % self.rows
        stored = self._stored(state, data, end, low)
        ended = (head + steps) % self.rows
        new_valid = _put(state["valid"], data["valid"], head, low)
        # The row after the rollout holds its final observation, and no step.
        valid = _put(new_valid, jnp.zeros((1, columns), bool), ended, low)
        over = _put(state["over"], data["terminated"] | data["truncated"], head, low)
        if self.spec.n_step > 1:
            # An agent that takes turns may have none in a rollout, before which its returns end.
            newest = (head - 1) % self.rows
            ends = state["valid"][newest, mine] & ~data["valid"][0]
            over = over.at[newest, mine].set(over[newest, mine] | ends)
        begun = {}
        if self._whole:
            begins = jnp.zeros((steps, columns), bool).at[0].set(True)
            begun["begins"] = _put(state["begins"], begins, head, low)
            usable = self._usable_sequences(begun["begins"], rows, mine)
        else:
            usable = self._usable(valid, over, rows, mine)
        new = {
            **state,
            "data": stored,
            "valid": valid,
            "over": over,
            **begun,
            "usable": state["usable"].at[rows, mine].set(usable),
            "head": state["head"].at[mine].set(ended),
            "count": state["count"].at[mine].add(steps),
            "due": state["due"].at[mine].set(first + steps),
        }
        if self.spec.normalize_rewards:
            new |= self._moments(state, data, mine, interrupted)
        if self.spec.prioritized:
            new |= self._weighed(state, stored, usable, rows, mine)
        return new

    def _moments(self, state: State, data: Fields, mine: slice, interrupted: Array) -> State:
        """Return discounted returns and their moments after a rollout, as `RewardScale` does."""
        start = jnp.where(interrupted, 0.0, state["returns"][mine])
        end, returns = discounted_sums(data, start, self.spec.gamma)
        moments = merge_moments(state["moments"], returns.reshape(-1), data["valid"].reshape(-1))
        return {"returns": state["returns"].at[mine].set(end), "moments": moments}

    def _stored(self, state: State, data: Fields, end: Fields, low: int) -> State:
        """Return the stored fields with those of a rollout, and the observations it led to."""
        head, steps = state["head"][low], data["reward"].shape[0]
        fresh = {**data, "discount": jnp.where(data["terminated"], 0.0, self.spec.gamma)}
        # Of a carry there is one row for each rollout.
        fresh |= {name: end[name][None] for name in names_of("carry", end)}
        rows_of = {name: self.rows // x.shape[0] for name, x in state["data"].items()}
        if "priority" in data:
            powers = self._power(data["priority"])
            # One that is not finite would spoil every sample: its row counts as one without any.
            fresh["priority"] = jnp.where(jnp.isfinite(powers), powers, state["highest"])
        stored = {
            name: _put(x, fresh[name], head // rows_of[name], low)
            for name, x in state["data"].items()
        }
        for name in names_of("obs", end):
            stored[name] = _put(stored[name], end[name][None], (head + steps) % self.rows, low)
        return stored

    def _usable(self, valid: Array, over: Array, rows: Array, mine: slice) -> Array:
        """Return which of some rows, the last ones of environments, may be sampled."""
        usable = valid[rows][:, mine]
        ended = jnp.zeros(usable.shape[1], bool)
        # The last rows wait for what comes, unless their episode is over.
        for back in range(1, self.spec.n_step):
            ended = ended | over[rows[-1 - back], mine]
            usable = usable.at[-1 - back].set(usable[-1 - back] & ended)
        return usable

    def _usable_sequences(self, begins: Array, rows: Array, mine: slice) -> Array:
        """Return which of some rows, the last ones of environments, begin a whole sequence."""
        # The last of them is the observation after the newest row, which is no row itself.
        whole = jnp.arange(len(rows)) <= len(rows) - 1 - self.spec.reach
        return begins[rows][:, mine] & whole[:, None]

    def _weighed(
        self, state: State, stored: State, usable: Array, rows: Array, mine: slice
    ) -> State:
        """Return stamps, highest priority and sum tree after a rollout was added.

        Args:
            state: before it was added.
            stored: the fields with those of the rollout.
            usable: by row of `rows` and environment, whether it may be sampled now.
            rows: the rows that adding touched: the n before the rollout, its own, and the one
                after it.
            mine: the environments of the rollout.
        """
        steps, columns = len(rows) - self.spec.reach - 1, usable.shape[1]
        stamp = state["origin"] + state["count"][mine.start] // steps + 1
        stamps = jnp.broadcast_to(stamp, (steps, columns))
        # New rows have the priority that they bring, or else the highest so far.
        if "priority" in stored:
            fresh = stored["priority"][rows][:, mine]
        else:
            fresh = jnp.full(usable.shape, state["highest"])
        slots = rows[:, None] * self.envs + jnp.arange(mine.start, mine.stop)
        # A row before the rollout that could be sampled keeps the priority of an update.
        before = (jnp.arange(len(rows)) < self.spec.reach)[:, None]
        was_usable = state["usable"][rows][:, mine] & before
        weights = jnp.where(was_usable, state["tree"]["leaves"][slots], fresh)
        return {
            "stamp": _put(state["stamp"], stamps, state["head"][mine.start], mine.start),
            "highest": jnp.maximum(state["highest"], jnp.max(fresh)),
            "tree": set_weights(state["tree"], slots, jnp.where(usable, weights, 0.0)),
        }

    def _cut(self, state: State, mine: slice, interrupted: Array) -> State:
        """Return the state in which rows that need what was interrupted can't be sampled."""
        # Rows run from the newest back. The next rollout overwrites the observation after the
        # newest row, so no return that reaches the newest row can be sampled, even if its episode
        # ended there; one whose episode ended before it can.
        rows = (state["head"][mine.start] - 1 - jnp.arange(self.spec.reach)) % self.rows
        if self._whole:
            begins = state["begins"][rows][:, mine] & ~interrupted
            return {**state, "begins": state["begins"].at[rows, mine].set(begins)}
        over = state["over"][rows][:, mine]
        ended = jnp.cumsum(over.at[0].set(False), axis=0) > 0
        valid = state["valid"][rows][:, mine] & (~interrupted | ended)
        return {**state, "valid": state["valid"].at[rows, mine].set(valid)}

    def sample(
        self, state: State, *, size: int
    ) -> tuple[State, dict[str, Array], dict[str, Array]]:
        """Sample transitions or sequences.

        Returns:
            The state after it, data ``[1, size, ...]`` or ``[sequence_length, size, ...]``, and
            columns ``[size]``. What no usable row was found for is not valid.
        """
        key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["turn"])
        weight, columns = {}, {}
        if self.spec.prioritized:
            slots, weight["weight"] = self._by_priority(state, key, size)
            columns = {"slot": slots, "stamp": state["stamp"].reshape(-1)[slots]}
        else:
            slots = self._uniform(state, key, size)
        valid = state["usable"].reshape(-1)[slots]
        after = {**state, "turn": state["turn"] + 1}
        if self._whole:
            rows, more = self._sequences(state, slots, valid)
            after["head"] = _once_read(state["head"], (rows, more))
            weights = {name: jnp.broadcast_to(x, rows["valid"].shape) for name, x in weight.items()}
            return after, {**rows, **weights}, {**more, **columns}
        found = self._transitions(state, slots)
        after["head"] = _once_read(state["head"], found)
        data = {**found, **weight, "valid": valid}
        return after, {name: x[None] for name, x in data.items()}, columns

    def _by_priority(self, state: State, key: Array, size: int) -> tuple[Array, Array]:
        """Return slots sampled by priority, and their importance weights."""
        shares = (scattered(size) + jax.random.uniform(key, (size,))) / size
        slots = find(state["tree"], shares)
        count, priority = jnp.sum(state["usable"].reshape(-1)), state["tree"]["leaves"][slots]
        weights = (count * priority / jnp.sum(state["tree"]["tops"])) ** -self._beta(state)
        # Rounding may end at a slot that can't be sampled, whose weight would be infinite.
        weights = jnp.where(priority > 0, weights, 0.0)
        return slots, weights / jnp.max(weights)

    def _uniform(self, state: State, key: Array, size: int) -> Array:
        """Return slots sampled uniformly; one is not usable where no try found a usable one."""
        usable = state["usable"].reshape(-1)
        written = jnp.minimum(jnp.max(state["count"]), self.rows)
        if self._whole:
            # Only the first rows of rollouts may be usable.
            rollouts = written // self.rollout_length * self.envs
            first = jax.random.randint(key, (size, TRIES), 0, rollouts)
            rows = first // self.envs * self.rollout_length
            tries = rows * self.envs + first % self.envs
        else:
            tries = jax.random.randint(key, (size, TRIES), 0, written * self.envs)
        first_usable = jnp.argmax(usable[tries], axis=1)[:, None]
        return jnp.take_along_axis(tries, first_usable, 1)[:, 0]

    def _beta(self, state: State) -> Array:
        """Return the power of the importance weights, which rises from `beta` to 1."""
        share: Array = 0.0
        if self.spec.beta_steps:
            # The sum of 32-bit integers would overflow.
            steps = jnp.sum(state["count"], dtype=jnp.float32)
            share = jnp.minimum(1.0, steps / float(self.spec.beta_steps))
        return self.spec.beta + (1 - self.spec.beta) * share

    def _transitions(self, state: State, slots: Array) -> dict[str, Array]:
        """Return the fields of the transitions that begin at slots ``[n]``."""
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in state["data"].items()}
        over, total, last = state["over"].reshape(-1), self.rows * self.envs, slots
        reward, discount, going = flat["reward"][slots], flat["discount"][slots], ~over[slots]
        for _ in range(self.spec.n_step - 1):
            # Those whose episode is over stay where they are.
            last = (last + self.envs * going) % total
            reward = reward + jnp.where(going, discount * flat["reward"][last], 0.0)
            discount = jnp.where(going, discount * flat["discount"][last], discount)
            going = going & ~over[last]
        if self.spec.normalize_rewards:
            reward = reward / jnp.sqrt(state["moments"][1] + 1e-8)
        seen = names_of("obs", flat)
        first = {name: flat[name][slots] for name in (*seen, "action", *self.spec.extra)}
        return {
            **first,
            "reward": reward,
            "discount": discount,
            **{f"next_{name}": flat[name][(last + self.envs) % total] for name in seen},
        }

    def _sequences(self, state: State, slots: Array, found: Array) -> tuple[Fields, Fields]:
        """Return the fields and columns of the sequences that begin at slots ``[n]``.

        Those of which `found` ``[n]`` is false are masked.
        """
        data, total, length = state["data"], self.rows * self.envs, self.spec.reach
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in data.items()}
        rows = (slots + self.envs * jnp.arange(length)[:, None]) % total
        after = (slots + self.envs * length) % total
        valid = state["valid"].reshape(-1)[rows] & found
        terminated = flat["terminated"][rows] & valid
        reward = flat["reward"][rows]
        if self.spec.normalize_rewards:
            reward = reward / jnp.sqrt(state["moments"][1] + 1e-8)
        seen = names_of("obs", flat)
        carried = slots // self.envs // self.rollout_length * self.envs + slots % self.envs
        fields = {
            **{name: flat[name][rows] for name in (*seen, "action", *self.spec.extra)},
            "reward": reward,
            "terminated": terminated,
            "truncated": state["over"].reshape(-1)[rows] & valid & ~terminated,
            "valid": valid,
        }
        columns = {f"bootstrap_{name}": flat[name][after] for name in seen}
        return fields, columns | {name: flat[name][carried] for name in names_of("carry", flat)}

    def prioritize(self, state: State, slots: Array, stamps: Array, priorities: Array) -> State:
        """Return the state with new priorities of those rows that are still there.

        Args:
            state: of this replay.
            slots: of the rows ``[n]``.
            stamps: of the rows when they were sampled ``[n]``.
            priorities: by row ``[n]``, before their power is taken.
        """
        there = state["usable"].reshape(-1)[slots] & (state["stamp"].reshape(-1)[slots] == stamps)
        powers = self._power(priorities)
        # One that is not finite would spoil every sample: its row keeps the one that it has.
        there = there & jnp.isfinite(powers)
        weights = jnp.where(there, powers, state["tree"]["leaves"][slots])
        return {
            **state,
            "tree": set_weights(state["tree"], slots, weights),
            "highest": jnp.maximum(state["highest"], jnp.max(jnp.where(there, powers, 0.0))),
        }

    def _power(self, priorities: Array) -> Array:
        return (jnp.abs(priorities) + self.spec.eps) ** self.spec.alpha


def _put(whole: Array, part: Array, row: Array, low: int) -> Array:
    """Return an array ``[rows, envs, ...]`` with a part written from a row and environment on."""
    start = (row, low, *[0] * (whole.ndim - 2))
    return jax.lax.dynamic_update_slice(whole, part.astype(whole.dtype), start)


def _once_read(head: Array, sampled: Any) -> Array:
    """Return `head` as it is, but computed from what was sampled.

    The next rollout is then written after the replay was read. A program of several rounds may
    else write first, for which it copies the whole replay in every round.
    """
    for x in jax.tree.leaves(sampled):
        bits = jax.lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
        # It is 0, which XLA does not see.
        head = head + ((bits >> 16) >> 16).astype(head.dtype)
    return head
