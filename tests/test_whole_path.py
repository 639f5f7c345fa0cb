"""Numbers that only a whole run shows: what it draws, moves, loses and measures.

They are held against what its settings say.
"""

import itertools
import math

import jax
import numpy as np
import pytest

import flowrl as fl
from environments import Clockwork
from flowrl.core.events import OperatorRan, QueueLevel, Tap, Took
from flowrl.core.items import Row, Tally
from flowrl.runtime.rows import RowMaker

MLP = fl.Policy(fl.networks.MLP, hidden=(4,))
DQN = {
    "envs_per_runner": 2,
    "rollout_length": 4,
    "learning_starts": 16,
    "batch_size": 8,
    "updates_per_step": 0.5,
    "report_every": 4,
    "policy": fl.Policy(fl.networks.QNetwork, hidden=(4,)),
}


def watched(graph, see, kinds, until, runtime="local"):
    """Run a graph until a Row; `see` gets the run and each event at the moment at which it
    happens."""
    runs = []
    with fl.run(
        graph,
        runtime=runtime,
        observers=[Tap(lambda event: see(runs[0], event) if runs else None, *kinds)],
    ) as run:
        runs.append(run)
        while not until(next(run)):
            pass
    return run


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"], ids=["host", "device"])
def test_the_importance_exponent_rises_with_the_steps_that_came(env):
    graph = fl.dqn(env, fl.DQNSettings(**DQN, prioritized=True)).set("replay.beta_steps", 128)
    came, found = [0], []

    def see(run, event):
        if event.node == "add" and event.item is not None:
            came[0] += event.steps
        if event.node != "batch" or event.item is None:
            return
        replay, batch = run._session.place.handles["replay"], jax.device_get(event.item)
        leaves = (
            replay.arrays["tree"]["leaves"]
            if env.startswith("gymnax")
            else replay.pool.objects[0].tree.leaves
        )
        priority = np.asarray(leaves)[batch.columns["slot"]]
        ratio, weight = np.log(priority / priority.min()), np.log(batch["weight"][0])
        if ratio.max() > 0.1:  # weight = (priority / the least) ** -beta
            share = min(1.0, came[0] / 128)
            found.append((share, -(ratio @ weight) / (ratio @ ratio), 0.4 + 0.6 * share))

    watched(graph, see, [OperatorRan], lambda row: row["env_steps"] > 200)
    shares, got, wanted = np.array(found).T
    np.testing.assert_allclose(got, wanted, atol=0.01)
    assert shares.min() < 0.5 and (shares == 1).sum() >= 3


def test_the_target_network_moves_by_the_share_tau_towards_the_newest_parameters():
    graph = fl.dqn("CartPole-v1", fl.DQNSettings(**DQN, target_update_every=1, tau=0.25))
    before, moved = {}, []

    def see(run, event):
        state = run._session.place.handles["learner"].state["core"]
        now = jax.device_get((state["target"], state["weights"].params))
        if event.node == "target" and isinstance(event, Took):
            before["target"] = now[0]
        elif event.node == "target" and event.item is not None:
            moved.append((before["target"], *now))

    watched(graph, see, [Took, OperatorRan], lambda row: row["updates"] >= 8)
    assert len(moved) >= 8
    for old, new, params in moved:
        for name, x in new.items():
            np.testing.assert_allclose(
                x, 0.75 * old[name] + 0.25 * params[name], rtol=1e-5, atol=1e-7
            )
    assert any(np.abs(new[name] - old[name]).max() > 1e-4 for old, new, _ in moved for name in new)


def tally(steps):
    return Tally(
        (), {"env_steps": steps, "episodes": 0, "return_mean": math.nan, "length_mean": math.nan}
    )


def test_steps_per_second_are_the_steps_of_a_row_over_its_seconds():
    rows = RowMaker("g", 10.0)
    speeds = [
        rows.row(tally(steps), now)["steps_per_second"]
        for steps, now in ((100, 14.0), (100, 15.0), (30, 15.5))
    ]
    assert speeds == [25.0, 100.0, 60.0]


@pytest.mark.parametrize("runtime", ["local", "ray", "xla"], indirect=True)
def test_a_rows_speed_is_that_of_its_own_steps_and_seconds(runtime):
    env = "gymnax:CartPole-v1" if isinstance(runtime, fl.XlaRuntime) else "CartPole-v1"
    graph = fl.ppo(
        env,
        fl.PPOSettings(
            envs_per_runner=2,
            rollout_length=8,
            batch_size=16,
            epochs=1,
            minibatch_size=None,
            policy=MLP,
        ),
    )
    with fl.run(graph, runtime=runtime) as run:
        rows: list[Row] = [next(run) for _ in range(4)]
    for before, row in itertools.pairwise(rows):
        seconds = row["seconds"] - before["seconds"]
        assert row["steps_per_second"] * seconds == pytest.approx(
            row["env_steps"] - before["env_steps"], rel=1e-6
        )


class FailsOnce(Clockwork):
    """The first of them raises at a step of its life."""

    failed = False

    def __init__(self, at):
        super().__init__()
        self.at, self.life = at, 0

    def step(self, action):
        self.life += 1
        if self.life == self.at and not FailsOnce.failed:
            FailsOnce.failed = True
            raise OSError("a joint broke")
        return super().step(action)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_requests_in_flight_to_a_runner_that_is_restarted_are_lost_and_counted(
    in_flight, monkeypatch
):
    monkeypatch.setattr(FailsOnce, "failed", False)
    spec = fl.Runners(
        FailsOnce,
        MLP,
        envs_per_runner=1,
        rollout_length=5,
        env_settings={"at": 18},
        on_error="restart",
    )
    graph = fl.Graph("g", runners=spec).then(
        sample=fl.ParallelSample(mode="async", in_flight=in_flight), report=fl.Report()
    )
    with fl.run(graph) as run:
        rows = [next(run) for _ in range(8)]
    counts = run.counts()
    assert (
        counts["restarts"] == 1
        and counts["lost_requests"] == in_flight
        and counts["lost_steps"] == 5 * in_flight
    )
    assert rows[-1]["lost_steps"] == 5 * in_flight and run.audit().closed


@pytest.mark.parametrize("seed", range(3))
def test_a_stage_stops_where_its_queue_is_full(seed):
    runners = fl.Runners("CartPole-v1", MLP, num_runners=2, envs_per_runner=1, rollout_length=4)
    learner = fl.Learner(MLP, fl.losses.VTraceLoss(), fl.SGD())
    graph = fl.Graph("g", runners=runners, learner=learner).then(
        sample=fl.ParallelSample(mode="async"),
        queue=fl.Queue(3),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )
    levels = []
    with fl.run(
        graph,
        runtime=fl.LocalRuntime(schedule="random"),
        seed=seed,
        observers=[Tap(lambda e: levels.append((e.level, e.capacity)), QueueLevel)],
    ) as run:
        for _ in range(20):
            next(run)
    assert {capacity for _, capacity in levels} == {3} and max(level for level, _ in levels) == 3
