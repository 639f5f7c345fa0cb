"""Operators that get experience."""

import pytest
from drive import Calls, batch, drive

import flowrl as fl
from conftest import rows_and_weights


def test_parallel_sample_yields_one_batch_a_round():
    joined = batch(2, 6)
    runners = Calls(collect=joined)
    assert drive(fl.ParallelSample(), None, None, runners=runners) == [[joined], [joined]]
    assert runners.calls == [("collect", 1.0), ("collect", 1.0)]


def test_parallel_sample_asks_the_runners_that_it_names():
    others = Calls(collect="theirs")
    assert drive(fl.ParallelSample(runners="others"), None, runners=Calls(), others=others) == [
        ["theirs"]
    ]


def test_parallel_sample_is_a_source_and_writes_nothing():
    assert (
        fl.ParallelSample().source
        and fl.ParallelSample().writes == ()
        and fl.ParallelSample().init() is None
    )


def test_runners_of_two_give_one_batch_side_by_side():
    runners = fl.Runners(
        "CartPole-v1",
        fl.Policy(fl.networks.MLP, hidden=(4,)),
        num_runners=2,
        envs_per_runner=3,
        rollout_length=5,
    ).open()
    try:
        ((got,), (again,)) = drive(fl.ParallelSample(), None, None, runners=runners)
    finally:
        runners.close()
    assert got.shape == again.shape == (5, 6) and got.steps == 30
    assert got.columns["producer"].tolist() == [0, 0, 0, 1, 1, 1]
    assert (got.columns["bootstrap_obs"] == again["obs"][0]).all(), (
        "the second round goes on where the first ended"
    )


SMALL = fl.PPOSettings(
    num_runners=2,
    envs_per_runner=2,
    rollout_length=8,
    batch_size=32,
    epochs=1,
    minibatch_size=None,
    policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
)


@pytest.mark.parametrize(
    "runtime",
    ["local", pytest.param("ray", marks=(pytest.mark.ray, pytest.mark.system))],
    indirect=True,
)
def test_work_at_the_sampler_gives_what_the_same_work_after_it_gives(runtime):
    downstream = fl.ppo("CartPole-v1", SMALL)
    at = downstream.remove("adv").set(
        "sample.local", fl.chain(adv=fl.Advantages(gamma=0.99, gae_lambda=0.95))
    )
    one, _ = rows_and_weights(
        downstream.set("adv.gamma", 0.99).set("adv.gae_lambda", 0.95), 2, "local"
    )
    two, _ = rows_and_weights(at, 2, runtime)
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], rel=1e-4)
    assert (
        "advantage" in at.compile().found.first_items["sample"].data
        and fl.Graph.from_text(at.text()) == at
    )


def one_in_three(batch):
    return [batch] * 3


@pytest.mark.parametrize(
    ("chain", "says"),
    [
        (
            fl.chain(more=fl.FlatMap(one_in_three)),
            r"sample: local gave 3 items for a rollout; it must give one item for each",
        ),
        (fl.chain(none=fl.Filter(lambda b: False)), r"local gave 0 items"),
        (fl.chain(adv=fl.Advantages(), norm=fl.Standardize("nothing")), r"sample: .*nothing"),
    ],
)
def test_work_at_the_sampler_that_gives_no_one_item_is_reported_before_the_run(chain, says):
    with pytest.raises(fl.errors.CheckError, match=says):
        fl.ppo("CartPole-v1", SMALL).set("sample.local", chain).check()


@pytest.mark.parametrize("op", [fl.Concat(8), fl.TrainOneStep(), fl.ParallelSample(), fl.Report()])
def test_what_has_a_state_or_an_effect_can_not_work_at_the_sampler(op):
    with pytest.raises(fl.errors.SettingError, match="local can't hold it="):
        fl.ParallelSample(local=fl.chain(it=op))
