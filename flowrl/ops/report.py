"""Operators that measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from flowrl.core.items import Batch, Tally, Trained
from flowrl.core.texts import amount
from flowrl.errors import SettingError
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref
from flowrl.rollout.evaluation import MAX_STEPS
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class Report(Operator):
    """Close a Row: the clock of a graph, which has exactly one. Changing it never changes what is learned.

    A Row closes with the first item at which as many items, steps and seconds as are asked for went by since the last.

    Args:
        every: items.
        every_steps: steps (T x B) of those items.
        every_seconds: seconds. The plan's numbers are then those per item.
        runners: whose episodes are told of.
    """

    every: int = 1
    every_steps: int = 0
    every_seconds: float = 0.0
    runners: Ref[RunnersHandle] = "runners"

    reports: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.every < 1 or self.every_steps < 0 or self.every_seconds < 0:
            raise SettingError(
                f"every must be at least 1, every_steps and every_seconds not negative; got {self}"
            )

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """How many items make a Row, and what is in one."""
        traffic = plan.found.steady[node]
        if not traffic.given:
            return None
        every = (
            Fraction(traffic.taken, traffic.given)
            if self.every_steps or self.every_seconds
            else Fraction(self.every)
        )
        steps, updates = (Fraction(plan.total(k), plan.rows) for k in ("sampled_steps", "updates"))
        return (
            "every item" if every == 1 else f"every {every} items",
            f"1 row = {amount(steps, 'step')}, {amount(updates, 'update')}",
        )

    def init(self) -> dict[str, Any]:
        """The items, steps and updates since the last Row, and when that was."""
        return {"items": 0, "steps": 0, "updates": [], "since": None}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Tally]:
        """Hold what an update did; at the last item of a Row, yield all of it."""
        held["items"] += 1
        if isinstance(item, Trained):
            held["updates"].append(item)
        if self.every_steps and isinstance(item, Batch | Trained):
            held["steps"] += item.steps
        if held["items"] < self.every or held["steps"] < self.every_steps:
            return
        if self.every_seconds:
            now = ctx.seconds()
            if held["since"] is None:  # the clock starts with the first item
                held["since"] = np.float64(now)
            if now - held["since"] < self.every_seconds:
                return
            held["since"] = np.float64(now)
        updates = tuple(held["updates"])
        held.update(items=0, steps=0, updates=[])
        yield Tally(updates, ctx[self.runners].episodes())


@dataclass(frozen=True)
class Evaluate(Operator):
    """Play whole episodes with the greedy actions, in environments of their own. Passes its item on.

    The result comes with the next Row as ``eval/return_mean``, ``eval/return_std``, ``eval/return_min``, ``eval/return_max``, and
    ``eval/cut_episodes``: how many of them had not ended after `max_steps`, of which the returns until then count.

    Args:
        every: items between two evaluations.
        episodes: episodes of each.
        seed: of the environments, the same each time.
        max_steps: of an episode.
        runners: who plays, with the weights that they have.
    """

    every: int = 100
    episodes: int = 10
    seed: int = 0
    max_steps: int = MAX_STEPS
    runners: Ref[RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def __post_init__(self) -> None:
        if self.every < 1 or self.episodes < 1 or self.max_steps < 1:
            raise SettingError(f"every, episodes and max_steps must be at least 1; got {self}")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """What is played, and how often."""
        counts = plan.counts(node)
        if not counts["evaluations"]:
            return None
        each = amount(Fraction(counts["evaluated_episodes"], counts["evaluations"]), "episode")
        return f"plays {each} greedily", plan.a_row(counts["evaluations"], "time")

    def init(self) -> dict[str, int]:
        """The items since the last evaluation."""
        return {"items": 0}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Evaluate when it is due, then pass the item on."""
        held["items"] = (held["items"] + 1) % self.every
        if held["items"] == 0:
            ctx[self.runners].evaluate(self.episodes, self.seed, self.max_steps)
        yield item
