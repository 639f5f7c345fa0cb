"""Graphs whose bottleneck is known, for it was planted: all of them sleep.

They do so `scale` times as long where the machine is busy with other work.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

import flowrl as fl
from environments import Clockwork

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,))


class Slow(Clockwork):
    """Every step takes `seconds`; those of the first that leaves a mark in a folder, if one is
    given, five times as long."""

    def __init__(self, seconds, marks=None):
        super().__init__()
        self.seconds, self.marks = seconds, marks

    def step(self, action):
        if self.marks is not None:
            with contextlib.suppress(FileExistsError):
                (Path(self.marks) / "lame").touch(exist_ok=False)
                self.seconds *= 5
            self.marks = None
        time.sleep(self.seconds)
        return super().step(action)


@dataclass(frozen=True)
class Lingers(fl.losses.Loss):
    """Another loss, each gradient step of which takes so many seconds longer."""

    loss: fl.losses.Loss
    seconds: float

    @property
    def needs(self):
        return self.loss.needs

    @property
    def on_policy(self):
        return self.loss.on_policy

    @property
    def sequences(self):
        return self.loss.sequences

    def __call__(self, policy, params, batch):
        loss, metrics = self.loss(policy, params, batch)
        # The callback needs the number itself: as an argument it would be unknown there.
        seconds = float(self.seconds)

        def sleep(_):
            time.sleep(seconds)
            return np.float32(0)

        some = jax.lax.stop_gradient(batch["reward"]).sum()
        return loss + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.float32), some), metrics


@dataclass(frozen=True)
class SlowSync(fl.SyncWeights):
    """Takes its time."""

    seconds: float = 0.0

    def step(self, held, item, ctx):
        time.sleep(self.seconds)
        yield from super().step(held, item, ctx)


@dataclass(frozen=True)
class Naps(fl.extend.Operator):
    """Passes items on at once, and naps with every n-th."""

    every: int
    seconds: float

    def init(self):
        return {"items": 0}

    def step(self, held, item, ctx):
        held["items"] = (held["items"] + 1) % self.every
        if held["items"] == 0:
            time.sleep(self.seconds)
        yield item


def impala(seconds, **settings):
    """Sampling and learning side by side."""
    settings = {
        "num_runners": 2,
        "envs_per_runner": 2,
        "rollout_length": 10,
        "batch_size": 40,
        "report_every": 4,
        "policy": POLICY,
        **settings,
    }
    return fl.impala(Slow, fl.IMPALASettings(**settings)).set(
        "runners.env_settings", {"seconds": seconds}
    )


def ppo(seconds, **settings):
    """Sampling and learning in turn."""
    settings = {
        "num_runners": 2,
        "envs_per_runner": 2,
        "rollout_length": 10,
        "batch_size": 40,
        "minibatch_size": 20,
        "epochs": 2,
        "policy": POLICY,
        **settings,
    }
    return fl.ppo(Slow, fl.PPOSettings(**settings)).set(
        "runners.env_settings", {"seconds": seconds}
    )


def slow_environment(scale=1):
    return impala(0.004 * scale)


def slow_loss(scale=1):
    graph = impala(0.0005 * scale)
    return graph.set("learner.loss", Lingers(fl.losses.VTraceLoss(), 0.05 * scale))


def slow_sync(scale=1):
    return impala(0.0005 * scale).replace(sync=SlowSync(seconds=0.05 * scale, wait=False))


def tiny_queue(scale=1):
    return (
        impala(0.002 * scale)
        .set("queue.capacity", 1)
        .insert(after="sync", naps=Naps(12, 0.25 * scale))
    )


def straggler(folder, scale=1):
    folder = Path(folder) / str(scale)
    folder.mkdir()
    return ppo(0.002, num_runners=3, batch_size=60).set(
        "runners.env_settings", {"seconds": 0.002 * scale, "marks": str(folder)}
    )


def slow_loss_in_minibatches():
    graph = impala(0.0005).set("train.minibatch_size", 20)
    return graph.set("learner.loss", Lingers(fl.losses.VTraceLoss(), 0.05))
