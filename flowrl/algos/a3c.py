"""Asynchronous advantage actor-critic (A3C, Mnih et al. 2016): gradients come from the runners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph, chain
from flowrl.graph.settings import Settings
from flowrl.learner.learner import Learner
from flowrl.ops.batch import Advantages
from flowrl.ops.gradients import ApplyGradients, ComputeGradients
from flowrl.ops.report import Report
from flowrl.ops.sample import ParallelSample
from flowrl.ops.weights import SyncWeights
from flowrl.rl.losses import PGLoss
from flowrl.rl.optimizers import Rate, RMSProp
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class A3CSettings(Settings):
    """Settings of `a3c`.

    Args:
        num_runners: number of runners, which sample and compute gradients side by side (default 4).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout, of which a gradient is (default 5).
        lr: learning rate, a number or a schedule such as fl.Linear (default 7e-4).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        gae_lambda: weight of longer advantage estimates: 0 one step, 1 full returns (default 1.0).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.01).
        max_grad_norm: largest global norm of the gradients (default 0.5).
        hidden: widths of the layers of the default policy; None: (64, 64), or 512 after the
            convolutions of a CNN (default None).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide rewards by the running deviation of returns (default False).
        report_every: updates per row of results (default 40).
        clip_rewards: bound of rewards in training, after scaling; None: no bound (default None).
        policy: policy to act and to train; None: a CNN for images, else an MLP (default None).
    """

    num_runners: int = 4
    envs_per_runner: int = 8
    rollout_length: int = 5
    lr: Rate = 7e-4
    gamma: float = 0.99
    gae_lambda: float = 1.0
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    normalize_rewards: bool = False
    report_every: int = 40
    clip_rewards: float | None = None
    policy: Policy | None = None


def a3c(env: Make = "CartPole-v1", settings: A3CSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of A3C: each runner computes gradients, and gets the newest weights back.

    No runner waits for another (Mnih et al. 2016, algorithm S3). A gradient is of data of the very
    weights that it was computed with, but is applied to weights that others may have updated since.

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `A3CSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, A3CSettings, changes)
    policy = s.policy or default_policy(env, normalize=s.normalize, hidden=s.hidden)
    local = chain(
        adv=Advantages(gamma=s.gamma, gae_lambda=s.gae_lambda),
        grads=ComputeGradients(),
    )
    return Graph(
        "a3c",
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
        sample=ParallelSample(mode="async", in_flight=1, local=local),
        apply=ApplyGradients(),
        sync=SyncWeights(to="producer"),
        report=Report(every=s.report_every),
    )
