"""Recurrent replay distributed DQN (R2D2, Kapturowski et al. 2019), for policies that remember.

It is DQN whose replay holds sequences with the carry before each, of which the first rows, the
burn-in, bring the carry up to date with the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
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
from flowrl.rl.recurrent_value_networks import RecurrentQNetwork
from flowrl.rl.sequence_losses import R2D2Loss
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class R2D2Settings(Settings):
    """Settings of `r2d2`.

    Each update samples `batch_size` sequences of ``burn_in + sequence_length`` rows. A sequence
    begins with a rollout, so `rollout_length` says how much adjacent ones overlap. Environment
    steps are those of all environments together.

    Args:
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout, with which a sequence begins (default
            10).
        buffer_size: environment steps that the replay holds (default 100_000).
        batch_size: sequences in the batch of one update (default 32).
        sequence_length: rows of a sequence that are trained on (default 20).
        burn_in: rows before them that only bring the stored carry up to date (default 10).
        learning_starts: environment steps before the first update (default 1_000).
        updates_per_step: updates per environment step; None: one per round (default 0.0125).
        target_update_every: updates between two updates of the target network (default 100).
        tau: share of the newest parameters in each target update; 1 copies them (default 1.0).
        lr: learning rate, a number or a schedule such as fl.Linear (default 1e-3).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 5).
        rescale: learn values on a scale that grows with their square root (default True).
        dueling: separate value and advantages in the network (default True).
        hidden: widths of the fully connected layers before the cell (default (64,)).
        cell: lstm or gru (default "lstm").
        size: width of the cell (default 64).
        prioritized: sample sequences by priority instead of uniformly (default True).
        beta_steps: environment steps over which the exponent of the importance weights rises; 0:
            never (default 0).
        epsilon: probability of a random action once it has fallen from 1 (default 0.05).
        epsilon_steps: environment steps over which epsilon falls from 1 (default 20_000).
        max_grad_norm: largest global norm of the gradients; None: any (default 40.0).
        normalize: scale observations by running moments, in the default policy (default False).
        report_every: updates per row of results (default 100).
        policy: policy to act and to train; None: RecurrentQNetwork of `hidden`, `cell`, `size`,
            `dueling` and `normalize` (default None).
    """

    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 10
    buffer_size: int = 100_000
    batch_size: int = 32
    sequence_length: int = 20
    burn_in: int = 10
    learning_starts: int = 1_000
    updates_per_step: float | None = 0.0125
    target_update_every: int = 100
    tau: float = 1.0
    lr: Rate = 1e-3
    gamma: float = 0.99
    n_step: int = 5
    rescale: bool = True
    dueling: bool = True
    hidden: tuple[int, ...] = (64,)
    cell: str = "lstm"
    size: int = 64
    prioritized: bool = True
    beta_steps: int = 0
    epsilon: float = 0.05
    epsilon_steps: int = 20_000
    max_grad_norm: float | None = 40.0
    normalize: bool = False
    report_every: int = 100
    policy: Policy | None = None


def r2d2(env: Make = "CartPole-v1", settings: R2D2Settings | None = None, **changes: Any) -> Graph:
    """Return the graph of R2D2: sample, add to the replay, sample sequences from it, train.

    The stored carry, the burn-in, the rescaled n-step targets and the priorities of sequences are
    those of Kapturowski et al. (2019).

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `R2D2Settings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, R2D2Settings, changes)
    network = {"hidden": s.hidden, "cell": s.cell, "size": s.size, "dueling": s.dueling}
    policy = s.policy or Policy(RecurrentQNetwork, **network, normalize=s.normalize)
    loss = R2D2Loss(s.gamma, s.n_step, s.burn_in, rescale=s.rescale)
    # Only a prioritized replay keeps the errors of the sequences that were trained on.
    feedback: dict[str, Any] = {"prio": UpdatePriorities()} if s.prioritized else {}
    return Graph(
        "r2d2",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            explore=EpsilonGreedy(end=s.epsilon, steps=s.epsilon_steps),
        ),
        replay=Replay(
            s.buffer_size,
            prioritized=s.prioritized,
            beta_steps=s.beta_steps,
            gamma=s.gamma,
            sequence_length=s.burn_in + s.sequence_length,
        ),
        learner=Learner(policy, loss, Adam(s.lr, max_grad_norm=s.max_grad_norm)),
    ).then(
        sample=ParallelSample(),
        add=ReplayAdd(),
        batch=ReplaySample(
            s.batch_size, learning_starts=s.learning_starts, updates_per_step=s.updates_per_step
        ),
        train=TrainOneStep(shuffle=False),
        **feedback,
        target=UpdateTarget(every=s.target_update_every, tau=s.tau),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
