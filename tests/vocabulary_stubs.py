"""The part of the field's vocabulary that flowrl lacks.

Settings that print, draw and cut, and do no work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import flowrl as fl


class PoolHandle(fl.extend.Handle):
    """Never opened."""


@dataclass(frozen=True)
class Stub(fl.extend.Stateless):
    """Passes its item on."""

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item


@dataclass(frozen=True)
class StubResource(fl.extend.Resource):
    """A resource that is only looked at."""

    def open(self, site: fl.extend.Site) -> fl.extend.Handle:
        raise NotImplementedError

    def review(self, use: Any) -> Iterator[tuple[str, str]]:
        return iter(())

    def describe(self) -> str:
        return type(self).__name__.lower()


# -- resources


@dataclass(frozen=True)
class Opponents(StubResource):
    size: int

    handle: ClassVar[type[fl.extend.Handle]] = PoolHandle


# -- sources


@dataclass(frozen=True)
class ReadDataset(Stub):
    path: str

    source: ClassVar[bool] = True


@dataclass(frozen=True)
class SetTask(Stub):
    runners: fl.extend.Ref[fl.extend.RunnersHandle] = "runners"

    source: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("runners",)


@dataclass(frozen=True)
class MatchMaker(Stub):
    win_rate: float
    opponents: fl.extend.Ref[PoolHandle] = "opponents"

    source: ClassVar[bool] = True


# -- flow


@dataclass(frozen=True)
class Select(Stub):
    policy: str


@dataclass(frozen=True)
class Loop(Stub):
    times: int
    body: fl.extend.Chain


@dataclass(frozen=True)
class Until:
    counter: str
    value: float


@dataclass(frozen=True)
class Phase(Stub):
    phases: Mapping[str, Until]


# -- training


@dataclass(frozen=True)
class Adapt(Stub):
    lr: float
    learner: fl.extend.Ref[fl.extend.LearnerHandle] = "learner"


@dataclass(frozen=True)
class Snapshot(Stub):
    every: int
    opponents: fl.extend.Ref[PoolHandle] = "opponents"

    writes: ClassVar[tuple[str, ...]] = ("opponents",)
