"""Sequences of a replay, on the host and on the device, against a slow list of what happened."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import GAMMA, World
from test_ring import chi_square, limit

import flowrl as fl
from flowrl.replay.jax_core import Core
from flowrl.replay.ring import Ring

FIELDS = ("obs", "action", "reward", "terminated", "truncated", "valid")
TYPES = (
    ("obs", (), "float32"),
    ("action", (), "int32"),
    ("reward", (), "float32"),
    ("terminated", (), "bool"),
)
CARRIES = (("carry[0]", (2,), "float32"), ("carry[1]", (), "float32"))


class Remembering(World):
    """A world whose rollouts bring the carry before them: numbers that say who and when."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.starts = [[] for _ in self.rows]
        """By environment, the places of the first rows of rollouts."""

    def rollout(self, *of):
        batch, rows = super().rollout(*of)
        first = batch["obs"][0]
        carry = {"carry[0]": np.stack([first, -first], 1), "carry[1]": first + 0.5}
        return fl.extend.Batch(batch.data, {**batch.columns, **carry}), rows

    def added(self, first, rows):
        super().added(first, rows)
        for env, column in enumerate(rows, first):
            self.starts[env].append(len(self.rows[env]) - len(column))

    def sequences(self, keep, length, repairs=True):
        """By the first observation: the rows that may be sampled where so many of each environment
        are kept, what the last leads to, and how many are no longer masked."""
        found = {}
        for whole, starts in zip(self.rows, self.starts, strict=True):
            places = [i for i, row in enumerate(whole) if repairs or row[1] is not None]
            oldest = places[max(0, len(places) - keep)] if places else 0
            for start in starts:
                rows = whole[start : start + length + 1]
                gap = next((i for i, row in enumerate(rows) if row[1] is None), None)
                if start < oldest or (gap is None and len(whole) < start + length):
                    continue
                if repairs or gap is None:
                    found[rows[0][0]] = self.expected(rows[:gap][:length], length, gap)
        return found

    @staticmethod
    def expected(rows, length, gap):
        """Rows ``[length]`` of fields, the observation after them, and the version."""
        lines = [list(row[:6]) for row in rows]
        after = rows[-1][0] + 1
        if gap is not None:
            # Where rows are missing the last step is cut short, and leads to the row after it.
            lines[-1][4] |= lines[-1][5] and not lines[-1][3]
            lines += [[after, None, 0.0, False, False, False]]
            lines += [[None, None, 0.0, False, False, False]] * (length - len(lines))
        return lines[:length], after if len(rows) == length else None, rows[0][6]


def agree(batch, wanted):
    """Hold sampled sequences ``[T, n]`` against those of the list, by their first observations."""
    rows = np.stack([np.asarray(batch.data[name], np.float64) for name in FIELDS], 2)
    for i, first in enumerate(rows[0, :, 0].tolist()):
        lines, after, version = wanted[first]
        # What means nothing in a masked row is None, and NaN as a number.
        expected = np.array(lines, np.float64)
        known = ~np.isnan(expected)
        np.testing.assert_allclose(rows[:, i][known], expected[known], rtol=1e-5)
        if after is not None:
            assert float(batch.columns["bootstrap_obs"][i]) == after
        assert np.asarray(batch.columns["carry[0]"])[i].tolist() == [first, -first]
        assert float(batch.columns["carry[1]"][i]) == first + 0.5
        if "version" in batch.columns:
            assert int(batch.columns["version"][i]) == version


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    envs=st.integers(1, 3),
    length=st.integers(1, 9),
    steps=st.integers(1, 5),
    more=st.integers(1, 12),
    over=st.sampled_from([0.0, 0.2, 0.6]),
    prioritized=st.booleans(),
    apart=st.booleans(),
)
def test_sequences_are_those_of_a_slow_list(
    seed, envs, length, steps, more, over, prioritized, apart
):
    rng = np.random.default_rng(seed)
    world = Remembering(envs, rng, over)
    spec = fl.Replay(1000, prioritized=prioritized, sequence_length=length, gamma=GAMMA)
    ring = Ring(spec, steps + length + more, envs, 0, seed)
    for version in range(14):
        first, count = (int(rng.integers(envs)), 1) if apart else (0, envs)
        batch, rows = world.rollout(first, count, steps, version)
        if rng.random() < 0.15:
            continue  # it is lost on its way
        world.added(first, rows)
        reported = ring.add(batch)
        wanted = world.sequences(ring.rows - 1, length)
        assert reported["usable"] == len(wanted) == ring.usable.sum()
        found = ring._beginning_at(np.flatnonzero(ring.usable), {}, {})
        assert found.data["obs"].shape[0] == length
        assert set(found.data["obs"][0].tolist()) == wanted.keys()
        agree(found, wanted)
        if wanted:
            agree(ring.sample(5), wanted)
        if prioritized:
            np.testing.assert_array_equal(
                ring.tree.leaves[: ring.usable.size] > 0, ring.usable.ravel()
            )


