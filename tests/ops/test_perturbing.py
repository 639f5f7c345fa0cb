"""Operators of evolution strategies."""

import numpy as np
import pytest
from drive import Calls, drive

import flowrl as fl


def returns(pairs=3):
    rows = (2, pairs)
    data = {
        "noise_seed": np.broadcast_to(np.arange(pairs, dtype=np.uint32), rows),
        "noise_scale": np.full(rows, 0.1, np.float32),
        "return": np.arange(2.0 * pairs, dtype=np.float32).reshape(rows),
        "length": np.ones(rows, np.int32),
    }
    return fl.extend.Batch(data, {"version": np.zeros(pairs, np.int32)})


class Playing(Calls):
    """Runners that note each turn."""

    def perturbed(self, node, turn, **how):
        self.calls.append((node, int(turn), how))
        return "returns"


def test_each_turn_has_a_number_of_its_own():
    runners = Playing()
    op = fl.ParallelEvaluate(3, 0.1, episodes=2, max_steps=9)
    assert drive(op, None, None, runners=runners) == [["returns"], ["returns"]]
    how = {"pairs": 3, "sigma": 0.1, "episodes": 2, "max_steps": 9, "sampled": False}
    assert runners.calls == [("node", 0, how), ("node", 1, how)]


@pytest.mark.parametrize("op", [fl.CentredRanks(), fl.TopDirections(2)])
def test_utilities_are_added_beside_what_was_there(op):
    item = returns()
    [[shaped]] = drive(op, item)
    assert set(shaped.data) == {*item.data, "utility"} and shaped.columns is item.columns
    assert shaped["utility"].shape == (2, 3)
    with pytest.raises(fl.errors.ContractError, match="needs a Batch, got"):
        drive(op, 1)


def test_ranks_rise_with_returns_and_what_is_not_among_the_best_is_0():
    [[ranked]] = drive(fl.CentredRanks(), returns())
    np.testing.assert_allclose(np.ravel(ranked["utility"]), np.linspace(-0.5, 0.5, 6), atol=1e-6)
    [[best]] = drive(fl.TopDirections(1), returns())
    assert np.flatnonzero(np.asarray(best["utility"]).any(axis=0)).tolist() == [2]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fl.ParallelEvaluate(0, 0.1), "pairs must be at least 1, got 0"),
        (lambda: fl.ParallelEvaluate(1, 0.1, max_steps=0), "max_steps must be at least 1, got 0"),
        (lambda: fl.ParallelEvaluate(1, 0.0), r"sigma must be above 0, got 0\.0"),
        (lambda: fl.TopDirections(0), "top must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(make, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        make()


def test_more_directions_than_pairs_are_refused():
    with pytest.raises(fl.errors.ContractError, match="top=4 directions of a batch of 3 pairs"):
        drive(fl.TopDirections(4), returns())
