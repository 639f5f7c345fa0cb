"""The ring of a replay against a slow list; its draws against the paper's formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import GAMMA, World

import flowrl as fl
from flowrl.replay.ring import Ring
from flowrl.replay.sum_tree import SumTree, scattered


def everything(ring):
    """All that may be drawn, by observation."""
    slots = np.flatnonzero(ring.usable)
    drawn = ring._beginning_at(slots, {}, {})
    rows = zip(
        *(drawn.data[k][0].tolist() for k in ("obs", "action", "reward", "discount", "next_obs")),
        drawn.columns["version"].tolist(),
        strict=True,
    )
    return {obs: tuple(rest) for obs, *rest in rows}


def agree(ring, world, n):
    got, wanted = everything(ring), world.transitions(ring.rows - 1, n)
    assert got.keys() == wanted.keys()
    for obs, row in wanted.items():
        assert got[obs] == pytest.approx(row, rel=1e-5, abs=1e-5)
    assert ring.count == len(wanted)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    envs=st.integers(1, 4),
    n=st.integers(1, 4),
    steps=st.integers(1, 5),
    has_capacity=st.integers(1, 12),
    over=st.sampled_from([0.0, 0.2, 0.6]),
    prioritized=st.booleans(),
    apart=st.booleans(),
)
def test_what_may_be_drawn_is_what_a_slow_list_says(
    seed, envs, n, steps, has_capacity, over, prioritized, apart
):
    rng = np.random.default_rng(seed)
    world = World(envs, rng, over)
    spec = fl.Replay(1000, prioritized=prioritized, n_step=n, gamma=GAMMA)
    ring = Ring(spec, steps + n + has_capacity + 1, envs, 0, seed)
    held = 0
    for version in range(12):
        first, count = (int(rng.integers(envs)), 1) if apart else (0, envs)
        batch, rows = world.rollout(first, count, steps, version)
        if rng.random() < 0.15:
            continue  # it is lost on its way
        world.added(first, rows)
        reported = ring.add(batch)
        agree(ring, world, n)
        held += batch.steps
        assert (
            reported["added"] == held == reported["held"] + reported["evicted"]
            and reported["held"] == ring.real.sum()
        )
        if ring.count:
            assert (
                set(ring.sample(7).data["obs"][0].tolist())
                <= world.transitions(ring.rows - 1, n).keys()
            )
        if prioritized:
            np.testing.assert_array_equal(
                ring.tree.leaves[: ring.usable.size] > 0, ring.usable.ravel()
            )


def filled(prioritized=True, seed=0, **settings):
    world = World(3, np.random.default_rng(seed))
    ring = Ring(fl.Replay(1000, prioritized=prioritized, gamma=GAMMA, **settings), 40, 3, 0, seed)
    for version in range(12):
        ring.add(world.rollout(0, 3, 5, version)[0])
    return ring


def chi_square(counts, shares):
    expected = counts.sum() * shares
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees):
    """What a chi-square of so many degrees of freedom exceeds with chance 1e-4 (Wilson and Hilferty
    1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * np.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("prioritized", [True, False])
def test_rows_are_drawn_as_often_as_their_priority_says(prioritized):
    ring, rng = filled(prioritized), np.random.default_rng(1)
    usable = np.flatnonzero(ring.usable)
    powers = np.ones(len(usable))
    if prioritized:
        errors = rng.exponential(size=len(usable))
        ring.prioritize(usable, ring.stamp.ravel()[usable], errors)
        powers = (errors + 1e-6) ** 0.6
    seen = dict.fromkeys(ring.data["obs"].ravel()[usable].tolist(), 0)
    for _ in range(2000):
        for obs in ring.sample(16).data["obs"][0].tolist():
            seen[obs] += 1
    assert chi_square(np.array(list(seen.values())), powers / powers.sum()) < limit(len(usable) - 1)


def test_importance_weights_are_those_of_the_paper():
    ring, rng = filled(alpha=0.7, beta=0.4), np.random.default_rng(1)
    usable = np.flatnonzero(ring.usable)
    errors = rng.exponential(size=len(usable))
    ring.prioritize(usable, ring.stamp.ravel()[usable], errors)
    drawn = ring.sample(64, beta=0.4)
    chance = dict(
        zip(usable.tolist(), (errors + 1e-6) ** 0.7 / ((errors + 1e-6) ** 0.7).sum(), strict=True)
    )
    weights = np.array(
        [(len(usable) * chance[slot]) ** -0.4 for slot in drawn.columns["slot"].tolist()]
    )
    np.testing.assert_allclose(drawn.data["weight"][0], weights / weights.max(), rtol=1e-5)


def test_a_priority_that_comes_late_meets_no_other_row():
    world = World(1, np.random.default_rng(0), 0.0)
    ring = Ring(fl.Replay(100, prioritized=True, gamma=GAMMA), 8, 1, 0, 0)
    ring.add(world.rollout(0, 1, 5, 0)[0])
    drawn = ring.sample(5)
    ring.add(world.rollout(0, 1, 5, 1)[0])  # overwrites the first three
    before = ring.tree.leaves.copy()
    ring.prioritize(drawn.columns["slot"], drawn.columns["stamp"], np.full(5, 9.0))
    changed = np.flatnonzero(ring.tree.leaves != before)
    assert set(ring.data["obs"][changed, 0].tolist()) == {3.0, 4.0}


def test_a_priority_that_was_meant_for_a_lost_shard_meets_none_of_the_new_one():
    lost, new = (
        Ring(fl.Replay(100, prioritized=True, gamma=GAMMA), 8, 1, 0, seed) for seed in (0, 1)
    )
    for ring in (lost, new):
        ring.add(World(1, np.random.default_rng(0), 0.0).rollout(0, 1, 5, 0)[0])
    drawn, before = lost.sample(5), new.tree.leaves.copy()
    reported = new.prioritize(drawn.columns["slot"], drawn.columns["stamp"], np.full(5, 9.0))
    np.testing.assert_array_equal(new.tree.leaves, before)
    assert reported == new.held()


def test_a_priority_that_was_meant_for_another_larger_replay_meets_none_of_this():
    small, large = (
        Ring(fl.Replay(100, prioritized=True, gamma=GAMMA), rows, 1, 0, seed)
        for rows, seed in ((8, 0), (40, 1))
    )
    world = World(1, np.random.default_rng(0), 0.0)
    for version in range(4):
        batch, _ = world.rollout(0, 1, 5, version)
        small.add(batch), large.add(batch)
    before, slots = small.tree.leaves.copy(), np.flatnonzero(large.usable)
    small.prioritize(slots, large.stamp.ravel()[slots], np.full(len(slots), 9.0))
    np.testing.assert_array_equal(small.tree.leaves, before)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_rollouts_that_were_joined_are_added_one_after_the_other(order):
    world = World(3, np.random.default_rng(0))
    ring = Ring(fl.Replay(1000, prioritized=True, n_step=2, gamma=GAMMA), 40, 3, 0, 0)
    for version in range(3):
        parts = []
        for env in (*order, *order):
            batch, rows = world.rollout(env, 1, 4, version)
            world.added(env, rows)
            parts.append(batch)
        reported = ring.add(fl.extend.Batch.join(parts))
        agree(ring, world, 2)
        assert reported["added"] == reported["held"] == ring.real.sum() == 24 * (version + 1)


def test_new_rows_have_the_highest_priority_or_the_one_that_they_bring():
    ring = filled()
    usable = np.flatnonzero(ring.usable)
    ring.prioritize(usable[:1], ring.stamp.ravel()[usable[:1]], np.array([31.0]))
    batch, _ = World(3, np.random.default_rng(5)).rollout(0, 3, 5, 9)
    ring.add(batch)
    new = np.flatnonzero(ring.usable.ravel() & (ring.stamp.ravel() == ring.rollouts))
    np.testing.assert_allclose(ring.tree.leaves[new], 31.0**0.6, rtol=1e-5)
    own = Ring(fl.Replay(1000, prioritized=True, gamma=GAMMA), 40, 3, 0, 0)
    own.add(batch.with_(priority=np.abs(batch["obs"])))
    new = np.flatnonzero(own.usable)
    np.testing.assert_allclose(
        own.tree.leaves[new], (own.data["obs"].ravel()[new] + 1e-6) ** 0.6, rtol=1e-5
    )


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_priority_that_is_not_finite_is_refused(wrong):
    ring = filled()
    leaves, usable = ring.tree.leaves.copy(), np.flatnonzero(ring.usable)[:2]
    with pytest.raises(fl.errors.ContractError, match=f"priority that is not finite: {wrong}"):
        ring.prioritize(usable, ring.stamp.ravel()[usable], np.array([1.0, wrong]))
    np.testing.assert_array_equal(ring.tree.leaves, leaves)
    batch, _ = World(3, np.random.default_rng(5)).rollout(0, 3, 5, 9)
    own = Ring(fl.Replay(1000, prioritized=True, gamma=GAMMA), 40, 3, 0, 0)
    own.add(batch.with_(priority=np.where(batch["valid"], 1.0, wrong)))
    assert np.isfinite(own.sample(8).data["weight"]).all()
    with pytest.raises(fl.errors.ContractError, match="let the operator or loss"):
        own.add(batch.with_(priority=np.where(batch["valid"], wrong, 1.0)))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 31, 33, 1000, 5000]),
    share=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_the_sum_tree_finds_what_a_running_sum_finds(seed, size, share):
    rng, tree = np.random.default_rng(seed), SumTree(size)
    weights = np.where(rng.random(size) < share, rng.exponential(size=size), 0.0)
    weights[rng.integers(size)] = 1.0
    for part in np.array_split(rng.permutation(size), 3):
        tree[part] = weights[part]
    assert tree.total == pytest.approx(weights.sum())
    shares = np.concatenate([rng.random(50), [0.0, np.nextafter(1.0, 0.0)]])
    found = tree.find(shares)
    assert (weights[found] > 0).all()
    sums = np.cumsum(weights)
    expected = np.searchsorted(sums, shares * sums[-1], side="right")
    assert (
        np.abs(sums[np.minimum(found, size - 1)] - sums[np.minimum(expected, size - 1)])
        <= 1e-9 * sums[-1] + np.where(found == expected, 0, 1e-9)
    ).all()


