"""A replay on the device, over environments written in JAX: pure functions of arrays, so that a runtime may fuse them with all else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.items import Batch, nbytes
from flowrl.core.texts import in_bytes
from flowrl.errors import GraphError, SettingError
from flowrl.graph.protocols import Site
from flowrl.replay.handle import ReplayHandle, Stock
from flowrl.replay.shards import needed, reached, too_large, too_small
from flowrl.replay.sum_tree import WIDE, scattered

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = Any
State = dict[str, Any]
MOST = 2**31 - 1
"""Slots that an index of 32 bits reaches."""
TRIES = 4
"""Slots that are drawn for each transition, of which the first that may be drawn counts."""


@lru_cache(maxsize=64)
def core_of(spec: Replay, rows: int, envs: int) -> Core:
    """The core for these settings: one and the same for equal ones, so that what was compiled for one run serves the next."""
    return Core(spec, rows, envs)


@dataclass(frozen=True)
class Core:
    """The pure functions of a replay: `Ring` on the device, whose slots are those of a ring. Every fragment has the same length."""

    spec: Replay
    rows: int
    """A multiple of a fragment's, so that none is cut in two."""
    envs: int

    def empty(self, key: Array, *, fields: tuple[tuple[str, tuple[int, ...], str], ...]) -> State:
        """Nothing, for fields of these names, shapes and types."""
        rows, size = (self.rows, self.envs), -(-self.rows * self.envs // WIDE**2) * WIDE**2
        flags = {name: jnp.zeros(rows, bool) for name in ("over", "valid", "usable")}
        tree = {
            "leaves": jnp.zeros(size),
            "blocks": jnp.zeros(size // WIDE),
            "tops": jnp.zeros(size // WIDE**2),
        }
        origin = jax.random.randint(
            key, (), 0, 2**30
        )  # of the stamps: what another replay gave is meant for none of its rows
        stamps = {
            "origin": origin,
            "stamp": jnp.zeros(rows, jnp.int32),
            "highest": jnp.float32(1),
            "tree": tree,
        }
        return {
            "data": {name: jnp.zeros((*rows, *shape), dtype) for name, shape, dtype in fields}
            | {"discount": jnp.zeros(rows)},
            **flags,
            "head": jnp.zeros(self.envs, jnp.int32),
            "count": jnp.zeros(self.envs, jnp.int32),
            "due": jnp.zeros(self.envs, jnp.int32),
            "key": jax.random.key_data(key),
            "turn": jnp.uint32(0),
            **(stamps if self.spec.prioritized else {}),
        }

    def add(
        self, state: State, data: dict[str, Array], end: Array, first: Array, *, low: int
    ) -> State:
        """Add a fragment ``[T, B]`` of the environments from `low` on, the observations ``[B, ...]`` that it led to, and where it goes on from."""
        steps, columns = data["reward"].shape
        head, before = state["head"][low], self.spec.n_step
        state = self._cut(
            state,
            slice(low, low + columns),
            (state["count"][low] > 0) & (state["due"][low] != first[0]),
        )
        behind = (head + steps) % self.rows

        def put(whole: Array, part: Array, row: Array = head) -> Array:
            return jax.lax.dynamic_update_slice(
                whole, part.astype(whole.dtype), (row, low, *[0] * (whole.ndim - 2))
            )

        over = data["terminated"] | data["truncated"]
        fresh = {**data, "discount": jnp.where(data["terminated"], 0.0, self.spec.gamma)}
        if "priority" in data:
            fresh["priority"] = self._power(data["priority"])
        stored = {name: put(x, fresh[name]) for name, x in state["data"].items()}
        stored["obs"] = put(stored["obs"], end[None], behind)
        valid = put(put(state["valid"], data["valid"]), jnp.zeros((1, columns), bool), behind)
        overs = put(state["over"], over)
        at = (head + jnp.arange(-before, steps + 1)) % self.rows
        mine = slice(low, low + columns)
        usable = valid[at][:, mine]
        ending = jnp.zeros(columns, bool)
        for back in range(
            1, before
        ):  # the last rows wait for what comes, unless their episode is over
            ending = ending | overs[at[-1 - back], mine]
            usable = usable.at[-1 - back].set(usable[-1 - back] & ending)
        new = {
            **state,
            "data": stored,
            "valid": valid,
            "over": overs,
            "usable": state["usable"].at[at, mine].set(usable),
            "head": state["head"].at[mine].set(behind),
            "count": state["count"].at[mine].add(steps),
            "due": state["due"].at[mine].set(first + steps),
        }
        if not self.spec.prioritized:
            return new
        stamp = put(
            state["stamp"],
            jnp.broadcast_to(state["origin"] + state["count"][low] // steps + 1, (steps, columns)),
        )
        brought = (
            stored["priority"][at][:, mine]
            if "priority" in stored
            else jnp.full(usable.shape, state["highest"])
        )
        slots = at[:, None] * self.envs + jnp.arange(low, low + columns)
        was = state["usable"][at][:, mine] & (jnp.arange(before + steps + 1) < before)[:, None]
        weights = jnp.where(usable, jnp.where(was, state["tree"]["leaves"][slots], brought), 0.0)
        return {
            **new,
            "stamp": stamp,
            "highest": jnp.maximum(state["highest"], jnp.max(brought)),
            "tree": _set(state["tree"], slots, weights),
        }

    def _cut(self, state: State, mine: slice, broken: Array) -> State:
        """Where what comes next does not follow on, rows that need it can't be drawn any more, and returns end before it."""
        rows = (state["head"][mine.start] - 1 - jnp.arange(self.spec.n_step)) % self.rows
        over = state["over"][rows][:, mine]
        ended = jnp.cumsum(over.at[0].set(False), axis=0) > 0
        return {
            **state,
            "valid": state["valid"]
            .at[rows, mine]
            .set(state["valid"][rows][:, mine] & (~broken | ended)),
            "over": state["over"].at[rows[0], mine].set(over[0] | broken),
        }

    def sample(
        self, state: State, *, size: int
    ) -> tuple[State, dict[str, Array], dict[str, Array]]:
        """Draw transitions: the state behind, data ``[1, size]`` and columns. One for which nothing was found is not valid."""
        key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["turn"])
        usable, data, columns = state["usable"].reshape(-1), {}, {}
        if self.spec.prioritized:
            shares = (scattered(size) + jax.random.uniform(key, (size,))) / size
            slots = _find(state["tree"], shares)
            number, weight = jnp.sum(usable), state["tree"]["leaves"][slots]
            weights = (number * weight / jnp.sum(state["tree"]["tops"])) ** -self._beta(state)
            data["weight"] = weights / jnp.max(weights)
            columns = {"slot": slots, "stamp": state["stamp"].reshape(-1)[slots]}
        else:
            most = jnp.minimum(jnp.max(state["count"]), self.rows) * self.envs
            tries = jax.random.randint(key, (size, TRIES), 0, most)
            slots = jnp.take_along_axis(tries, jnp.argmax(usable[tries], axis=1)[:, None], 1)[:, 0]
        data = {**self._transitions(state, slots), **data, "valid": usable[slots]}
        return (
            {**state, "turn": state["turn"] + 1},
            {name: x[None] for name, x in data.items()},
            columns,
        )

    def _beta(self, state: State) -> Array:
        share = (
            jnp.minimum(1.0, jnp.sum(state["count"]) / self.spec.beta_steps)
            if self.spec.beta_steps
            else 0.0
        )
        return self.spec.beta + (1 - self.spec.beta) * share

    def _transitions(self, state: State, slots: Array) -> dict[str, Array]:
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in state["data"].items()}
        over, total, at = state["over"].reshape(-1), self.rows * self.envs, slots
        reward, discount, going = flat["reward"][slots], flat["discount"][slots], ~over[slots]
        for _ in range(self.spec.n_step - 1):
            at = (at + self.envs * going) % total
            reward = reward + jnp.where(going, discount * flat["reward"][at], 0.0)
            discount = jnp.where(going, discount * flat["discount"][at], discount)
            going = going & ~over[at]
        first = {name: flat[name][slots] for name in ("obs", "action", *self.spec.extra)}
        return {
            **first,
            "reward": reward,
            "discount": discount,
            "next_obs": flat["obs"][(at + self.envs) % total],
        }

    def prioritize(self, state: State, slots: Array, stamps: Array, priorities: Array) -> State:
        """Set the priorities of rows, of those that are still there."""
        there = state["usable"].reshape(-1)[slots] & (state["stamp"].reshape(-1)[slots] == stamps)
        powers = self._power(priorities)
        weights = jnp.where(there, powers, state["tree"]["leaves"][slots])
        return {
            **state,
            "tree": _set(state["tree"], slots, weights),
            "highest": jnp.maximum(state["highest"], jnp.max(jnp.where(there, powers, 0.0))),
        }

    def _power(self, priorities: Array) -> Array:
        return (jnp.abs(priorities) + self.spec.eps) ** self.spec.alpha


def _set(tree: State, slots: Array, weights: Array) -> State:
    slots, weights = slots.reshape(-1), weights.reshape(-1)
    leaves = tree["leaves"].at[slots].set(weights)
    blocks = tree["blocks"].at[slots // WIDE].set(leaves.reshape(-1, WIDE)[slots // WIDE].sum(1))
    tops = tree["tops"].at[slots // WIDE**2].set(blocks.reshape(-1, WIDE)[slots // WIDE**2].sum(1))
    return {"leaves": leaves, "blocks": blocks, "tops": tops}


def _find(tree: State, shares: Array) -> Array:
    """As `SumTree.find` does it."""
    sums = jnp.cumsum(tree["tops"])
    mass = jnp.minimum(shares * sums[-1], jnp.nextafter(sums[-1], 0.0))
    row = jnp.searchsorted(sums, mass, side="right")
    mass = mass - (sums - tree["tops"])[row]
    for level in ("blocks", "leaves"):
        part = tree[level].reshape(-1, WIDE)[row]
        sums = jnp.cumsum(part, axis=1)
        mass = jnp.clip(mass, 0.0, jnp.nextafter(sums[:, -1], 0.0))
        at = jnp.sum(sums <= mass[:, None], axis=1)
        mass = mass - jnp.take_along_axis(sums - part, at[:, None], 1)[:, 0]
        row = row * WIDE + at
    return row


class JaxReplay(ReplayHandle):
    """A replay on the device at work. Shards are one here."""

    def __init__(self, spec: Replay, site: Site) -> None:
        super().__init__(spec, site)
        self.core: Core | None = None
        self.arrays: State = {}
        self.came = 0
        self.reached = False
        """Whether enough came for an n-step return."""

    @property
    def state(self) -> Any:
        """What is static, and the arrays."""
        return {**self.static, "arrays": self.arrays}

    @state.setter
    def state(self, state: Any) -> None:
        self.steps, self.pending, self.arrays = (
            state["steps"],
            dict(state["pending"]),
            state["arrays"],
        )

    @property
    def drawable(self) -> bool:
        """By what came."""
        return self.reached

    def close(self) -> None:
        """Nothing to let go of."""

    def _made(self, batch: Batch) -> Core:
        """The functions for batches of this form; the arrays when the first comes."""
        steps, total = batch.shape[0], self.runners.environments
        rows = math.ceil((self.spec.buffer_size / total + 1) / steps) * steps
        if self.core is None:
            too_small(self.spec, self.site.name, -(-self.spec.buffer_size // total), steps, total)
            if rows * total > MOST:
                raise SettingError(
                    f"buffer_size={self.spec.buffer_size:,} is more than the {MOST:,} steps of a device; lower {self.site.name}.buffer_size"
                )
            self.core = core_of(self.spec, rows, total)
        if self.core.rows % steps:
            raise GraphError(
                f"fragments of {steps} steps came after others; a replay on the device takes those of one length"
            )
        if not self.arrays:
            names = (
                "obs",
                "action",
                "reward",
                *self.spec.extra,
                *["priority"] * (self.spec.prioritized and "priority" in batch.data),
            )
            fields = tuple(
                (name, tuple(batch.data[name].shape[2:]), str(batch.data[name].dtype))
                for name in names
            )
            empty = partial(self.core.empty, fields=fields)
            self.nbytes = sum(
                map(nbytes, jax.tree.leaves(jax.eval_shape(empty, jax.random.key(0))))
            )
            try:
                self.arrays = self.site.run(self.core.empty, self.site.key("draws"), fields=fields)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise too_large(
                    self.spec, self.site.name, in_bytes(self.nbytes), " on the device"
                ) from error
        return self.core

    def add(self, batch: Batch) -> None:
        """Write every runner's columns."""
        batch = needed(self.spec, batch)
        core, envs = self._made(batch), np.asarray(batch.columns["env"])
        parts = np.split(np.arange(len(envs)), np.flatnonzero(np.diff(envs) != 1) + 1)
        for part in parts:
            mine = slice(int(part[0]), int(part[-1]) + 1)
            given = (batch.data, batch.columns["bootstrap_obs"], batch.columns["first"])
            if len(parts) > 1:
                given = self.site.run(_columns, *given, first=mine.start, last=mine.stop)
            self.arrays = self.site.run(
                core.add, self.arrays, *given, donate=(0,), low=int(envs[part[0]])
            )
        self.came += batch.steps
        self.reached = self.reached or reached(self.spec, self.came, batch.shape[0], core.envs)
        self._noted(batch.steps)

    def sample(self, size: int, reader: str, ahead: int = 0) -> Batch:
        """Draw from all."""
        if not self.reached:
            raise self._nothing()
        self.arrays, data, columns = self.site.run(
            cast("Core", self.core).sample, self.arrays, donate=(0,), size=size
        )
        self._drew(reader, size)
        return Batch(data, {"version": jnp.full(size, jnp.nan), **columns})

    def prioritize(self, feedback: dict[str, Array]) -> None:
        """At once: the device waits for itself."""
        self._prioritized(feedback)
        given = (feedback["slot"], feedback["stamp"], feedback["priority"])
        self.arrays = self.site.run(
            cast("Core", self.core).prioritize, self.arrays, *given, donate=(0,)
        )

    def stock(self) -> Stock:
        """By what the device counted."""
        if not self.arrays or self.core is None:
            return Stock(0, 0, 0, 0)
        count = np.asarray(self.arrays["count"])
        held = int(np.minimum(count, self.core.rows - 1).sum())
        return Stock(int(count.sum()), held, int(count.sum()) - held, 0)


def _columns(
    data: dict[str, Array], end: Array, start: Array, *, first: int, last: int
) -> tuple[dict[str, Array], Array, Array]:
    return {name: x[:, first:last] for name, x in data.items()}, end[first:last], start[first:last]
