"""Operators around a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from flowrl.errors import ContractError, SettingError, a
from flowrl.graph.plan import Plan, amount
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.items import Batch, Trained
from flowrl.ops.batch import need
from flowrl.resources.replay_handle import ReplayHandle


@dataclass(frozen=True)
class ReplayAdd(Stateless):
    """Add every batch of experience to the replay. Passes its item on.

    Args:
        replay: what it is added to.

    Raises:
        ContractError: a field or column that a replay needs is missing.
    """

    replay: Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Add it, then pass it on."""
        ctx[self.replay].add(need(batch))
        yield batch


@dataclass(frozen=True)
class ReplaySample(Operator):
    """Draw batches ``[1, batch]`` from the replay: behind `ReplayAdd` with every item, or at a start of its own.

    With `updates_per_step` the ratio is kept exactly: so many draws for every step that comes from `start` on, what is left over carried to the
    next time. The replay ratio, samples drawn for each step of an environment, is ``batch x updates_per_step``.

    Args:
        batch: transitions.
        start: steps that must have come before the first draw.
        updates_per_step: draws for each step (a fraction); None for one with each item, or at a start for as many as what follows can take.
        replay: what is drawn from.
    """

    batch: int
    start: int = 1
    updates_per_step: float | None = None
    replay: Ref[ReplayHandle] = "replay"

    source: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.batch < 1 or self.start < 1:
            raise SettingError(f"batch and start must be at least 1, got batch={self.batch}, start={self.start}")
        if self.updates_per_step is not None and self.updates_per_step <= 0:
            raise SettingError(f"updates_per_step must be above 0 or None, got {self.updates_per_step}")

    @property
    def ratio(self) -> Fraction | None:
        """The draws for a step, exactly: 0.1 is 1/10, and 1/3 is 1/3."""
        return None if self.updates_per_step is None else Fraction(self.updates_per_step).limit_denominator(1_000_000)

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """How much how often, and the replay ratio."""
        counts = plan.counts(node)
        if not counts["draws"]:
            return None
        ratio = counts["drawn_steps"] / max(plan.total("added_steps"), 1)
        return (
            f"{amount(Fraction(self.batch), 'step')} a draw, {plan.a_row(counts['draws'], 'draw')}",
            f"replay ratio {ratio:g}: steps drawn for each that is added",
        )

    def init(self) -> dict[str, int]:
        """What is left over, in parts of a draw."""
        return {"left": 0}

    def prepare(self, ctx: Context) -> None:
        """Say what is waited for."""
        ctx[self.replay].expect(ctx.name, self.start, self.updates_per_step is not None)

    def ready(self, held: dict[str, int], ctx: Context) -> bool:
        """Whether a draw is due."""
        replay, ratio = ctx[self.replay], self.ratio
        if ratio is None:
            return replay.holds(self.start)
        return held["left"] + replay.fresh(ctx.name) * ratio.numerator >= ratio.denominator

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Batch]:
        """What is due."""
        replay, ratio = ctx[self.replay], self.ratio
        if ratio is None:
            draws = int(replay.holds(self.start))
        else:
            draws, held["left"] = divmod(held["left"] + replay.take(ctx.name) * ratio.numerator, ratio.denominator)
        for _ in range(draws):
            yield replay.sample(self.batch)


@dataclass(frozen=True)
class UpdatePriorities(Stateless):
    """Tell the replay how far off each transition was that an update trained on. Passes its item on.

    Args:
        replay: where they were drawn.

    Raises:
        ContractError: the item does not tell, or the replay keeps no priorities.
    """

    replay: Ref[ReplayHandle] = "replay"

    writes: ClassVar[tuple[str, ...]] = ("replay",)

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Of how many steps."""
        return f"priorities -> {self.replay}", plan.a_row(plan.counts(node)["prioritized_steps"], "step")

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Trained]:
        """Tell it, then pass the item on."""
        if not isinstance(item, Trained):
            raise ContractError(f"needs what an update gives, got {a(item)}; put it behind TrainOneStep")
        if missing := {"slot", "priority"} - set(item.feedback):
            what = "the batch was drawn without priorities" if "slot" in missing else "the loss tells no priority of each sample"
            raise ContractError(f"{what}; take Replay(..., prioritized=True) and a loss such as DQNLoss, or remove this operator")
        ctx[self.replay].prioritize(item.feedback)
        yield item
