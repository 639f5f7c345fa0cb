"""Operators that get experience."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from flowrl.core.items import Batch
from flowrl.core.texts import amount
from flowrl.errors import SettingError, a
from flowrl.graph.graph import Chain, Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref, Stateless, hidden
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class ParallelSample(Stateless):
    """Get fragments from the runners.

    In rounds (``mode="sync"``): ask every runner for a fragment once, wait for all, yield ONE joined batch ``[fragment, runners x envs]``.
    It is one batch on purpose: fragments one by one would let a small `Concat` train between two of the same round. With
    ``mode="async"`` every runner is kept busy, and fragments ``[fragment, envs]`` are yielded as they come.

    Args:
        mode: ``sync`` or ``async``.
        min_fraction: of the runners whose fragments end a round; those of the others are in a later one, with their true version.
        in_flight: requests to each runner at once, if they come as they come.
        local: operators that every fragment goes through where it is sampled, before it is sent: `fl.chain(...)` of such without a state
            that give one batch for each. In the place of a learner they find the weights that acted, so `Advantages` works there.
        runners: who is asked.

    Raises:
        EnvironmentFailed: an environment raised, gave NaN, or broke its declared shape or type.
    """

    mode: Literal["sync", "async"] = "sync"
    min_fraction: float = 1.0
    in_flight: int = 2
    local: Chain | None = None
    runners: Ref[RunnersHandle] = "runners"

    source: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in ("sync", "async"):
            raise SettingError(f"mode must be sync or async, got {self.mode!r}")
        if not 0 < self.min_fraction <= 1:
            raise SettingError(
                f"min_fraction must be above 0 and at most 1, got {self.min_fraction}"
            )
        if self.in_flight < 1:
            raise SettingError(f"in_flight must be at least 1, got {self.in_flight}")
        if self.local is not None and not isinstance(self.local, Chain):
            raise SettingError(f"local must be fl.chain(name=operator, ...), got {a(self.local)}")
        for name, op in (self.local or {}).items():
            if wrong := hidden(op, Operator):
                raise SettingError(f"local: {name}: {wrong}")
            if op.init() is not None or op.source or op.queue or op.reports or op.writes:
                raise SettingError(
                    f"local can't hold {name}={op!r}: only operators without a state or an effect can work at a sampler"
                )

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Of whom, and how much how often."""
        calls, steps = plan.found.steady[node].given, plan.counts(node)["sampled_steps"]
        if not steps:
            return None
        each = amount(Fraction(steps // max(calls, 1)), "step")
        return plan.graph.resources[
            str(self.runners)
        ].describe(), f"{each} a call, {plan.a_row(calls, 'call')}"

    def review(self, graph: Graph) -> Iterator[str]:
        """What is wrong with the operators at the sampler."""
        for name, op in (self.local or {}).items():
            yield from (f"{name}: {text}" for text in op.review(graph))

    def prepare(self, ctx: Context) -> None:
        """Tell the samplers what to do there."""
        if self.local is not None:
            ctx[self.runners].localize(self.local)

    def ready(self, state: None, ctx: Context) -> bool:
        """Whether samples may be asked for, where lag is paced."""
        return ctx[self.runners].may(0.0 if self.mode == "async" else self.min_fraction)

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Batch]:
        """One round, or the next fragment."""
        runners = ctx[self.runners]
        yield (
            runners.next(self.in_flight)
            if self.mode == "async"
            else runners.collect(self.min_fraction)
        )
