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

    runners: int = 1
    envs: int = 8
    fragment: int = 5
    batch: int = 40
    lr: Rate = 7e-4
    gamma: float = 0.99
    lam: float = 1.0
    entropy: float = 0.0
    grad_clip: float = 0.5
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
            count=s.runners,
            envs=s.envs,
            fragment=s.fragment,
            clip_rewards=s.clip_rewards,
        ),
        learner=Learner(policy, PGLoss(entropy=s.entropy), RMSProp(s.lr, clip=s.grad_clip)),
    ).then(
        sample=ParallelSample(),
        batch=Concat(s.batch),
        adv=Advantages(gamma=s.gamma, lam=s.lam),
        train=TrainOneStep(),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
