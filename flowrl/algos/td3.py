"""TD3, a deterministic policy gradient with two critics and delays (Fujimoto et al. 2018)."""

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
from flowrl.rl.actor_critics import TD3Network
from flowrl.rl.deterministic_losses import TD3Loss
from flowrl.rl.explore import GaussianNoise, RandomStart
from flowrl.rl.optimizer_groups import Optimizers
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class TD3Settings(Settings):
    """Settings of `td3`.

    Environment steps are those of all environments together.

    Args:
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 1).
        rollout_length: steps per environment in one rollout (default 1).
        buffer_size: environment steps that the replay holds (default 1_000_000).
        batch_size: transitions in the batch of one update (default 256).
        learning_starts: environment steps before the first update, whose actions are random
            (default 1_000).
        updates_per_step: updates per environment step (default 1.0).
        policy_delay: updates of the critics for each one of the policy and of the target network
            (default 2).
        tau: share of the newest parameters in each target update; 1 copies them (default 0.005).
        lr: learning rate of the policy, a number or a schedule such as fl.Linear (default 1e-3).
        critic_lr: learning rate of the critics; None: that of the policy (default None).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 1).
        noise: standard deviation of the noise on actions, where 1 is half their range (default
            0.1).
        target_noise: standard deviation of the noise on target actions (default 0.2).
        target_noise_clip: largest size of the noise on target actions (default 0.5).
        critics: number of critics, of whose values the smallest is the target (default 2).
        hidden: widths of the layers of the policy and of each critic (default (256, 256)).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide sampled rewards by the running deviation of returns (default
            False).
        report_every: updates per row of results (default 200).
        policy: policy to act and to train; None: TD3Network of `critics`, `hidden` and `normalize`
            (default None).
    """

    num_runners: int = 1
    envs_per_runner: int = 1
    rollout_length: int = 1
    buffer_size: int = 1_000_000
    batch_size: int = 256
    learning_starts: int = 1_000
    updates_per_step: float = 1.0
    policy_delay: int = 2
    tau: float = 0.005
    lr: Rate = 1e-3
    critic_lr: Rate | None = None
    gamma: float = 0.99
    n_step: int = 1
    noise: float = 0.1
    target_noise: float = 0.2
    target_noise_clip: float = 0.5
    critics: int = 2
    hidden: tuple[int, ...] = (256, 256)
    normalize: bool = False
    normalize_rewards: bool = False
    report_every: int = 200
    policy: Policy | None = None


def td3(env: Make = "Pendulum-v1", settings: TD3Settings | None = None, **changes: Any) -> Graph:
    """Return the graph of TD3: a deterministic policy with noise fills a replay, and learns of it.

    By default there is one update of both critics for every environment step, and at every second
    one of them the policy and the target network follow (Fujimoto et al. 2018, algorithm 1).

    Args:
        env: id of an environment, or a function that makes one (default "Pendulum-v1").
        settings: settings of the algorithm; None: those of `TD3Settings()` (default None).
        **changes: single settings, such as ``lr=1e-4``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, TD3Settings, changes)
    policy = s.policy or Policy(
        TD3Network, critics=s.critics, hidden=s.hidden, normalize=s.normalize
    )
    optimizer = Optimizers(
        actor=Adam(s.lr),
        critic=Adam(s.lr if s.critic_lr is None else s.critic_lr),
        every={"actor": s.policy_delay},
    )
    return Graph(
        "td3",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=s.rollout_length,
            explore=RandomStart(s.learning_starts, GaussianNoise(s.noise)),
        ),
        replay=Replay(
            s.buffer_size,
            n_step=s.n_step,
            gamma=s.gamma,
            normalize_rewards=s.normalize_rewards,
        ),
        learner=Learner(policy, TD3Loss(s.target_noise, s.target_noise_clip), optimizer),
    ).then(
        sample=ParallelSample(),
        add=ReplayAdd(),
        batch=ReplaySample(
            s.batch_size, learning_starts=s.learning_starts, updates_per_step=s.updates_per_step
        ),
        train=TrainOneStep(shuffle=False),
        target=UpdateTarget(every=s.policy_delay, tau=s.tau),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
