"""Ape-X (Horgan et al. 2018): DQN edited. Sampling, drawing and learning go on side by side, over a prioritized replay in shards."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.algos.dqn import DQNSettings, dqn
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph, chain
from flowrl.ops.queue import Queue
from flowrl.ops.replay import InitialPriorities


@dataclass(frozen=True)
class ApexSettings(DQNSettings):
    """The settings of `apex`: those of `dqn`, and what goes on side by side.

    `updates_per_step` None lets learning go as fast as it can; `queue` is in draws, `sync_every` in updates. Environment i of N explores with
    ``epsilon ** (1 + spread x i / (N - 1))``, at first with 1, over `epsilon_steps`. The power of the importance weights stays 0.4, as it
    does in the paper, unless `beta_steps` says otherwise.
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


def apex(env: Make = "CartPole-v1", settings: ApexSettings | None = None) -> Graph:
    """Three stages: sampling into the replay; drawing from it; and behind a queue learning."""
    s = given(settings, ApexSettings)
    local = chain(prio=InitialPriorities(gamma=s.gamma, n_step=s.n_step)) if s.prioritized else None
    return (
        dqn(env, s)
        .rename("apex")
        .set("sample.mode", "async")
        .set("sample.in_flight", s.in_flight)
        .set("sample.local", local)
        .set("runners.explore.spread", s.spread)
        .set("replay.shards", s.shards)
        .move("draw", after=())
        .insert(after="draw", queue=Queue(s.queue_capacity))
        .set("sync.every", s.sync_every)
        .set("sync.wait", False)
    )
