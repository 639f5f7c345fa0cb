"""Policies that were saved by every version until now load, and act as they did then.

``python tests/observe/test_golden_policies.py v2`` writes those of a new format.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import flowrl as fl
from flowrl.core.file_sums import facts_of
from flowrl.errors import SaveError
from flowrl.observe.manifest import seal
from flowrl.observe.saved_policies import FORMAT

GOLDEN = Path(__file__).parent / "golden_policies"
SMALL = {"num_runners": 1, "envs_per_runner": 2, "rollout_length": 8, "batch_size": 16}
Q = {"num_runners": 1, "envs_per_runner": 2, "learning_starts": 16, "buffer_size": 64}
Q |= {"batch_size": 8}


def network(kind, **settings):
    return fl.Policy(getattr(fl.networks, kind), **settings)


POLICIES = {
    "mlp": lambda: fl.pg("CartPole-v1", policy=network("MLP", hidden=(4,)), **SMALL),
    "lstm": lambda: fl.impala("CartPole-v1", policy=network("RNN", cell="lstm", size=4), **SMALL),
    "normalized": lambda: fl.ppo(
        "Pendulum-v1", normalize=True, policy=network("MLP", hidden=(4,)), minibatch_size=8, **SMALL
    ),
    "q": lambda: fl.dqn("CartPole-v1", policy=network("QNetwork", hidden=(4,)), **Q),
    "sac": lambda: fl.sac("Pendulum-v1", policy=network("SACNetwork", hidden=(4,)), **Q),
}


def actions(path):
    """What a saved policy does, greedily, after a few observations."""
    policy = fl.load(path)
    size = policy.spaces.obs.shape[0]
    observations = np.sin(np.arange(5 * size, dtype=np.float32)).reshape(5, size)
    acts, carry = [], None
    for obs in observations:
        act = policy.act(obs, carry)
        if isinstance(act, tuple):
            act, carry = act
        acts.append(np.asarray(act).tolist())
    return acts


def make(folder):
    """Save a policy of each kind, and what it does."""
    found = {}
    for name, graph in POLICIES.items():
        with fl.run(graph()) as run:
            next(run)
            run.save(folder / name)
        for file in ("audit.txt", "explain.txt", "profile.json", "plan.txt", "manifest.json"):
            (folder / name / file).unlink()
        # It names the folder of this machine.
        (folder / name / "policy/weights/commit_success.txt").write_text("\n")
        seal(folder / name)
        found[name] = actions(folder / name)
    (folder / "actions.json").write_text(json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("version", [path.name for path in sorted(GOLDEN.iterdir())])
def test_an_old_policy_acts_as_it_did(version):
    wanted = json.loads((GOLDEN / version / "actions.json").read_text())
    assert len(wanted) >= 5
    for name, acts in wanted.items():
        np.testing.assert_allclose(actions(GOLDEN / version / name), acts, 1e-4, 1e-5, err_msg=name)


def test_this_format_has_its_policies():
    assert (GOLDEN / f"v{FORMAT}").is_dir()


def test_an_unknown_format_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "v1/mlp", tmp_path / "run")
    file = tmp_path / "run/policy/policy.json"
    newer = file.read_text().replace('"format": 1', '"format": 99')
    file.write_text(newer)
    manifest = tmp_path / "run/manifest.json"
    said = json.loads(manifest.read_text())
    said["files"]["policy/policy.json"] = facts_of(file)
    manifest.write_text(json.dumps(said))
    with pytest.raises(SaveError, match=re.escape("has format 99, and this version of flowrl")):
        fl.load(tmp_path / "run")


if __name__ == "__main__":
    make(GOLDEN / sys.argv[1])
