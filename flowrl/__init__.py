"""flowrl: write a reinforcement learning algorithm as a graph of operators, see its plan in numbers, run it anywhere.

>>> import flowrl as fl
>>> print(fl.ppo("CartPole-v1").compile())  # doctest: +SKIP

Nothing is imported until it is asked for: `import flowrl` loads neither jax nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.algos.a2c import A2CSettings, a2c
    from flowrl.algos.pg import PGSettings, pg
    from flowrl.algos.ppo import PPOSettings, ppo
    from flowrl.algos.tuned import tuned
    from flowrl.errors import (
        CheckError,
        ContractError,
        EnvironmentFailed,
        FlowrlError,
        GraphError,
        NotFinite,
        PolicyError,
        RuntimeFailed,
        SaveError,
        SettingError,
    )
    from flowrl.graph.graph import Chain, Graph, chain
    from flowrl.graph.protocols import Context, Handle, Operator, Ref, Resource, Site, Stateless
    from flowrl.graph.values import Spec
    from flowrl.items import Batch, Row, Trained
    from flowrl.ops.batch import Advantages, Concat, Standardize
    from flowrl.ops.flow import Filter, FlatMap, Map
    from flowrl.ops.report import Evaluate, Report
    from flowrl.ops.sample import ParallelSample
    from flowrl.ops.train import TrainOneStep
    from flowrl.ops.weights import SyncWeights
    from flowrl.resources.learner import Learner, LearnerHandle
    from flowrl.resources.runners import Runners, RunnersHandle
    from flowrl.rl.losses import Loss, PGLoss, PPOLoss
    from flowrl.rl.networks import CNN, MLP, action_outputs
    from flowrl.rl.optimizers import SGD, Adam, Cosine, Linear, Optax, RMSProp
    from flowrl.rl.policies import Policy, RunningNorm
    from flowrl.running import Run, run
    from flowrl.runtime.local import LocalRuntime
    from flowrl.runtime.ray import RayRuntime
    from flowrl.saving import TrainedPolicy, load

__version__ = "0.1.0"

_HOMES = {
    "algos.a2c": "A2CSettings a2c",
    "algos.pg": "PGSettings pg",
    "algos.ppo": "PPOSettings ppo",
    "algos.tuned": "tuned",
    "errors": "CheckError ContractError EnvironmentFailed FlowrlError GraphError NotFinite PolicyError RuntimeFailed SaveError SettingError",
    "graph.graph": "Chain Graph chain",
    "graph.protocols": "Context Handle Operator Ref Resource Site Stateless",
    "graph.values": "Spec",
    "items": "Batch Row Trained",
    "ops.batch": "Advantages Concat Standardize",
    "ops.flow": "Filter FlatMap Map",
    "ops.report": "Evaluate Report",
    "ops.sample": "ParallelSample",
    "ops.train": "TrainOneStep",
    "ops.weights": "SyncWeights",
    "resources.learner": "Learner LearnerHandle",
    "resources.runners": "Runners RunnersHandle",
    "rl.losses": "Loss PGLoss PPOLoss",
    "rl.networks": "CNN MLP action_outputs",
    "rl.optimizers": "SGD Adam Cosine Linear Optax RMSProp",
    "rl.policies": "Policy RunningNorm",
    "running": "Run run",
    "runtime.local": "LocalRuntime",
    "runtime.ray": "RayRuntime",
    "saving": "TrainedPolicy load",
}
_HOME = {name: f"flowrl.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605 - a list of the names above


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from flowrl.errors import unknown

        raise AttributeError(f"flowrl has no {unknown('name', name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
