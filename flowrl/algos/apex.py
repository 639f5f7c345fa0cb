"""Distributed DQN with a prioritized, sharded replay (Ape-X, Horgan et al. 2018).

It edits the graph of DQN so that sampling, replay and learning go on side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.dqn import DQNSettings, dqn
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph, chain
from flowrl.ops.queue import Queue
from flowrl.ops.replay import InitialPriorities


@dataclass(frozen=True)
class ApexSettings(DQNSettings):
    """Settings of `apex`: those of `dqn`, and those of the parallel stages.

    Environment i of N explores with ``epsilon ** (1 + spread x i / (N - 1))``, where epsilon
    falls from 1 over `epsilon_steps`. The exponent of the importance weights stays at 0.4, as in
    the paper, unless `beta_steps` is above 0. Where `updates_per_step` is None, there are as many
    updates as the learner can take.

    Args:
        num_runners: number of runners, which sample side by side (default 2).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 16).
        buffer_size: environment steps that the replay holds (default 50_000).
        batch_size: transitions in the batch of one update (default 64).
        minibatch_size: transitions per gradient step; None: the whole batch (default None).
        learning_starts: environment steps before the first update (default 1_000).
        updates_per_step: updates per environment step; None: no limit (default 0.125).
        target_update_every: updates between two updates of the target network (default 100).
        tau: share of the newest parameters in each target update; 1 copies them (default 1.0).
        lr: learning rate, a number or a schedule such as fl.Linear (default 1e-3).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 3).
        double: choose the next action with the newest parameters (default True).
        dueling: separate value and advantages in the network (default True).
        distribution: what is learned of a return: its mean ("none"), "c51" or "quantile" (default
            "none").
        atoms: numbers for each distribution (default 51).
        v_min: lowest return of the distributions of "c51" (default -10.0).
        v_max: highest return of the distributions of "c51" (default 10.0).
        noisy: explore by noisy layers of the network, without epsilon (default False).
        hidden: widths of the fully connected layers (default (64, 64)).
        prioritized: sample transitions by priority instead of uniformly (default True).
        beta_steps: environment steps over which the exponent rises; 0: never (default 0).
        epsilon: base of the exploration probabilities once it has fallen from 1 (default 0.4).
        epsilon_steps: environment steps over which epsilon falls from 1 (default 10_000).
        max_grad_norm: largest global norm of the gradients; None: any (default 10.0).
        normalize: scale observations by running moments, in the default policy (default False).
        normalize_rewards: divide sampled rewards by the running deviation of returns (default
            False).
        report_every: updates per row of results (default 100).
        policy: policy to act and to train; None: QNetwork of these settings (default None).
        spread: how much epsilon differs between environments; 0: not at all (default 7.0).
        shards: parts of the replay, each for environments of its own (default 2).
        in_flight: requests to each runner at the same time (default 2).
        queue_capacity: batches that the queue before the learner holds (default 4).
        sync_every: updates between two publications of weights to the runners (default 10).
    """

    num_runners: int = 2
    rollout_length: int = 16
    n_step: int = 3
    dueling: bool = True
    prioritized: bool = True
    beta_steps: int = 0
    epsilon: float = 0.4
    spread: float = 7.0
    shards: int = 2
    in_flight: int = 2
    queue_capacity: int = 4
    sync_every: int = 10


def apex(env: Make = "CartPole-v1", settings: ApexSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of Ape-X: three stages that go on side by side.

    The first samples into the replay, the second samples batches from the replay, and the third,
    after a queue, learns (Horgan et al. 2018).

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `ApexSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, ApexSettings, changes)
    # Without priorities in the replay, nothing would read those that are computed at the runners,
    # which are of rewards as they are, not as the replay scales them, and of values, not of the
    # distributions by which the loss judges.
    local = None
    if s.prioritized and not s.normalize_rewards and s.distribution == "none":
        local = chain(prio=InitialPriorities(gamma=s.gamma, n_step=s.n_step))
    graph = dqn(env, s)
    if not s.noisy:
        graph = graph.set("runners.explore.spread", s.spread)
    return (
        graph.rename("apex")
        .set("sample.mode", "async")
        .set("sample.in_flight", s.in_flight)
        .set("sample.local", local)
        .set("replay.shards", s.shards)
        .move("batch", after=())
        .insert(after="batch", queue=Queue(s.queue_capacity))
        .set("sync.every", s.sync_every)
        .set("sync.wait", False)
    )
