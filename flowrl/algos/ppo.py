"""Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation (Schulman et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.learner.learner import Learner
from flowrl.ops.batch import Advantages, Concat, Standardize
from flowrl.ops.report import Report
from flowrl.ops.sample import ParallelSample
from flowrl.ops.train import TrainOneStep
from flowrl.ops.weights import SyncWeights
from flowrl.rl.losses import PPOLoss
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class PPOSettings:
    """The settings of `ppo`. `envs` and `fragment` are per runner, `batch` and `minibatch` in steps."""

    runners: int = 1
    envs: int = 8
    fragment: int = 128
    batch: int = 1024
    epochs: int = 10
    minibatch: int | None = 128
    lr: Rate = 3e-4
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value_clip: float | None = None
    entropy: float = 0.0
    target_kl: float | None = None
    grad_clip: float = 0.5
    normalize: bool = False
    normalize_rewards: bool = False
    clip_rewards: float | None = None
    policy: Policy | None = None


def ppo(env: Make = "CartPole-v1", settings: PPOSettings | None = None) -> Graph:
    """Clipped surrogate objective, several epochs of minibatches per batch, synchronous sampling: lag 0."""
    s = given(settings, PPOSettings)
    policy = s.policy or default_policy(env, normalize=s.normalize)
    loss = PPOLoss(clip=s.clip, value_clip=s.value_clip, entropy=s.entropy, target_kl=s.target_kl)
    scale = s.gamma if s.normalize_rewards else None
    return Graph(
        "ppo",
        runners=Runners(
            env,
            policy,
            count=s.runners,
            envs=s.envs,
            fragment=s.fragment,
            normalize_rewards=scale,
            clip_rewards=s.clip_rewards,
        ),
        learner=Learner(policy, loss, Adam(s.lr, clip=s.grad_clip)),
    ).then(
        sample=ParallelSample(),
        batch=Concat(s.batch),
        adv=Advantages(gamma=s.gamma, lam=s.lam),
        norm=Standardize(),
        train=TrainOneStep(epochs=s.epochs, minibatch=s.minibatch),
        sync=SyncWeights(),
        report=Report(),
    )
