"""Operators that train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from flowrl.errors import SettingError
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.items import Trained
from flowrl.ops.batch import need
from flowrl.resources.learner import LearnerHandle


@dataclass(frozen=True)
class TrainOneStep(Stateless):
    """Train the learner on each batch: one update, one compiled call, whatever its epochs. Yields a `Trained`.

    Args:
        epochs: how often each step of the batch is used.
        minibatch: steps per gradient step, drawn anew each epoch; None for the whole batch.
        learner: what is trained.

    Raises:
        ContractError: the batch lacks a field that the loss needs, or `minibatch` does not divide it.
    """

    epochs: int = 1
    minibatch: int | None = None
    learner: Ref[LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SettingError(f"epochs must be at least 1, got {self.epochs}")
        if self.minibatch is not None and self.minibatch < 1:
            raise SettingError(f"minibatch must be at least 1 or None, got {self.minibatch}")

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Trained]:
        """One batch in, what the update did out."""
        yield ctx[self.learner].update(need(batch), epochs=self.epochs, minibatch=self.minibatch)


@dataclass(frozen=True)
class UpdateTarget(Operator):
    """Move the learner's target network towards its newest parameters, with every so many items. Passes its item on.

    Args:
        every: items between two moves.
        tau: by which share (Polyak averaging); 1 copies the parameters.
        learner: whose.

    Raises:
        ContractError: the learner's loss uses no target network.
    """

    every: int = 1
    tau: float = 1.0
    learner: Ref[LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SettingError(f"every must be at least 1, got {self.every}")
        if not 0 < self.tau <= 1:
            raise SettingError(f"tau must be above 0 and at most 1, got {self.tau}")

    def init(self) -> dict[str, int]:
        """The items since the last move."""
        return {"items": 0}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Move it when it is due, then pass the item on."""
        held["items"] = (held["items"] + 1) % self.every
        if held["items"] == 0:
            ctx[self.learner].update_target(self.tau)
        yield item
