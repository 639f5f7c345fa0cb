"""Deep deterministic policy gradient (DDPG, Lillicrap et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.settings import given
from flowrl.algos.td3 import TD3Settings, td3
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.rl.optimizers import Rate
from flowrl.rl.policies import Policy


@dataclass(frozen=True)
class DDPGSettings(Settings):
    """Settings of `ddpg`.

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
        tau: share of the newest parameters in each target update; 1 copies them (default 0.005).
        lr: learning rate of the policy, a number or a schedule such as fl.Linear (default 1e-3).
        critic_lr: learning rate of the critic; None: that of the policy (default None).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 1).
        noise: standard deviation of the noise on actions, where 1 is half their range (default
            0.1).
        hidden: widths of the layers of the policy and of the critic (default (256, 256)).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide sampled rewards by the running deviation of returns (default
            False).
        report_every: updates per row of results (default 200).
        policy: policy to act and to train; None: TD3Network with one critic, of `hidden` and
            `normalize` (default None).
    """

    num_runners: int = 1
    envs_per_runner: int = 1
    rollout_length: int = 1
    buffer_size: int = 1_000_000
    batch_size: int = 256
    learning_starts: int = 1_000
    updates_per_step: float = 1.0
    tau: float = 0.005
    lr: Rate = 1e-3
    critic_lr: Rate | None = None
    gamma: float = 0.99
    n_step: int = 1
    noise: float = 0.1
    hidden: tuple[int, ...] = (256, 256)
    normalize: bool = False
    normalize_rewards: bool = False
    report_every: int = 200
    policy: Policy | None = None


def ddpg(env: Make = "Pendulum-v1", settings: DDPGSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of DDPG: TD3 with one critic, without its delays and its smoothed targets.

    The noise on actions is normal, not an Ornstein-Uhlenbeck process: both work as well (Fujimoto
    et al. 2018, section 6.1).

    Args:
        env: id of an environment, or a function that makes one (default "Pendulum-v1").
        settings: settings of the algorithm; None: those of `DDPGSettings()` (default None).
        **changes: single settings, such as ``lr=1e-4``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, DDPGSettings, changes)
    as_td3 = TD3Settings(**vars(s), critics=1, policy_delay=1, target_noise=0.0)
    return td3(env, as_td3).rename("ddpg")
