"""`Ring`: the newest rows of some environments in NumPy arrays, and transitions drawn from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flowrl.core.clock import REPLAY
from flowrl.core.items import Batch
from flowrl.replay.sum_tree import SumTree, scattered

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = np.ndarray[Any, Any]


def same(one: Array, other: Array) -> bool:
    """Whether two short arrays are equal; a tenth of the time that NumPy takes for it."""
    return (
        one.tobytes() == other.tobytes() if one.dtype == other.dtype else np.array_equal(one, other)
    )


class Ring:
    """A part of a replay: `rows` rows of each of `envs` environments, the oldest of which make room for new ones.

    Slot ``row x envs + env`` holds one row as runners give it. So what follows a step stands in the next row of the same environment, and an
    observation is stored once. Behind the newest row of an environment stands the observation that it led to, until the next fragment begins with
    the same. A row may be drawn once its `n_step` successors within the episode are there (`usable`).
    """

    def __init__(self, spec: Replay, rows: int, envs: int, low: int, seed: Any) -> None:
        self.spec = spec
        self.rows = rows
        self.envs = envs
        self.low = low
        """The number of its first environment."""
        self.n_step = spec.n_step
        self.extra = spec.extra
        self.random = np.random.default_rng(seed)
        self.data: dict[str, Array] = {}
        """By field: ``[rows, envs, ...]``."""
        self.flat: dict[str, Array] = {}
        """The same by slot: ``[rows x envs, ...]``."""
        self.valid, self.over, self.usable, self.real = np.zeros((4, rows, envs), bool)
        self.mine = np.arange(low, low + envs, dtype=np.int32)
        """The numbers of its environments."""
        self.head = np.zeros(envs, np.int64)
        """By environment: the row behind its newest one."""
        self.due = np.full(envs, -1, np.int32)
        """By environment: the number of the step with which it goes on; -1 before the first."""
        self.discounts = np.array([spec.gamma, 0], np.float32)
        """Behind a step that goes on, and behind one that ends its episode."""
        self.high = 0
        """Rows that were ever written."""
        self.count = self.added = self.evicted = 0
        """Usable rows; rows that came, and that had to go."""
        self.tree = SumTree(rows * envs) if spec.prioritized else None
        self.stamp = np.zeros((rows, envs) if spec.prioritized else (0, 0), np.int64)
        """The fragment with which a row came: a priority that comes late must meet the row that it is meant for."""
        own = self.random.bit_generator.seed_seq.generate_state(1)[0] >> 2
        self.fragments = (
            int(own) << 32
        )  # what another replay, or a shard that was lost, gave is meant for none of its rows
        self.highest = 1.0

    def close(self) -> None:
        """Nothing to let go of."""

    # -- adding

    @REPLAY
    def add(self, batch: Batch) -> dict[str, int]:
        """Add fragments ``[T, B]``, those of one environment in the order in which they were made; what is held then is told."""
        steps, columns = batch.shape
        numbers, first = batch.columns["env"], batch.columns["first"]
        whole = same(numbers, self.mine)
        if not whole and len(
            cuts := np.flatnonzero(np.diff(numbers) <= 0) + 1
        ):  # what follows writes to each environment once
            for part in np.split(np.arange(columns), cuts):
                self.add(
                    Batch(
                        {k: v[:, part] for k, v in batch.data.items()},
                        {k: v[part] for k, v in batch.columns.items()},
                    )
                )
            return self.held()
        envs: Any = slice(None) if whole else numbers - self.low
        if not self.data:
            self._allocate(batch)
        if not same(due := self.due[envs], first):
            for env in (numbers - self.low)[(due != first) & (due >= 0)]:
                self._cut(int(env))
        self.due[envs] = first + steps
        heads = self.head[envs]
        places = heads.tolist()
        before, start, rows = self.n_step - 1, places[0], self.rows
        even = whole and places.count(start) == columns
        if (
            even and before <= start < rows - steps
        ):  # rows that lie one behind the other are reached by far more quickly
            new, head = slice(start, start + steps), slice(start + steps, start + steps + 1)
            window, gone, touched = (
                slice(start - before, start + steps),
                slice(start, head.stop),
                slice(start - before, head.stop),
            )
        else:

            def at(offset: int, count: int) -> Any:
                """So many rows, from the head on."""
                return (
                    heads + np.arange(offset, offset + count)[:, None]
                ) % rows, numbers - self.low

            new, head, window = at(0, steps), at(steps, 1), at(-before, before + steps)
            gone, touched = at(0, steps + 1), at(-before, before + steps + 1)
        self.added += steps * columns
        self.evicted += int(np.count_nonzero(self.real[gone]))
        self.count -= int(np.count_nonzero(self.usable[touched]))
        was = self.usable[touched].copy() if self.tree is not None else None
        self.real[new], self.real[head], self.valid[head], self.usable[head] = (
            True,
            False,
            False,
            False,
        )
        over = batch.data["terminated"] | batch.data["truncated"]
        self.over[new], self.valid[new] = over, batch.data["valid"]
        self.data["obs"][new], self.data["obs"][head] = (
            batch.data["obs"],
            batch.columns["bootstrap_obs"],
        )
        for name in ("action", "reward", *self.extra):
            self.data[name][new] = batch.data[name]
        self.data["discount"][new] = self.discounts.take(batch.data["terminated"])
        self.data["version"][new] = batch.columns["version"]
        usable = self.valid[window]
        if before:  # the last of them wait for what comes, unless their episode is over
            usable = usable.copy()
            usable[-before:] &= np.logical_or.accumulate(self.over[window][: -before - 1 : -1])[
                ::-1
            ]
        self.usable[window] = usable
        self.count += int(np.count_nonzero(usable))
        if self.tree is not None and was is not None:
            was[before:] = False
            self._weigh(touched, was, new, batch)
        if self.high < rows:
            self.high = max(self.high, min(rows, max(places) + steps))
        self.head[envs] = (start + steps) % rows if even else (heads + steps) % rows
        return self.held()

    def held(self) -> dict[str, int]:
        """Rows that came, had to go, are there, and may be drawn."""
        return {
            "added": self.added,
            "evicted": self.evicted,
            "held": self.added - self.evicted,
            "usable": self.count,
        }

    def _weigh(self, touched: Any, was: Array, new: Any, batch: Batch) -> None:
        """Set the weights of rows that came, had to go, or may be drawn from now on."""
        tree = cast("SumTree", self.tree)
        self.fragments += 1
        self.stamp[new] = self.fragments
        if "priority" in self.data:
            self.data["priority"][new] = self._power(batch.data["priority"])
            fresh = self.data["priority"][touched]
            self.highest = max(self.highest, float(fresh.max()))
        else:
            fresh = np.float64(self.highest)
        if isinstance(touched, slice):
            slots = np.arange(touched.start * self.envs, touched.stop * self.envs)
        else:
            slots = (touched[0] * self.envs + touched[1]).ravel()
        weights = np.where(self.usable[touched], fresh, 0.0)
        weights = np.where(
            was & self.usable[touched], tree.leaves[slots].reshape(was.shape), weights
        )
        tree[slots] = weights.ravel()

    def _power(self, priorities: Array) -> Array:
        return (np.abs(priorities).astype(np.float64) + self.spec.eps) ** self.spec.alpha

    def _cut(self, env: int) -> None:
        """What comes next does not follow on: end the newest episode where it is, as one that was cut short."""
        head = int(self.head[env])
        rows = (head - 1 - np.arange(self.n_step)) % self.rows
        self.over[rows[0], env] |= self.valid[rows[0], env]
        late = rows[self.valid[rows, env] & ~self.usable[rows, env]]
        after = (head + 1) % self.rows
        self.evicted += int(self.real[after, env])
        self.count += len(late) - int(self.usable[after, env])
        self.usable[late, env] = True
        self.usable[after, env] = self.valid[after, env] = self.real[after, env] = False
        if self.tree is not None:
            self.tree[late * self.envs + env] = (
                self.data["priority"][late, env] if "priority" in self.data else self.highest
            )
            self.tree[np.array([after * self.envs + env])] = 0.0
        self.head[env] = after
        self.high = max(self.high, min(self.rows, head + 1))

    def _allocate(self, batch: Batch) -> None:
        for name in ("obs", "action", "reward", *self.extra):
            self.data[name] = np.zeros(
                (self.rows, self.envs, *batch.data[name].shape[2:]), batch.data[name].dtype
            )
        self.data["discount"] = np.zeros((self.rows, self.envs), np.float32)
        self.data["version"] = np.zeros((self.rows, self.envs), np.int32)
        if self.tree is not None and "priority" in batch.data:
            self.data["priority"] = np.zeros((self.rows, self.envs))
        self.flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in self.data.items()}

    # -- drawing

    @REPLAY
    def sample(self, n: int, beta: float = 1.0) -> Batch:
        """``[1, n]`` transitions, each with the `n_step` return and what it is worth behind that.

        Raises:
            LookupError: no row may be drawn yet.
        """
        if not self.count:
            raise LookupError("there is nothing to draw yet")
        if self.tree is None:
            return self._transitions(self._uniform(n), {}, {})
        shares = (scattered(n) + self.random.random(n)) / n
        slots = self.tree.find(shares)
        weights = (self.count * self.tree.leaves[slots] / self.tree.total) ** -beta
        columns = {"slot": slots, "stamp": self.stamp.reshape(-1)[slots]}
        return self._transitions(
            slots, {"weight": (weights / weights.max()).astype(np.float32)[None]}, columns
        )

    def _uniform(self, n: int) -> Array:
        """Usable slots, each as likely as any other: drawn from all, and those that are not are thrown away."""
        usable, most = self.usable.reshape(-1), self.high * self.envs
        if 4 * self.count < most:
            return self.random.choice(np.flatnonzero(usable), n)
        slots = self.random.integers(0, most, n + n // 8 + 4)
        slots = slots[usable[slots]]
        while len(slots) < n:
            more = self.random.integers(0, most, 2 * n)
            slots = np.concatenate([slots, more[usable[more]]])
        return slots[:n]

    def _transitions(
        self, slots: Array, data: dict[str, Array], columns: dict[str, Array]
    ) -> Batch:
        flat = self.flat
        reward, discount, at = flat["reward"].take(slots), flat["discount"].take(slots), slots
        if self.n_step > 1:
            over, going = self.over.reshape(-1), ~self.over.reshape(-1).take(slots)
            for _ in range(self.n_step - 1):
                at = at + self.envs * going
                reward += np.where(going, discount * flat["reward"].take(at, mode="wrap"), 0)
                discount = np.where(
                    going, discount * flat["discount"].take(at, mode="wrap"), discount
                )
                going &= ~over.take(at, mode="wrap")
        found = {
            "obs": flat["obs"].take(slots, axis=0),
            "action": flat["action"].take(slots, axis=0),
            "reward": reward,
            "discount": discount,
            "next_obs": flat["obs"].take(at + self.envs, axis=0, mode="wrap"),
            **{name: flat[name].take(slots, axis=0) for name in self.extra},
        }
        return Batch(
            {name: x[None] for name, x in found.items()} | data,
            {"version": flat["version"].take(slots), **columns},
        )

    @REPLAY
    def prioritize(self, slots: Array, stamps: Array, priorities: Array) -> dict[str, int]:
        """Set the priorities of rows, of those that are still there; what is held is told."""
        usable, stamp = (
            x.reshape(-1).take(slots, mode="clip") for x in (self.usable, self.stamp)
        )  # of another replay it may have no such slot
        there = usable & (stamp == stamps)
        powers = self._power(priorities)[there]
        if len(powers):
            cast("SumTree", self.tree)[slots[there]] = powers
            self.highest = max(self.highest, float(powers.max()))
        return self.held()
