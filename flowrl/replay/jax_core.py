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

    @property
    def _flag_names(self) -> tuple[str, ...]:
        """The names of the flags of rows by which it is found out what may be sampled."""
        return ("valid", "over", "begins") if self._whole else ("valid", "over")

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
        flags = {name: jnp.zeros(rows, bool) for name in (*self._flag_names, "usable")}
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
            "usable_count": jnp.int32(0),
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
        head = state["head"][low]
        # Those before the rollout that its steps complete, its own, and the one after it.
        rows = (head + jnp.arange(-self.spec.reach, steps + 1)) % self.rows
        # Each flag is read once, then written once: XLA would copy all of it between two writes.
        old = {name: state[name][rows][:, mine] for name in self._flag_names}
        flags = self._flags(old, data, interrupted)
        was_usable = state["usable"][rows][:, mine]
        flags["usable"] = _once_read(flags["usable"], was_usable)
        stored = self._stored(state, data, end, low)
        new = {
            **state,
            "data": stored,
            **{name: state[name].at[rows, mine].set(x) for name, x in flags.items()},
            "head": state["head"].at[mine].set((head + steps) % self.rows),
            "count": state["count"].at[mine].add(steps),
            "due": state["due"].at[mine].set(first + steps),
        }
        if self.spec.normalize_rewards:
            new |= self._moments(state, data, mine, interrupted)
        if self.spec.prioritized:
            new |= self._weighed(state, stored, was_usable, flags["usable"], rows, mine)
        return new

    def _flags(self, old: Fields, data: Fields, interrupted: Array) -> Fields:
        """Return the flags ``[reach + T + 1, B]`` of the rows that a rollout touches.

        Args:
            old: what they were.
            data: the fields of the rollout, ``[T, B, ...]``.
            interrupted: by environment, whether it does not follow on the rows before it ``[B]``.
        """
        before = {name: x[: self.spec.reach] for name, x in old.items()}
        over = data["terminated"] | data["truncated"]
        # The row after the rollout holds its final observation, and no step.
        none = jnp.zeros_like(over[:1])
        if self._whole:
            begins = jnp.zeros_like(over).at[0].set(True)
            begins = jnp.concatenate([before["begins"] & ~interrupted, begins, none])
            # A sequence ends before the row after the rollout.
            whole = jnp.arange(len(begins)) <= len(begins) - 1 - self.spec.reach
            return {
                "begins": begins,
                "valid": jnp.concatenate([before["valid"], data["valid"], none]),
                "over": jnp.concatenate([before["over"], over, none]),
                "usable": begins & whole[:, None],
            }
        valid = before["valid"] & (~interrupted | self._ended_before_newest(before["over"]))
        if self.spec.n_step > 1:
            # An agent that takes turns may have none in a rollout, before which its returns end.
            ends = valid[-1] & ~data["valid"][0]
            before["over"] = before["over"].at[-1].set(before["over"][-1] | ends)
        valid = jnp.concatenate([valid, data["valid"], none])
        over = jnp.concatenate([before["over"], over, none])
        return {"valid": valid, "over": over, "usable": self._usable(valid, over)}

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

    def _usable(self, valid: Array, over: Array) -> Array:
        """Return which of the last rows of environments, and the one after, may be sampled."""
        usable, ended = valid, jnp.zeros_like(over[0])
        # The last rows wait for what comes, unless their episode is over.
        for back in range(1, self.spec.n_step):
            ended = ended | over[-1 - back]
            usable = usable.at[-1 - back].set(usable[-1 - back] & ended)
        return usable

    @staticmethod
    def _ended_before_newest(over: Array) -> Array:
        """Return of which rows, the last ones ``[n, B]``, the episode ended before the newest row.

        The next rollout overwrites the observation after the newest row. Where it does not follow
        on that row, no return that reaches it can be sampled, even if its episode ended there; one
        whose episode ended before it can.
        """
        return jnp.cumsum(over.at[-1].set(False)[::-1], axis=0)[::-1] > 0

    def _weighed(
        self,
        state: State,
        stored: State,
        was_usable: Array,
        usable: Array,
        rows: Array,
        mine: slice,
    ) -> State:
        """Return stamps, highest priority, sum tree and count of rows after a rollout was added.

        Args:
            state: before it was added.
            stored: the fields with those of the rollout.
            was_usable: by row of `rows` and environment, whether it could be sampled before.
            usable: whether it may be sampled now.
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
        weights = jnp.where(was_usable & before, state["tree"]["leaves"][slots], fresh)
        return {
            "stamp": _put(state["stamp"], stamps, state["head"][mine.start], mine.start),
            "highest": jnp.maximum(state["highest"], jnp.max(fresh)),
            "tree": set_weights(state["tree"], slots, jnp.where(usable, weights, 0.0)),
            "usable_count": state["usable_count"] + jnp.sum(usable) - jnp.sum(was_usable),
        }

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
            after["head"] = _once_read(state["head"], (rows, more, columns))
            weights = {name: jnp.broadcast_to(x, rows["valid"].shape) for name, x in weight.items()}
            return after, {**rows, **weights}, {**more, **columns}
        found = self._transitions(state, slots)
        after["head"] = _once_read(state["head"], (found, valid, columns))
        data = {**found, **weight, "valid": valid}
        return after, {name: x[None] for name, x in data.items()}, columns

    def _by_priority(self, state: State, key: Array, size: int) -> tuple[Array, Array]:
        """Return slots sampled by priority, and their importance weights."""
        shares = (scattered(size) + jax.random.uniform(key, (size,))) / size
        slots = find(state["tree"], shares)
        count, priority = state["usable_count"], state["tree"]["leaves"][slots]
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
            "head": _once_read(state["head"], there),
            "tree": set_weights(state["tree"], slots, weights),
            "highest": jnp.maximum(state["highest"], jnp.max(jnp.where(there, powers, 0.0))),
        }

    def _power(self, priorities: Array) -> Array:
        return (jnp.abs(priorities) + self.spec.eps) ** self.spec.alpha


def _put(whole: Array, part: Array, row: Array, low: int) -> Array:
    """Return an array ``[rows, envs, ...]`` with a part written from a row and environment on."""
    start = (row, low, *[0] * (whole.ndim - 2))
    return jax.lax.dynamic_update_slice(whole, part.astype(whole.dtype), start)


def _once_read(new: Array, read: Any) -> Array:
    """Return an array as it is, but computed from what was read of the replay.

    What is written by it is then written after that was read. A program of several rounds may else
    write first, for which it copies the whole replay in every round.

    Args:
        new: what is written, or the row at which the next rollout is.
        read: arrays that were read.
    """
    for x in jax.tree.leaves(read):
        bits = jax.lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
        # It is 0, which XLA does not see.
        new = new + ((bits >> 16) >> 16).astype(new.dtype)
    return new
