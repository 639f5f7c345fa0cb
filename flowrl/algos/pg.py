"""The vanilla policy gradient with a learned baseline (Sutton et al. 2000; Williams 1992)."""

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
from flowrl.rl.losses import PGLoss
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class PGSettings:
    """The settings of `pg`. `envs` and `fragment` are per runner, `batch` in steps."""

    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 128
    batch_size: int = 1024
    lr: Rate = 3e-3
    gamma: float = 0.99
    gae_lambda: float = 0.97
    ent_coef: float = 0.0
    normalize: bool = False
    clip_rewards: float | None = None
    policy: Policy | None = None


def pg(env: Make = "CartPole-v1", settings: PGSettings | None = None) -> Graph:
    """Returns minus a learned value, one gradient step per large synchronous batch."""
    s = given(settings, PGSettings)
    policy = s.policy or default_policy(env, normalize=s.normalize)
    return Graph(
        "pg",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            clip_rewards=s.clip_rewards,
        ),
        learner=Learner(policy, PGLoss(ent_coef=s.ent_coef), Adam(s.lr)),
    ).then(
        sample=ParallelSample(),
        batch=Concat(s.batch_size),
        adv=Advantages(gamma=s.gamma, gae_lambda=s.gae_lambda),
        norm=Standardize(),
        train=TrainOneStep(),
        sync=SyncWeights(),
        report=Report(),
    )
