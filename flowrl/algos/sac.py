"""Soft actor-critic with a learned temperature (SAC, Haarnoja et al. 2018b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.learner.learner import Learner
from flowrl.ops.replay import ReplayAdd, ReplaySample
from flowrl.ops.report import Report
from flowrl.ops.sample import ParallelSample
from flowrl.ops.train import TrainOneStep, UpdateTarget
from flowrl.ops.weights import SyncWeights
from flowrl.replay.replay import Replay
from flowrl.rl.actor_critics import SACNetwork
from flowrl.rl.explore import RandomStart, Sampled
from flowrl.rl.optimizer_groups import Optimizers
from flowrl.rl.optimizers import Adam, Optimizer, Rate
from flowrl.rl.policies import Policy
from flowrl.rl.value_losses import SACLoss
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class SACSettings(Settings):
    """Settings of `sac`.

    Environment steps are those of all environments together.

    Args:
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 1).
        rollout_length: steps per environment in one rollout (default 1).
        buffer_size: environment steps that the replay holds (default 1_000_000).
        batch_size: transitions in the batch of one update (default 256).
        minibatch_size: transitions per gradient step; None: the whole batch (default None).
        learning_starts: environment steps before the first update (default 100).
        random_steps: environment steps at first whose actions are random (default 0).
        updates_per_step: updates per environment step (default 1.0).
        tau: share of the newest parameters in each target update; 1 copies them (default 0.005).
        lr: learning rate, a number or a schedule such as fl.Linear (default 3e-4).
        critic_lr: learning rate of the critics; None: `lr` (default None).
        alpha_lr: learning rate of the temperature; None: `lr` (default None).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 1).
        alpha: initial temperature of the entropy (default 1.0).
        target_entropy: entropy to aim at, in nats; None: minus action dimensions (default None).
        hidden: widths of the layers of the default policy (default (256, 256)).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide sampled rewards by the running deviation of returns (default
            False).
        report_every: updates per row of results (default 200).
        policy: policy to act and to train; None: SACNetwork of `alpha` and `normalize` (default
            None).
    """

    num_runners: int = 1
    envs_per_runner: int = 1
    rollout_length: int = 1
    buffer_size: int = 1_000_000
    batch_size: int = 256
    minibatch_size: int | None = None
    learning_starts: int = 100
    random_steps: int = 0
    updates_per_step: float = 1.0
    tau: float = 0.005
    lr: Rate = 3e-4
    critic_lr: Rate | None = None
    alpha_lr: Rate | None = None
    gamma: float = 0.99
    n_step: int = 1
    alpha: float = 1.0
    target_entropy: float | None = None
    hidden: tuple[int, ...] = (256, 256)
    normalize: bool = False
    normalize_rewards: bool = False
    report_every: int = 200
    policy: Policy | None = None


def sac(env: Make = "Pendulum-v1", settings: SACSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of SAC: stochastic actions go into a replay, from which it learns.

    By default there is one update for every environment step. The temperature is learned
    (Haarnoja et al. 2018b).

    Args:
        env: id of an environment, or a function that makes one (default "Pendulum-v1").
        settings: settings of the algorithm; None: those of `SACSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, SACSettings, changes)
    policy = s.policy or Policy(SACNetwork, alpha=s.alpha, hidden=s.hidden, normalize=s.normalize)
    explore = RandomStart(s.random_steps) if s.random_steps else Sampled()
    return Graph(
        "sac",
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
            n_step=s.n_step,
            gamma=s.gamma,
            normalize_rewards=s.normalize_rewards,
        ),
        learner=Learner(policy, SACLoss(s.target_entropy), _optimizer(s)),
    ).then(
        sample=ParallelSample(),
        add=ReplayAdd(),
        batch=ReplaySample(
            s.batch_size, learning_starts=s.learning_starts, updates_per_step=s.updates_per_step
        ),
        train=TrainOneStep(minibatch_size=s.minibatch_size, shuffle=False),
        target=UpdateTarget(tau=s.tau),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )


def _optimizer(s: SACSettings) -> Optimizer | Optimizers:
    """Return one optimiser for all parameters, or one for each group if their rates differ."""
    if s.critic_lr is None and s.alpha_lr is None:
        return Adam(s.lr)
    return Optimizers(
        actor=Adam(s.lr),
        critic=Adam(s.lr if s.critic_lr is None else s.critic_lr),
        temperature=Adam(s.lr if s.alpha_lr is None else s.alpha_lr),
    )
