"""QMIX (Rashid et al. 2018): Q-learning of a cooperative team by a monotonic mixer of values.

The mixer sees the global state, which no agent needs in order to act.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowrl.algos.settings import given
from flowrl.algos.vdn import team_dqn
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.rl.optimizers import Rate
from flowrl.rl.policies import Policy
from flowrl.rl.team_networks import TeamQNetwork


@dataclass(frozen=True)
class QMIXSettings(Settings):
    """Settings of `qmix`.

    They are those of `VDNSettings`, and the widths of the mixer.

    Args:
        reward: sum of the agents' rewards, or their mean (default sum).
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
        double: choose the next actions with the newest parameters (default True).
        dueling: separate value and advantages in the network of an agent (default False).
        hidden: widths of the fully connected layers of an agent (default (64, 64)).
        mixing: width of the mixer's layer (default 32).
        hyper_hidden: width of the layer of the mixer's hypernetworks (default 64).
        prioritized: sample transitions by priority instead of uniformly (default False).
        beta_steps: environment steps over which the exponent rises; 0: never (default 100_000).
        epsilon: probability of each agent's random action once it has fallen from 1 (default 0.05).
        epsilon_steps: environment steps over which epsilon falls from 1 (default 10_000).
        max_grad_norm: largest global norm of the gradients; None: any (default 10.0).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide sampled rewards by the running deviation of returns (default
            False).
        report_every: updates per row of results (default 100).
        policy: policy to act and to train; None: TeamQNetwork with a monotonic mixer of these
            settings (default None).
    """

    reward: Literal["sum", "mean"] = "sum"
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
    mixing: int = 32
    hyper_hidden: int = 64
    prioritized: bool = False
    beta_steps: int = 100_000
    epsilon: float = 0.05
    epsilon_steps: int = 10_000
    max_grad_norm: float | None = 10.0
    normalize: bool = False
    normalize_rewards: bool = False
    report_every: int = 100
    policy: Policy | None = None


def qmix(
    env: Make = "pettingzoo:mpe2.simple_spread_v3",
    settings: QMIXSettings | None = None,
    **changes: Any,
) -> Graph:
    """Return the graph of QMIX: that of VDN, with a monotonic mixer of the agents' values.

    The team's action value is a network of its agents' values that never falls where one of these
    rises, so each agent's best action is its part of the best joint action. Its weights come from
    the global state (Rashid et al. 2018).

    Args:
        env: environment of several agents that have equal spaces and Discrete actions, and that act
            at once, as `fl.envs.Joint` takes it; or a `Joint` itself (default
            "pettingzoo:mpe2.simple_spread_v3").
        settings: settings of the algorithm; None: those of `QMIXSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, QMIXSettings, changes)
    policy = s.policy or Policy(
        TeamQNetwork,
        mixer="monotonic",
        hidden=s.hidden,
        dueling=s.dueling,
        normalize=s.normalize,
        mixing=s.mixing,
        hyper_hidden=s.hyper_hidden,
    )
    return team_dqn(env, s, policy, state=True).rename("qmix")
