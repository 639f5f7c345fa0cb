"""Operators that train in two halves."""

from dataclasses import replace

import numpy as np
import pytest
from drive import Calls, batch, drive, trained

import flowrl as fl
from flowrl.core.items import Metrics

POLICY = fl.Policy(fl.networks.MLP, hidden=(4,))


def gradients(value=1.0, valid=4.0, loss=0.0, lag=0, version=0):
    columns = {name: np.int32([x, x]) for name, x in (("version", version), ("lag", lag))}
    return fl.extend.Gradients(
        8,
        {"w": np.float32([value, 0])},
        Metrics.pack({"loss": loss}),
        np.float32(valid),
        {"before": {}, "after": {}, "moments": {}},
        {**columns, "producer": np.int32([0, 1])},
    )


def test_compute_gradients_asks_the_learner_that_it_names():
    one, learner = batch(), Calls(gradients="found", lacking="")
    op = fl.ComputeGradients(learner="other")
    assert drive(op, one, learner=Calls(), other=learner) == [["found"]]
    assert learner.calls[-1] == ("gradients", one)
    assert op.writes == () and op.init() is None


def test_apply_gradients_updates_the_learner_that_it_names():
    found, done = gradients(), trained(8)
    learner = Calls(apply=done)
    assert drive(fl.ApplyGradients(), found, learner=learner) == [[done]]
    assert learner.calls == [("apply", found)] and fl.ApplyGradients().writes == ("learner",)


def test_average_gradients_yields_the_mean_of_every_n_weighted_by_valid_rows():
    op = fl.AverageGradients(2)
    items = [gradients(4.0, valid=1, loss=8.0), gradients(0.0, valid=3, version=1), gradients()]
    (none, (mean,), rest) = drive_on(op, *items)
    assert none == rest == []
    assert mean.params["w"].tolist() == [1, 0] and mean.metrics.values.tolist() == [2]
    assert (float(mean.valid), mean.steps, mean.batches) == (4, 16, 2)
    assert mean.columns["version"].tolist() == [0, 0, 1, 1]
    assert mean.columns["producer"].tolist() == [0, 1, 0, 1]


def drive_on(op, *items):
    """What an operator yields for items that it takes one after another."""
    from drive import Context

    state, ctx = op.init(), Context({}, ())
    return [list(op.step(state, item, ctx)) for item in items]


def test_the_mean_of_gradients_without_a_valid_row_is_no_step_and_not_nan():
    empty = replace(gradients(valid=0), params={"w": np.float32([np.nan, np.inf])})
    ((), (mean,)) = drive_on(fl.AverageGradients(2), empty, empty)
    assert mean.params["w"].tolist() == [0, 0]


def test_the_mean_of_one_is_that_one():
    one = gradients()
    ((mean,),) = drive_on(fl.AverageGradients(1), one)
    assert mean is one


@pytest.mark.parametrize("op", [fl.AverageGradients(2), fl.ApplyGradients()])
def test_they_take_gradients_only(op):
    with pytest.raises(fl.errors.ContractError, match="needs gradients, got a Batch; put it after"):
        drive(op, batch(), learner=Calls())


def test_compute_gradients_takes_batches_only():
    with pytest.raises(fl.errors.ContractError, match="needs a Batch, got a Gradients"):
        drive(fl.ComputeGradients(), gradients(), learner=Calls(lacking=""))


def test_a_count_below_1_is_refused():
    with pytest.raises(fl.errors.SettingError, match="count must be at least 1, got 0"):
        fl.AverageGradients(0)


# -- graphs with them


SMALL = {"num_runners": 2, "envs_per_runner": 2, "rollout_length": 4, "policy": POLICY}
A3C = fl.a3c("CartPole-v1", **SMALL, report_every=2)
HALVES = {"grads": fl.ComputeGradients(), "apply": fl.ApplyGradients()}
A2C = (
    fl.a2c("CartPole-v1", **SMALL, batch_size=16, report_every=2)
    .remove("train")
    .insert(after="adv", **HALVES)
)


