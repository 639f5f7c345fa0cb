"""Advantages against slow loops written from their definition, and against rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import rlax

from flowrl.ops.batch import advantages
from flowrl.rl.masked import standardized
from flowrl.rl.returns import gae, td_errors, vtrace

fast = jax.jit(gae)


def slow_gae(reward, value, value_end, terminated, truncated, gamma, lam):
    """Equation 16 of Schulman et al. (2016): the sum of (gamma lam)^k delta_(t + k) up to the end
    of t's own episode."""
    T = len(reward)
    values = [*value, value_end]
    found = np.zeros(T)
    for t in range(T):
        for k in range(T - t):
            at = t + k
            following = 0.0 if terminated[at] else values[at + 1]
            found[t] += (gamma * lam) ** k * (reward[at] + gamma * following - values[at])
            if terminated[at] or truncated[at]:
                break
    return found


def stream(seed, T, ends=0.2, kinds=("terminated", "truncated")):
    """A stream in NEXT_STEP form: after each done comes a row that holds the final observation and
    is not valid."""
    rng = np.random.default_rng(seed)
    done = {"terminated": np.zeros(T, bool), "truncated": np.zeros(T, bool)}
    valid = np.ones(T, bool)
    for t in range(T):
        if t and (done["terminated"] | done["truncated"])[t - 1]:
            valid[t] = False
        elif rng.random() < ends:
            done[rng.choice(kinds)][t] = True
    reward = np.where(valid, rng.normal(size=T), 0).astype(np.float32)
    value, end = rng.normal(size=T).astype(np.float32), np.float32(rng.normal())
    return reward, value, end, done["terminated"], done["truncated"], valid


