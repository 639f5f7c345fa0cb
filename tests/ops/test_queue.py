"""The queue's own step: what is too old is dropped or an error; the rest goes on."""

import numpy as np
import pytest
from drive import Calls, batch, drive

import flowrl as fl


def test_a_queue_passes_on_what_comes_out():
    assert drive(fl.Queue(2), "one", "two") == [["one"], ["two"]]


class Aged(Calls):
    def __init__(self, version):
        super().__init__()
        self.version = version

    def lag(self, item):
        return int(np.max(self.version - item.columns["version"]))


@pytest.mark.parametrize(("version", "goes_on"), [(2, True), (3, False)])
def test_what_is_older_than_max_lag_is_dropped(version, goes_on):
    b = batch()
    assert drive(fl.Queue(2, max_lag=2), b, learner=Aged(version)) == [[b] if goes_on else []]


def test_or_ends_the_run():
    with pytest.raises(
        fl.errors.ContractError, match="a batch is 3 updates old, more than max_lag=2"
    ):
        drive(fl.Queue(2, max_lag=2, on_stale="error"), batch(), learner=Aged(3))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"capacity": 0}, "capacity"),
        ({"full": "burst"}, "full must be one of block"),
        ({"max_lag": -1}, "max_lag"),
        ({"order": "any"}, "order"),
    ],
)
def test_settings_are_checked(settings, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.Queue(**settings)


def test_mix_in_gives_each_batch_as_often_as_it_says():
    one, two, three, four = (batch(fill=float(i)) for i in range(4))
    assert drive(fl.MixIn(batches=4, uses=2), one, two, three) == [[one], [two, one], [three, two]]
    assert drive(fl.MixIn(batches=4, uses=3), one, two, three, four) == [
        [one],
        [two, one],
        [three, one, two],
        [four, two, three],
    ]
    assert drive(fl.MixIn(uses=1), one, two) == [[one], [two]]
    assert drive(fl.MixIn(batches=1, uses=3), one, two, three) == [
        [one],
        [two, one],
        [three, two],
    ], "the oldest goes, be it with uses left"


def test_mix_in_is_part_of_the_plan():
    graph = fl.impala().insert(after="queue", mix=fl.MixIn(batches=4, uses=2))
    plan = graph.compile()
    assert plan.per_row("trained_steps") == 2 * plan.per_row("sampled_steps")
    assert plan.lag > fl.impala().compile().lag
