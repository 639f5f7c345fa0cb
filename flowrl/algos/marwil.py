"""Monotonic advantage re-weighted imitation learning (MARWIL, Wang et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.algos.default import default_policy
from flowrl.algos.settings import given
from flowrl.envs.gym_envs import Make
from flowrl.graph.graph import Graph
from flowrl.graph.settings import Settings
from flowrl.learner.learner import Learner
from flowrl.offline.dataset import Dataset
from flowrl.ops.offline import ReadDataset
from flowrl.ops.report import Evaluate, Report
from flowrl.ops.train import TrainOneStep
from flowrl.ops.weights import SyncWeights
from flowrl.rl.offline_losses import MARWILLoss
from flowrl.rl.optimizers import Adam, Rate
from flowrl.rl.policies import Policy
from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class MARWILSettings(Settings):
    """Settings of `marwil`.

    Nothing is sampled: the environment gives the spaces, and evaluations play in it.

    Args:
        data: directory of the dataset, or its id in Minari's local store (default "dataset").
        batch_size: transitions in the batch of one update (default 256).
        lr: learning rate, a number or a schedule such as fl.Linear (default 1e-3).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        beta: how much the advantage counts; 0 is behaviour cloning (default 1.0).
        vf_coef: coefficient of the value loss (default 1.0).
        hidden: widths of the layers of the default policy; None: (64, 64), or 512 after the
            convolutions for images (default None).
        normalize: scale observations by running moments, in the default policy (default False).
        buffer_size: environment steps of the dataset that memory holds (default 1_000_000).
        evaluate_every: updates between two evaluations (default 1_000).
        episodes: episodes of each evaluation (default 10).
        envs_per_runner: environments in which an evaluation plays (default 8).
        report_every: updates per row of results (default 100).
        policy: policy to train; None: a CNN for images, else an MLP (default None).
    """

    data: str = "dataset"
    batch_size: int = 256
    lr: Rate = 1e-3
    gamma: float = 0.99
    beta: float = 1.0
    vf_coef: float = 1.0
    hidden: tuple[int, ...] | None = None
    normalize: bool = False
    buffer_size: int = 1_000_000
    evaluate_every: int = 1_000
    episodes: int = 10
    envs_per_runner: int = 8
    report_every: int = 100
    policy: Policy | None = None


def marwil(
    env: Make = "CartPole-v1", settings: MARWILSettings | None = None, **changes: Any
) -> Graph:
    """Return the graph of MARWIL: imitate a dataset, good actions more than bad ones.

    An action counts by the exponential of its advantage, that of the return to go over the value.
    So the policy may become better than the one that the data are from (Wang et al. 2018).

    A run of it ends by its updates: ``until=lambda row: row["updates"] >= 10_000``.

    Args:
        env: id of an environment, or a function that makes one (default "CartPole-v1").
        settings: settings of the algorithm; None: those of `MARWILSettings()` (default None).
        **changes: single settings, such as ``lr=1e-4``, in place of those of `settings`.

    Raises:
        SettingError: `settings` is of another class, or one of its values is out of range.
    """
    s = given(settings, MARWILSettings, changes)
    policy = s.policy or default_policy(env, normalize=s.normalize, hidden=s.hidden)
    return Graph(
        "marwil",
        runners=Runners(env, policy, envs_per_runner=s.envs_per_runner),
        dataset=Dataset(s.data, n_step=None, gamma=s.gamma, buffer_size=s.buffer_size),
        learner=Learner(policy, MARWILLoss(s.beta, s.vf_coef), Adam(s.lr)),
    ).then(
        read=ReadDataset(s.batch_size),
        train=TrainOneStep(shuffle=False),
        sync=SyncWeights(every=s.evaluate_every),
        evaluate=Evaluate(every=s.evaluate_every, episodes=s.episodes),
        report=Report(every=s.report_every),
    )
