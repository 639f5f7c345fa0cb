"""flowrl: reinforcement learning algorithms as graphs of operators.

A graph shows its plan in numbers, and runs in one process, on Ray or as one XLA program.

>>> import flowrl as fl
>>> print(fl.ppo("CartPole-v1").compile())  # doctest: +SKIP

A module is imported when one of its names is first used: `import flowrl` loads neither jax nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl import envs as envs
    from flowrl import errors as errors
    from flowrl import extend as extend
    from flowrl import losses as losses
    from flowrl import networks as networks
    from flowrl.algos.a2c import A2CSettings as A2CSettings
    from flowrl.algos.a2c import a2c as a2c
    from flowrl.algos.a3c import A3CSettings as A3CSettings
    from flowrl.algos.a3c import a3c as a3c
    from flowrl.algos.apex import ApexSettings as ApexSettings
    from flowrl.algos.apex import apex as apex
    from flowrl.algos.appo import APPOSettings as APPOSettings
    from flowrl.algos.appo import appo as appo
    from flowrl.algos.ars import ARSSettings as ARSSettings
    from flowrl.algos.ars import ars as ars
    from flowrl.algos.bc import BCSettings as BCSettings
    from flowrl.algos.bc import bc as bc
    from flowrl.algos.config import Config as Config
    from flowrl.algos.cql import CQLSettings as CQLSettings
    from flowrl.algos.cql import cql as cql
    from flowrl.algos.ddpg import DDPGSettings as DDPGSettings
    from flowrl.algos.ddpg import ddpg as ddpg
    from flowrl.algos.dqn import DQNSettings as DQNSettings
    from flowrl.algos.dqn import dqn as dqn
    from flowrl.algos.es import ESSettings as ESSettings
    from flowrl.algos.es import es as es
    from flowrl.algos.impala import IMPALASettings as IMPALASettings
    from flowrl.algos.impala import impala as impala
    from flowrl.algos.iql import IQLSettings as IQLSettings
    from flowrl.algos.iql import iql as iql
    from flowrl.algos.marwil import MARWILSettings as MARWILSettings
    from flowrl.algos.marwil import marwil as marwil
    from flowrl.algos.multi_ppo import MultiPPOSettings as MultiPPOSettings
    from flowrl.algos.multi_ppo import multi_ppo as multi_ppo
    from flowrl.algos.pg import PGSettings as PGSettings
    from flowrl.algos.pg import pg as pg
    from flowrl.algos.ppo import PPOSettings as PPOSettings
    from flowrl.algos.ppo import ppo as ppo
    from flowrl.algos.qmix import QMIXSettings as QMIXSettings
    from flowrl.algos.qmix import qmix as qmix
    from flowrl.algos.r2d2 import R2D2Settings as R2D2Settings
    from flowrl.algos.r2d2 import r2d2 as r2d2
    from flowrl.algos.rainbow import RainbowSettings as RainbowSettings
    from flowrl.algos.rainbow import rainbow as rainbow
    from flowrl.algos.sac import SACSettings as SACSettings
    from flowrl.algos.sac import sac as sac
    from flowrl.algos.self_play import self_play as self_play
    from flowrl.algos.td3 import TD3Settings as TD3Settings
    from flowrl.algos.td3 import td3 as td3
    from flowrl.algos.tuned import tuned as tuned
    from flowrl.algos.vdn import VDNSettings as VDNSettings
    from flowrl.algos.vdn import vdn as vdn
    from flowrl.algos.write_dataset import write_dataset as write_dataset
    from flowrl.core.curves import Curves as Curves
    from flowrl.core.items import Row as Row
    from flowrl.debugging.prompt import debug as debug
    from flowrl.graph.graph import Graph as Graph
    from flowrl.graph.graph import chain as chain
    from flowrl.learner.league import League as League
    from flowrl.learner.learner import Learner as Learner
    from flowrl.observe.diff import Diff as Diff
    from flowrl.observe.diff import diff as diff
    from flowrl.observe.exporting import Export as Export
    from flowrl.observe.frozen import Frozen as Frozen
    from flowrl.observe.initial import Init as Init
    from flowrl.observe.match import Match as Match
    from flowrl.observe.match import match as match
    from flowrl.observe.record import Record as Record
    from flowrl.observe.saved_policies import load as load
    from flowrl.observe.saved_policies import load_policies as load_policies
    from flowrl.observe.sinks import Csv as Csv
    from flowrl.observe.sinks import MLflow as MLflow
    from flowrl.observe.sinks import TensorBoard as TensorBoard
    from flowrl.observe.sinks import WandB as WandB
    from flowrl.observe.snapshots import Snapshots as Snapshots
    from flowrl.observe.trained import TrainedPolicy as TrainedPolicy
    from flowrl.offline.dataset import Dataset as Dataset
    from flowrl.offline.writing import DatasetWriter as DatasetWriter
    from flowrl.ops.batch import Advantages as Advantages
    from flowrl.ops.batch import Concat as Concat
    from flowrl.ops.batch import Standardize as Standardize
    from flowrl.ops.evolution import CentredRanks as CentredRanks
    from flowrl.ops.evolution import ParallelEvaluate as ParallelEvaluate
    from flowrl.ops.evolution import TopDirections as TopDirections
    from flowrl.ops.flow import Filter as Filter
    from flowrl.ops.flow import FlatMap as FlatMap
    from flowrl.ops.flow import Gate as Gate
    from flowrl.ops.flow import Map as Map
    from flowrl.ops.flow import Merge as Merge
    from flowrl.ops.flow import Switch as Switch
    from flowrl.ops.flow import UntilReturn as UntilReturn
    from flowrl.ops.gradients import ApplyGradients as ApplyGradients
    from flowrl.ops.gradients import AverageGradients as AverageGradients
    from flowrl.ops.gradients import ComputeGradients as ComputeGradients
    from flowrl.ops.league import AddOpponent as AddOpponent
    from flowrl.ops.league import ChooseOpponents as ChooseOpponents
    from flowrl.ops.offline import ReadDataset as ReadDataset
    from flowrl.ops.offline import WriteDataset as WriteDataset
    from flowrl.ops.queue import MixIn as MixIn
    from flowrl.ops.queue import Queue as Queue
    from flowrl.ops.replay import InitialPriorities as InitialPriorities
    from flowrl.ops.replay import ReplayAdd as ReplayAdd
    from flowrl.ops.replay import ReplaySample as ReplaySample
    from flowrl.ops.replay import UpdatePriorities as UpdatePriorities
    from flowrl.ops.report import Evaluate as Evaluate
    from flowrl.ops.report import Report as Report
    from flowrl.ops.sample import ParallelSample as ParallelSample
    from flowrl.ops.select import Select as Select
    from flowrl.ops.train import TrainOneStep as TrainOneStep
    from flowrl.ops.train import UpdateTarget as UpdateTarget
    from flowrl.ops.weights import SyncWeights as SyncWeights
    from flowrl.page.serving import serve as serve
    from flowrl.replay.replay import Replay as Replay
    from flowrl.resuming import resume as resume
    from flowrl.rl.explore import EpsilonGreedy as EpsilonGreedy
    from flowrl.rl.explore import GaussianNoise as GaussianNoise
    from flowrl.rl.explore import NoisyWeights as NoisyWeights
    from flowrl.rl.explore import RandomStart as RandomStart
    from flowrl.rl.explore import Sampled as Sampled
    from flowrl.rl.optimizer_groups import Optimizers as Optimizers
    from flowrl.rl.optimizers import SGD as SGD
    from flowrl.rl.optimizers import Adam as Adam
    from flowrl.rl.optimizers import Cosine as Cosine
    from flowrl.rl.optimizers import Linear as Linear
    from flowrl.rl.optimizers import Optax as Optax
    from flowrl.rl.optimizers import RMSProp as RMSProp
    from flowrl.rl.policies import Policy as Policy
    from flowrl.rl.team import Scripted as Scripted
    from flowrl.rl.team import Team as Team
    from flowrl.rollout.evaluation import Evaluation as Evaluation
    from flowrl.rollout.runners import Runners as Runners
    from flowrl.running import Run as Run
    from flowrl.runtime.local import LocalRuntime as LocalRuntime
    from flowrl.runtime.members import Sweep as Sweep
    from flowrl.runtime.placement import Actor as Actor
    from flowrl.runtime.ray import RayRuntime as RayRuntime
    from flowrl.runtime.xla import XlaRuntime as XlaRuntime
    from flowrl.seeding.runs import run_seeds as run_seeds
    from flowrl.starting import run as run
    from flowrl.tuning.journal import Trial as Trial
    from flowrl.tuning.spaces import Choice as Choice
    from flowrl.tuning.spaces import LogUniform as LogUniform
    from flowrl.tuning.spaces import RandInt as RandInt
    from flowrl.tuning.spaces import Uniform as Uniform
    from flowrl.tuning.study import Study as Study
    from flowrl.tuning.study import tune as tune

__version__ = "0.1.0"

# The names of each module: the imports above are only read by type checkers and editors.
_HOMES = {
    "algos.a2c": "A2CSettings a2c",
    "algos.a3c": "A3CSettings a3c",
    "algos.apex": "ApexSettings apex",
    "algos.appo": "APPOSettings appo",
    "algos.ars": "ARSSettings ars",
    "algos.bc": "BCSettings bc",
    "algos.config": "Config",
    "algos.ddpg": "DDPGSettings ddpg",
    "algos.cql": "CQLSettings cql",
    "algos.dqn": "DQNSettings dqn",
    "algos.es": "ESSettings es",
    "algos.impala": "IMPALASettings impala",
    "algos.iql": "IQLSettings iql",
    "algos.marwil": "MARWILSettings marwil",
    "algos.multi_ppo": "MultiPPOSettings multi_ppo",
    "algos.pg": "PGSettings pg",
    "algos.ppo": "PPOSettings ppo",
    "algos.qmix": "QMIXSettings qmix",
    "algos.rainbow": "RainbowSettings rainbow",
    "algos.r2d2": "R2D2Settings r2d2",
    "algos.sac": "SACSettings sac",
    "algos.self_play": "self_play",
    "algos.td3": "TD3Settings td3",
    "algos.tuned": "tuned",
    "algos.vdn": "VDNSettings vdn",
    "algos.write_dataset": "write_dataset",
    "core.items": "Row",
    "debugging.prompt": "debug",
    "graph.graph": "Graph chain",
    "learner.learner": "Learner",
    "learner.league": "League",
    "core.curves": "Curves",
    "observe.diff": "Diff diff",
    "observe.exporting": "Export",
    "observe.frozen": "Frozen",
    "observe.initial": "Init",
    "observe.record": "Record",
    "observe.match": "Match match",
    "observe.saved_policies": "load load_policies",
    "observe.snapshots": "Snapshots",
    "observe.sinks": "Csv MLflow TensorBoard WandB",
    "observe.trained": "TrainedPolicy",
    "offline.dataset": "Dataset",
    "offline.writing": "DatasetWriter",
    "ops.batch": "Advantages Concat Standardize",
    "ops.gradients": "ApplyGradients AverageGradients ComputeGradients",
    "ops.league": "AddOpponent ChooseOpponents",
    "ops.evolution": "CentredRanks ParallelEvaluate TopDirections",
    "ops.flow": "Filter FlatMap Gate Map Merge Switch UntilReturn",
    "ops.offline": "ReadDataset WriteDataset",
    "ops.queue": "MixIn Queue",
    "ops.replay": "InitialPriorities ReplayAdd ReplaySample UpdatePriorities",
    "ops.report": "Evaluate Report",
    "ops.sample": "ParallelSample",
    "ops.select": "Select",
    "ops.train": "TrainOneStep UpdateTarget",
    "ops.weights": "SyncWeights",
    "replay.replay": "Replay",
    "rl.explore": "EpsilonGreedy GaussianNoise RandomStart NoisyWeights Sampled",
    "rl.optimizer_groups": "Optimizers",
    "rl.optimizers": "SGD Adam Cosine Linear Optax RMSProp",
    "rl.policies": "Policy",
    "rl.team": "Scripted Team",
    "rollout.evaluation": "Evaluation",
    "rollout.runners": "Runners",
    "page.serving": "serve",
    "resuming": "resume",
    "running": "Run",
    "starting": "run",
    "runtime.local": "LocalRuntime",
    "runtime.members": "Sweep",
    "runtime.placement": "Actor",
    "runtime.ray": "RayRuntime",
    "runtime.xla": "XlaRuntime",
    "seeding.runs": "run_seeds",
    "tuning.journal": "Trial",
    "tuning.spaces": "Choice LogUniform RandInt Uniform",
    "tuning.study": "Study tune",
}
MODULES = ("envs", "errors", "extend", "losses", "networks")
"""Modules of public names beside those of everyday use, which stand here."""

_HOME = {name: f"flowrl.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, *MODULES])  # noqa: PLE0605 - a list of the names above


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"flowrl.{name}")
    if name not in _HOME:
        from flowrl.errors import unknown

        # Python itself asks for names such as __wrapped__, which shall import nothing.
        for module in () if name.startswith("_") else MODULES:
            if name in importlib.import_module(f"flowrl.{module}").__all__:
                raise AttributeError(f"flowrl has no name '{name}'; it is flowrl.{module}.{name}")
        hint = unknown("name", name, __all__).removeprefix("unknown ")
        raise AttributeError(f"flowrl has no {hint}")
    # Once it is a global of this module, the name is found without this function.
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
