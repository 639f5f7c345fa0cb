"""Operators that measure: `Report`, which closes Rows, and `Evaluate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from flowrl.core.items import Batch, Filling, Tally, Trained
from flowrl.core.texts import amount
from flowrl.errors import SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref
from flowrl.graph.refs import resource_and_part
from flowrl.graph.settings import check_at_least_1, check_not_negative
from flowrl.rollout.evaluation import MAX_STEPS
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class Report(Operator):
    """Close rows of results; a graph has exactly one such operator.

    A row closes with the first item at which `every` items, `every_steps` steps and `every_seconds`
    seconds passed since the last one. Changing these never changes what is learned.

    Args:
        every: least number of items in a row (default 1).
        every_steps: least number of environment steps (T x B) of those items (default 0).
        every_seconds: least number of seconds between two rows (default 0.0). If it is set, the
            plan's numbers are those per item.
        runners: name of the runners whose episodes are reported (default ``runners``).

    Raises:
        SettingError: a number is out of its range.
    """

    every: int = 1
    every_steps: int = 0
    every_seconds: float = 0.0
    runners: Ref[RunnersHandle] = "runners"

    reports: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least_1(self, "every")
        check_not_negative(self, "every_steps", "every_seconds")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return how many items make a Row, and how many steps and updates are in one."""
        traffic = plan.found.steady[node]
        if not traffic.given:
            return None
        every = Fraction(self.every)
        if self.every_steps or self.every_seconds:
            every = Fraction(traffic.taken, traffic.given)
        counters = ("sampled_steps", "most_sampled_steps", "updates")
        steps, most, updates = (Fraction(plan.total(name), plan.rows) for name in counters)
        # Of whole episodes only the most steps are known.
        sampled = f"<= {amount(steps + most, 'step')}" if most else amount(steps, "step")
        parts = [amount(updates, "update")]
        # A graph that learns from a dataset alone samples none.
        if steps or most or not updates:
            parts.insert(0, sampled)
        return (
            "every item" if every == 1 else f"every {every} items",
            f"1 row = {', '.join(parts)}",
        )

    def init(self) -> dict[str, Any]:
        """Return the items, steps and updates since the last Row, and when that was."""
        return {"items": 0, "steps": 0, "updates": [], "since": None}

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Tally]:
        """Keep what an update returned; with the last item of a Row, yield all of it."""
        held["items"] += 1
        if isinstance(item, Trained):
            held["updates"].append(item)
        if self.every_steps and isinstance(item, Batch | Trained):
            held["steps"] += item.steps
        if held["items"] < self.every or held["steps"] < self.every_steps:
            return
        if self.every_seconds:
            now = ctx.seconds()
            # The first Row's seconds count from the first item that could close it.
            if held["since"] is None:
                held["since"] = np.float64(now)
            if now - held["since"] < self.every_seconds:
                return
            held["since"] = np.float64(now)
        updates = tuple(held["updates"])
        held.update(items=0, steps=0, updates=[])
        yield Tally(updates, ctx[self.runners].episodes())


@dataclass(frozen=True)
class Evaluate(Operator):
    """Play whole episodes with greedy actions in separate environments, and pass the item on.

    The result comes with the next Row as ``eval/return_mean``, ``eval/return_std``,
    ``eval/return_min``, ``eval/return_max``, and ``eval/cut_episodes``: the number of episodes that
    had not ended after `max_steps`, of which the returns until then count.

    Args:
        every: items between two evaluations (default 100).
        episodes: episodes of each evaluation (default 10).
        seed: seed of the environments, the same in each evaluation (default 0).
        max_steps: steps after which an episode is cut off (default 30_000).
        runners: name of the runners that play, with the weights that they have (default
            ``runners``).

    Raises:
        SettingError: a number is out of its range.
    """

    every: int = 100
    episodes: int = 10
    seed: int = 0
    max_steps: int = MAX_STEPS
    runners: Ref[RunnersHandle] = "runners"

    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "every", "episodes", "max_steps")
        if not 0 <= self.seed < 2**32:
            raise SettingError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")

    def review(self, graph: Graph) -> Iterator[str]:
        """Report runners whose results are in no row."""
        for node in graph.nodes:
            report, (whole, _) = node.op, resource_and_part(str(self.runners))
            if isinstance(report, Report) and report.runners not in (self.runners, whole):
                yield (
                    f"lets {self.runners} play, but no row has the result, for {node.name} reports "
                    f"{report.runners}; set runners={str(report.runners)!r}, or {node.name}'s "
                    f"runners={str(self.runners)!r}"
                )

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return what is played, and how often."""
        counts = plan.counts(node)
        if not counts["evaluations"]:
            return None
        each = amount(Fraction(counts["evaluated_episodes"], counts["evaluations"]), "episode")
        return f"plays {each} greedily", plan.a_row(counts["evaluations"], "time")

    def prepare(self, ctx: Context) -> None:
        """Let the runners keep the weights that play, for the best policy of a run."""
        ctx[self.runners].keep_evaluated()

    def init(self) -> dict[str, int]:
        """Return the number of items since the last evaluation."""
        return {"items": Filling(0, self.every)}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Evaluate with every n-th item, then yield the item."""
        held["items"] = Filling.after(held["items"], self.every)
        if held["items"] == 0:
            ctx[self.runners].evaluate(self.episodes, self.seed, self.max_steps)
        yield item
