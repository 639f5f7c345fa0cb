"""Policy gradient with a learned baseline (Sutton et al. 2000; Williams 1992)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
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
class PGSettings(Settings):
    """Settings of `pg`.

    Args:
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 128).
        batch_size: environment steps in the batch of one update, at least (default 1024).
        lr: learning rate, a number or a schedule such as fl.Linear (default 3e-3).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        gae_lambda: weight of longer advantage estimates: 0 one step, 1 full returns (default 0.97).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.0).
        hidden: widths of the layers of the default policy; None: (64, 64), or 512 after the
            convolutions of a CNN (default None).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide rewards by the running deviation of returns (default False).
        clip_rewards: bound of rewards in training, after scaling; None: no bound (default None).
        policy: policy to act and to train; None: a CNN for images, else an MLP (default None).
    """

    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 128
    batch_size: int = 1024
    lr: Rate = 3e-3
    gamma: float = 0.99
    gae_lambda: float = 0.97
    vf_coef: float = 0.5
    ent_coef: float = 0.0
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    normalize_rewards: bool = False
    clip_rewards: float | None = None
    policy: Policy | None = None


def pg(env: Make = "CartPole-v1", settings: PGSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of the policy gradient: one gradient step on each large batch.

    Advantages are returns minus a learned value (Sutton et al. 2000; Williams 1992). Sampling is
    synchronous, so the policy lag is 0.

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `PGSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, PGSettings, changes)
    policy = s.policy or default_policy(env, normalize=s.normalize, hidden=s.hidden)
    return Graph(
        "pg",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            normalize_rewards=s.gamma if s.normalize_rewards else None,
            clip_rewards=s.clip_rewards,
        ),
        learner=Learner(policy, PGLoss(s.vf_coef, s.ent_coef), Adam(s.lr)),
    ).then(
        sample=ParallelSample(),
        batch=Concat(s.batch_size),
        adv=Advantages(gamma=s.gamma, gae_lambda=s.gae_lambda),
        norm=Standardize(),
        train=TrainOneStep(),
        sync=SyncWeights(),
        report=Report(),
    )
