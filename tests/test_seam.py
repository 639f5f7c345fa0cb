"""The walking skeleton: one recipe, its operators written once, run in every way."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import flowrl as fl
from flowrl.graph.trace import trace
from flowrl.runtime.local import LocalRuntime
from fused import Corridor, JaxRunners, scan

POLICY = fl.Policy(fl.MLP, hidden=(16,))


def recipe(runners):
    learner = fl.Learner(POLICY, fl.PPOLoss(), fl.Adam(1e-2))
    return fl.Graph("ppo", runners=runners, learner=learner).then(
        sample=fl.ParallelSample(),
        batch=fl.Concat(128),
        adv=fl.Advantages(),
        norm=fl.Standardize(),
        train=fl.TrainOneStep(epochs=2, minibatch=64),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def rows_of(runtime, graph, count, seed=0):
    session = runtime.open(graph.compile(), seed)
    try:
        rows = []
        for row in session:
            rows.append(row)
            if len(rows) == count:
                with session.handle("learner") as learner:
                    return rows, jax.device_get(learner.state["core"]["weights"].params)
    finally:
        session.close()


GYM = recipe(fl.Runners("CartPole-v1", POLICY, count=2, envs=4, fragment=16))
FUSED = recipe(JaxRunners(Corridor(), POLICY, envs=8, fragment=16))


def test_local_on_gymnasium():
    rows, _ = rows_of(LocalRuntime(), GYM, 3)
    assert [r["updates"] for r in rows] == [1, 2, 3]
    assert [r["trained_steps"] for r in rows] == [128, 256, 384]
    assert all(r["lag_max"] == 0 for r in rows)


@pytest.mark.parametrize("graph", [GYM, FUSED], ids=["gymnasium", "jax"])
def test_abstract_trace(graph):
    found = trace(graph)
    assert found.problems == [] and found.exact and (found.rows, found.warmup_rows) == (1, 0)
    assert found.steady["train"].counts["learner"]["gradient_steps"] == 4
    assert found.forms["adv"]["advantage"].shape == (16, 8)
    assert found.lags["train"] == [0.0]


def test_one_scan_learns_and_equals_the_local_loop():
    states, tallies = scan(FUSED, 60)
    local, _ = rows_of(LocalRuntime(), FUSED, 60)
    fused = np.asarray(tallies.episodes["return_mean"])
    assert states["learner"]["version"] == 60
    assert fused[-10:].mean() > 0.95 > np.nanmean(fused[:3]) + 0.1
    np.testing.assert_allclose(fused[:5], [r["return_mean"] for r in local[:5]], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(tallies.updates[0].lag[1]), 0)


@pytest.mark.ray
def test_two_ray_runners_equal_the_local_loop():
    from flowrl.runtime.ray import RayRuntime

    local, a = rows_of(LocalRuntime(), GYM, 3)
    ray, b = rows_of(RayRuntime(), GYM, 3)
    noisy = {"seconds", "steps_per_second"}
    assert [{k: v for k, v in r.items() if k not in noisy} for r in local] == [{k: v for k, v in r.items() if k not in noisy} for r in ray]
    assert all((a[k] == b[k]).all() for k in a)
