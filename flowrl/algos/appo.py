"""APPO: IMPALA edited. The clipped surrogate around a target network, on V-trace advantages (IMPACT, Luo et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.algos.impala import IMPALASettings, impala
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.ops.train import UpdateTarget
from flowrl.rl.losses import APPOLoss


@dataclass(frozen=True)
class APPOSettings(IMPALASettings):
    """The settings of `appo`: those of `impala`, and how it keeps near its target network."""

    clip_ratio: float = 0.2
    kl_coef: float = 0.0
    target_update_every: int = 2


def appo(env: Make = "CartPole-v1", settings: APPOSettings | None = None) -> Graph:
    """Two stages as in `impala`; the target network is renewed with every so many updates."""
    s = given(settings, APPOSettings)
    own = ("clip_ratio", "kl_coef", "target_update_every")
    plain = IMPALASettings(**{k: v for k, v in vars(s).items() if k not in own})
    loss = APPOLoss(
        clip_ratio=s.clip_ratio,
        gamma=s.gamma,
        vtrace_lambda=s.vtrace_lambda,
        vf_coef=s.vf_coef,
        ent_coef=s.ent_coef,
        kl_coef=s.kl_coef,
    )
    return (
        impala(env, plain)
        .rename("appo")
        .set("learner.loss", loss)
        .insert(after="train", target=UpdateTarget(every=s.target_update_every))
    )
