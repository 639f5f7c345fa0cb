"""Asynchronous PPO with a target network (APPO; IMPACT, Luo et al. 2020).

It is IMPALA with another loss: the surrogate objective, clipped around a target network, on
V-trace advantages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.impala import IMPALASettings, impala
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.ops.train import UpdateTarget
from flowrl.rl.losses import APPOLoss


@dataclass(frozen=True)
class APPOSettings(IMPALASettings):
    """Settings of `appo`: those of `impala`, and three for its target network.

    The probability ratio is that of the newest policy to the target network.

    Args:
        num_runners: number of runners, which sample side by side (default 2).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 50).
        batch_size: environment steps in the batch of one update, at least (default 500).
        in_flight: requests to each runner at the same time (default 2).
        queue_capacity: batches that the queue before the learner holds (default 16).
        max_lag: largest policy lag in updates; older batches are dropped; None: any (default None).
        epochs: passes over the batch in one update (default 1).
        minibatch_size: environment steps per gradient step; None: the whole batch (default None).
        lr: learning rate, a number or a schedule such as fl.Linear (default 5e-4).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        vtrace_lambda: weight of longer traces in V-trace (default 1.0).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.01).
        max_grad_norm: largest global norm of the gradients (default 40.0).
        report_every: updates per row of results (default 10).
        hidden: widths of the layers of the default policy; None: (64, 64), or 512 after the
            convolutions of a CNN (default None).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide rewards by the running deviation of returns (default False).
        clip_rewards: bound of rewards in training, after scaling; None: no bound (default None).
        policy: policy to act and to train; None: a CNN for images, else an MLP (default None).
        clip_ratio: how far the probability ratio may move from 1 (default 0.2).
        kl_coef: coefficient of the KL divergence from the target network (default 0.0).
        target_update_every: updates between two updates of the target network (default 2).
    """

    clip_ratio: float = 0.2
    kl_coef: float = 0.0
    target_update_every: int = 2


def appo(env: Make = "CartPole-v1", settings: APPOSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of APPO: the two stages of `impala`, with a target network.

    The target network is updated once in every `target_update_every` updates (IMPACT, Luo et al.
    2020).

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `APPOSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, APPOSettings, changes)
    # The loss and the target network take these; the graph of IMPALA has no place for them.
    own = ("clip_ratio", "kl_coef", "target_update_every")
    plain = IMPALASettings(**{k: v for k, v in vars(s).items() if k not in own})
    loss = APPOLoss(
        clip_ratio=s.clip_ratio,
        gamma=s.gamma,
        vtrace_lambda=s.vtrace_lambda,
        vf_coef=s.vf_coef,
        ent_coef=s.ent_coef,
        kl_coef=s.kl_coef,
    )
    return (
        impala(env, plain)
        .rename("appo")
        .set("learner.loss", loss)
        .insert(after="train", target=UpdateTarget(every=s.target_update_every))
    )