def test_any_part_of_a_draw_by_priority_is_one_of_all():
    order = scattered(256)
    assert sorted(order) == list(range(256)) and all(
        part.min() < 64 and part.max() >= 192 for part in np.split(order, 8)
    )


@pytest.mark.parametrize("n", [1, 3])
def test_a_priority_outlasts_the_rollouts_that_follow(n):
    world, rng = World(3, np.random.default_rng(0), 0.4), np.random.default_rng(1)
    ring = Ring(fl.Replay(1000, prioritized=True, n_step=n, gamma=GAMMA), 40, 3, 0, 0)
    for version in range(12):  # once round
        ring.add(world.rollout(0, 3, 5, version)[0])
        slots = np.flatnonzero(ring.usable)
        ring.prioritize(slots, ring.stamp.ravel()[slots], 0.1 + rng.random(len(slots)))
        stamps, leaves = ring.stamp.copy().ravel(), ring.tree.leaves.copy()
        ring.add(world.rollout(0, 3, 5, version)[0])
        kept = slots[(ring.stamp.ravel()[slots] == stamps[slots]) & ring.usable.ravel()[slots]]
        assert len(kept) > 3
        np.testing.assert_array_equal(ring.tree.leaves[kept], leaves[kept])


@pytest.mark.parametrize("apart", [False, True])
def test_sampled_rewards_are_divided_by_the_deviation_of_all_returns_so_far(apart):
    """Those of before, too: they are stored as they came."""
    envs, steps, n = 3, 4, 2
    rng = np.random.default_rng(5)
    world = World(envs, rng)
    ring = Ring(fl.Replay(1000, n_step=n, gamma=GAMMA, normalize_rewards=True), 20, envs, 0, 0)
    for version in range(12):
        first, count = (int(rng.integers(envs)), 1) if apart else (0, envs)
        batch, rows = world.rollout(first, count, steps, version)
        batch.data["reward"] *= 50 if version > 8 else 1
        rows = [
            [(*row[:2], row[2] * (50 if version > 8 else 1), *row[3:]) for row in column]
            for column in rows
        ]
        if version == 5:
            continue  # it is lost on its way
        world.added(first, rows)
        ring.add(batch)
        got, wanted = everything(ring), world.transitions(ring.rows - 1, n)
        assert got.keys() == wanted.keys()
        for obs, row in wanted.items():
            assert got[obs][1] * world.deviation() == pytest.approx(row[1], rel=1e-3, abs=1e-4)
