"""Operators that train."""

import pytest
from drive import Calls, batch, drive, trained

import flowrl as fl


def updates(learner):
    return [call for call in learner.calls if call[0] == "update"]


def test_train_one_step_is_one_update_a_batch_whatever_its_epochs():
    a, b, done = batch(2, 3), batch(4, 3), trained(6)
    learner = Calls(update=done, lacking="")
    assert drive(fl.TrainOneStep(epochs=10, minibatch_size=3), a, b, learner=learner) == [
        [done],
        [done],
    ]
    assert updates(learner) == [
        ("update", a, ("epochs", 10), ("minibatch_size", 3), ("shuffle", True)),
        ("update", b, ("epochs", 10), ("minibatch_size", 3), ("shuffle", True)),
    ]


def test_train_one_step_trains_the_learner_that_it_names():
    other = Calls(update="done", lacking="")
    assert drive(
        fl.TrainOneStep(learner="learner_b"), batch(), learner=Calls(), learner_b=other
    ) == [["done"]]
    assert updates(other)[0][2:] == (("epochs", 1), ("minibatch_size", None), ("shuffle", True))


def test_train_one_step_is_an_effect_on_its_learner():
    assert fl.TrainOneStep().writes == ("learner",)


def test_train_one_step_takes_batches_only():
    with pytest.raises(
        fl.errors.ContractError, match="needs a Batch, got a Trained; put it where batches flow"
    ):
        drive(fl.TrainOneStep(), trained(5), learner=Calls())


SETTINGS = [
    ({"epochs": 0}, "epochs must be at least 1, got 0"),
    ({"minibatch_size": 0}, "minibatch_size must be at least 1 or None, got 0"),
    ({"minibatch_size": -8}, "minibatch_size must be at least 1 or None, got -8"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS, ids=[m for _, m in SETTINGS])
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(fl.errors.SettingError, match=message):
        fl.TrainOneStep(**settings)