@cache
def compiled(prioritized, length, envs, steps, rows):
    """The functions of a replay on the device, compiled once for all examples."""
    spec = fl.Replay(
        1000, prioritized=prioritized, sequence_length=length, gamma=GAMMA, beta_steps=0
    )
    core = Core(spec, rows, envs, steps)
    read = jax.jit(lambda state: core._sequences(state, jnp.arange(rows * envs), jnp.bool_(True)))
    add, sample = (
        jax.jit(core.add, static_argnames="low"),
        jax.jit(core.sample, static_argnames="size"),
    )
    return core, add, sample, read, jax.jit(core.prioritize)


def added(add, state, batch, low=0):
    carry = {name: x for name, x in batch.columns.items() if name.startswith("carry")}
    end = {"obs": batch.columns["bootstrap_obs"], **carry}
    return add(state, batch.data, end, batch.columns["first"], low=low)


@pytest.mark.system
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from([(1, 1, 1), (2, 3, 5), (3, 4, 4), (2, 4, 9)]),
    over=st.sampled_from([0.0, 0.2, 0.6]),
    prioritized=st.booleans(),
    apart=st.booleans(),
)
def test_sequences_on_the_device_are_those_of_a_slow_list(seed, form, over, prioritized, apart):
    envs, steps, length = form
    rows = steps * (3 + -(-length // steps))
    core, add, sample, read, _ = compiled(prioritized, length, envs, steps, rows)
    rng = np.random.default_rng(seed)
    world = Remembering(envs, np.random.default_rng(seed), over)
    state = core.empty(jax.random.key(seed % 1000), fields=TYPES, carries=CARRIES)
    for version in range(12):
        first, count = (int(rng.integers(envs)), 1) if apart else (0, envs)
        batch, given = world.rollout(first, count, steps, version)
        if rng.random() < 0.15:
            continue  # it is lost on its way
        world.added(first, given)
        state = added(add, state, batch, first)
        wanted = world.sequences(rows - 1, length, repairs=False)
        usable = np.flatnonzero(state["usable"])
        data, columns = jax.device_get(read(state))
        found = fl.extend.Batch(
            {name: x[:, usable] for name, x in data.items()},
            {name: x[usable] for name, x in columns.items()},
        )
        assert set(found.data["obs"][0].tolist()) == wanted.keys()
        agree(found, wanted)
        _, data, columns = jax.device_get(sample(state, size=6))
        there = np.flatnonzero(data["valid"].any(0))
        drawn = fl.extend.Batch(
            {name: x[:, there] for name, x in data.items()},
            {name: x[there] for name, x in columns.items()},
        )
        agree(drawn, wanted)
        if prioritized:
            leaves = state["tree"]["leaves"][: rows * envs]
            np.testing.assert_array_equal(leaves > 0, state["usable"].ravel())


def filled(prioritized):
    """A ring and a replay on the device that were given the same rollouts, 3 environments of 5."""
    spec = fl.Replay(1000, prioritized=prioritized, sequence_length=7, gamma=GAMMA, beta_steps=0)
    ring = Ring(spec, 60, 3, 0, 0)
    core, add, *_ = compiled(prioritized, 7, 3, 5, 60)
    state = core.empty(jax.random.key(0), fields=TYPES, carries=CARRIES)
    world = Remembering(3, np.random.default_rng(0))
    for version in range(11):
        batch, _ = world.rollout(0, 3, 5, version)
        ring.add(batch)
        state = added(add, state, batch)
    return ring, state


@pytest.mark.parametrize("prioritized", [True, False])
def test_sequences_are_drawn_as_often_as_their_priority_says(prioritized):
    ring, state = filled(prioritized)
    *_, sample, _, prioritize = compiled(prioritized, 7, 3, 5, 60)
    usable = np.flatnonzero(ring.usable)
    np.testing.assert_array_equal(usable, np.flatnonzero(state["usable"]))
    powers, weights = np.ones(len(usable)), None
    if prioritized:
        errors = np.random.default_rng(1).exponential(size=len(usable))
        ring.prioritize(usable, ring.stamp.ravel()[usable], errors)
        state = prioritize(state, usable, state["stamp"].ravel()[usable], errors)
        powers = (errors + 1e-6) ** 0.6
        weights = (len(usable) * powers / powers.sum()) ** -0.4
    firsts = ring.flat["obs"][usable].tolist()
    on_host, on_device = dict.fromkeys(firsts, 0), dict.fromkeys(firsts, 0)
    for _ in range(300):
        drawn = ring.sample(16, beta=0.4)
        for obs in drawn.data["obs"][0].tolist():
            on_host[obs] += 1
    if weights is not None:
        by_obs = dict(zip(firsts, weights, strict=True))
        wanted = np.array([by_obs[obs] for obs in drawn.data["obs"][0].tolist()])
        np.testing.assert_allclose(
            drawn.data["weight"], np.tile(wanted / wanted.max(), (7, 1)), rtol=1e-5
        )
    for _ in range(40):
        state, data, _ = sample(state, size=128)
        for obs in np.asarray(data["obs"])[0, np.asarray(data["valid"]).any(0)].tolist():
            on_device[obs] += 1
    for counts in (on_host, on_device):
        seen = np.array(list(counts.values()))
        assert chi_square(seen, powers / powers.sum()) < limit(len(usable) - 1)


def test_a_priority_is_that_of_a_sequence_and_outlasts_the_rollouts_that_follow():
    ring, _ = filled(True)
    world = Remembering(3, np.random.default_rng(9))
    batch = ring.sample(4)
    slots, stamps = batch.columns["slot"], batch.columns["stamp"]
    ring.prioritize(slots, stamps, np.full(4, 9.0))
    np.testing.assert_allclose(ring.tree.leaves[slots], 9.0**0.6, rtol=1e-5)
    before = ring.tree.leaves.copy()
    # Rollouts that do not follow cut the sequences that waited, which get the highest priority.
    ring.add(world.rollout(0, 3, 5, 0)[0])
    kept = slots[ring.usable.ravel()[slots]]
    assert len(kept)
    np.testing.assert_array_equal(ring.tree.leaves[kept], before[kept])
    new = np.flatnonzero((ring.tree.leaves > 0) & (before == 0))
    np.testing.assert_allclose(ring.tree.leaves[new], 9.0**0.6, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sequence_length": 0}, "sequence_length must be at least 1"),
        ({"sequence_length": 5, "n_step": 2}, r"the returns of sequences are the loss's own"),
    ],
)
def test_settings_of_sequences_that_can_not_be(settings, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.Replay(100, **settings)


def test_rollouts_of_another_length_are_refused():
    ring = Ring(fl.Replay(100, sequence_length=4), 30, 1, 0, 0)
    world = Remembering(1, np.random.default_rng(0))
    ring.add(world.rollout(0, 1, 3, 0)[0])
    with pytest.raises(fl.errors.ContractError, match="of 2 steps came after others of 3"):
        ring.add(world.rollout(0, 1, 2, 1)[0])
