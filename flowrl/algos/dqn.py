"""Deep Q-learning (DQN, Mnih et al. 2015), and what Rainbow (Hessel et al. 2018) adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowrl.algos.action_values import explore_of, loss_of, policy_of
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
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class DQNSettings(Settings):
    """Settings of `dqn`.

    Each update samples `batch_size` transitions from the replay and takes one gradient step for
    every `minibatch_size` of them. With `prioritized`, the exponent of the importance weights
    rises from 0.4 to 1 over `beta_steps`. Environment steps are those of all environments
    together; a round is one rollout of every runner.

    Args:
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 4).
        buffer_size: environment steps that the replay holds (default 50_000).
        batch_size: transitions in the batch of one update (default 64).
        minibatch_size: transitions per gradient step; None: the whole batch (default None).
        learning_starts: environment steps before the first update (default 1_000).
        updates_per_step: updates per environment step; None: one per round (default 0.125).
        target_update_every: updates between two updates of the target network (default 100).
        tau: share of the newest parameters in each target update; 1 copies them (default 1.0).
        lr: learning rate, a number or a schedule such as fl.Linear (default 1e-3).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 1).
        double: choose the next action with the newest parameters (default True).
        dueling: separate value and advantages in the network (default False).
        distribution: what is learned of a return: its mean ("none"), "c51" or "quantile" (default
            "none").
        atoms: numbers for each distribution (default 51).
        v_min: lowest return of the distributions of "c51" (default -10.0).
        v_max: highest return of the distributions of "c51" (default 10.0).
        noisy: explore by noisy layers of the network, without epsilon (default False).
        hidden: widths of the fully connected layers (default (64, 64)).
        prioritized: sample transitions by priority instead of uniformly (default False).
        beta_steps: environment steps over which the exponent rises; 0: never (default 100_000).
        epsilon: probability of a random action once it has fallen from 1 (default 0.05).
        epsilon_steps: environment steps over which epsilon falls from 1 (default 10_000).
        max_grad_norm: largest global norm of the gradients; None: any (default 10.0).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide sampled rewards by the deviation of returns (default False).
        report_every: updates per row of results (default 100).
        policy: policy to act and to train; None: QNetwork of these settings (default None).
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
    distribution: Literal["none", "c51", "quantile"] = "none"
    atoms: int = 51
    v_min: float = -10.0
    v_max: float = 10.0
    noisy: bool = False
    hidden: tuple[int, ...] = (64, 64)
    prioritized: bool = False
    beta_steps: int = 100_000
    epsilon: float = 0.05
    epsilon_steps: int = 10_000
    max_grad_norm: float | None = 10.0
    normalize: bool = False
    normalize_rewards: bool = False
    report_every: int = 100
    policy: Policy | None = None


def dqn(env: Make = "CartPole-v1", settings: DQNSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of DQN: sample, add to the replay, sample from the replay, train.

    Every ratio between these steps is a setting. The algorithm is that of Mnih et al. (2015) with
    double Q-learning (van Hasselt et al. 2016), and by choice dueling (Wang et al. 2016),
    prioritized (Schaul et al. 2016), distributional (Bellemare et al. 2017, Dabney et al. 2018),
    noisy (Fortunato et al. 2018) and with returns of several steps.

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `DQNSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, DQNSettings, changes)
    policy = policy_of(s)
    # Only a prioritized replay keeps the errors of the transitions that were trained on.
    feedback: dict[str, Any] = {"prio": UpdatePriorities()} if s.prioritized else {}
    return Graph(
        "dqn",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            explore=explore_of(s),
        ),
        replay=Replay(
            s.buffer_size,
            prioritized=s.prioritized,
            beta_steps=s.beta_steps,
            n_step=s.n_step,
            gamma=s.gamma,
            normalize_rewards=s.normalize_rewards,
        ),
        learner=Learner(policy, loss_of(s), Adam(s.lr, max_grad_norm=s.max_grad_norm)),
    ).then(
        sample=ParallelSample(),
        add=ReplayAdd(),
        batch=ReplaySample(
            s.batch_size, learning_starts=s.learning_starts, updates_per_step=s.updates_per_step
        ),
        train=TrainOneStep(minibatch_size=s.minibatch_size, shuffle=False),
        **feedback,
        target=UpdateTarget(every=s.target_update_every, tau=s.tau),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
