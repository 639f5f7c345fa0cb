"""DQN with all of double, dueling, prioritized, n-step, distributional and noisy learning.

Hessel et al. (2018) call it Rainbow. It is the graph of `dqn` with other settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowrl.algos.dqn import DQNSettings, dqn
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph


@dataclass(frozen=True)
class RainbowSettings(DQNSettings):
    """Settings of `rainbow`: those of `dqn`, with what it switches on.

    Returns of an environment that lie outside `v_min` and `v_max` are learned as these. Epsilon
    counts only where `noisy` is off.

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
        n_step: environment steps of each return (default 3).
        double: choose the next action with the newest parameters (default True).
        dueling: separate value and advantages in the network (default True).
        distribution: what is learned of a return: its mean ("none"), "c51" or "quantile" (default
            "c51").
        atoms: numbers for each distribution (default 51).
        v_min: lowest return of the distributions of "c51" (default -10.0).
        v_max: highest return of the distributions of "c51" (default 10.0).
        noisy: explore by noisy layers of the network, without epsilon (default True).
        hidden: widths of the fully connected layers (default (64, 64)).
        prioritized: sample transitions by priority instead of uniformly (default True).
        beta_steps: environment steps over which the exponent rises; 0: never (default 100_000).
        epsilon: probability of a random action once it has fallen from 1 (default 0.05).
        epsilon_steps: environment steps over which epsilon falls from 1 (default 10_000).
        max_grad_norm: largest global norm of the gradients; None: any (default 10.0).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide sampled rewards by the deviation of returns (default False).
        report_every: updates per row of results (default 100).
        policy: policy to act and to train; None: QNetwork of these settings (default None).
    """

    n_step: int = 3
    dueling: bool = True
    distribution: Literal["none", "c51", "quantile"] = "c51"
    noisy: bool = True
    prioritized: bool = True


def rainbow(
    env: Make = "CartPole-v1", settings: RainbowSettings | None = None, **changes: Any
) -> Graph:
    """Return the graph of Rainbow: that of DQN with six extensions at once.

    These are double Q-learning, a dueling network, a prioritized replay, returns of several steps,
    distributions of returns (C51) and noisy layers, which explore (Hessel et al. 2018).

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `RainbowSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    return dqn(env, given(settings, RainbowSettings, changes)).rename("rainbow")
