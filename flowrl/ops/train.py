"""Operators that train: `TrainOneStep`, and `UpdateTarget` for target networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from flowrl.core.items import Batch, Trained
from flowrl.core.texts import amount, plural
from flowrl.errors import ContractError, SettingError
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.graph.refs import resource_and_part
from flowrl.graph.settings import check_at_least_1, check_not_negative
from flowrl.learner.learner import LearnerHandle
from flowrl.ops.batch import Advantages, need
from flowrl.ops.evolution import CentredRanks, ParallelEvaluate, TopDirections
from flowrl.ops.replay import ReplaySample

ADDING = (Advantages, ReplaySample, ParallelEvaluate, TopDirections, CentredRanks)
ADDED = {field: kind.__name__ for kind in ADDING for field in kind.adds}
"""By field that a loss may need, the operator that adds it to a batch."""


@dataclass(frozen=True)
class TrainOneStep(Stateless):
    """Train the learner on each batch, and yield a `Trained`.

    A batch is one update and one compiled call, whatever its epochs.

    Args:
        epochs: passes over the batch in one update (default 1).
        minibatch_size: steps (or transitions) per gradient step; None: the whole batch (default
            None).
        shuffle: whether each epoch shuffles the minibatches again, or takes them in order (default
            True). The latter is enough for what comes in random order, as from a replay.
        learner: name of the learner that is trained (default ``learner``).

    Raises:
        SettingError: a number is below 1.
        ContractError: the batch lacks a field that the loss needs, or `minibatch_size` does not
            divide it.
    """

    epochs: int = 1
    minibatch_size: int | None = None
    shuffle: bool = True
    learner: Ref[LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "epochs", "minibatch_size")

    def _sampled(self, plan: Plan) -> int:
        """Return the steps that were sampled for the learner."""
        learner: Any = plan.graph.resources[str(self.learner)]
        _, policy = resource_and_part(str(getattr(learner, "runners", "")))
        return plan.total(f"sampled_steps/{policy}" if policy else "sampled_steps")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return epochs and minibatches of an update; gradient steps, and uses of a sample."""
        counts = plan.counts(node)
        if not counts["updates"]:
            return None
        steps = counts["gradient_steps"] or counts["most_gradient_steps"]
        epochs = Fraction(counts["used_steps"], counts["trained_steps"])
        batches = amount(Fraction(steps, counts["updates"]) / epochs, "minibatch")
        # Of an update that may stop early only the most gradient steps are known.
        at_most = "<= " if counts["most_gradient_steps"] else ""
        right = f"{at_most}{plan.a_row(steps, 'gradient step')}"
        # What is read from a dataset was sampled by other runs, and of whole episodes only the most
        # steps are known.
        if sampled := self._sampled(plan):
            uses = counts["used_steps"] / sampled
            right += f", each sample used {uses:g} {plural(uses, 'time')}"
        return f"{amount(epochs, 'epoch')} x {batches}", right

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Trained]:
        """Train on the batch, and yield what the update returned."""
        learner = ctx[self.learner]
        if lacking := learner.lacking(need(batch), ADDED):
            raise ContractError(lacking)
        yield learner.update(
            batch, epochs=self.epochs, minibatch_size=self.minibatch_size, shuffle=self.shuffle
        )


@dataclass(frozen=True)
class UpdateTarget(Operator):
    """Move the learner's target network towards its newest parameters, and pass the item on.

    It moves with the first item at which both `every` items and `every_steps` steps came since the
    last time.

    Args:
        every: items between two moves (default 1).
        every_steps: environment steps (T x B) of those items (default 0).
        tau: share of the way that the target network moves (Polyak averaging), above 0; 1 copies
            the parameters (default 1.0).
        learner: name of the learner whose target network moves (default ``learner``).

    Raises:
        SettingError: a number is out of its range.
        ContractError: the learner's loss uses no target network.
    """

    every: int = 1
    every_steps: int = 0
    tau: float = 1.0
    learner: Ref[LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "every")
        check_not_negative(self, "every_steps")
        if not 0 < self.tau <= 1:
            raise SettingError(f"tau must be above 0 and at most 1, got {self.tau}")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return by which share it moves the target, and how often in a Row."""
        share = "" if self.tau == 1 else f" by {self.tau:g}"
        moves = plan.counts(node)["target_updates"]
        return f"moves the target of {self.learner}{share}", plan.a_row(moves, "time")

    def init(self) -> dict[str, Any]:
        """Return the items and steps since the last move, as arrays for XLA programs."""
        return {"items": np.int32(0), "steps": np.int32(0)}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Any]:
        """Move the target if it is time, then yield the item."""
        if (self.every, self.every_steps) == (1, 0):
            ctx[self.learner].update_target(self.tau)
        else:
            items, steps = held["items"] + 1, held["steps"]
            if self.every_steps and isinstance(item, Batch | Trained):
                steps = steps + item.steps
            moves = (items >= self.every) & (steps >= self.every_steps)
            # Within an XLA program these are tracers, of which an `if` can't reset the counts.
            held["items"], held["steps"] = items * ~moves, steps * ~moves
            ctx.when(moves, self.learner, "update_target", self.tau)
        yield item
