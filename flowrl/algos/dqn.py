"""Deep Q-learning (Mnih et al. 2015): double (van Hasselt et al. 2016), dueling (Wang et al. 2016), prioritized (Schaul et al. 2016), n-step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.learner.learner import Learner
from flowrl.ops.replay import ReplayAdd, ReplaySample, UpdatePriorities
from flowrl.ops.report import Report
from flowrl.ops.sample import ParallelSample
from flowrl.ops.train import TrainOneStep, UpdateTarget
from flowrl.ops.weights import SyncWeights
from flowrl.replay.replay import Replay
from flowrl.rl.explore import EpsilonGreedy
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rl.value_losses import DQNLoss
from flowrl.rl.value_networks import QNetwork
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class DQNSettings:
    """The settings of `dqn`. `envs` and `fragment` are per runner; `epsilon_steps` and `start` in steps of all environments together.

    `batch` transitions are drawn `updates_per_step` times a step, and trained on in gradient steps of `minibatch` each (None: of all at once).
    `policy` is in place of the one that `hidden` and `dueling` make. Where draws are `prioritized`, the power of their importance weights rises
    from 0.4 to 1 over `beta_steps` steps of all environments together (0: never).
    """

    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 4
    buffer_size: int = 50_000
    batch_size: int = 64
    minibatch_size: int | None = None
    learning_starts: int = 1_000
    updates_per_step: float | None = 0.125
    target_update_every: int = 100
    tau: float = 1.0
    lr: Rate = 1e-3
    gamma: float = 0.99
    n_step: int = 1
    double: bool = True
    dueling: bool = False
    hidden: tuple[int, ...] = (64, 64)
    prioritized: bool = False
    beta_steps: int = 100_000
    epsilon: float = 0.05
    epsilon_steps: int = 10_000
    max_grad_norm: float | None = 10.0
    report_every: int = 100
    policy: Policy | None = None


def dqn(env: Make = "CartPole-v1", settings: DQNSettings | None = None) -> Graph:
    """Sample, add, draw, train: every rate is written down."""
    s = given(settings, DQNSettings)
    policy = s.policy or Policy(QNetwork, hidden=s.hidden, dueling=s.dueling)
    explore = EpsilonGreedy(end=s.epsilon, steps=s.epsilon_steps)
    feedback: dict[str, Any] = {"prio": UpdatePriorities()} if s.prioritized else {}
    return Graph(
        "dqn",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            explore=explore,
        ),
        replay=Replay(
            s.buffer_size,
            prioritized=s.prioritized,
            beta_steps=s.beta_steps,
            n_step=s.n_step,
            gamma=s.gamma,
        ),
        learner=Learner(
            policy, DQNLoss(double=s.double), Adam(s.lr, max_grad_norm=s.max_grad_norm)
        ),
    ).then(
        sample=ParallelSample(),
        add=ReplayAdd(),
        draw=ReplaySample(
            s.batch_size, learning_starts=s.learning_starts, updates_per_step=s.updates_per_step
        ),
        train=TrainOneStep(minibatch_size=s.minibatch_size, shuffle=False),
        **feedback,
        target=UpdateTarget(every=s.target_update_every, tau=s.tau),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
