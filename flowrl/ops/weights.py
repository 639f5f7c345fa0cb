"""`SyncWeights`: publish the learner's weights to the runners."""

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
from flowrl.graph.settings import check_at_least_1, check_not_negative
from flowrl.learner.learner import LearnerHandle
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class SyncWeights(Operator):
    """Publish the learner's weights to the runners, and pass the item on.

    Every sample that is requested from then on uses them. It publishes with the first item at which
    both `every` items and `every_steps` steps came since the last time.

    Args:
        every: items between two publications (default 1).
        every_steps: environment steps (T x B) of those items (default 0).
        to: ``all`` runners, or the ``producer``: only those runners whose samples were trained on
            since the last time (default ``all``).
        wait: whether to wait for the weights to be computed; no sample is then requested with older
            ones (default True). If not, the learner goes on at once, and samples may still be
            requested with the older ones.
        learner: name of the learner whose weights are published (default ``learner``).
        runners: name of the runners that receive them (default ``runners``).

    Raises:
        SettingError: a setting is out of its range.
        ContractError: for `to` ``producer``, the item does not say which runner gave it.
    """

    every: int = 1
    every_steps: int = 0
    to: Literal["all", "producer"] = "all"
    wait: bool = True
    learner: Ref[LearnerHandle] = "learner"
    runners: Ref[RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "every")
        check_not_negative(self, "every_steps")
        if self.to not in ("all", "producer"):
            raise SettingError(f"to must be all or producer, got {self.to!r}")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return from where to where, with how many bytes and how often."""
        counts = plan.counts(node)
        if not counts["publishes"]:
            return None
        size = in_bytes(counts["weight_bytes"] // counts["publishes"])
        return (
            f"{self.learner} -> {self.runners}",
            f"{size}, {plan.a_row(counts['publishes'], 'time')}",
        )

    def init(self) -> dict[str, Any]:
        """Return the items and steps since the last time, and if needed who gave them."""
        return {"items": 0, "steps": 0, "producers": []}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Any]:
        """Publish the weights if it is time, then yield the item."""
        held["items"] += 1
        if self.every_steps and isinstance(item, Batch | Trained):
            held["steps"] += item.steps
        if self.to == "producer":
            held["producers"].append(_producers(item))
        if held["items"] >= self.every and held["steps"] >= self.every_steps:
            # Only the runners whose samples were used get the weights; None stands for all.
            to = np.unique(np.concatenate(held["producers"])) if held["producers"] else None
            # The counts are set back first: a step commits its state before it yields.
            held.update(items=0, steps=0, producers=[])
            ctx[self.runners].publish(*ctx[self.learner].weights(), to=to, wait=self.wait)
        yield item


def _producers(item: Any) -> Any:
    """Return the indices of the runners that gave an item.

    Raises:
        ContractError: it does not say.
    """
    columns: dict[str, Any] = {}
    if isinstance(item, Trained):
        columns = item.feedback
    elif isinstance(item, Batch):
        columns = item.columns
    producers = columns.get("producer")
    if producers is None:
        raise ContractError(
            "the item does not say which runner gave it: it was sampled from a replay "
            "(take to='all'), or lost the column producer "
            "(change batches by batch.with_(...), which keeps the columns)"
        )
    return producers
