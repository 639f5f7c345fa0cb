"""Operators that carry weights."""

import pytest
from drive import Calls, batch, drive, trained

import flowrl as fl


def test_sync_weights_publishes_and_passes_its_item_on():
    learner, runners = Calls(weights=("weights", 7)), Calls()
    items = (trained(6), batch(), "anything")
    assert drive(fl.SyncWeights(), *items, learner=learner, runners=runners) == [[item] for item in items]
    assert runners.calls == [("publish", "weights", 7)] * 3 and learner.calls == [("weights",)] * 3


def test_sync_weights_goes_from_and_to_those_that_it_names():
    learner, runners = Calls(weights=("b's", 2)), Calls()
    op = fl.SyncWeights(learner="learner_b", runners="players")
    drive(op, 1, learner=Calls(), runners=Calls(), learner_b=learner, players=runners)
    assert runners.calls == [("publish", "b's", 2)]


def test_sync_weights_publishes_before_it_passes_on():
    runners = Calls()
    op = fl.SyncWeights()
    step = op.step(op.init(), 1, {"learner": Calls(weights=("w", 1)), "runners": runners})
    assert next(step) == 1 and runners.calls == [("publish", "w", 1)]


def test_sync_weights_publishes_with_every_so_many_items_and_steps():
    def published(op, *items):
        learner, runners, state, times = Calls(weights=("w", 1)), Calls(), op.init(), []
        for i, item in enumerate(items, 1):
            before = len(runners.calls)
            assert list(op.step(state, item, {"learner": learner, "runners": runners})) == [item]
            times += [i] * (len(runners.calls) - before)
        return times

    assert published(fl.SyncWeights(every=3), *range(7)) == [3, 6]
    assert published(fl.SyncWeights(every_steps=10), *[trained(4)] * 7) == [3, 6]
    assert published(fl.SyncWeights(every=4, every_steps=10), *[trained(4)] * 8) == [4, 8]


def test_weights_that_come_too_seldom_for_the_loss_are_told():
    with pytest.raises(fl.CheckError, match="PPOLoss is on-policy, but it trains on data up to 1 update old"):
        fl.ppo().set("sync.every", 2).check()


def test_sync_weights_is_an_effect_on_the_runners():
    assert fl.SyncWeights().writes == ("runners",)
