"""A replay on the device against a slow list; its draws against the paper's formulas."""

import re
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
from flowrl.replay.jax_core import Core, core_of

FIELDS = (("obs", (), "float32"), ("action", (), "int32"), ("reward", (), "float32"))


@cache
def compiled(prioritized, n, envs, rows):
    """The functions of a replay, compiled once for all examples."""
    core = Core(
        fl.Replay(1000, prioritized=prioritized, n_step=n, gamma=GAMMA, beta_steps=0), rows, envs
    )
    everything = jax.jit(lambda state: core._transitions(state, jnp.arange(rows * envs)))
    return (
        core,
        jax.jit(core.add, static_argnames="low"),
        jax.jit(core.sample, static_argnames="size"),
        everything,
        jax.jit(core.prioritize),
    )


def added(add, state, batch, low=0):
    end = {"obs": batch.columns["bootstrap_obs"]}
    return add(state, batch.data, end, batch.columns["first"], low=low)


@pytest.mark.system
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from([(1, 1, 1), (3, 2, 2), (2, 4, 3), (4, 2, 1)]),
    over=st.sampled_from([0.0, 0.2, 0.6]),
    prioritized=st.booleans(),
    apart=st.booleans(),
)
def test_what_may_be_drawn_is_what_a_slow_list_says(seed, form, over, prioritized, apart):
    envs, steps, n = form
    rows = 4 * steps if steps > 1 else 6
    core, add, sample, everything, _ = compiled(prioritized, n, envs, rows)
    world, rng = World(envs, np.random.default_rng(seed), over), np.random.default_rng(seed)
    state = core.empty(jax.random.key(seed % 1000), fields=FIELDS)
    for version in range(10):
        first, count = (int(rng.integers(envs)), 1) if apart else (0, envs)
        batch, given = world.rollout(first, count, steps, version)
        if rng.random() < 0.15:
            continue  # it is lost on its way
        world.added(first, given)
        state = added(add, state, batch, first)
        wanted, drawn = (
            world.transitions(rows - 1, n, repairs=False),
            jax.device_get(everything(state)),
        )
        usable = np.flatnonzero(state["usable"])
        got = {
            float(drawn["obs"][i]): [
                float(drawn[k][i]) for k in ("action", "reward", "discount", "next_obs")
            ]
            for i in usable
        }
        assert got.keys() == wanted.keys()
        for obs, row in wanted.items():
            assert got[obs] == pytest.approx(row[:4], rel=1e-4, abs=1e-5)
        _, drawn, _ = jax.device_get(sample(state, size=5))
        assert set(drawn["obs"][0][drawn["valid"][0]].tolist()) <= wanted.keys()
        if prioritized:
            np.testing.assert_array_equal(
                state["tree"]["leaves"][: rows * envs] > 0, state["usable"].ravel()
            )


def test_a_batch_of_runners_that_gave_unequally_many_rollouts_is_written_where_each_of_them_is():
    """As asynchronous runners give them, whose rollouts are joined."""
    world = World(2, np.random.default_rng(0))
    graph = fl.dqn("gymnax:CartPole-v1", fl.DQNSettings(num_runners=2, envs_per_runner=1))
    orders = [(1, 0, 1), (0,), (1,), (1,), (0, 1), (0,), (1,), (0, 1)]
    with fl.run(graph) as run:
        replay = run._session.place.handles["replay"]
        for version, envs in enumerate(orders):
            rollouts = [world.rollout(env, 1, 2, version) for env in envs]
            for env, (_, rows) in zip(envs, rollouts, strict=True):
                world.added(env, rows)
            replay.add(fl.extend.Batch.join([batch for batch, _ in rollouts]))
        state, everything = replay.arrays, compiled(False, 1, 2, replay.core.rows)[3]
        usable = np.flatnonzero(state["usable"])
        seen = set(np.asarray(everything(state)["obs"])[usable].tolist())
    assert seen == world.transitions(replay.core.rows, 1, repairs=False).keys()


def test_rollouts_of_another_length_are_refused_though_their_length_divides_the_first():
    world = World(1, np.random.default_rng(0))
    graph = fl.dqn("gymnax:CartPole-v1", fl.DQNSettings(num_runners=1, envs_per_runner=1))
    with fl.run(graph) as run:
        replay = run._session.place.handles["replay"]
        replay.add(world.rollout(0, 1, 4, 0)[0])
        with pytest.raises(fl.errors.GraphError, match="of 2 steps came after others of 4; a repl"):
            replay.add(world.rollout(0, 1, 2, 1)[0])
        replay.add(world.rollout(0, 1, 4, 2)[0])


def test_beta_goes_up_to_1_where_the_steps_of_all_environments_exceed_32_bits():
    core = core_of(fl.Replay(100, prioritized=True, beta=0.5, beta_steps=4_000_000_000), 10, 3)
    for count, wanted in ((0, 0.5), (1_000_000_000, 0.875), (2_000_000_000, 1.0)):
        state = {"count": jnp.full(3, count, jnp.int32)}
        assert float(core._beta(state)) == pytest.approx(wanted)


