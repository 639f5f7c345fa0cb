"""Runs that take a second, which several files of tests show."""

import flowrl as fl

SMALL = {"envs_per_runner": 2, "rollout_length": 16, "batch_size": 32, "minibatch_size": 16}


def small():
    return fl.ppo("CartPole-v1", policy=fl.Policy(fl.networks.MLP, hidden=(8,)), **SMALL)


def two_runs(folder):
    """Save two runs in a folder, each with a warning; return the directory of the first."""
    for name in ("first", "second"):
        with fl.run(small(), steps=400, out=folder / name) as run:
            for _ in run:
                if len(run.rows) == 3:
                    run.warn("odd")
    return folder / "first"
