"""Soft actor-critic with a price of entropy that finds itself (Haarnoja et al. 2018b)."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.learner.learner import Learner
from flowrl.ops.replay import ReplayAdd, ReplaySample
from flowrl.ops.report import Report
from flowrl.ops.sample import ParallelSample
from flowrl.ops.train import TrainOneStep, UpdateTarget
from flowrl.ops.weights import SyncWeights
from flowrl.replay.replay import Replay
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rl.value_losses import SACLoss
from flowrl.rl.value_networks import SACNetwork
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class SACSettings:
    """The settings of `sac`. `envs` and `fragment` are per runner; `start` in steps of all environments together."""

    num_runners: int = 1
    envs_per_runner: int = 1
    rollout_length: int = 1
    buffer_size: int = 1_000_000
    batch_size: int = 256
    minibatch_size: int | None = None
    learning_starts: int = 100
    updates_per_step: float = 1.0
    tau: float = 0.005
    lr: Rate = 3e-4
    gamma: float = 0.99
    n_step: int = 1
    alpha: float = 1.0
    target_entropy: float | None = None
    report_every: int = 200
    policy: Policy | None = None


def sac(env: Make = "Pendulum-v1", settings: SACSettings | None = None) -> Graph:
    """Sampled actions into a replay, and an update for every step."""
    s = given(settings, SACSettings)
    policy = s.policy or Policy(SACNetwork, alpha=s.alpha)
    return Graph(
        "sac",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
        ),
        replay=Replay(s.buffer_size, n_step=s.n_step, gamma=s.gamma),
        learner=Learner(policy, SACLoss(s.target_entropy), Adam(s.lr)),
    ).then(
        sample=ParallelSample(),
        add=ReplayAdd(),
        draw=ReplaySample(
            s.batch_size, learning_starts=s.learning_starts, updates_per_step=s.updates_per_step
        ),
        train=TrainOneStep(minibatch_size=s.minibatch_size, shuffle=False),
        target=UpdateTarget(tau=s.tau),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
