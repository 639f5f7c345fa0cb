"""The vocabulary that graphs are tried with, some of which flowrl has by now: settings that print, draw and cut, and do no work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import flowrl as fl


class ReplayHandle(fl.Handle):
    """Never opened."""


class PoolHandle(fl.Handle):
    """Never opened."""


@dataclass(frozen=True)
class Stub(fl.Stateless):
    """Passes its item on."""

    def step(self, state: None, item: Any, ctx: fl.Context) -> Iterator[Any]:
        yield item


@dataclass(frozen=True)
class StubResource(fl.Resource):
    """A resource that is only looked at."""

    def open(self, site: fl.Site) -> fl.Handle:
        raise NotImplementedError

    def review(self, use: Any) -> Iterator[tuple[str, str]]:
        return iter(())

    def describe(self) -> str:
        return type(self).__name__.lower()


# -- resources and losses


@dataclass(frozen=True)
class Replay(StubResource):
    capacity: int
    prioritized: bool = False

    handle: ClassVar[type[fl.Handle]] = ReplayHandle

    def describe(self) -> str:
        return f"up to {self.capacity:,} steps"


@dataclass(frozen=True)
class Opponents(StubResource):
    size: int

    handle: ClassVar[type[fl.Handle]] = PoolHandle


@dataclass(frozen=True)
class StubLoss(fl.Loss):
    """A loss that is only looked at."""

    needs: ClassVar[tuple[str, ...]] = ("obs",)
    on_policy: ClassVar[bool] = False

    def __call__(self, policy: Any, params: Any, batch: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class VTraceLoss(StubLoss):
    entropy: float = 0.0


@dataclass(frozen=True)
class APPOLoss(StubLoss):
    clip: float = 0.2


@dataclass(frozen=True)
class QLoss(StubLoss):
    double: bool = True
    gamma: float = 0.99


# -- sources


@dataclass(frozen=True)
class ParallelSample(Stub):
    mode: str = "sync"
    in_flight: int = 1
    local: fl.Chain | None = None
    runners: fl.Ref[fl.RunnersHandle] = "runners"

    source: ClassVar[bool] = True


@dataclass(frozen=True)
class ReplaySample(Stub):
    batch: int
    start: int = 0
    updates_per_step: float | None = None
    replay: fl.Ref[ReplayHandle] = "replay"

    source: ClassVar[bool] = True


@dataclass(frozen=True)
class ReadDataset(Stub):
    path: str

    source: ClassVar[bool] = True


@dataclass(frozen=True)
class ParallelEvaluate(Stub):
    noise: float
    episodes: int
    min_steps: int
    runners: fl.Ref[fl.RunnersHandle] = "runners"

    source: ClassVar[bool] = True


@dataclass(frozen=True)
class SetTask(Stub):
    runners: fl.Ref[fl.RunnersHandle] = "runners"

    source: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("runners",)


@dataclass(frozen=True)
class MatchMaker(Stub):
    win_rate: float
    opponents: fl.Ref[PoolHandle] = "opponents"

    source: ClassVar[bool] = True


# -- flow


@dataclass(frozen=True)
class Queue(Stub):
    capacity: int
    full: str = "block"
    order: str = "fifo"
    max_lag: int | None = None
    on_stale: str = "drop"

    queue: ClassVar[fl.Bounds] = fl.Bounds(16)


@dataclass(frozen=True)
class Merge(Stub):
    weights: Mapping[str, int] | None = None

    joins: ClassVar[bool] = True


@dataclass(frozen=True)
class Zip(Stub):
    joins: ClassVar[bool] = True


@dataclass(frozen=True)
class Select(Stub):
    policy: str


@dataclass(frozen=True)
class MixIn(Stub):
    batches: int
    uses: int


@dataclass(frozen=True)
class Gate(Stub):
    start: int


@dataclass(frozen=True)
class Loop(Stub):
    times: int
    body: fl.Chain


@dataclass(frozen=True)
class Until:
    counter: str
    value: float


@dataclass(frozen=True)
class Phase(Stub):
    phases: Mapping[str, Until]


# -- replay


@dataclass(frozen=True)
class InitialPriorities(Stub):
    pass


@dataclass(frozen=True)
class ReplayAdd(Stub):
    replay: fl.Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)


@dataclass(frozen=True)
class UpdatePriorities(Stub):
    replay: fl.Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)


# -- training


@dataclass(frozen=True)
class ComputeGradients(Stub):
    learner: fl.Ref[fl.LearnerHandle] = "learner"


@dataclass(frozen=True)
class AverageGradients(Stub):
    count: int


@dataclass(frozen=True)
class ApplyGradients(Stub):
    learner: fl.Ref[fl.LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)


@dataclass(frozen=True)
class UpdateTarget(Stub):
    every: int = 0
    every_steps: int = 0
    learner: fl.Ref[fl.LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)


@dataclass(frozen=True)
class EvolutionStep(Stub):
    lr: float
    learner: fl.Ref[fl.LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)


@dataclass(frozen=True)
class Adapt(Stub):
    lr: float
    learner: fl.Ref[fl.LearnerHandle] = "learner"


@dataclass(frozen=True)
class SyncWeights(Stub):
    to: str = "all"
    every: int = 1
    every_steps: int = 0
    wait: bool = True
    learner: fl.Ref[fl.LearnerHandle] = "learner"
    runners: fl.Ref[fl.RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)


@dataclass(frozen=True)
class Snapshot(Stub):
    every: int
    opponents: fl.Ref[PoolHandle] = "opponents"

    writes: ClassVar[tuple[str, ...]] = ("opponents",)
