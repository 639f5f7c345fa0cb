"""What is shown of items, and what is compared of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from flowrl.core.items import Batch, Metrics, MultiBatch
from flowrl.observe.looking import brief, comparison, fields, number, stats, whole

TRAINED = fl.extend.Trained(
    8,
    Metrics(("loss", "kl"), np.float32([0.5, np.nan])),
    (np.float32(1), np.float32(2)),
    {"producer": np.arange(2)},
)
BATCH = fl.extend.Batch(
    {"reward": np.float32([[1, np.nan], [3, np.inf]]), "valid": np.ones((2, 2), bool)},
    {"version": np.int32([4, 5])},
)


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (np.float32([1, 2, 6]), (1, 3, 6, 0)),
        (np.float32([1, np.nan, 3]), (1, 2, 3, 1)),
        (np.float32([np.nan]), (np.nan, np.nan, np.nan, 1)),
        (np.zeros((0, 3)), (np.nan, np.nan, np.nan, 0)),
        (np.uint8([0, 255]), (0, 127.5, 255, 0)),
        (np.array([True, False]), (0, 0.5, 1, 0)),
        (np.float32([-np.inf, np.inf]), (-np.inf, np.nan, np.inf, 0)),
        (jnp.bfloat16([1, 3]) if callable(jnp.bfloat16) else None, (1, 2, 3, 0)),
        (jax.random.key(0), (np.nan,) * 4),
        (np.array(["a"]), (np.nan,) * 4),
    ],
)
def test_statistics_are_of_the_values_that_are_numbers(x, wanted):
    np.testing.assert_array_equal(stats(x), wanted)


def test_a_number_of_an_item_by_its_name():
    assert [number(BATCH, f"reward.{k}") for k in ("min", "max", "nan")] == [1, np.inf, 1]
    assert [
        number(BATCH, n) for n in ("steps", "version.mean", "reward", "loss", "reward.most")
    ] == [4, 4.5, None, None, None]
    assert [
        number(TRAINED, n) for n in ("loss", "lag_mean", "lag_max", "steps", "producer.max", "clip")
    ] == [0.5, 1, 2, 8, 1, None]
    assert number(fl.Row({"loss": 3.0}), "loss") == 3
    assert number(None, "loss") is None


def test_an_item_as_text():
    lines = whole(BATCH).splitlines()
    assert lines[0] == brief(BATCH) == "a Batch [2, 2], 4 steps"
    assert lines[1].split() == ["field", "shape", "type", "min", "mean", "max", "NaN"]
    assert lines[2].split("  ")[1:3] == ["reward", "[2, 2]"] and lines[2].endswith("inf    1")
    assert lines[-1].split() == ["version", "[2]", "int32", "4", "4.5", "5", "0"]
    assert "  loss      0.5" in whole(TRAINED) and "producer  [2]" in whole(TRAINED)
    assert whole("x" * 3000).endswith("xxx ...")
    assert brief(fl.Row({})) == "a Row"


@pytest.mark.parametrize(
    "text",
    [
        "loss",
        "loss>",
        ">3",
        "loss>ten",
        "loss > 3 or kl > 1",
        "__import__('os')>1",
        "loss=>3",
        "loss>nan",
    ],
)
def test_what_is_no_comparison_is_reported(text):
    with pytest.raises(
        fl.errors.SettingError, match="takes a comparison of a name with a number, such as loss>10"
    ):
        comparison(text)


def test_comparisons_hold_or_do_not():
    assert comparison("my-metric>-3").name == "my-metric"
    assert comparison("loss>=1e3").holds(1000) and not comparison("loss != 3").holds(3)
    assert str(comparison(" obs.nan > 0 ")) == "obs.nan>0"
    assert not comparison("loss>0").holds(float("nan"))


def test_of_several_policies_each_batch_is_shown_and_its_numbers_have_its_name():
    def of(value):
        return Batch({"reward": np.full((2, 3), value), "valid": np.ones((2, 3), bool)})

    item = MultiBatch({"red": of(1.0), "blue": of(2.0)})
    assert brief(item) == "a MultiBatch of red [2, 3], blue [2, 3], 12 steps"
    assert whole(item).count("reward") == 2 and "blue: a Batch [2, 3], 6 steps" in whole(item)
    assert number(item, "blue.reward.mean") == 2.0 and number(item, "red.steps") == 6.0
    assert number(item, "steps") == 12.0 and number(item, "reward.mean") is None
    assert "red.reward" in fields(item)
