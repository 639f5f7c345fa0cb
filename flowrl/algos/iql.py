"""Implicit Q-learning (IQL, Kostrikov et al. 2022)."""

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
from flowrl.rl.offline_losses import IQLLoss
from flowrl.rl.offline_networks import IQLNetwork
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class IQLSettings(Settings):
    """Settings of `iql`.

    Nothing is sampled: the environment gives the spaces, and evaluations play in it.

    Args:
        data: directory of the dataset, or its id in Minari's local store (default "dataset").
        batch_size: transitions in the batch of one update (default 256).
        lr: learning rate, a number or a schedule such as fl.Linear (default 3e-4).
        tau: share of the newest parameters in each target update; 1 copies them (default 0.005).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of each return (default 1).
        expectile: which expectile of the critics the value is, from 0 to 1 (default 0.7).
        beta: how much the advantage counts, the inverse temperature (default 3.0).
        hidden: widths of the layers of the default policy (default (256, 256)).
        normalize: scale observations by running moments, in the default policy (default False).
        buffer_size: environment steps of the dataset that memory holds (default 1_000_000).
        evaluate_every: updates between two evaluations (default 1_000).
        episodes: episodes of each evaluation (default 10).
        envs_per_runner: environments in which an evaluation plays (default 8).
        report_every: updates per row of results (default 100).
        policy: policy to train; None: IQLNetwork of `normalize` (default None).
    """

    data: str = "dataset"
    batch_size: int = 256
    lr: Rate = 3e-4
    tau: float = 0.005
    gamma: float = 0.99
    n_step: int = 1
    expectile: float = 0.7
    beta: float = 3.0
    hidden: tuple[int, ...] = (256, 256)
    normalize: bool = False
    buffer_size: int = 1_000_000
    evaluate_every: int = 1_000
    episodes: int = 10
    envs_per_runner: int = 8
    report_every: int = 100
    policy: Policy | None = None


def iql(env: Make = "Pendulum-v1", settings: IQLSettings | None = None, **changes: Any) -> Graph:
    """Return the graph of implicit Q-learning: critics and a policy from a dataset alone.

    The value is an upper expectile of the critics at the dataset's actions, so no action is judged
    that the data do not have (Kostrikov et al. 2022).

    A run of it ends by its updates: ``until=lambda row: row["updates"] >= 10_000``.

    Args:
        env: id of an environment, or a function that makes one (default "Pendulum-v1").
        settings: settings of the algorithm; None: those of `IQLSettings()` (default None).
        **changes: single settings, such as ``lr=1e-4``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, IQLSettings, changes)
    policy = s.policy or Policy(IQLNetwork, hidden=s.hidden, normalize=s.normalize)
    return Graph(
        "iql",
        runners=Runners(env, policy, envs_per_runner=s.envs_per_runner),
        dataset=Dataset(s.data, n_step=s.n_step, gamma=s.gamma, buffer_size=s.buffer_size),
        learner=Learner(policy, IQLLoss(s.expectile, s.beta), Adam(s.lr)),
    ).then(
        read=ReadDataset(s.batch_size),
        train=TrainOneStep(shuffle=False),
        target=UpdateTarget(tau=s.tau),
        sync=SyncWeights(every=s.evaluate_every),
        evaluate=Evaluate(every=s.evaluate_every, episodes=s.episodes),
        report=Report(every=s.report_every),
    )
