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

    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 128
    batch_size: int = 1024
    epochs: int = 10
    minibatch_size: int | None = 128
    lr: Rate = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_clip: float | None = None
    ent_coef: float = 0.0
    target_kl: float | None = None
    max_grad_norm: float = 0.5
    normalize: bool = False
    normalize_rewards: bool = False
    clip_rewards: float | None = None
    policy: Policy | None = None


def ppo(env: Make = "CartPole-v1", settings: PPOSettings | None = None) -> Graph:
    """Clipped surrogate objective, several epochs of minibatches per batch, synchronous sampling: lag 0."""
    s = given(settings, PPOSettings)
    policy = s.policy or default_policy(env, normalize=s.normalize)
    loss = PPOLoss(
        clip_ratio=s.clip_ratio, value_clip=s.value_clip, ent_coef=s.ent_coef, target_kl=s.target_kl
    )
    scale = s.gamma if s.normalize_rewards else None
    return Graph(
        "ppo",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            normalize_rewards=scale,
            clip_rewards=s.clip_rewards,
        ),
        learner=Learner(policy, loss, Adam(s.lr, max_grad_norm=s.max_grad_norm)),
    ).then(
        sample=ParallelSample(),
        batch=Concat(s.batch_size),
        adv=Advantages(gamma=s.gamma, gae_lambda=s.gae_lambda),
        norm=Standardize(),
        train=TrainOneStep(epochs=s.epochs, minibatch_size=s.minibatch_size),
        sync=SyncWeights(),
        report=Report(),
    )
