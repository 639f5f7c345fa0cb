"""Operators that carry weights."""

import numpy as np
import pytest
from drive import Calls, batch, drive, trained

import flowrl as fl


def published(weights, version, to=None, wait=True):
    return ("publish", weights, version, ("to", to), ("wait", wait))


def test_sync_weights_publishes_and_passes_its_item_on():
    learner, runners = Calls(weights=("weights", 7)), Calls()
    items = (trained(6), batch(), "anything")
    assert drive(fl.SyncWeights(), *items, learner=learner, runners=runners) == [
        [item] for item in items
    ]
    assert runners.calls == [published("weights", 7)] * 3 and learner.calls == [("weights",)] * 3


def test_sync_weights_goes_from_and_to_those_that_it_names():
    learner, runners = Calls(weights=("b's", 2)), Calls()
    op = fl.SyncWeights(learner="learner_b", runners="players")
    drive(op, 1, learner=Calls(), runners=Calls(), learner_b=learner, players=runners)
    assert runners.calls == [published("b's", 2)]


def test_sync_weights_publishes_before_it_passes_on():
    runners = Calls()
    op = fl.SyncWeights()
    step = op.step(op.init(), 1, {"learner": Calls(weights=("w", 1)), "runners": runners})
    assert next(step) == 1 and runners.calls == [published("w", 1)]


def test_sync_weights_publishes_with_every_so_many_items_and_steps():
    def times(op, *items):
        learner, runners, state, found = Calls(weights=("w", 1)), Calls(), op.init(), []
        for i, item in enumerate(items, 1):
            before = len(runners.calls)
            assert list(op.step(state, item, {"learner": learner, "runners": runners})) == [item]
            found += [i] * (len(runners.calls) - before)
        return found

    assert times(fl.SyncWeights(every=3), *range(7)) == [3, 6]
    assert times(fl.SyncWeights(every_steps=10), *[trained(4)] * 7) == [3, 6]
    assert times(fl.SyncWeights(every=4, every_steps=10), *[trained(4)] * 8) == [4, 8]


def test_sync_weights_may_go_to_those_only_whose_samples_were_trained():
    def update(*producers):
        return fl.extend.Trained(
            4, trained(4).metrics, (0.0, 0.0), {"producer": np.array(producers)}
        )

    learner, runners = Calls(weights=("w", 1)), Calls()
    drive(
        fl.SyncWeights(to="producer", every=2),
        update(2, 2),
        update(0, 2),
        update(1),
        update(1),
        learner=learner,
        runners=runners,
    )
    assert [dict(call[3:])["to"].tolist() for call in runners.calls] == [[0, 2], [1]]
    with pytest.raises(fl.errors.ContractError, match="lost the column producer"):
        drive(fl.SyncWeights(to="producer"), trained(4), learner=learner, runners=runners)
    with pytest.raises(fl.errors.SettingError, match="to must be all or producer"):
        fl.SyncWeights(to="some")


def test_a_runner_that_gets_no_weights_goes_on_with_its_own():
    runners = fl.Runners(
        "CartPole-v1",
        fl.Policy(fl.networks.MLP, hidden=(4,)),
        num_runners=2,
        envs_per_runner=1,
        rollout_length=2,
    ).open()
    weights = runners._start().weights
    runners.publish(weights, np.int32(5), to=np.array([1, 1]))
    assert runners.collect().columns["version"].tolist() == [0, 5]
    runners.publish(weights, np.int32(6), to=np.array([0]))
    assert runners.collect().columns["version"].tolist() == [6, 5]
    runners.close()


def test_weights_that_come_too_seldom_for_the_loss_are_reported():
    with pytest.raises(
        fl.errors.CheckError, match="PPOLoss is on-policy, but it trains on data up to 1 update old"
    ):
        fl.ppo().set("sync.every", 2).check()


def test_sync_weights_is_an_effect_on_the_runners():
    assert fl.SyncWeights().writes == ("runners",)
