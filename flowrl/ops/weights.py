"""Operators that carry weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from flowrl.graph.protocols import Context, Ref, Stateless
from flowrl.resources.learner import LearnerHandle
from flowrl.resources.runners import RunnersHandle


@dataclass(frozen=True)
class SyncWeights(Stateless):
    """Publish the learner's weights to the runners; every sample that is asked for from then on uses them. Passes its item on.

    Args:
        learner: whose weights.
        runners: who gets them.
    """

    learner: Ref[LearnerHandle] = "learner"
    runners: Ref[RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """Publish, then pass the item on."""
        ctx[self.runners].publish(*ctx[self.learner].weights())
        yield item
