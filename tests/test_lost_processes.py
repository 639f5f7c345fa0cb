"""A run whose learner's process is lost goes on from its newest snapshot."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

import flowrl as fl
from conftest import same, timeless
from flowrl.core.events import Tap, Warned
from flowrl.errors import LostError, SaveError, SettingError
from flowrl.running import Run

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,))
SMALL = {"num_runners": 2, "envs_per_runner": 2, "rollout_length": 16, "batch_size": 64}
GRAPH = fl.ppo("CartPole-v1", minibatch_size=32, epochs=2, policy=POLICY, **SMALL)
EVERY = fl.Snapshots(every=0)


class Losing(fl.LocalRuntime):
    """One process, in which rounds raise what they raise where another process was lost.

    Args:
        losses: the numbers of these rounds, counted over all sessions.
        meanwhile: is called when a session has been closed.
    """

    def __init__(self, *losses, meanwhile=lambda: None):
        super().__init__()
        given = {"losses": losses, "rounds": [0], "meanwhile": meanwhile}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def open(self, plan, seed, stream=None):
        session = super().open(plan, seed, stream)
        original, close = session.turns.round, session.close

        def round_(rows):
            tallies = original(rows)
            self.rounds[0] += 1
            if self.rounds[0] in self.losses:
                raise LostError("learner's process ended: it was killed")
            return tallies

        session.turns.round = round_
        session.close = lambda: (close(), self.meanwhile())
        return session


def run_of(out=None, runtime="local", count=6, **how):
    """Return a run after so many rows, the rows that it returned, and its warnings."""
    warned = []
    observers = [Tap(lambda event: warned.append(event.text), Warned)]
    goal = {"until": lambda row: row["row"] >= count}
    with fl.run(GRAPH, runtime=runtime, out=out, observers=observers, **goal, **how) as run:
        returned = list(run)
    return run, returned, warned


@pytest.fixture(scope="module")
def whole():
    run, rows, _ = run_of()
    return run.policy.weights, timeless(rows)


def saved(path):
    return timeless([json.loads(x) for x in (path / "rows.jsonl").read_text().splitlines()])


@pytest.mark.parametrize(
    ("every", "losses", "numbers"),
    [
        (0, (4,), [1, 2, 3, 4, 5, 6]),
        (0, (2, 4, 5, 9), [1, 2, 3, 4, 5, 6]),
        (1e9, (1,), [1, 2, 3, 4, 5, 6]),
        (1e9, (4,), [1, 2, 3, 1, 2, 3, 4, 5, 6]),
    ],
    ids=["once", "often", "in the first round", "before the first snapshot"],
)
def test_a_run_goes_on_bit_for_bit_where_a_process_was_lost(
    every, losses, numbers, whole, tmp_path
):
    out = tmp_path / "run"
    run, rows, warned = run_of(out, Losing(*losses), snapshots=fl.Snapshots(every=every))
    assert [row["row"] for row in rows] == numbers
    assert same(run.policy.weights, whole[0])
    np.testing.assert_equal(timeless(run.rows), whole[1])
    np.testing.assert_equal(saved(out), whole[1])
    assert same(fl.load(out).weights, whole[0])
    assert len(warned) == len(losses) and run.audit().closed
    assert "learner's process ended: it was killed; the run goes on from row" in warned[0]


def test_a_damaged_snapshot_is_passed_over(whole, tmp_path):
    def damage():
        newest = max((tmp_path / "run/snapshots").glob("row-*.json"))
        newest.write_bytes(newest.read_bytes()[:-9])

    runtime = Losing(5, meanwhile=lambda: runtime.rounds[0] == 5 and damage())
    run, rows, warned = run_of(tmp_path / "run", runtime, snapshots=EVERY)
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 4, 5, 6]
    assert "the snapshot before it is taken" in warned[0]
    assert "goes on from row 3" in warned[1] and "makes the 1 row after it again" in warned[1]
    assert same(run.policy.weights, whole[0])
    np.testing.assert_equal(saved(tmp_path / "run"), whole[1])
    how = {"runtime": "local", "until": lambda row: row["row"] >= 7}
    with fl.resume(tmp_path / "run", **how) as again:
        assert [row["row"] for row in again] == [7]


def test_losses_that_come_again_and_again_end_the_run(tmp_path):
    runtime = Losing(3, 4, 5)
    with pytest.raises(LostError, match="it was killed"):
        run_of(tmp_path / "run", runtime, snapshots=EVERY)
    assert runtime.rounds[0] == 5
    assert [row["row"] for row in saved(tmp_path / "run")] == [1, 2]
    with pytest.raises(SettingError, match="a runtime of your own, losing; give it again"):
        fl.resume(tmp_path / "run", steps=1_000)
    how = {"runtime": "local", "until": lambda row: row["row"] >= 4}
    with fl.resume(tmp_path / "run", **how) as run:
        assert [row["row"] for row in run] == [3, 4]


@pytest.mark.parametrize("how", [{}, {"out": True, "snapshots": False}], ids=["no out", "none"])
def test_without_snapshots_a_loss_ends_the_run(how, tmp_path):
    out = tmp_path / "run" if how.pop("out", False) else None
    with pytest.raises(LostError, match="it was killed"):
        run_of(out, Losing(2), **how)


def test_a_run_without_a_good_snapshot_says_so(tmp_path):
    def damage():
        for file in (tmp_path / "run/snapshots").glob("row-*.json"):
            file.write_bytes(b"")

    with pytest.raises(SaveError, match=r"has no good snapshot: .*row-0000000002\.json"):
        run_of(tmp_path / "run", Losing(3, meanwhile=damage), snapshots=EVERY)


def mine(_):
    return os.getpid()


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
@pytest.mark.parametrize("count", [1, 2])
def test_a_learner_that_is_killed_or_stopped_costs_no_row(monkeypatch, tmp_path, count):
    """Of a group, its second process."""
    monkeypatch.setattr("flowrl.runtime.ray_calls.ASKING_SECONDS", 1.0)
    monkeypatch.setattr("flowrl.runtime.ray_calls.HUNG_SECONDS", 4.0)
    graph = fl.impala("CartPole-v1", policy=POLICY, report_every=3, **SMALL)
    runtime = fl.RayRuntime(place={"learner": fl.Actor(count=count)}, processes=1)
    warned = []
    observers = [Tap(lambda event: warned.append(event.text), Warned)]
    faults = {3: signal.SIGKILL, 6: signal.SIGSTOP}
    how = {"runtime": runtime, "out": tmp_path / "run", "snapshots": EVERY}
    with fl.run(graph, observers=observers, until=lambda row: row["row"] >= 9, **how) as run:
        for row in run:
            if fault := faults.pop(row["row"], None):
                remote = run._session.place.sites["learner"].homes[0].remote
                actor = remote.members[1].actor if count > 1 else remote.actor
                os.kill(ray.get(actor.__ray_call__.remote(mine)), fault)
        assert run.audit().closed
    assert [row["row"] for row in run.rows] == list(range(1, 10))
    assert [row["updates"] for row in saved(tmp_path / "run")] == list(range(3, 28, 3))
    assert len(warned) == 2
    name = "learner" if count == 1 else "learner, 1"
    assert f"{name}'s process ended" in warned[0]
    assert f"{name}'s process has not answered for 4 s" in warned[1]


NODES = """
import time, warnings
warnings.simplefilter("ignore")  # of Ray's own test cluster
import flowrl as fl
from ray.cluster_utils import Cluster