@pytest.mark.parametrize("prioritized", [True, False])
def test_rows_are_drawn_as_often_as_their_priority_says(prioritized):
    core, add, sample, _, prioritize = compiled(prioritized, 1, 3, 40)
    world, state = World(3, np.random.default_rng(0)), core.empty(jax.random.key(0), fields=FIELDS)
    for version in range(12):
        state = added(add, state, world.rollout(0, 3, 5, version)[0])
    usable = np.flatnonzero(state["usable"])
    powers = np.ones(len(usable))
    if prioritized:
        errors = np.random.default_rng(1).exponential(size=len(usable))
        state = prioritize(state, usable, state["stamp"].ravel()[usable], errors)
        powers = (errors + 1e-6) ** 0.6
        _, drawn, columns = sample(state, size=64)
        by_slot = dict(
            zip(usable.tolist(), (len(usable) * powers / powers.sum()) ** -0.4, strict=True)
        )
        wanted = np.array([by_slot[slot] for slot in columns["slot"].tolist()])
        np.testing.assert_allclose(drawn["weight"][0], wanted / wanted.max(), rtol=1e-3)
    seen = dict.fromkeys(np.asarray(state["data"]["obs"]).ravel()[usable].tolist(), 0)
    for _ in range(150):
        state, drawn, _ = sample(state, size=256)
        for obs in np.asarray(drawn["obs"][0])[np.asarray(drawn["valid"][0])].tolist():
            seen[obs] += 1
    assert chi_square(np.array(list(seen.values())), powers / powers.sum()) < limit(len(usable) - 1)


def test_a_priority_that_comes_late_meets_no_other_row():
    core, add, sample, _, prioritize = compiled(True, 1, 1, 10)
    world, state = (
        World(1, np.random.default_rng(0), 0.0),
        core.empty(jax.random.key(0), fields=FIELDS),
    )
    state, _, columns = sample(added(add, state, world.rollout(0, 1, 5, 0)[0]), size=5)
    for version in (1, 2):  # overwrites the first five
        state = added(add, state, world.rollout(0, 1, 5, version)[0])
    after = prioritize(state, columns["slot"], columns["stamp"], jnp.full(5, 9.0))
    np.testing.assert_array_equal(after["tree"]["leaves"], state["tree"]["leaves"])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_priority_that_is_not_finite_spoils_no_sample(wrong):
    core, add, sample, _, prioritize = compiled(True, 1, 1, 10)
    batch, _ = World(1, np.random.default_rng(0), 0.0).rollout(0, 1, 5, 0)
    fields = (*FIELDS, ("priority", (), "float32"))
    brought = batch.with_(priority=np.array([[9.0], [wrong], [1.0], [1.0], [1.0]]))
    state = added(add, core.empty(jax.random.key(0), fields=fields), brought)
    # The row counts as one that brings none, which has the highest priority so far: at first, 1.
    leaves = np.array([9.0, 1.0, 1.0, 1.0, 1.0]) ** 0.6
    np.testing.assert_allclose(state["tree"]["leaves"][:5], leaves, rtol=1e-4)
    slots = np.arange(5)
    state = prioritize(
        state, slots, state["stamp"].ravel()[slots], np.array([2.0, 3.0, wrong, 4.0, 5.0])
    )
    leaves = np.array([2.0, 3.0, 1.0, 4.0, 5.0]) ** 0.6
    np.testing.assert_allclose(state["tree"]["leaves"][:5], leaves, rtol=1e-4)
    assert np.isfinite([state["highest"], *sample(state, size=5)[1]["weight"][0]]).all()


def test_rounding_that_ends_at_an_empty_slot_leaves_the_others_their_weights(monkeypatch):
    core, add, *_ = compiled(True, 1, 1, 10)
    batch, _ = World(1, np.random.default_rng(0), 0.0).rollout(0, 1, 5, 0)
    state = added(add, core.empty(jax.random.key(0), fields=FIELDS), batch)
    monkeypatch.setattr("flowrl.replay.jax_core.find", lambda tree, shares: jnp.array([0, 9]))
    _, data, _ = core.sample(state, size=2)
    assert data["weight"].tolist() == [[1.0, 0.0]] and data["valid"].tolist() == [[True, False]]


def test_a_priority_that_was_meant_for_another_replay_meets_no_row():
    core, add, sample, _, prioritize = compiled(True, 1, 1, 10)
    batch, _ = World(1, np.random.default_rng(0), 0.0).rollout(0, 1, 5, 0)
    one, other = (
        added(add, core.empty(jax.random.key(seed), fields=FIELDS), batch) for seed in (0, 1)
    )
    _, _, columns = sample(other, size=5)
    after = prioritize(one, columns["slot"], columns["stamp"], jnp.full(5, 9.0))
    np.testing.assert_array_equal(after["tree"]["leaves"], one["tree"]["leaves"])


