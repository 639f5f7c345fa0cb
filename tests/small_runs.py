"""Runs that take a second, which several files of tests show."""

import numpy as np

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


class Fan(fl.extend.Operator):
    """Reports a metric that is no number from the fourth batch on."""

    def init(self):
        return {"seen": 0}

    def step(self, state, batch, ctx):
        state["seen"] = min(state["seen"] + 1, 4)
        ctx.metric("fan", np.float32(1.0 if state["seen"] < 4 else np.nan))
        yield batch
