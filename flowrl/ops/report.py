"""Operators that measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from flowrl.errors import SettingError
from flowrl.graph.protocols import Context, Operator, Ref
from flowrl.items import Tally, Trained
from flowrl.resources.runners import RunnersHandle


@dataclass(frozen=True)
class Report(Operator):
    """Close a Row: the clock of a graph, which has exactly one. Changing it never changes what is learned.

    Args:
        every: items that make a Row.
        runners: whose episodes are told of.
    """

    every: int = 1
    runners: Ref[RunnersHandle] = "runners"

    clock: ClassVar[bool] = True
    effect: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SettingError(f"every must be at least 1, got {self.every}")

    def init(self) -> dict[str, Any]:
        """The items and the updates since the last Row."""
        return {"items": 0, "updates": []}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Tally]:
        """Hold what an update did; at the last item of a Row, yield all of it."""
        held["items"] += 1
        if isinstance(item, Trained):
            held["updates"].append(item)
        if held["items"] >= self.every:
            updates = tuple(held["updates"])
            held.update(items=0, updates=[])
            yield Tally(updates, ctx[self.runners].episodes())
