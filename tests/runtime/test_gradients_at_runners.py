"""Gradients that are computed where rollouts are sampled, in every runtime."""

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import flowrl as fl
from conftest import close, rows_and_weights, runner_pids, timeless
from teams import TwoCartPoles, two_learners

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,), normalize=True)
SMALL = {"envs_per_runner": 4, "rollout_length": 5, "report_every": 3, "policy": POLICY}
on_ray = pytest.mark.parametrize("runtime", [pytest.param("ray", marks=pytest.mark.ray)])


def a3c(runners=2, **changes):
    return fl.a3c("CartPole-v1", num_runners=runners, **{**SMALL, **changes})


def in_rounds(runners=2):
    """Runners compute gradients in rounds, of which the mean is applied: lag 0."""
    return a3c(runners).set("sample.mode", "sync").set("sync.to", "all")


def after_sampling(runners=2):
    """The same, but the learner trains on the batch of each round."""
    local = a3c().nodes[0].op.local
    return (
        in_rounds(runners)
        .set("sample.local", None)
        .remove("apply")
        .insert(after="sample", adv=local["adv"], train=fl.TrainOneStep())
    )


def test_with_one_runner_a3c_is_a2c():
    rows, weights = rows_and_weights(a3c(runners=1), 3, "local")
    others, wanted = rows_and_weights(after_sampling(runners=1), 3, "local")
    close((timeless(rows), weights), (timeless(others), wanted))
    assert rows[-1]["lag_max"] == 0


def test_the_mean_of_the_gradients_of_a_round_is_the_gradient_of_its_batch():
    rows, weights = rows_and_weights(in_rounds(), 3, "local")
    others, wanted = rows_and_weights(after_sampling(), 3, "local")
    close((timeless(rows), weights), (timeless(others), wanted))
    assert rows[-1]["trained_steps"] == 9 * 2 * 20 and rows[-1]["lag_max"] == 0


@pytest.mark.parametrize("graph", [a3c(), in_rounds()], ids=["a3c", "in rounds"])
def test_the_plan_equals_what_is_counted_and_the_audit_closes(graph):
    with fl.run(graph, seed=3) as run:
        rows = [next(run) for _ in range(4)]
    plan, counts = run.plan, run.counts()
    for name in ("sampled_steps", "requests", "publishes", "updates", "applied_gradients"):
        assert counts[name] == 4 * plan.per_row(name) > 0, name
    assert rows[-1]["trained_steps"] == counts["sampled_steps"] == 20 * counts["requests"]
    assert rows[-1]["lag_max"] == plan.lag == len(graph.nodes[0].op.mode) // 5
    audit = run.audit()
    assert audit.closed, str(audit)
    assert audit.edges[0].put.steps == counts["sampled_steps"]


def test_the_random_numbers_of_a_loss_differ_between_rollouts_and_repeat_with_the_seed():
    graph = a3c().set("learner.loss", Noisy()).set("learner.optimizer", fl.SGD(0.0))
    (a, _), (b, _), (c, _) = (rows_and_weights(graph, 3, "local", seed=s) for s in (1, 1, 2))
    noise = [row["noise"] for row in a]
    assert noise == [row["noise"] for row in b] != [row["noise"] for row in c]
    assert len(set(noise)) == 3


@dataclass(frozen=True)
class Noisy(fl.losses.Loss):
    """A policy gradient that reports the mean of its random numbers."""

    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "advantage", "target")
    on_policy: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def __call__(self, policy, params, batch):
        loss, metrics = fl.losses.PGLoss()(policy, params, batch)
        return loss, {**metrics, "noise": (batch["seed"] / 2.0**32).mean()}


def test_gradients_that_are_not_finite_end_the_run_with_the_number_of_the_update():
    graph = a3c().set("learner.loss", Breaking())
    with pytest.raises(fl.errors.NotFiniteError, match=r"a3c\.learner: update 1, of row 1, gave"):
        rows_and_weights(graph, 1, "local")


@dataclass(frozen=True)
class Breaking(Noisy):
    """A loss that is not finite."""

    random: ClassVar[bool] = False

    def __call__(self, policy, params, batch):
        loss, metrics = fl.losses.PGLoss()(policy, params, batch)
        return loss * np.nan, metrics


@on_ray
@pytest.mark.system
def test_on_ray_they_are_what_they_are_here(runtime):
    rows, weights = rows_and_weights(in_rounds(), 3, runtime)
    others, wanted = rows_and_weights(in_rounds(), 3, "local")
    close((timeless(rows), weights), (timeless(others), wanted))


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_runner_that_is_killed_loses_only_its_gradients():
    with fl.run(a3c(), runtime="ray") as run:
        for _ in range(3):
            next(run)
        os.kill(runner_pids()[0], signal.SIGKILL)
        while (row := next(run)).get("restarts", 0) < 1:
            pass
        for _ in range(3):
            row = next(run)
    counts, audit = run.counts(), run.audit()
    assert row["lost_steps"] == 20 == counts["lost_steps"], "its one request"
    assert counts["updates"] == counts["requests"] == counts["applied_gradients"]
    assert row["trained_steps"] == counts["sampled_steps"] == 20 * counts["requests"]
    assert audit.closed, str(audit)
    assert {e.before: e.put.items for e in audit.edges}["sample"] == counts["updates"]


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_learner_in_a_process_of_its_own_applies_them():
    with fl.run(in_rounds(), runtime=fl.RayRuntime(place={"learner": fl.Actor()}), seed=5) as run:
        rows = [next(run) for _ in range(3)]
        weights = run.policy.weights
    others, wanted = rows_and_weights(in_rounds(), 3, "local", seed=5)
    close((timeless(rows), weights), (timeless(others), wanted))
    assert run.audit().closed


def test_one_policy_of_several_agents_gives_gradients_and_of_several_policies_they_are_refused():
    graph = fl.a3c(TwoCartPoles, num_runners=2, **{**SMALL, "envs_per_runner": 2})
    with fl.run(graph, seed=1) as run:
        row = next(run)
    assert row["updates"] == 3 and run.audit().closed
    assert run.counts()["sampled_steps"] == row["trained_steps"]
    local = graph.nodes[0].op.local
    teams = two_learners(policy=POLICY).set("sample.local", fl.chain(grads=local["grads"]))
    with pytest.raises(fl.errors.CheckError, match="unknown resource 'learner'"):
        teams.check()
    own = fl.chain(size=fl.Map(numbered))
    with pytest.raises(fl.errors.CheckError, match="of several policies it must give batches"):
        two_learners(policy=POLICY).set("sample.local", own).check()


def numbered(batch):
    return {"steps": batch.steps}
