"""IMPALA (Espeholt et al. 2018): sampling never waits for learning; V-trace corrects for the age of the data."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
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
class IMPALASettings:
    """The settings of `impala`. `envs` and `fragment` are per runner, `batch` in steps, `queue` in batches."""

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
    clip_rewards: float | None = None
    policy: Policy | None = None


def impala(env: Make = "CartPole-v1", settings: IMPALASettings | None = None) -> Graph:
    """Two stages: sampling, and behind a queue learning. Weights go back with every update."""
    s = given(settings, IMPALASettings)
    policy = s.policy or default_policy(env)
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
