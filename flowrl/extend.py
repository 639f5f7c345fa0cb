"""What operators, resources, runtimes and observers of your own are written with."""

from flowrl.core.events import (
    Dropped,
    Ended,
    Event,
    Observer,
    OperatorRan,
    QueueLevel,
    Restarted,
    RowClosed,
    Started,
    Took,
    Updated,
    Updating,
    Warned,
    WeightsSent,
)
from flowrl.core.items import Batch, Filling, Gradients, MultiBatch, Trained
from flowrl.graph.bounds import Bounds
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import (
    Context,
    Handle,
    Operator,
    Ref,
    Resource,
    Site,
    Stateless,
)
from flowrl.learner.learner import LearnerHandle
from flowrl.replay.handle import ReplayHandle, Stock
from flowrl.rl.explore import Explore
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.requests import AsyncRequests, LateError
from flowrl.runtime.base import Runtime, Session

__all__ = [
    "AsyncRequests",
    "Batch",
    "Bounds",
    "Chain",
    "Context",
    "Dropped",
    "Ended",
    "Event",
    "Explore",
    "Filling",
    "Gradients",
    "Handle",
    "LateError",
    "LearnerHandle",
    "MultiBatch",
    "Observer",
    "Operator",
    "OperatorRan",
    "QueueLevel",
    "Ref",
    "ReplayHandle",
    "Resource",
    "Restarted",
    "RowClosed",
    "RunnersHandle",
    "Runtime",
    "Session",
    "Site",
    "Started",
    "Stateless",
    "Stock",
    "Took",
    "Trained",
    "Updated",
    "Updating",
    "Warned",
    "WeightsSent",
]
