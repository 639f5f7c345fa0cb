"""Evolution strategies (ES, Salimans et al. 2017): mirrored sampling, centred ranks and Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.learner.learner import Learner
from flowrl.ops.evolution import CentredRanks, ParallelEvaluate
from flowrl.ops.report import Report
from flowrl.ops.train import TrainOneStep
from flowrl.ops.weights import SyncWeights
from flowrl.rl.evolution import EvolutionLoss
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class ESSettings(Settings):
    """Settings of `es`.

    A perturbation is the weights plus random noise; a pair is one with its mirror image.

    Args:
        num_runners: number of runners, which share the pairs (default 1).
        envs_per_runner: most episodes that a runner plays side by side (default 32).
        pairs: mirrored pairs of perturbations in one update (default 20).
        sigma: standard deviation of the perturbation of each weight (default 0.1).
        episodes: episodes of each perturbation, whose mean return counts (default 1).
        max_steps: environment steps after which an episode is cut (default 1000).
        sampled: sample the actions of the stochastic policy, in place of greedy ones (default
            False).
        lr: learning rate, a number or a schedule such as fl.Linear (default 0.03).
        weight_decay: coefficient of the decay of weights by Adam; 0: none (default 0.0).
        hidden: widths of the layers of the default policy; None: (64, 64), or 512 after the
            convolutions of a CNN (default None).
        normalize: scale observations by running moments, in the default policy (default False).
        report_every: updates per row of results (default 1).
        policy: policy to perturb and to train; None: a CNN for images, else an MLP (default None).
    """

    num_runners: int = 1
    envs_per_runner: int = 32
    pairs: int = 20
    sigma: float = 0.1
    episodes: int = 1
    max_steps: int = 1000
    sampled: bool = False
    lr: Rate = 0.03
    weight_decay: float = 0.0
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    report_every: int = 1
    policy: Policy | None = None


def es(env: Make = "CartPole-v1", settings: ESSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of ES: a gradient from the returns of perturbed weights, and nothing else.

    Whole episodes are played with perturbed weights. Their ranks weigh the noise of each, which is
    made again from its seed (Salimans et al. 2017).

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `ESSettings()` (default None).
        **changes: single settings, such as ``lr=1e-3``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, ESSettings, changes)
    policy = s.policy or default_policy(env, normalize=s.normalize, hidden=s.hidden)
    return Graph(
        "es",
        runners=Runners(
            env,
            policy,
            num_runners=s.num_runners,
            envs_per_runner=s.envs_per_runner,
            rollout_length=1,
        ),
        learner=Learner(policy, EvolutionLoss(), Adam(s.lr, weight_decay=s.weight_decay)),
    ).then(
        evaluate=ParallelEvaluate(
            s.pairs, s.sigma, episodes=s.episodes, max_steps=s.max_steps, sampled=s.sampled
        ),
        rank=CentredRanks(),
        train=TrainOneStep(),
        sync=SyncWeights(),
        report=Report(every=s.report_every),
    )
