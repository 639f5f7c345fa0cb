"""Operators that shape batches."""

import numpy as np
import pytest
from drive import Calls, batch, drive, trained

import flowrl as fl
from flowrl.core.items import Batch


def test_concat_joins_side_by_side_until_there_are_enough_steps():
    a, b, c, d = (batch(2, 3, fill) for fill in (1.0, 2.0, 3.0, 4.0))
    out = drive(fl.Concat(12), a, b, c, d)
    assert [len(x) for x in out] == [0, 1, 0, 1]
    (first,), (second,) = out[1], out[3]
    assert first.shape == (2, 6) and first["reward"][0].tolist() == [1, 1, 1, 2, 2, 2]
    assert second["reward"][1].tolist() == [3, 3, 3, 4, 4, 4]
    assert first.columns["version"].shape == (6,) and first.columns["bootstrap_obs"].shape == (6, 4)


def test_concat_never_splits_a_rollout_and_passes_a_large_one_as_it_is():
    large = batch(5, 3)
    assert drive(fl.Concat(7), large) == [[large]]
    ((), (joined,)) = drive(fl.Concat(7), batch(1, 6), batch(1, 6))
    assert joined.steps == 12


def test_concat_counts_steps_by_their_number_also_the_invalid_ones():
    assert [len(x) for x in drive(fl.Concat(6), batch(2, 3, valid=np.zeros((2, 3), bool)))] == [1]


def test_concat_refuses_other_lengths_in_time_and_what_is_no_batch():
    with pytest.raises(
        fl.errors.ContractError,
        match="can't join 4 steps in time with 2; give all runners the same rollout_length",
    ):
        drive(fl.Concat(99), batch(2, 3), batch(4, 3))
    with pytest.raises(
        fl.errors.ContractError, match="needs a Batch, got a Trained; put it where batches flow"
    ):
        drive(fl.Concat(99), trained(5))
    with pytest.raises(fl.errors.ContractError, match="needs a Batch, got a Trained"):
        drive(fl.Concat(99), batch(2, 3), trained(5))


def test_concat_of_many_batches_looks_at_each_of_them_once(monkeypatch):
    seen, steps = [], Batch.steps.fget
    monkeypatch.setattr(Batch, "steps", property(lambda x: seen.append(x) or steps(x)))
    out = drive(fl.Concat(1_200), *[batch(2, 3)] * 200)
    assert [len(x) for x in out] == [0] * 199 + [1] and len(seen) <= 2 * 200


def test_two_concats_of_one_graph_do_not_share_what_they_hold():
    op = fl.Concat(99)
    assert op.init() is not op.init()


def slow_gae(reward, value, end, terminated, truncated, gamma, lam):
    """Generalised advantage estimation, one step after another, as the paper has it."""
    values = [*value, end]
    out, running = [], 0.0
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * values[t + 1] * (not terminated[t]) - values[t]
        running = delta + gamma * lam * (not (terminated[t] or truncated[t])) * running
        out.insert(0, running)
    return out


def test_advantages_are_those_of_every_column_alone():
    rng = np.random.default_rng(0)
    flags = {
        "terminated": np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]], bool),
        "truncated": np.array([[0, 0, 0]] * 3 + [[1, 0, 0]], bool),
    }
    fields = {
        "reward": rng.normal(size=(4, 3)).astype(np.float32),
        "value": rng.normal(size=(4, 3)).astype(np.float32),
        **flags,
    }
    b, end = batch(4, 3, **fields), np.array([1.0, -2.0, 3.0], np.float32)
    learner = Calls(values=end)
    ((got,),) = drive(fl.Advantages(gamma=0.9, gae_lambda=0.8), b, learner=learner)
    for i in range(3):
        wanted = slow_gae(
            *(b[k][:, i] for k in ("reward", "value")),
            end[i],
            *(b[k][:, i] for k in ("terminated", "truncated")),
            0.9,
            0.8,
        )
        np.testing.assert_allclose(got["advantage"][:, i], wanted, rtol=1e-5)
    np.testing.assert_allclose(got["target"], got["advantage"] + b["value"], rtol=1e-6)
    ((verb, obs),) = learner.calls
    assert verb == "values" and obs is b
    assert set(got.data) == {*b.data, "advantage", "target"} and got.columns is b.columns


def test_advantages_of_rows_that_are_not_valid_are_0():
    b = batch(
        3, 1, 1.0, valid=np.array([[1], [0], [1]], bool), terminated=np.array([[1], [0], [0]], bool)
    )
    ((got,),) = drive(
        fl.Advantages(gamma=1.0, gae_lambda=1.0),
        b,
        learner=Calls(values=np.array([5.0], np.float32)),
    )
    assert got["advantage"].ravel().tolist() == [0.0, 0.0, 5.0]


def test_advantages_name_the_fields_that_they_lack():
    short = fl.extend.Batch(
        {"obs": np.zeros((2, 3)), "reward": np.zeros((2, 3)), "valid": np.ones((2, 3), bool)}
    )
    with pytest.raises(
        fl.errors.ContractError,
        match="needs the fields value, terminated, truncated, but the batch has obs, reward, valid",
    ):
        drive(fl.Advantages(), short, learner=Calls())
    with pytest.raises(fl.errors.ContractError, match="needs a Batch, got a str"):
        drive(fl.Advantages(), "a batch", learner=Calls())


def test_standardize_gives_mean_0_and_variance_1_over_valid_rows():
    valid = np.array([[1, 1, 0], [1, 1, 1]], bool)
    b = batch(2, 3, advantage=np.array([[1, 2, 1000], [3, 4, 5]], np.float32), valid=valid)
    ((got,),) = drive(fl.Standardize(), b)
    kept = np.asarray(got["advantage"])[valid]
    np.testing.assert_allclose([kept.mean(), kept.std()], [0, 1], atol=1e-6)
    np.testing.assert_allclose(kept, (np.array([1, 2, 3, 4, 5]) - 3) / np.sqrt(2), atol=1e-6)
    assert got["advantage"][0, 2] == 0 and got["reward"] is b["reward"]


def test_standardize_takes_any_field_and_leaves_equal_numbers_finite():
    ((got,),) = drive(fl.Standardize(field="reward"), batch(2, 3, 7.0))
    assert np.asarray(got["reward"]).tolist() == [[0.0] * 3] * 2
    with pytest.raises(
        fl.errors.ContractError, match="needs the field advantage, but the batch has obs"
    ):
        drive(fl.Standardize(), batch(2, 3))
    with pytest.raises(fl.errors.ContractError, match=r"field rewards, .*; did you mean reward\?$"):
        drive(fl.Standardize("rewards"), batch(2, 3))


SETTINGS = [
    (lambda: fl.Concat(0), "batch_size must be at least 1, got 0"),
    (lambda: fl.Advantages(gamma=1.01), "gamma must be from 0 to 1, got 1.01"),
    (lambda: fl.Advantages(gae_lambda=-0.1), "gae_lambda must be from 0 to 1, got -0.1"),
]


@pytest.mark.parametrize(("make", "message"), SETTINGS, ids=[m for _, m in SETTINGS])
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(fl.errors.SettingError, match=message):
        make()
