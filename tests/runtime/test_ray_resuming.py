"""Runs on Ray that are cut and go on: all is accounted for, and no rollout is trained twice."""

import json
import time
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from flowrl.core.events import Tap, Updating
from test_resuming import EVERY, cut

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,))
SMALL = {"num_runners": 2, "envs_per_runner": 2, "rollout_length": 8, "batch_size": 32}
Q = {
    "num_runners": 2, "envs_per_runner": 2, "rollout_length": 4, "batch_size": 16,
    "learning_starts": 40, "buffer_size": 400, "report_every": 3,
    "policy": fl.Policy(fl.networks.QNetwork, hidden=(8,)),
}  # fmt: skip


class Numbered(gym.Env):
    """Every step of every episode has an observation of its own: the episode's, and its number."""

    observation_space = gym.spaces.Box(0, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = np.array([self.np_random.integers(1e6), 0], np.float32)
        return self.seen.copy(), {}

    def step(self, action):
        self.seen[1] += 1
        return self.seen.copy(), 1.0, bool(self.seen[1] == 7), False, {}


GRAPHS = {
    "impala": lambda: fl.impala(Numbered, policy=POLICY, report_every=2, **SMALL),
    "ppo": lambda: fl.ppo(Numbered, policy=POLICY, minibatch_size=16, **SMALL),
    "apex": lambda: fl.apex(Numbered, **Q),
}


def runtime_of(name):
    return {"one": fl.RayRuntime(processes=1), "two": fl.RayRuntime(processes=2)}.get(name, name)


def watched(trained):
    """An observer that notes the observations of each update by its number."""

    def note(event):
        obs = np.asarray(event.batch["obs"])
        # A batch of a replay has transitions only.
        is_step = np.asarray(event.batch.data.get("valid", True))
        trained[event.version] = obs[is_step].reshape(-1, 2).tolist()

    tap = Tap(note, Updating)
    tap.live = True
    return tap


def twice(trained):
    """The steps that were trained more than once."""
    steps = Counter(tuple(step) for steps in trained.values() for step in steps)
    return [step for step, count in steps.items() if count > 1]


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("impala", "two", "one"),
        ("impala", "local", "one"),
        ("impala", "one", "local"),
        ("ppo", "one", "local"),
        ("apex", "two", "one"),
    ],
)
def test_what_was_cut_goes_on_with_other_processes_and_trains_nothing_twice(
    name, before, after, tmp_path
):
    graph, trained = GRAPHS[name](), {}
    how = {"observers": [watched(trained)], "until": lambda row: row["row"] >= 6}
    with fl.run(
        graph, runtime=runtime_of(before), out=tmp_path / "run", snapshots=EVERY, **how
    ) as run:
        next(run)
        with run._session.kept():
            # What is being written stays as it is, though stages have threads of their own.
            counts = run.counts()
            time.sleep(0.2)
            assert run.counts() == counts
        list(run)
    updates = run.rows[3]["updates"]
    for version in [version for version in trained if version >= updates]:
        del trained[version]
    out = cut(tmp_path / "run", 4, tmp_path / "cut")
    how["until"] = lambda row: row["row"] >= 9
    with fl.resume(out, graph, runtime=runtime_of(after), **how) as run:
        assert [row["row"] for row in run] == [5, 6, 7, 8, 9]
        audit = run.audit()
    assert audit.closed, f"\n{audit}"
    assert sorted(trained) == list(range(int(run.rows[-1]["updates"])))
    assert name == "apex" or twice(trained) == []
    rows = [json.loads(x) for x in (out / "rows.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(1, 10))
    for column in ("updates", "env_steps", "episodes"):
        assert np.diff([row[column] for row in rows]).min() >= 0, column
