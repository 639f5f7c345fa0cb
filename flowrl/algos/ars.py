"""Augmented random search (ARS, Mania et al. 2018): linear policies along the best directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.learner.learner import Learner
from flowrl.ops.evolution import ParallelEvaluate, TopDirections
from flowrl.ops.report import Report
from flowrl.ops.train import TrainOneStep
from flowrl.ops.weights import SyncWeights
from flowrl.rl.evolution import EvolutionLoss
from flowrl.rl.networks import MLP
from flowrl.rl.optimizers import SGD, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class ARSSettings(Settings):
    """Settings of `ars`.

    A perturbation is the weights plus random noise; a pair is one with its mirror image, which
    Mania et al. (2018) call a direction.

    Args:
        num_runners: number of runners, which share the pairs (default 1).
        envs_per_runner: most episodes that a runner plays side by side (default 32).
        pairs: mirrored pairs of perturbations in one update (default 16).
        top: pairs that count, those with the highest of their returns (default 8).
        sigma: standard deviation of the perturbation of each weight (default 0.1).
        episodes: episodes of each perturbation, whose mean return counts (default 1).
        max_steps: environment steps after which an episode is cut (default 1000).
        sampled: sample the actions of the stochastic policy, in place of greedy ones (default
            False).
        lr: learning rate, a number or a schedule such as fl.Linear (default 0.05).
        hidden: widths of the layers of the default policy (default ()).
        normalize: scale observations by running moments, in the default policy: the paper's V2
            (default True).
        report_every: updates per row of results (default 1).
        policy: policy to perturb and to train; None: MLP without hidden layers (default None).
    """

    num_runners: int = 1
    envs_per_runner: int = 32
    pairs: int = 16
    top: int = 8
    sigma: float = 0.1
    episodes: int = 1
    max_steps: int = 1000
    sampled: bool = False
    lr: Rate = 0.05
    hidden: tuple[int, ...] = ()
    normalize: bool = True
    report_every: int = 1
    policy: Policy | None = None


def ars(env: Make = "CartPole-v1", settings: ARSSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of ARS: steps along the best directions, scaled by the returns' deviation.

    It is ES with a linear policy, returns in place of ranks, plain gradient steps, and running
    moments of the observations (Mania et al. 2018, algorithm 2).

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `ARSSettings()` (default None).
        **changes: single settings, such as ``lr=1e-2``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, ARSSettings, changes)
    policy = s.policy or Policy(MLP, hidden=s.hidden, normalize=s.normalize)
    return Graph(
        "ars",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=1,
        ),
        learner=Learner(policy, EvolutionLoss(), SGD(s.lr)),
    ).then(
        evaluate=ParallelEvaluate(
            s.pairs, s.sigma, episodes=s.episodes, max_steps=s.max_steps, sampled=s.sampled
        ),
        rank=TopDirections(s.top),
        train=TrainOneStep(),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
