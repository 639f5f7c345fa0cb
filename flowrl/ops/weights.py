"""Operators that carry weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from flowrl.errors import SettingError
from flowrl.graph.protocols import Context, Operator, Ref
from flowrl.items import Batch, Trained
from flowrl.resources.learner import LearnerHandle
from flowrl.resources.runners import RunnersHandle


@dataclass(frozen=True)
class SyncWeights(Operator):
    """Publish the learner's weights to the runners; every sample that is asked for from then on uses them. Passes its item on.

    It publishes with the first item at which as many items and steps as are asked for went by since the last time.

    Args:
        every: items between two times.
        every_steps: steps (T x B) of those items.
        learner: whose weights.
        runners: who gets them.
    """

    every: int = 1
    every_steps: int = 0
    learner: Ref[LearnerHandle] = "learner"
    runners: Ref[RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def __post_init__(self) -> None:
        if self.every < 1 or self.every_steps < 0:
            raise SettingError(f"every must be at least 1 and every_steps not negative, got {self}")

    def init(self) -> dict[str, int]:
        """The items and steps since the last time."""
        return {"items": 0, "steps": 0}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Publish if it is due, then pass the item on."""
        held["items"] += 1
        if self.every_steps and isinstance(item, Batch | Trained):
            held["steps"] += item.steps
        if held["items"] >= self.every and held["steps"] >= self.every_steps:
            held.update(items=0, steps=0)
            ctx[self.runners].publish(*ctx[self.learner].weights())
        yield item