SMALL = {"envs_per_runner": 2, "rollout_length": 16, "batch_size": 64}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        graph = fl.impala("CartPole-v1", num_runners=4, report_every=3, **SMALL)
        runtime = fl.RayRuntime(address=cluster.address, processes=2)
        with fl.run(graph, runtime=runtime) as run:
            for row in run:
                if row["row"] == 5:
                    cluster.remove_node(node, allow_graceful=False)
                    gone, steps = time.monotonic(), row["env_steps"]
                restarts = run.counts()["restarts"]
                if restarts == 2 and row["row"] > 10:
                    break
            counts = run.counts()
            print("found", restarts, counts["lost_steps"], run.audit().closed, flush=True)
            print("seconds", time.monotonic() - gone, row["env_steps"] - steps, flush=True)
    finally:
        cluster.shutdown()
"""


@pytest.mark.system
@pytest.mark.ray
def test_a_node_that_vanishes_costs_the_rollouts_of_its_runners(tmp_path):
    script = tmp_path / "nodes.py"
    script.write_text(NODES)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = next(line for line in done.stdout.splitlines() if line.startswith("found"))
    _, restarts, lost, closed = found.split()
    # Two runners were on the node, of which each had up to two rollouts under way.
    assert restarts == "2" and int(lost) <= 2 * 2 * 32 and closed == "True"


@pytest.mark.parametrize("where", ["_keep", "_consider", "open"])
def test_a_process_that_is_lost_beside_a_round_costs_no_row_either(
    where, whole, tmp_path, monkeypatch
):
    """While a snapshot is written, while the best policy is fetched, and while all is reopened."""
    lost = LostError("learner's process ended: it was killed")
    if where == "open":
        runtime, opens, calls = Losing(4), Losing.open, []

        def reopened(*args):
            calls.append(args)
            if len(calls) == 2:
                raise lost
            return opens(*args)

        monkeypatch.setattr(Losing, "open", reopened)
    else:
        runtime, done, calls = "local", getattr(Run, where), []

        def loses(self, *args, **how):
            calls.append(len(self.rows))
            if len(calls) == 3:
                raise lost
            return done(self, *args, **how)

        monkeypatch.setattr(Run, where, loses)
    out = tmp_path / "run"
    run, rows, warned = run_of(out, runtime, snapshots=fl.Snapshots(every=0))
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert same(run.policy.weights, whole[0])
    np.testing.assert_equal(saved(out), whole[1])
    assert run.audit().closed and len(warned) == (2 if where == "open" else 1)


def test_the_best_policy_of_a_future_that_was_given_up_is_forgotten(tmp_path):
    how = {"runtime": Losing(4), "snapshots": fl.Snapshots(every=1e9)}
    with fl.run(GRAPH, out=tmp_path / "run", **how) as run:
        rows = [next(run) for _ in range(4)]
        assert [row["row"] for row in rows] == [1, 2, 3, 1]
        # None where no episode ended in the first round.
        assert run._saver.best.score is None or run._saver.best.score.row == 1
