"""Operators that carry weights."""

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
    step = fl.SyncWeights().step(None, 1, {"learner": Calls(weights=("w", 1)), "runners": runners})
    assert next(step) == 1 and runners.calls == [("publish", "w", 1)]


def test_sync_weights_is_an_effect_on_the_runners():
    assert fl.SyncWeights().writes == ("runners",)