def test_a_plan_knows_the_lag_of_gradients_and_prints_the_nodes():
    text = str(A3C.compile())
    assert "lag bound none, expected 1 in lock-step" in text
    assert "8 steps a call, 2 calls a row, through adv, grads" in text
    assert "updates learner" in text and "2 times a row, by 8 steps each" in text
    parts = A2C.insert(after="grads", mean=fl.AverageGradients(4)).compile()
    assert "lag 0" in str(parts) and "mean of 4 gradients" in str(parts)
    assert parts.per_row("sampled_steps") == 2 * 4 * 16 and parts.per_row("updates") == 2


def test_an_on_policy_loss_takes_late_gradients_but_no_gradients_of_old_data():
    assert A3C.compile().found.lags["apply"] and max(A3C.compile().found.lags["apply"]) == 1
    late = A2C.set("sync.every", 3)
    with pytest.raises(
        fl.errors.CheckError,
        match=r"a2c\.grads: PGLoss is on-policy, but it trains on data up to 2",
    ):
        late.check()
    unknown = A2C.insert(after="adv", lost=fl.Map(versions_computed))
    with pytest.raises(fl.errors.CheckError, match="the age of its data can't be known"):
        unknown.check()


def versions_computed(batch):
    import jax.numpy as jnp

    columns = {
        **batch.columns,
        "version": jnp.zeros_like(batch.columns["version"] + batch["obs"][0, :, 0]),
    }
    return replace(batch, columns=columns)


def test_a_queue_of_gradients_may_hold_them_for_any_number_of_updates():
    queued = A3C.insert(after="sample", queue=fl.Queue(2))
    with pytest.raises(fl.errors.CheckError, match=r"a3c\.queue: PGLoss is on-policy, but what"):
        queued.check()


@pytest.mark.parametrize(
    ("loss", "policy", "only"),
    [
        (fl.losses.DQNLoss(), fl.Policy(fl.networks.QNetwork, hidden=(4,)), "a target network"),
        (fl.losses.PPOLoss(kl_penalty_target=0.1), POLICY, "numbers that adapt"),
    ],
)
def test_what_only_the_learner_has_is_not_at_the_sampler(loss, policy, only):
    graph = A3C.set("learner.loss", loss).set("learner.policy", policy)
    with pytest.raises(
        fl.errors.CheckError, match=f"sample: ComputeGradients can't .* needs {only}, which only"
    ):
        graph.set("runners.policy", policy).check()


def test_a_field_that_the_loss_needs_is_named_at_the_sampler_too():
    with pytest.raises(
        fl.errors.CheckError, match=r"needs the fields advantage, target, .*put Advantages\(...\)"
    ):
        A3C.set("sample.local", fl.chain(grads=fl.ComputeGradients())).check()


def test_a_learner_that_does_not_exist_is_named():
    local = fl.chain(adv=fl.Advantages(), grads=fl.ComputeGradients(learner="lerner"))
    with pytest.raises(fl.errors.CheckError, match="'lerner'; did you mean 'learner'"):
        A3C.set("sample.local", local).check()


def test_items_of_any_kind_come_from_the_sampler_one_by_one_but_not_joined():
    graph = A3C.remove("apply", "sync").set("sample.local", fl.chain(size=fl.Map(as_dict)))
    graph = fl.Graph("own", runners=graph.resources["runners"]).then(
        sample=graph.nodes[0].op, report=fl.Report(every=2)
    )
    with fl.run(graph) as run:
        row = next(run)
    assert row["env_steps"] == 16 == run.counts()["sampled_steps"]
    with pytest.raises(fl.errors.CheckError, match="can't join what local gave in a round, a dict"):
        graph.set("sample.mode", "sync").check()


def as_dict(batch):
    return {"reward": batch["reward"]}
