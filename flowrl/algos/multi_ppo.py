"""Proximal policy optimisation of several agents (Schulman et al. 2017).

With a central critic it is MAPPO (Yu et al. 2022), without one IPPO (de Witt et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from flowrl.algos.default import widths
from flowrl.algos.ppo import PPOSettings, ppo
from flowrl.algos.separate import policy_names, separated
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.envs.joint import WithState
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.rl.optimizers import Rate
from flowrl.rl.policies import Policy
from flowrl.rl.team_networks import CentralCritic


@dataclass(frozen=True)
class MultiPPOSettings(Settings):
    """Settings of `multi_ppo`.

    They are those of `PPOSettings`, and whose policies there are.

    Args:
        policies: shared, one policy for all agents; separate, one for each; or the name of each
            agent's policy, a mapping by agent or a function of the agent's name (default shared).
        central_critic: whether values are of the global state, too (default False).
        num_runners: number of runners, which sample side by side (default 1).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 128).
        batch_size: turns of agents in the batch of one update of a policy, at least (default 1024).
        epochs: passes over the batch in one update (default 10).
        minibatch_size: turns of agents per gradient step; None: the whole batch (default 128).
        lr: learning rate, a number or a schedule such as fl.Linear (default 3e-4).
        gamma: discount factor per turn of an agent, from 0 to 1 (default 0.99).
        gae_lambda: weight of longer advantage estimates: 0 one step, 1 full returns (default 0.95).
        clip_ratio: how far the probability ratio may move from 1 (default 0.2).
        value_clip: how far a value may move from the old value; None: any distance (default None).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.0).
        target_kl: KL divergence in nats; 1.5 times it ends an update; None: never (default None).
        max_grad_norm: largest global norm of the gradients (default 0.5).
        hidden: widths of the layers of the default policy; None: (64, 64), or 512 after the
            convolutions of a CNN (default None).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide rewards by the running deviation of returns (default False).
        clip_rewards: bound of rewards in training, after scaling; None: no bound (default None).
        policy: policy to act and to train, each of them; None: CentralCritic, or without that a CNN
            for images, else an MLP (default None).
    """

    policies: Literal["shared", "separate"] | Mapping[str, str] | Callable[[str], str] = "shared"
    central_critic: bool = False
    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 128
    batch_size: int = 1024
    epochs: int = 10
    minibatch_size: int | None = 128
    lr: Rate = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_clip: float | None = None
    vf_coef: float = 0.5
    ent_coef: float = 0.0
    target_kl: float | None = None
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    normalize_rewards: bool = False
    clip_rewards: float | None = None
    policy: Policy | None = None


def multi_ppo(
    env: Make = "pettingzoo:mpe2.simple_spread_v3",
    settings: MultiPPOSettings | None = None,
    **changes: Any,
) -> Graph:
    """Return the graph of PPO for several agents, with one policy for all or with several.

    Each policy has a learner of its own, which takes the steps of `ppo` on the turns of its agents.
    With a central critic values are of the global state beside what an agent sees itself, and
    actions of that alone (MAPPO, Yu et al. 2022).

    Args:
        env: environment of several agents: an id, or a function or class that makes one (default
            "pettingzoo:mpe2.simple_spread_v3").
        settings: settings of the algorithm; None: those of `MultiPPOSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, one of its values is out of range, or the
            environment, whose agents' names are needed, has but one.
    """
    s = given(settings, MultiPPOSettings, changes)
    env = WithState(env) if s.central_critic else env
    policy = s.policy
    if policy is None and s.central_critic:
        policy = Policy(CentralCritic, normalize=s.normalize, **widths(s.hidden))
    same = {field.name: getattr(s, field.name) for field in fields(PPOSettings)}
    graph = ppo(env, PPOSettings(**{**same, "policy": policy})).rename("multi_ppo")
    if names := policy_names(env, s.policies):
        return separated(graph, names, None if isinstance(s.policies, str) else s.policies)
    return graph
