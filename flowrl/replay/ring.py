"""`Ring`: the newest rows of some environments in NumPy arrays, and samples of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from flowrl.core.clock import REPLAY
from flowrl.core.items import Batch
from flowrl.core.keeping import Keeping, writable
from flowrl.core.trees import names_of
from flowrl.errors import ContractError
from flowrl.replay.sequences import carries_of, sequences_of
from flowrl.replay.sum_tree import SumTree, scattered
from flowrl.replay.transitions import transitions_of
from flowrl.rollout.reward_scale import RewardScale

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = np.ndarray[Any, Any]


def same(one: Array, other: Array) -> bool:
    """Return whether two short arrays are equal, in a tenth of the time that NumPy takes."""
    if one.dtype != other.dtype:
        return np.array_equal(one, other)
    return one.tobytes() == other.tobytes()


class _Places(NamedTuple):
    """The places in arrays ``[rows, envs]`` that adding a rollout reads and writes."""

    new: Any
    """The rows of the rollout."""
    first: Any
    """The first of them."""
    head: Any
    """The row after it, which takes the final observation."""
    window: Any
    """The rows whose returns or sequences may be complete now: the rollout's, and those before it
    that wait for it at most."""
    overwritten: Any
    """The rows of the rollout and the one after it."""
    touched: Any
    """The window and the row after it."""


class Ring(Keeping):
    """A part of a replay: `rows` rows of each of `envs` environments.

    Slot ``row x envs + env`` holds one row as runners give it; the newest rows replace the oldest.
    So what follows a step is stored in the next row of the same environment, and an observation is
    stored once. After the newest row of an environment comes the observation that it led to, until
    the next rollout begins with the same. A row may be sampled once its `n_step` successors within
    the episode are there (`usable`); with `sequence_length`, only the first row of a rollout, once
    there are so many rows from it on.

    Args:
        spec: the settings of the replay.
        rows: rows of each environment.
        envs: environments.
        low: the number of its first environment.
        seed: of the random numbers by which it samples.
    """

    lasting = (
        "random", "data", "seen", "valid", "over", "usable", "real", "head", "next_step",
        "rows_written", "count", "added", "evicted", "tree", "scale", "stamp", "rollouts",
        "highest_priority", "begins", "rollout_length",
    )  # fmt: skip
    remade = (
        "spec", "rows", "envs", "low", "n_step", "reach", "extra", "flat", "env_numbers",
        "discounts", "observed", "stored",
    )  # fmt: skip

    def __init__(self, spec: Replay, rows: int, envs: int, low: int, seed: Any) -> None:
        self.spec = spec
        self.rows = rows
        self.envs = envs
        self.low = low
        self.n_step = spec.n_step
        self.reach = spec.reach
        self.extra = spec.extra
        self.random = np.random.default_rng(seed)
        self.data: dict[str, Array] = {}
        """The arrays by field: ``[rows, envs, ...]``."""
        self.seen: tuple[str, ...] = ()
        """The fields that observations consist of."""
        self.flat: dict[str, Array] = {}
        """The same arrays by slot: ``[rows x envs, ...]``."""
        self.valid, self.over, self.usable, self.real = np.zeros((4, rows, envs), bool)
        """By row: whether it is a step, whether it ended its episode, whether it may be sampled,
        and whether it came with a rollout (masked rows too, but not the observation at the head).
        """
        whole = spec.sequence_length is not None
        self.begins = np.zeros((rows, envs) if whole else (0, 0), bool)
        """By row, whether a rollout begins there, of which the carry is known."""
        self.rollout_length = 0
        """Rows of a rollout; 0 before the first one."""
        self.env_numbers = np.arange(low, low + envs, dtype=np.int32)
        self.head = np.zeros(envs, np.int64)
        """By environment, the row after its newest one."""
        self.next_step = np.full(envs, -1, np.int32)
        """By environment, the number of the step with which it goes on; -1 before the first."""
        self.discounts = np.array([spec.gamma, 0], np.float32)
        """The discount after a step that goes on, and after one that ends its episode."""
        self.rows_written = 0
        """How many rows, from row 0 on, may hold steps of some environment; at most `rows`.

        Uniform sampling picks among these.
        """
        # The rows that may be sampled now; those that were added and evicted so far.
        self.count = self.added = self.evicted = 0
        self.tree = SumTree(rows * envs) if spec.prioritized else None
        self.scale = RewardScale(envs, spec.gamma) if spec.normalize_rewards else None
        self.stamp = np.zeros((rows, envs) if spec.prioritized else (0, 0), np.int64)
        """The number of the rollout that a row came with.

        A priority that comes late is set only if the row that it is meant for is still there.
        """
        # Rollouts are numbered from a random origin on: priorities of rows of another replay, or of
        # a shard that was lost, then match none of these rows.
        origin = self.random.bit_generator.seed_seq.generate_state(1)[0] >> 2
        self.rollouts = int(origin) << 32
        self.highest_priority = 1.0

    def close(self) -> None:
        """Do nothing: a ring holds only memory."""

    def take(self, state: Any) -> None:
        """Go on with the rows that were kept."""
        super().take(writable(state))
        self._view()

    def _view(self) -> None:
        """Make the views of the arrays by slot."""
        self.flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in self.data.items()}
        self.observed = [(self.data[name], name, f"bootstrap_{name}") for name in self.seen]
        named = ("action", "reward", *self.extra)
        # One that was kept before its first rows has no arrays yet.
        self.stored = [(self.data[name], name) for name in named if name in self.data]

    # -- adding

    @REPLAY
    def add(self, batch: Batch) -> dict[str, int]:
        """Add rollouts and return what is held then.

        Args:
            batch: ``[T, B]``, the rollouts of one environment in the order in which they were made.

        Returns:
            The numbers that `held` returns.
        """
        numbers = batch.columns["env"]
        whole = same(numbers, self.env_numbers)
        if not whole:
            # Adding writes to each environment once, so several rollouts of one are added in turn.
            cuts = np.flatnonzero(np.diff(numbers) <= 0) + 1
            if len(cuts):
                for columns in np.split(np.arange(len(numbers)), cuts):
                    self.add(_columns_of(batch, columns))
                return self.held()
        if not self.data:
            self._allocate(batch)
        if self.begins.size:
            self._check_length(batch.shape[0])
        if "priority" in self.data:
            _check_finite(batch.data["priority"][batch.data["valid"].astype(bool)])
        self._add_once(batch, whole=whole)
        return self.held()

    def _check_length(self, steps: int) -> None:
        """Refuse rollouts of sequences that are of another length than the first one.

        Raises:
            ContractError: with both lengths.
        """
        if steps != self.rollout_length:
            raise ContractError(
                f"rollouts of {steps} steps came after others of {self.rollout_length}; a replay "
                "of sequences takes those of one length"
            )

    def _add_once(self, batch: Batch, *, whole: bool) -> None:
        """Add at most one rollout of each environment; `whole` means one of each, in order."""
        steps, columns = batch.data["reward"].shape
        numbers, first = batch.columns["env"], batch.columns["first"]
        envs: Any = slice(None) if whole else numbers - self.low
        self._cut_where_interrupted(envs, numbers, first)
        if self.scale is not None:
            self.scale.observe(batch.data, envs=envs)
        self.next_step[envs] = first + steps
        heads = self.head[envs]
        head_rows = heads.tolist()
        start = head_rows[0]
        even = whole and head_rows.count(start) == columns
        # Slices are far quicker than indices: they serve unless the rows go round the end.
        if even and self.reach - 1 <= start < self.rows - steps:
            places = self._slices(start, steps)
        else:
            places = self._indices(heads, steps, numbers)
        self.added += steps * columns
        self.evicted += int(np.count_nonzero(self.real[places.overwritten]))
        self.count -= int(np.count_nonzero(self.usable[places.touched]))
        was_usable = self.usable[places.touched].copy() if self.tree is not None else None
        self._store(batch, places)
        self._mark_usable(places.window)
        if was_usable is not None:
            was_usable[self.reach - 1 :] = False
            self._set_weights(places, was_usable, batch)
        if self.rows_written < self.rows:
            written = min(self.rows, max(head_rows) + steps)
            self.rows_written = max(self.rows_written, written)
        self.head[envs] = ((start if even else heads) + steps) % self.rows

    def _slices(self, start: int, steps: int) -> _Places:
        """Return the places of rollouts that begin in the same row and do not go round the end."""
        stop, before = start + steps, self.reach - 1
        # By position: this is done for every rollout.
        return _Places(
            slice(start, stop),
            slice(start, start + 1),
            slice(stop, stop + 1),
            slice(start - before, stop),
            slice(start, stop + 1),
            slice(start - before, stop + 1),
        )

    def _indices(self, heads: Array, steps: int, numbers: Array) -> _Places:
        """Return the places of rollouts that begin in any rows, as indices of rows and columns."""
        envs, before = numbers - self.low, self.reach - 1

        def at(offset: int, count: int) -> Any:
            """Return the places of so many rows from an offset to the heads on."""
            rows = heads + np.arange(offset, offset + count)[:, None]
            return rows % self.rows, envs

        return _Places(
            new=at(0, steps),
            first=at(0, 1),
            head=at(steps, 1),
            window=at(-before, before + steps),
            overwritten=at(0, steps + 1),
            touched=at(-before, before + steps + 1),
        )

    def _store(self, batch: Batch, places: _Places) -> None:
        """Write the rows of rollouts, and the observations that they led to."""
        new, head, data = places.new, places.head, batch.data
        self.real[new] = True
        self.real[head] = self.valid[head] = self.usable[head] = False
        self.over[new] = data["terminated"] | data["truncated"]
        if self.n_step > 1:
            # An agent that takes turns may have none in a rollout, before which its returns end.
            last = _row_before(places.first)
            self.over[last] |= self.valid[last] & ~data["valid"][:1]
        self.valid[new] = data["valid"]
        for array, name, ending in self.observed:
            array[new] = data[name]
            array[head] = batch.columns[ending]
        for array, name in self.stored:
            array[new] = data[name]
        self.data["version"][new] = batch.columns["version"]
        if self.spec.sequence_length is None:
            self.data["discount"][new] = self.discounts.take(data["terminated"])
            return
        self.data["terminated"][new] = data["terminated"]
        self.begins[new] = self.begins[head] = False
        self.begins[places.first] = True
        carried = self._carry_at(places.first)
        for name in carries_of(batch):
            self.data[name][carried] = batch.columns[name][None]

    def _carry_at(self, first: Any) -> Any:
        """Return the places of carries in their arrays, which have one row for each rollout's."""
        if isinstance(first, slice):
            return slice(row := first.start // self.rollout_length, row + 1)
        return first[0] // self.rollout_length, first[1]

    def _mark_usable(self, window: Any) -> None:
        """Mark the rows of a window that may be sampled, and count them."""
        usable, before = self._candidates[window], self.reach - 1
        if before:
            usable = usable.copy()
            # The last rows wait for what comes, unless their episode is over; those of sequences,
            # unless rollouts are missing after them.
            over = self.over[window] if self.spec.sequence_length is None else ~self.real[window]
            newest_first = over[: -before - 1 : -1]
            usable[-before:] &= np.logical_or.accumulate(newest_first)[::-1]
        self.usable[window] = usable
        self.count += int(np.count_nonzero(usable))

    @property
    def _candidates(self) -> Array:
        """By row, whether it may be sampled once those that follow are there."""
        return self.valid if self.spec.sequence_length is None else self.begins

    def held(self) -> dict[str, int]:
        """Return how many rows came, had to go, are there, and may be sampled."""
        return {
            "added": self.added,
            "evicted": self.evicted,
            "held": self.added - self.evicted,
            "usable": self.count,
        }

    def _set_weights(self, places: _Places, was_usable: Array, batch: Batch) -> None:
        """Set the weights of rows that came, had to go, or may be sampled from now on.

        Args:
            places: of the rollouts.
            was_usable: by touched row, whether it could be sampled before and is not overwritten.
            batch: the rollouts.
        """
        tree, touched = cast("SumTree", self.tree), places.touched
        self.rollouts += 1
        self.stamp[places.new] = self.rollouts
        # New rows have the priority that they bring, or else the highest so far.
        if "priority" in self.data:
            self.data["priority"][places.new] = self._power(batch.data["priority"])
            fresh = self.data["priority"][touched]
            self.highest_priority = max(self.highest_priority, float(fresh.max()))
        else:
            fresh = np.float64(self.highest_priority)
        if isinstance(touched, slice):
            slots = np.arange(touched.start * self.envs, touched.stop * self.envs)
        else:
            slots = (touched[0] * self.envs + touched[1]).ravel()
        usable = self.usable[touched]
        weights = np.where(usable, fresh, 0.0)
        # A row that could be sampled before keeps the priority that an update gave it.
        old = tree.leaves[slots].reshape(was_usable.shape)
        tree[slots] = np.where(was_usable & usable, old, weights).ravel()

    def _power(self, priorities: Array) -> Array:
        return (np.abs(priorities).astype(np.float64) + self.spec.eps) ** self.spec.alpha

    def _cut_where_interrupted(self, envs: Any, numbers: Array, first: Array) -> None:
        """End the newest episodes of environments whose next rollout does not follow on."""
        expected = self.next_step[envs]
        if same(expected, first):
            return
        interrupted = (expected != first) & (expected >= 0)
        for env in (numbers - self.low)[interrupted]:
            self._cut(int(env))

    def _cut(self, env: int) -> None:
        """End the newest episode of an environment where it is, as one that was truncated."""
        head = int(self.head[env])
        newest = (head - 1 - np.arange(self.reach)) % self.rows
        self.over[newest[0], env] |= self.valid[newest[0], env]
        # Rows that waited for more steps have all that their returns will get.
        waiting = newest[self._candidates[newest, env] & ~self.usable[newest, env]]
        # The final observation stays in the row at the head, so the next rollout begins after it.
        after = (head + 1) % self.rows
        self.evicted += int(self.real[after, env])
        self.count += len(waiting) - int(self.usable[after, env])
        self.usable[waiting, env] = True
        for flags in (self.usable, self.valid, self.real, self._candidates):
            flags[after, env] = False
        if self.tree is not None:
            brought = self.data.get("priority")
            weights = self.highest_priority if brought is None else brought[waiting, env]
            self.tree[waiting * self.envs + env] = weights
            self.tree[np.array([after * self.envs + env])] = 0.0
        self.head[env] = after
        if self.scale is not None:
            self.scale.returns[env] = 0.0

    def _allocate(self, batch: Batch) -> None:
        """Make the arrays, once the first batch shows the shapes and types of its fields."""
        self.seen = names_of("obs", batch.data)
        for name in (*self.seen, "action", "reward", *self.extra):
            field = batch.data[name]
            self.data[name] = np.zeros((self.rows, self.envs, *field.shape[2:]), field.dtype)
        if self.spec.sequence_length is None:
            self.data["discount"] = np.zeros((self.rows, self.envs), np.float32)
        else:
            self.data["terminated"] = np.zeros((self.rows, self.envs), bool)
        self.rollout_length = batch.shape[0]
        for name in carries_of(batch):
            carry, rollouts = batch.columns[name], -(-self.rows // self.rollout_length)
            self.data[name] = np.zeros((rollouts, self.envs, *carry.shape[1:]), carry.dtype)
        self.data["version"] = np.zeros((self.rows, self.envs), np.int32)
        if self.tree is not None and "priority" in batch.data:
            self.data["priority"] = np.zeros((self.rows, self.envs))
        self._view()

    # -- sampling

    @REPLAY
    def sample(self, n: int, beta: float = 1.0) -> Batch:
        """Return transitions ``[1, n]``, each with its `n_step` return and what it leads to.

        With `sequence_length` these are sequences ``[sequence_length, n]``.

        Args:
            n: transitions or sequences.
            beta: the power of the importance weights (Schaul et al. 2016), where it is prioritized.

        Raises:
            LookupError: no row may be sampled yet.
        """
        if not self.count:
            raise LookupError("there is nothing to sample yet")
        if self.tree is None:
            return self._beginning_at(self._uniform(n), {}, {})
        shares = (scattered(n) + self.random.random(n)) / n
        slots = self.tree.find(shares)
        weights = (self.count * self.tree.leaves[slots] / self.tree.total) ** -beta
        weight = (weights / weights.max()).astype(np.float32)[None]
        columns = {"slot": slots, "stamp": self.stamp.reshape(-1)[slots]}
        return self._beginning_at(slots, {"weight": weight}, columns)

    def _beginning_at(
        self, slots: Array, data: dict[str, Array], columns: dict[str, Array]
    ) -> Batch:
        """Return the transitions or sequences that begin at slots ``[n]``, with more fields."""
        if self.spec.sequence_length is None:
            return transitions_of(self, slots, data, columns)
        return sequences_of(self, slots, data, columns)

    def _uniform(self, n: int) -> Array:
        """Return n usable slots, each as likely as any other."""
        usable, written = self.usable.reshape(-1), self.rows_written * self.envs
        if 4 * self.count < written:
            return self.random.choice(np.flatnonzero(usable), n)
        # Where most slots are usable it is quicker to pick from all, and drop those that are not.
        slots = self._any_slots(written, n + n // 8 + 4)
        slots = slots[usable.take(slots)]
        while len(slots) < n:
            more = self._any_slots(written, 2 * n)
            slots = np.concatenate([slots, more[usable.take(more)]])
        return slots[:n]

    def _any_slots(self, written: int, n: int) -> Array:
        """Return n of the slots below `written`, usable or not."""
        # A share below 1 of a whole number never rounds up to it, and `integers` takes twice as
        # long for a few numbers.
        return (self.random.random(n) * written).astype(np.int64)

    @REPLAY
    def prioritize(self, slots: Array, stamps: Array, priorities: Array) -> dict[str, int]:
        """Set the priorities of those rows that are still there, and return what is held.

        Args:
            slots: of the rows ``[n]``.
            stamps: the numbers of the rollouts that they came with ``[n]``.
            priorities: by row ``[n]``, before their power is taken.

        Raises:
            ContractError: the priority of a row that is still there is not finite.
        """
        # Slots that came from a larger replay may not exist here: these are clipped.
        usable = self.usable.reshape(-1).take(slots, mode="clip")
        stamp = self.stamp.reshape(-1).take(slots, mode="clip")
        there = usable & (stamp == stamps)
        _check_finite(priorities[there])
        powers = self._power(priorities)[there]
        if len(powers):
            cast("SumTree", self.tree)[slots[there]] = powers
            self.highest_priority = max(self.highest_priority, float(powers.max()))
        return self.held()


def _check_finite(priorities: Array) -> None:
    """Raise an error if a priority is not finite: in the sum tree it would spoil every sample.

    Raises:
        ContractError: with the first such priority.
    """
    wrong = priorities[~np.isfinite(priorities)]
    if len(wrong):
        raise ContractError(
            f"got a priority that is not finite: {wrong[0]}; let the operator or loss that it "
            "comes from give a finite one for each step"
        )


def _row_before(place: Any) -> Any:
    """Return the place of the row before that of one row."""
    if isinstance(place, slice):
        return slice(place.start - 1, place.start)
    # The row before the first one is the last.
    return place[0] - 1, place[1]


def _columns_of(batch: Batch, columns: Array) -> Batch:
    """Return a batch of some of the columns."""
    return Batch(
        {name: x[:, columns] for name, x in batch.data.items()},
        {name: x[columns] for name, x in batch.columns.items()},
    )
