"""Advantage actor-critic (A2C), the synchronous version of A3C (Mnih et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
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
class A2CSettings(Settings):
    """Settings of `a2c`.

    Args:
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 5).
        batch_size: environment steps in the batch of one update, at least (default 40).
        lr: learning rate, a number or a schedule such as fl.Linear (default 7e-4).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        gae_lambda: weight of longer advantage estimates: 0 one step, 1 full returns (default 1.0).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.0).
        max_grad_norm: largest global norm of the gradients (default 0.5).
        hidden: widths of the layers of the default policy; None: (64, 64), or 512 after the
            convolutions of a CNN (default None).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide rewards by the running deviation of returns (default False).
        report_every: updates per row of results (default 50).
        clip_rewards: bound of rewards in training, after scaling; None: no bound (default None).
        policy: policy to act and to train; None: a CNN for images, else an MLP (default None).
    """

    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 5
    batch_size: int = 40
    lr: Rate = 7e-4
    gamma: float = 0.99
    gae_lambda: float = 1.0
    vf_coef: float = 0.5
    ent_coef: float = 0.0
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    normalize_rewards: bool = False
    report_every: int = 50
    clip_rewards: float | None = None
    policy: Policy | None = None


def a2c(env: Make = "CartPole-v1", settings: A2CSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of A2C: one gradient step on each small batch.

    It takes the policy gradient with n-step advantages (the synchronous version of A3C, Mnih et
    al. 2016). Sampling is synchronous, so the policy lag is 0.

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `A2CSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, A2CSettings, changes)
    policy = s.policy or default_policy(env, normalize=s.normalize, hidden=s.hidden)
    return Graph(
        "a2c",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            normalize_rewards=s.gamma if s.normalize_rewards else None,
            clip_rewards=s.clip_rewards,
        ),
        learner=Learner(
            policy, PGLoss(s.vf_coef, s.ent_coef), RMSProp(s.lr, max_grad_norm=s.max_grad_norm)
        ),
    ).then(
        sample=ParallelSample(),
        batch=Concat(s.batch_size),
        adv=Advantages(gamma=s.gamma, gae_lambda=s.gae_lambda),
        train=TrainOneStep(),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
