"""Several learners in a graph, each of which counts its own updates."""

import pytest

import flowrl as fl
from conftest import close, timeless
from environments import Corridor

MLP = fl.Policy(fl.networks.MLP, hidden=(4,))
QUIET = {"envs_per_runner": 2, "rollout_length": 4}


def graph(env):
    """Two learners with runners of their own, the second of which updates once where the first does
    four times."""
    g = fl.Graph(
        "two",
        first=fl.Runners(env, MLP, **QUIET),
        second=fl.Runners(env, MLP, **QUIET),
        quick=fl.Learner(MLP, fl.losses.VTraceLoss(), fl.Adam(1e-3), runners="first"),
        slow=fl.Learner(MLP, fl.losses.VTraceLoss(), fl.Adam(1e-3), runners="second"),
    )
    g = g.then(
        a=fl.ParallelSample(runners="first"),
        train_a=fl.TrainOneStep(learner="quick"),
        sync_a=fl.SyncWeights(learner="quick", runners="first"),
    )
    g = g.then(
        after=(),
        b=fl.ParallelSample(runners="second"),
        batch_b=fl.Concat(32),
        train_b=fl.TrainOneStep(learner="slow"),
        sync_b=fl.SyncWeights(learner="slow", runners="second"),
    )
    return g.then(
        after=("sync_a", "sync_b"), both=fl.Merge(), report=fl.Report(every=5, runners="first")
    )


def test_learners_at_different_rates_have_no_warmup_and_a_period_as_short_as_it_is():
    plan = graph(Corridor).compile()
    assert (plan.found.exact, plan.found.rows, plan.found.warmup_rows, plan.lag) == (True, 1, 0, 0)
    assert plan.per_row("updates", "train_a") == 4 and plan.per_row("updates", "train_b") == 1


@pytest.mark.system
@pytest.mark.parametrize("runtime", ["local", "xla"])
def test_the_plan_is_what_is_counted(runtime):
    g = graph(Corridor)
    plan = g.compile()
    with fl.run(g, runtime=runtime if runtime == "local" else fl.XlaRuntime(chunk=2)) as run:
        rows = [next(run) for _ in range(6)]
    counted = run.counts()
    assert all(
        counted[k] == plan.per_row(k) * len(run.rows)
        for k in ("updates", "requests", "publishes", "trained_steps")
    )
    assert rows[-1]["updates"] == 30 and rows[-1]["lag_max"] == 0


@pytest.mark.system
def test_one_program_of_two_learners_gives_the_rows_of_the_local_runtime():
    g = graph(Corridor)
    close(rows_of(g, fl.XlaRuntime(chunk=2)), rows_of(g, "local"))


def rows_of(g, runtime):
    with fl.run(g, runtime=runtime) as run:
        return timeless([next(run) for _ in range(4)])


def test_lag_is_counted_in_the_updates_of_the_learner_whose_weights_sampled():
    found = graph(Corridor).set("sync_b.every", 3).compile().found
    assert (found.exact, found.warmup_rows) == (True, 0)
    assert (max(found.lags["train_a"]), max(found.lags["train_b"])) == (0, 2)