@pytest.mark.parametrize(
    ("gamma", "lam"), [(0.99, 0.95), (0.5, 0.5), (1.0, 1.0), (0.9, 0.0), (0.0, 1.0)]
)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition_at_valid_rows(seed, gamma, lam):
    *args, valid = stream(seed, 24)
    assert not valid.all()
    np.testing.assert_allclose(
        fast(*args, gamma, lam)[valid], slow_gae(*args, gamma, lam)[valid], rtol=1e-4, atol=1e-5
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_equals_the_definition_for_any_ends_and_discounts(seed, ends, gamma, lam):
    *args, valid = stream(seed, 9, ends)
    np.testing.assert_allclose(
        fast(*args, gamma, lam)[valid], slow_gae(*args, gamma, lam)[valid], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("seed", range(3))
def test_equals_rlax_where_nothing_is_truncated(seed):
    reward, value, end, terminated, truncated, _ = stream(seed, 24, kinds=("terminated",))
    theirs = rlax.truncated_generalized_advantage_estimation(
        jnp.asarray(reward),
        jnp.asarray(0.97 * ~terminated, jnp.float32),
        0.9,
        jnp.append(jnp.asarray(value), end),
    )
    np.testing.assert_allclose(
        fast(reward, value, end, terminated, truncated, 0.97, 0.9), theirs, rtol=1e-4, atol=1e-5
    )


def test_jitted_equals_plain():
    *args, _ = stream(0, 12)
    args = jax.tree.map(jnp.asarray, args)
    np.testing.assert_allclose(
        gae(*args, 0.99, 0.95), fast(*args, 0.99, 0.95), rtol=1e-5, atol=1e-6
    )


def test_golden_numbers():
    advantage = gae(
        jnp.array([1.0, 2.0, 0.0, 3.0]),
        jnp.array([4.0, 6.0, 8.0, 10.0]),
        jnp.array(2.0),
        jnp.array([False, False, False, False]),
        jnp.array([False, True, False, False]),
        0.5,
        0.5,
    )
    # by hand: delta = 1+3-4, 2+4-6, 0+5-8, 3+1-10 = 0, 0, -3, -6; nothing flows back across the
    # truncation
    np.testing.assert_allclose(advantage, [0.0, 0.0, -4.5, -6.0])


@pytest.mark.parametrize(
    ("terminated", "truncated", "wanted"),
    [(True, False, 1 - 4), (False, True, 1 + 0.5 * 6 - 4), (True, True, 1 - 4)],
)
def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not(
    terminated, truncated, wanted
):
    ends = [jnp.array([kind, False, False]) for kind in (terminated, truncated)]
    found = gae(
        jnp.array([1.0, 0.0, 100.0]), jnp.array([4.0, 6.0, 8.0]), jnp.array(50.0), *ends, 0.5, 0.9
    )
    assert found[0] == wanted


@pytest.mark.parametrize(
    ("terminated", "truncated", "wanted"),
    [(True, False, 1 - 4), (False, True, 1 + 0.5 * 6 - 4), (False, False, 1 + 0.5 * 6 - 4)],
)
def test_the_last_row_bootstraps_from_the_end_unless_terminated(terminated, truncated, wanted):
    found = gae(
        jnp.array([1.0]),
        jnp.array([4.0]),
        jnp.array(6.0),
        jnp.array([terminated]),
        jnp.array([truncated]),
        0.5,
        0.9,
    )
    assert found[0] == wanted


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_two_episodes_joined_equal_each_alone(kind):
    rng = np.random.default_rng(0)

    def episode(T):
        ends = {k: np.zeros(T + 1, bool) for k in ("terminated", "truncated")}
        ends[kind][T - 1] = True  # row T is the one after the done: it holds the final observation
        return (
            rng.normal(size=T + 1).astype(np.float32),
            rng.normal(size=T + 1).astype(np.float32),
            ends["terminated"],
            ends["truncated"],
        )

    (ra, va, ta, ua), (rb, vb, tb, ub) = a, b = episode(5), episode(7)
    joined = fast(
        *(np.concatenate(x) for x in zip((ra, va), (rb, vb), strict=True)),
        np.float32(9),
        np.append(ta, tb),
        np.append(ua, ub),
        0.9,
        0.8,
    )
    for (reward, value, terminated, truncated), rows in ((a, joined[:6]), (b, joined[6:])):
        T = len(reward) - 1
        alone = fast(reward[:T], value[:T], value[T], terminated[:T], truncated[:T], 0.9, 0.8)
        np.testing.assert_allclose(rows[:T], alone, rtol=1e-5, atol=1e-6)


def test_lambda_one_gives_discounted_returns_minus_values():
    reward, value, end, terminated, truncated, _ = stream(1, 10, ends=0)
    returns = [
        sum(0.9 ** (k - t) * reward[k] for k in range(t, 10)) + 0.9 ** (10 - t) * end
        for t in range(10)
    ]
    np.testing.assert_allclose(
        fast(reward, value, end, terminated, truncated, 0.9, 1.0),
        returns - value,
        rtol=1e-4,
        atol=1e-5,
    )


def test_lambda_zero_gives_one_step_differences():
    reward, value, end, terminated, truncated, valid = stream(2, 10)
    wanted = reward + 0.9 * np.append(value[1:], end) * ~terminated - value
    np.testing.assert_allclose(
        fast(reward, value, end, terminated, truncated, 0.9, 0.0)[valid],
        wanted[valid],
        rtol=1e-5,
        atol=1e-6,
    )


def columns(T=12, B=3):
    streams = [stream(seed, T, 0.3) for seed in range(B)]
    reward, value, end, terminated, truncated, valid = (
        np.stack(x, -1) for x in zip(*streams, strict=True)
    )
    return streams, (reward, value, end, terminated, truncated, valid)


both = jax.jit(lambda *args: advantages(*args, gamma=0.99, gae_lambda=0.95))


def test_advantages_are_those_of_every_column_and_zero_at_invalid_rows():
    streams, stacked = columns()
    advantage, target = both(*stacked)
    valid = stacked[-1]
    assert advantage.shape == target.shape == valid.shape
    for b, (*args, _) in enumerate(streams):
        wanted = np.where(valid[:, b], slow_gae(*args, 0.99, 0.95), 0)
        np.testing.assert_allclose(advantage[:, b], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target[valid], (advantage + stacked[1])[valid], rtol=1e-6)


def test_rewards_at_invalid_rows_change_no_valid_advantage():
    _, (reward, *rest, valid) = columns()
    plain, _ = both(reward, *rest, valid)
    other, _ = both(np.where(valid, reward, 1e9).astype(np.float32), *rest, valid)
    np.testing.assert_array_equal(plain, other)


def test_standardized_has_mean_zero_and_variance_one_over_valid_rows_only():
    rng = np.random.default_rng(0)
    valid = rng.random((8, 4)) < 0.7
    x = np.where(valid, rng.normal(5, 3, (8, 4)), 1e9).astype(np.float32)
    found = np.asarray(standardized(x, valid))
    np.testing.assert_allclose(
        found[valid], (x[valid] - x[valid].mean()) / x[valid].std(), rtol=1e-4, atol=1e-5
    )
    assert (found[~valid] == 0).all()


@pytest.mark.parametrize("filler", [0.0, 1e30, np.nan])
def test_standardized_does_not_look_at_invalid_rows(filler):
    valid = np.array([[True, False], [True, True]])
    found = standardized(jnp.where(valid, jnp.array([[1.0, 0.0], [2.0, 6.0]]), filler), valid)
    np.testing.assert_allclose(found[valid], (np.array([1, 2, 6]) - 3) / np.sqrt(14 / 3), rtol=1e-5)
    assert found[0, 1] == 0


@pytest.mark.parametrize(
    "valid", [np.zeros((2, 3), bool), np.ones((2, 3), bool)], ids=["none valid", "all alike"]
)
def test_standardized_of_nothing_to_scale_is_zero(valid):
    np.testing.assert_array_equal(standardized(jnp.full((2, 3), 7.0), valid), 0)


# -- V-trace


def slow_vtrace(
    log_ratio, reward, value, end, terminated, truncated, valid, gamma, lam, rho_clip, c_clip
):
    """Equation 1 of Espeholt et al. (2018) by its sums, for each episode alone."""
    T, values = len(reward), [*value, end]
    ratio = np.where(valid, np.exp(np.where(valid, log_ratio, 0.0)), 0.0)
    target = np.array(value, float)
    for s in np.flatnonzero(valid):
        trace = 1.0
        for t in range(s, T):
            following = 0.0 if terminated[t] else values[t + 1]
            target[s] += (
                trace * min(rho_clip, ratio[t]) * (reward[t] + gamma * following - values[t])
            )
            if terminated[t] or truncated[t]:
                break
            trace *= gamma * lam * min(c_clip, ratio[t])
    targets = [*target, end]
    following = [0.0 if terminated[t] else targets[t + 1] for t in range(T)]
    return target, np.minimum(rho_clip, ratio) * (reward + gamma * np.array(following) - value)


def ratios(seed, T):
    return np.random.default_rng(seed + 99).normal(0, 0.7, T).astype(np.float32)


fast_vtrace = jax.jit(vtrace)


@pytest.mark.parametrize(
    "settings",
    [(0.99, 1.0, 1.0, 1.0), (0.9, 0.9, 2.0, 0.8), (1.0, 0.0, 1.0, 1.0), (0.5, 1.0, 0.7, 1.5)],
)
@pytest.mark.parametrize("seed", range(4))
def test_vtrace_equals_the_definition(seed, settings):
    args = (ratios(seed, 24), *stream(seed, 24))
    assert not args[-1].all()
    for fast_one, slow_one, plain in zip(
        fast_vtrace(*args, *settings),
        slow_vtrace(*args, *settings),
        vtrace(*args, *settings),
        strict=True,
    ):
        np.testing.assert_allclose(fast_one, slow_one, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(fast_one, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_vtrace_equals_rlax_where_no_episode_is_cut_short(seed):
    T, gamma = 16, 0.97
    log_ratio = ratios(seed, T)
    reward, value, end, terminated, truncated, valid = stream(seed, T, kinds=("terminated",))
    discount = gamma * (1.0 - terminated) * valid
    rho = np.where(valid, np.exp(log_ratio), 0.0).astype(np.float32)
    value_tp1 = np.append(value[1:], end)
    expected = rlax.vtrace_td_error_and_advantage(
        value, value_tp1, reward, discount.astype(np.float32), rho
    )
    target, advantage = vtrace(log_ratio, reward, value, end, terminated, truncated, valid, gamma)
    np.testing.assert_allclose(target - value, expected.errors, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(advantage, expected.pg_advantage, rtol=1e-4, atol=1e-5)


def test_vtrace_of_two_episodes_joined_is_that_of_each_alone():
    one, two = stream(5, 9, ends=0.0), stream(6, 8, ends=0.0)
    for kind in (
        3,
        4,
    ):  # terminated, then truncated; the row after it holds the final observation and its value
        first = [*(x.copy() if np.ndim(x) else x for x in one)]
        first[kind][-2], first[5][-1], first[0][-1] = True, False, 0.0
        joined = [
            np.concatenate([a, b]) if np.ndim(a) else b for a, b in zip(first, two, strict=True)
        ]
        log_ratio = ratios(1, 17)
        alone = vtrace(log_ratio[:9], *first, 0.9), vtrace(log_ratio[9:], *two, 0.9)
        for both, a, b in zip(vtrace(log_ratio, *joined, 0.9), *alone, strict=True):
            np.testing.assert_allclose(both[:8], a[:8], rtol=1e-5)
            np.testing.assert_allclose(both[9:], b, rtol=1e-5)


def test_vtrace_on_policy_is_the_discounted_return():
    *args, valid = stream(3, 12)
    target, advantage = vtrace(np.zeros(12, np.float32), *args, valid, 0.9)
    np.testing.assert_allclose(
        (target - args[1])[valid], fast(*args, 0.9, 1.0)[valid], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(advantage[valid], fast(*args, 0.9, 1.0)[valid], rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1), st.integers(1, 5))
def test_td_errors_are_those_of_n_steps_or_as_many_as_there_are(seed, ends, gamma, n):
    reward, _, _, terminated, truncated, valid = stream(seed, 9, ends)
    rng = np.random.default_rng(seed)
    values, action = rng.normal(size=(10, 3)).astype(np.float32), rng.integers(0, 3, 9)
    found = td_errors(values, action, reward, terminated, jnp.asarray(truncated), valid, gamma, n)
    for t in np.flatnonzero(valid):
        total, worth = 0.0, 1.0
        for at in range(t, min(t + n, 9)):
            total, worth = total + worth * reward[at], worth * gamma * (not terminated[at])
            if terminated[at] or truncated[at]:
                break
        np.testing.assert_allclose(
            found[t],
            abs(total + worth * values[at + 1].max() - values[t, action[t]]),
            rtol=1e-4,
            atol=1e-4,
        )
    assert not np.asarray(found)[~valid].any()
