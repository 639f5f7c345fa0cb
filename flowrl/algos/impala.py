"""IMPALA: asynchronous sampling with V-trace (Espeholt et al. 2018).

Sampling never waits for learning; V-trace corrects for the age of the data.
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
from flowrl.ops.batch import Concat
from flowrl.ops.queue import Queue
from flowrl.ops.report import Report
from flowrl.ops.sample import ParallelSample
from flowrl.ops.train import TrainOneStep
from flowrl.ops.weights import SyncWeights
from flowrl.rl.losses import VTraceLoss
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class IMPALASettings(Settings):
    """Settings of `impala`.

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
    """

    num_runners: int = 2
    envs_per_runner: int = 8
    rollout_length: int = 50
    batch_size: int = 500
    in_flight: int = 2
    queue_capacity: int = 16
    max_lag: int | None = None
    epochs: int = 1
    minibatch_size: int | None = None
    lr: Rate = 5e-4
    gamma: float = 0.99
    vtrace_lambda: float = 1.0
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    max_grad_norm: float = 40.0
    report_every: int = 10
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    normalize_rewards: bool = False
    clip_rewards: float | None = None
    policy: Policy | None = None


def impala(
    env: Make = "CartPole-v1", settings: IMPALASettings | None = None, **changes: Any
) -> Graph:
    """Return the graph of IMPALA: two stages, sampling and learning, with a queue between them.

    The runners get new weights after every update, and V-trace corrects for the policy lag
    (Espeholt et al. 2018).

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `IMPALASettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, IMPALASettings, changes)
    policy = s.policy or default_policy(env, normalize=s.normalize, hidden=s.hidden)
    loss = VTraceLoss(
        gamma=s.gamma, vtrace_lambda=s.vtrace_lambda, vf_coef=s.vf_coef, ent_coef=s.ent_coef
    )
    return Graph(
        "impala",
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
        sample=ParallelSample(mode="async", in_flight=s.in_flight),
        batch=Concat(s.batch_size),
        queue=Queue(s.queue_capacity, max_lag=s.max_lag),
        train=TrainOneStep(epochs=s.epochs, minibatch_size=s.minibatch_size),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
