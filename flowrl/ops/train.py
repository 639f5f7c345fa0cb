"""Operators that train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from flowrl.core.items import Batch, Trained
from flowrl.core.texts import amount
from flowrl.errors import ContractError, SettingError
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.learner.learner import LearnerHandle
from flowrl.ops.batch import Advantages, need
from flowrl.ops.replay import ReplaySample

ADDED = {field: kind.__name__ for kind in (Advantages, ReplaySample) for field in kind.adds}
"""By field that a loss may need: who adds it to a batch."""


@dataclass(frozen=True)
class TrainOneStep(Stateless):
    """Train the learner on each batch: one update, one compiled call, whatever its epochs. Yields a `Trained`.

    Args:
        epochs: how often each step of the batch is used.
        minibatch_size: steps per gradient step; None for the whole batch.
        shuffle: whether minibatches are drawn anew each epoch, or taken in order: enough for what comes in random order, as from a replay.
        learner: what is trained.

    Raises:
        ContractError: the batch lacks a field that the loss needs, or `minibatch_size` does not divide it.
    """

    epochs: int = 1
    minibatch_size: int | None = None
    shuffle: bool = True
    learner: Ref[LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SettingError(f"epochs must be at least 1, got {self.epochs}")
        if self.minibatch_size is not None and self.minibatch_size < 1:
            raise SettingError(
                f"minibatch_size must be at least 1 or None, got {self.minibatch_size}"
            )

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Epochs and minibatches of an update; gradient steps, and how often a sample is used."""
        counts = plan.counts(node)
        if not counts["updates"]:
            return None
        steps = counts["gradient_steps"] or counts["most_gradient_steps"]
        epochs = Fraction(counts["used_steps"], counts["trained_steps"])
        batches = amount(Fraction(steps, counts["updates"]) / epochs, "minibatch")
        most = "<= " if counts["most_gradient_steps"] else ""
        uses = counts["used_steps"] / max(plan.total("sampled_steps"), 1)
        return (
            f"{amount(epochs, 'epoch')} x {batches}",
            f"{most}{plan.a_row(steps, 'gradient step')}, each sample used {uses:g} time{'s' * (uses != 1)}",
        )

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Trained]:
        """One batch in, what the update did out."""
        learner = ctx[self.learner]
        if lacking := learner.lacking(need(batch), ADDED):
            raise ContractError(lacking)
        yield learner.update(
            batch, epochs=self.epochs, minibatch_size=self.minibatch_size, shuffle=self.shuffle
        )


@dataclass(frozen=True)
class UpdateTarget(Operator):
    """Move the learner's target network towards its newest parameters. Passes its item on.

    It does so with the first item at which as many items and steps as are asked for went by since the last time.

    Args:
        every: items between two moves.
        every_steps: steps (T x B) of those items.
        tau: by which share (Polyak averaging); 1 copies the parameters.
        learner: whose.

    Raises:
        ContractError: the learner's loss uses no target network.
    """

    every: int = 1
    every_steps: int = 0
    tau: float = 1.0
    learner: Ref[LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)

    def __post_init__(self) -> None:
        if self.every < 1 or self.every_steps < 0:
            raise SettingError(
                f"every must be at least 1 and every_steps not negative, got every={self.every}, every_steps={self.every_steps}"
            )
        if not 0 < self.tau <= 1:
            raise SettingError(f"tau must be above 0 and at most 1, got {self.tau}")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """By how much, and how often."""
        by = "" if self.tau == 1 else f" by {self.tau:g}"
        return f"moves the target of {self.learner}{by}", plan.a_row(
            plan.counts(node)["target_updates"], "time"
        )

    def init(self) -> dict[str, Any]:
        """The items and steps since the last move."""
        return {"items": np.int32(0), "steps": np.int32(0)}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Any]:
        """Move it when it is due, then pass the item on."""
        if (self.every, self.every_steps) == (1, 0):
            ctx[self.learner].update_target(self.tau)
        else:
            items, steps = held["items"] + 1, held["steps"]
            if self.every_steps and isinstance(item, Batch | Trained):
                steps = steps + item.steps
            due = (items >= self.every) & (steps >= self.every_steps)
            held["items"], held["steps"] = items * ~due, steps * ~due
            ctx.when(due, self.learner, "update_target", self.tau)
        yield item
