"""Operators that carry weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from flowrl.core.items import Batch, Trained
from flowrl.core.texts import in_bytes
from flowrl.errors import ContractError, SettingError
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref
from flowrl.learner.learner import LearnerHandle
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class SyncWeights(Operator):
    """Publish the learner's weights to the runners; every sample that is asked for from then on uses them. Passes its item on.

    It publishes with the first item at which as many items and steps as are asked for went by since the last time.

    Args:
        every: items between two times.
        every_steps: steps (T x B) of those items.
        to: ``all`` runners, or the ``producer`` (those runners only whose samples were trained since the last time).
        wait: for the weights to be computed; no sample is then asked for with older ones. If not, the learner goes on at once, and samples
            may still be asked for with the older ones.
        learner: whose weights.
        runners: who gets them.
    """

    every: int = 1
    every_steps: int = 0
    to: Literal["all", "producer"] = "all"
    wait: bool = True
    learner: Ref[LearnerHandle] = "learner"
    runners: Ref[RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def __post_init__(self) -> None:
        if self.every < 1 or self.every_steps < 0:
            raise SettingError(f"every must be at least 1 and every_steps not negative, got {self}")
        if self.to not in ("all", "producer"):
            raise SettingError(f"to must be all or producer, got {self.to!r}")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """From where to where; bytes, and how often."""
        counts = plan.counts(node)
        if not counts["publishes"]:
            return None
        size = in_bytes(counts["weight_bytes"] // counts["publishes"])
        return (
            f"{self.learner} -> {self.runners}",
            f"{size}, {plan.a_row(counts['publishes'], 'time')}",
        )

    def init(self) -> dict[str, Any]:
        """The items and steps since the last time, and who gave them, if these are the ones to be told."""
        return {"items": 0, "steps": 0, "producers": []}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Any]:
        """Publish if it is due, then pass the item on."""
        held["items"] += 1
        if self.every_steps and isinstance(item, Batch | Trained):
            held["steps"] += item.steps
        if self.to == "producer":
            held["producers"].append(_producers(item))
        if held["items"] >= self.every and held["steps"] >= self.every_steps:
            to = np.unique(np.concatenate(held["producers"])) if held["producers"] else None
            held.update(items=0, steps=0, producers=[])
            ctx[self.runners].publish(*ctx[self.learner].weights(), to=to, wait=self.wait)
        yield item


def _producers(item: Any) -> Any:
    told = (
        item.feedback
        if isinstance(item, Trained)
        else item.columns
        if isinstance(item, Batch)
        else {}
    )
    found = told.get("producer")
    if found is None:
        raise ContractError(
            "the item does not tell which runner gave it: it was drawn from a replay (take to='all'), or lost the column producer (change batches by "
            "batch.with_(...), which keeps the columns)"
        )
    return found
