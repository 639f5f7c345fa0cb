"""Operators that get experience."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from flowrl.graph.protocols import Context, Ref, Stateless
from flowrl.items import Batch
from flowrl.resources.runners import RunnersHandle


@dataclass(frozen=True)
class ParallelSample(Stateless):
    """Ask every runner for a fragment once, wait for all, yield ONE joined batch ``[fragment, runners x envs]``.

    It is one batch on purpose: fragments one by one would let a small `Concat` train between two of the same round.

    Raises:
        EnvironmentFailed: an environment raised, gave NaN, or broke its declared shape or type.
    """

    runners: Ref[RunnersHandle] = "runners"

    source: ClassVar[bool] = True

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Batch]:
        """One round."""
        yield ctx[self.runners].collect()