def test_equal_settings_have_one_core_whose_functions_are_compiled_once():
    assert (
        core_of(fl.Replay(100), 10, 4)
        is core_of(fl.Replay(100), 10, 4)
        is not core_of(fl.Replay(100), 12, 4)
    )
    with fl.run(
        fl.dqn(
            "gymnax:CartPole-v1",
            fl.DQNSettings(learning_starts=32, report_every=1, prioritized=True),
        )
    ) as run:
        next(run)
        replay = run._session.place.handles["replay"]
        assert replay.core is core_of(replay.spec, replay.core.rows, 8, 4)
        assert replay.nbytes == sum(x.nbytes for x in jax.tree.leaves(replay.arrays))


@pytest.mark.system
@pytest.mark.parametrize("n", [1, 3])
def test_a_priority_outlasts_the_rollouts_that_follow(n):
    core, add, _, _, prioritize = compiled(True, n, 3, 40)
    world, rng, state = (
        World(3, np.random.default_rng(0), 0.4),
        np.random.default_rng(1),
        core.empty(jax.random.key(0), fields=FIELDS),
    )
    highest = 1.0
    for version in range(12):  # once round
        before = added(add, state, world.rollout(0, 3, 5, version)[0])
        slots = np.flatnonzero(before["usable"])
        errors = 0.1 + rng.random(len(slots))
        before = prioritize(before, slots, before["stamp"].ravel()[slots], errors)
        highest = max(highest, (errors.max() + 1e-6) ** 0.6)
        state = added(add, before, world.rollout(0, 3, 5, version)[0])
        assert state["usable_count"] == np.sum(state["usable"])
        stamps, now = (np.asarray(x["stamp"]).ravel()[slots] for x in (before, state))
        kept = slots[(stamps == now) & np.asarray(state["usable"]).ravel()[slots]]
        assert len(kept) > 3
        np.testing.assert_array_equal(state["tree"]["leaves"][kept], before["tree"]["leaves"][kept])
        # What a new row overwrote had a priority, which is not the new row's.
        stamp = np.asarray(state["stamp"])
        fresh = np.flatnonzero((stamp == stamp.max()) & state["usable"])
        assert len(fresh) and (state["tree"]["leaves"][fresh] == state["highest"]).all()
        assert float(state["highest"]) == pytest.approx(highest, rel=1e-5)
    assert highest > 1


def test_sampled_rewards_are_divided_by_the_deviation_of_all_returns_so_far():
    spec = fl.Replay(1000, n_step=2, gamma=GAMMA, normalize_rewards=True)
    core, world = Core(spec, 24, 3), World(3, np.random.default_rng(5))
    add, transitions = jax.jit(core.add, static_argnames="low"), jax.jit(core._transitions)
    state = core.empty(jax.random.key(0), fields=FIELDS)
    for version in range(10):
        batch, rows = world.rollout(0, 3, 4, version)
        if version == 5:
            continue  # it is lost on its way
        world.added(0, rows)
        state = added(add, state, batch)
    sampled = jax.device_get(transitions(state, jnp.arange(24 * 3)))
    wanted = world.transitions(23, 2, repairs=False)
    rewards = {
        float(sampled["obs"][i]): sampled["reward"][i] for i in np.flatnonzero(state["usable"])
    }
    assert rewards.keys() == wanted.keys()
    for obs, row in wanted.items():
        assert rewards[obs] * world.deviation() == pytest.approx(row[1], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("kind", [{}, {"n_step": 3}, {"sequence_length": 2}], ids=str)
def test_a_program_of_several_rounds_copies_no_replay(kind, prioritized):
    core = Core(fl.Replay(1_000, **kind, prioritized=prioritized), 1_002, 1, 2)
    whole = "sequence_length" in kind
    fields = (*FIELDS, *((name, (), "bool") for name in ("terminated", "valid") if whole))

    def one_round(state, number):
        rows = {"obs": jnp.full((2, 1), number), "reward": jnp.ones((2, 1))}
        flags = {name: jnp.ones((2, 1), bool) for name in ("valid", "terminated", "truncated")}
        rows |= {"action": jnp.ones((2, 1), jnp.int32), **flags}
        end, first = {"obs": jnp.full(1, number)}, state["count"]
        state, data, of = core.sample(core.add(state, rows, end, first, low=0), size=8)
        if prioritized:
            state = core.prioritize(state, of["slot"], of["stamp"], jnp.arange(8.0))
        return state, sum(x.sum(dtype=jnp.float32) for x in data.values())

    def program(state):
        def two(i, carried):
            (state, total), number = carried, jnp.float32(i)
            state, first = one_round(state, number)
            state, second = one_round(state, number + 0.5)
            return state, total + first + second

        return jax.lax.fori_loop(0, 100, two, (state, jnp.float32(0)))

    state = core.empty(jax.random.key(0), fields=fields)
    text = jax.jit(program, donate_argnums=0).lower(state).compile().as_text()
    assert "f32[1002,1]" in text
    assert not re.findall(r"\w+\[1002\b\S* copy\(", text)
