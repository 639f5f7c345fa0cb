"""Advantage actor-critic: the synchronous form of A3C (Mnih et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.learner.learner import Learner
from flowrl.ops.batch import Advantages, Concat
from flowrl.ops.report import Report
from flowrl.ops.sample import ParallelSample
from flowrl.ops.train import TrainOneStep
from flowrl.ops.weights import SyncWeights
from flowrl.rl.losses import PGLoss
from flowrl.rl.optimizers import Rate, RMSProp
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class A2CSettings:
    """The settings of `a2c`. `envs` and `fragment` are per runner, `batch` in steps."""

    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 5
    batch_size: int = 40
    lr: Rate = 7e-4
    gamma: float = 0.99
    gae_lambda: float = 1.0
    ent_coef: float = 0.0
    max_grad_norm: float = 0.5
    normalize: bool = False
    report_every: int = 50
    clip_rewards: float | None = None
    policy: Policy | None = None


def a2c(env: Make = "CartPole-v1", settings: A2CSettings | None = None) -> Graph:
    """The policy gradient with n-step advantages: one gradient step per small synchronous batch."""
    s = given(settings, A2CSettings)
    policy = s.policy or default_policy(env, normalize=s.normalize)
    return Graph(
        "a2c",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            clip_rewards=s.clip_rewards,
        ),
        learner=Learner(
            policy, PGLoss(ent_coef=s.ent_coef), RMSProp(s.lr, max_grad_norm=s.max_grad_norm)
        ),
    ).then(
        sample=ParallelSample(),
        batch=Concat(s.batch_size),
        adv=Advantages(gamma=s.gamma, gae_lambda=s.gae_lambda),
        train=TrainOneStep(),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
