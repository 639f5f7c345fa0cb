"""Proximal policy optimisation (PPO, Schulman et al. 2017).

The advantages come from generalised advantage estimation (Schulman et al. 2016).
"""

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
from flowrl.rl.losses import PPOLoss
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class PPOSettings(Settings):
    """Settings of `ppo`.

    The probability ratio is that of the newest policy to the behaviour policy.

    Args:
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 128).
        batch_size: environment steps in the batch of one update, at least (default 1024).
        epochs: passes over the batch in one update (default 10).
        minibatch_size: environment steps per gradient step; None: the whole batch (default 128).
        lr: learning rate, a number or a schedule such as fl.Linear (default 3e-4).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        gae_lambda: weight of longer advantage estimates: 0 one step, 1 full returns (default 0.95).
        clip_ratio: how far the probability ratio may move from 1 (default 0.2).
        value_clip: how far a value may move from the old value; None: any distance (default None).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.0).
        target_kl: KL divergence in nats; 1.5 times it ends an update; None: never (default None).
        max_grad_norm: largest global norm of the gradients (default 0.5).
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
    epochs: int = 10
    minibatch_size: int | None = 128
    lr: Rate = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_clip: float | None = None
    vf_coef: float = 0.5
    ent_coef: float = 0.0
    target_kl: float | None = None
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    normalize_rewards: bool = False
    clip_rewards: float | None = None
    policy: Policy | None = None


def ppo(env: Make = "CartPole-v1", settings: PPOSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of PPO: several epochs of minibatches on each batch.

    Its loss is the clipped surrogate objective (Schulman et al. 2017), on advantages by generalised
    advantage estimation. Sampling is synchronous, so the policy lag is 0.

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `PPOSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, PPOSettings, changes)
    policy = s.policy or default_policy(env, normalize=s.normalize, hidden=s.hidden)
    loss = PPOLoss(
        clip_ratio=s.clip_ratio,
        value_clip=s.value_clip,
        vf_coef=s.vf_coef,
        ent_coef=s.ent_coef,
        target_kl=s.target_kl,
    )
    return Graph(
        "ppo",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            normalize_rewards=s.gamma if s.normalize_rewards else None,
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
