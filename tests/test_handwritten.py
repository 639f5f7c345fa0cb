"""The loop by hand that `make bench` measures against does the same maths.

One update from one batch gives the same parameters.
"""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

import flowrl as fl
from flowrl.core.permuting import permutation
from flowrl.graph.site import HereSite, Place
from flowrl.ops.batch import advantages
from flowrl.rl.masked import standardized

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def hand(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("handwritten")


def by_hand(weights):
    """flowrl's parameters under the names of the loop by hand."""
    out = {}
    for name, head in (("actor", "action"), ("critic", "value")):
        for i in range(2):
            out[f"{name}{i}"] = {
                "w": weights[f"{name}/layers/{i}/kernel"],
                "b": weights[f"{name}/layers/{i}/bias"],
            }
        out[f"{name}2"] = {"w": weights[f"heads/{head}/kernel"], "b": weights[f"heads/{head}/bias"]}
    return jax.tree.map(np.asarray, out)


def test_one_update_from_one_batch_gives_the_same_parameters(hand, monkeypatch):
    # The loop by hand shuffles as JAX does, in another order.
    monkeypatch.setattr(jax.random, "permutation", permutation)
    policy = fl.Policy(fl.networks.MLP, hidden=(64, 64))
    loss = fl.losses.PPOLoss(
        clip_ratio=hand.CLIP, vf_coef=hand.VALUE, value_clip=hand.VALUE_CLIP, ent_coef=hand.ENTROPY
    )
    place = Place(
        "same",
        {
            "runners": fl.Runners(
                "CartPole-v1", policy, envs_per_runner=hand.ENVS, rollout_length=hand.STEPS
            ),
            "learner": fl.Learner(policy, loss, fl.Adam(hand.LR, max_grad_norm=0.5)),
        },
        3,
        HereSite,
    )
    handles = place.open()
    runners, learner = handles["runners"], handles["learner"]
    batch = runners.collect()
    assert not batch["valid"].all()
    assert batch["truncated"].sum() == 0
    rng = np.random.default_rng(
        0
    )  # cut some episodes short, so that the bootstrap is tested too, and move the old values
    truncated = batch["terminated"] & (rng.random(batch.shape) < 0.5)
    batch = batch.with_(
        truncated=truncated,
        terminated=batch["terminated"] & ~truncated,
        value=batch["value"] + rng.normal(0, 0.3, batch.shape).astype(np.float32),
    )

    params = by_hand(learner.weights()[0].params)
    shuffle = jax.random.split(learner.state["core"]["key"])[1]
    rows = {
        k: batch[k]
        for k in ("obs", "reward", "terminated", "truncated", "valid", "action", "logp", "value")
    }
    expected, _, loss_by_hand = jax.jit(hand.update.__wrapped__)(
        params, hand.TX.init(params), shuffle, rows, batch.columns["bootstrap_obs"]
    )

    d = batch.data
    end = learner.values(batch)
    adv, target = advantages(
        d["reward"],
        d["value"],
        end,
        d["terminated"],
        d["truncated"],
        d["valid"],
        gamma=hand.GAMMA,
        gae_lambda=hand.LAM,
    )
    trained = learner.update(
        batch.with_(advantage=standardized(adv, d["valid"]), target=target),
        epochs=hand.EPOCHS,
        minibatch_size=hand.MINIBATCH,
    )
    got = by_hand(learner.weights()[0].params)
    place.close()

    # 320 steps of Adam let the last bits of two different programs grow; the update itself moved
    # weights by about 0.05
    moved = max(
        float(np.abs(a - b).max())
        for a, b in zip(
            jax.tree.leaves(by_hand_start(hand, learner)), jax.tree.leaves(got), strict=True
        )
    )
    assert moved > 0.03
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    metrics = dict(zip(trained.metrics.names, np.asarray(trained.metrics.values), strict=True))
    np.testing.assert_allclose(metrics["loss"], loss_by_hand, rtol=1e-4)


def by_hand_start(hand, learner):
    return by_hand(jax.jit(learner.core.init)(learner.site.key("init"))["weights"].params)


def test_five_asynchronous_updates_give_the_same_parameters(hand):
    pipeline = importlib.import_module("handwritten_impala")
    settings = fl.IMPALASettings(
        num_runners=1,
        envs_per_runner=16,
        rollout_length=pipeline.STEPS,
        batch_size=pipeline.BATCH,
        policy=fl.Policy(fl.networks.MLP, hidden=(64, 64)),
    )
    place = Place("same", fl.impala("CartPole-v1", settings).resources, 3, HereSite)
    handles = place.open()
    runners, learner = handles["runners"], handles["learner"]
    params = by_hand(learner.weights()[0].params)
    opt = pipeline.TX.init(params)
    for _ in range(5):  # the weights are not sent back, so that the ratios are not 1
        batch = runners.next(1)
        rows = {
            k: batch[k]
            for k in ("obs", "reward", "terminated", "truncated", "valid", "action", "logp")
        }
        params, opt, loss, _ = pipeline.update(params, opt, rows, batch.columns["bootstrap_obs"])
        trained = learner.update(batch)
    metrics = dict(zip(trained.metrics.names, np.asarray(trained.metrics.values), strict=True))
    place.close()
    assert abs(metrics["rho_mean"] - 1) > 1e-5
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    for a, b in zip(
        jax.tree.leaves(params), jax.tree.leaves(by_hand(learner.weights()[0].params)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_128_updates_of_dqn_from_one_draw_give_the_same_parameters(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    dqn = importlib.import_module("handwritten_dqn")
    policy = fl.Policy(fl.networks.QNetwork, hidden=(64, 64))
    resources = {
        "runners": fl.Runners(
            "CartPole-v1", policy, envs_per_runner=dqn.ENVS, rollout_length=dqn.STEPS
        ),
        "learner": fl.Learner(
            policy, fl.losses.DQNLoss(double=False), fl.Adam(dqn.LR, max_grad_norm=10.0)
        ),
    }
    place = Place("same", resources, 3, HereSite)
    learner = place.open()["learner"]
    names = ("trunk/layers/0", "trunk/layers/1", "advantage")

    def params_of(weights):
        return [
            tuple(np.asarray(weights.params[f"{name}/{part}"]) for part in ("kernel", "bias"))
            for name in names
        ]

    before = params_of(learner.weights()[0])
    n, rng = dqn.UPDATES * dqn.BATCH, np.random.default_rng(0)
    rows = {name: rng.normal(size=(n, 4)).astype(np.float32) for name in ("obs", "next_obs")}
    rows |= {
        "action": rng.integers(0, 2, n).astype(np.int32),
        "reward": rng.normal(size=n).astype(np.float32),
        "terminated": rng.random(n) < 0.3,
    }
    expected, _, loss = dqn.updates(before, dqn.TX.init(before), rows)

    drawn = {k: x[None] for k, x in rows.items() if k != "terminated"}
    drawn["discount"] = np.where(rows["terminated"], 0, dqn.GAMMA).astype(np.float32)[None]
    batch = fl.extend.Batch(drawn, {"version": np.zeros(n, np.int32)})
    trained = learner.update(batch, minibatch_size=dqn.BATCH, shuffle=False)
    got = params_of(learner.weights()[0])
    place.close()
    assert (
        max(
            float(np.abs(a - b).max())
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(got), strict=True)
        )
        > 0.01
    )
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    metrics = dict(zip(trained.metrics.names, np.asarray(trained.metrics.values), strict=True))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
