"""A small PPO recipe, its parts, and the operators that several of these tests put into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import flowrl as fl

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,))


def runners(env="CartPole-v1", **settings):
    return fl.Runners(
        env,
        **{
            "policy": POLICY,
            "num_runners": 2,
            "envs_per_runner": 4,
            "rollout_length": 16,
            **settings,
        },
    )


def learner(loss=None, **settings):
    return fl.Learner(
        **{
            "policy": POLICY,
            "loss": loss or fl.losses.PPOLoss(),
            "optimizer": fl.Adam(),
            **settings,
        }
    )


def recipe(**resources):
    """PPO in which one round is one batch of [16, 8]. Resources given by name replace its own or
    join them."""
    return fl.Graph("g", **{"runners": runners(), "learner": learner(), **resources}).then(
        sample=fl.ParallelSample(),
        batch=fl.Concat(128),
        adv=fl.Advantages(),
        norm=fl.Standardize(),
        train=fl.TrainOneStep(epochs=2, minibatch_size=64),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def line(*, loss=None, **ops):
    """The same resources with other operators."""
    return fl.Graph("g", runners=runners(), learner=learner(loss)).then(**ops)


@dataclass(frozen=True)
class Pass(fl.extend.Stateless):
    """Passes its item on."""

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item


@dataclass(frozen=True)
class Merge(Pass):
    """Takes items from several nodes."""

    joins: ClassVar[bool] = True


@dataclass(frozen=True)
class Queue(Pass):
    """Cuts a graph."""

    queue: ClassVar[fl.extend.Bounds] = fl.extend.Bounds(4)


@dataclass(frozen=True)
class Delay(fl.extend.Operator):
    """Holds `items` items back."""

    items: int = 1

    def init(self) -> list[Any]:
        return []

    def step(self, held: list[Any], item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        held.append(item)
        if len(held) > self.items:
            yield held.pop(0)


@dataclass(frozen=True)
class Counter(fl.extend.Operator):
    """Counts items by a rule of its own, and passes them on."""

    rule: Callable[[int], int]

    def init(self) -> dict[str, int]:
        return {"items": 0}

    def step(self, held: dict[str, int], item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        held["items"] = self.rule(held["items"])
        yield item


@dataclass(frozen=True)
class SyncEvery(fl.extend.Operator):
    """Publishes weights with every n-th item."""

    every: int = 2
    learner: fl.extend.Ref[fl.extend.LearnerHandle] = "learner"
    runners: fl.extend.Ref[fl.extend.RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def init(self) -> dict[str, int]:
        return {"items": 0}

    def step(self, held: dict[str, int], item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        held["items"] = (held["items"] + 1) % self.every
        if held["items"] == 0:
            ctx[self.runners].publish(*ctx[self.learner].weights())
        yield item


@dataclass(frozen=True)
class AnyAgeLoss(fl.losses.PGLoss):
    """A loss that says it may train on old data."""

    on_policy: ClassVar[bool] = False


def same(batch):
    return batch


def halves(batch):
    """A batch cut into two in time's other direction: columns 0..n and n..2n."""
    n = batch.shape[1] // 2
    return [
        fl.extend.Batch(
            {k: v[:, at] for k, v in batch.data.items()},
            {k: v[at] for k, v in batch.columns.items()},
        )
        for at in (slice(n), slice(n, None))
    ]
