"""Conservative Q-learning (CQL, Kumar et al. 2020) on soft actor-critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.learner.learner import Learner
from flowrl.offline.dataset import Dataset
from flowrl.ops.offline import ReadDataset
from flowrl.ops.report import Evaluate, Report
from flowrl.ops.train import TrainOneStep, UpdateTarget
from flowrl.ops.weights import SyncWeights
from flowrl.rl.actor_critics import SACNetwork
from flowrl.rl.offline_losses import CQLLoss
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class CQLSettings(Settings):
    """Settings of `cql`.

    Nothing is sampled: the environment gives the spaces, and evaluations play in it.

    Args:
        data: directory of the dataset, or its id in Minari's local store (default "dataset").
        batch_size: transitions in the batch of one update (default 256).
        lr: learning rate, a number or a schedule such as fl.Linear (default 3e-4).
        tau: share of the newest parameters in each target update; 1 copies them (default 0.005).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 1).
        cql_coef: coefficient of what keeps unseen actions low (default 1.0).
        actions: actions of each kind by which that is estimated (default 10).
        alpha: initial temperature of the entropy (default 1.0).
        target_entropy: entropy to aim at, in nats; None: minus action dimensions (default None).
        hidden: widths of the layers of the default policy (default (256, 256)).
        normalize: scale observations by running moments, in the default policy (default False).
        buffer_size: environment steps of the dataset that memory holds (default 1_000_000).
        evaluate_every: updates between two evaluations (default 1_000).
        episodes: episodes of each evaluation (default 10).
        envs_per_runner: environments in which an evaluation plays (default 8).
        report_every: updates per row of results (default 100).
        policy: policy to train; None: SACNetwork of `alpha` and `normalize` (default None).
    """

    data: str = "dataset"
    batch_size: int = 256
    lr: Rate = 3e-4
    tau: float = 0.005
    gamma: float = 0.99
    n_step: int = 1
    cql_coef: float = 1.0
    actions: int = 10
    alpha: float = 1.0
    target_entropy: float | None = None
    hidden: tuple[int, ...] = (256, 256)
    normalize: bool = False
    buffer_size: int = 1_000_000
    evaluate_every: int = 1_000
    episodes: int = 10
    envs_per_runner: int = 8
    report_every: int = 100
    policy: Policy | None = None


def cql(env: Make = "Pendulum-v1", settings: CQLSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of conservative Q-learning: soft actor-critic from a dataset alone.

    The critics are kept low at actions that the data do not have, so that the policy does not
    follow their errors there (Kumar et al. 2020).

    A run of it ends by its updates: ``until=lambda row: row["updates"] >= 10_000``.

    Args:
        env: id of an environment, or a function that makes one (default "Pendulum-v1").
        settings: settings of the algorithm; None: those of `CQLSettings()` (default None).
        **changes: single settings, such as ``lr=1e-4``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, CQLSettings, changes)
    policy = s.policy or Policy(SACNetwork, alpha=s.alpha, hidden=s.hidden, normalize=s.normalize)
    return Graph(
        "cql",
        runners=Runners(env, policy, envs_per_runner=s.envs_per_runner),
        dataset=Dataset(s.data, n_step=s.n_step, gamma=s.gamma, buffer_size=s.buffer_size),
        learner=Learner(policy, CQLLoss(s.cql_coef, s.actions, s.target_entropy), Adam(s.lr)),
    ).then(
        read=ReadDataset(s.batch_size),
        train=TrainOneStep(shuffle=False),
        target=UpdateTarget(tau=s.tau),
        sync=SyncWeights(every=s.evaluate_every),
        evaluate=Evaluate(every=s.evaluate_every, episodes=s.episodes),
        report=Report(every=s.report_every),
    )
