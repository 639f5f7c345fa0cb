"""The only asynchronous edge, and what may stand behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from flowrl.errors import ContractError, SettingError
from flowrl.graph.protocols import Bounds, Context, Operator, Ref, Stateless
from flowrl.learner.learner import LearnerHandle
from flowrl.ops.batch import need
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class Queue(Stateless):
    """Cut the graph: what stands before and what stands behind are stages that go on side by side.

    Args:
        capacity: items that it holds.
        full: what happens to an item that finds no room: it waits (``block``, so the stage before waits too), or the oldest or
            newest item is dropped.
        order: which item comes out first: the oldest (``fifo``) or the newest (``lifo``).
        max_lag: updates that a batch may be old when it comes out; None for any.
        on_stale: what happens to an older one: it is dropped (``drop``), or ends the run with an error (``error``); or there is none, for
            no sample is asked for as long as it could become older (``pace``): sampling then waits for learning.
        learner: whose version is compared with the batch's.
        runners: who is asked later where requests are paced.

    Raises:
        ContractError: a batch is older than `max_lag`, and is not to be dropped.
    """

    capacity: int = 16
    full: Literal["block", "drop_oldest", "drop_newest"] = "block"
    order: Literal["fifo", "lifo"] = "fifo"
    max_lag: int | None = None
    on_stale: Literal["drop", "pace", "error"] = "drop"
    learner: Ref[LearnerHandle] = "learner"
    runners: Ref[RunnersHandle] = "runners"

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise SettingError(f"capacity must be at least 1, got {self.capacity}")
        if self.max_lag is not None and self.max_lag < 0:
            raise SettingError(f"max_lag must not be negative, got {self.max_lag}")
        for name, known in (
            ("full", ("block", "drop_oldest", "drop_newest")),
            ("order", ("fifo", "lifo")),
            ("on_stale", ("drop", "pace", "error")),
        ):
            if getattr(self, name) not in known:
                raise SettingError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

        if self.on_stale == "pace" and (
            self.max_lag is None or (self.full, self.order) != ("block", "fifo")
        ):
            raise SettingError(
                "on_stale='pace' needs max_lag, full='block' and order='fifo': what is dropped or overtaken has no bound to keep"
            )

    @property
    def queue(self) -> Bounds:
        """What it may hold."""
        return Bounds(self.capacity, self.full, self.order, self.max_lag)

    def prepare(self, ctx: Context) -> None:
        """Tell the runners how many updates come of a fragment, if requests are paced."""
        if self.on_stale == "pace" and (updates := self._rate(ctx)):
            ctx[self.runners].pace(self.max_lag or 0, updates)

    def _rate(self, ctx: Context) -> Fraction | None:
        """The updates to a fragment; None while the plan is being made."""
        fragments = ctx.planned(self.runners, "requests")
        return Fraction(ctx.planned(self.learner, "updates"), fragments) if fragments else None

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Any]:
        """One item that was taken out; it goes on unless it is too old."""
        if self.max_lag is not None and (lag := ctx[self.learner].lag(need(batch))) > self.max_lag:
            if self.on_stale == "drop":
                ctx.drop()
                return
            if self.on_stale == "error" or self._rate(ctx):
                way = (
                    "sample faster"
                    if self.on_stale == "error"
                    else "more updates come of a fragment than the plan says"
                )
                raise ContractError(
                    f"a batch is {lag} updates old, more than max_lag={self.max_lag}; {way}, or let it be dropped (on_stale='drop')"
                )
        yield batch


@dataclass(frozen=True)
class MixIn(Operator):
    """Use recent batches again: each that comes is yielded, and behind it the oldest ones that have uses left (IMPACT, Luo et al. 2020).

    Args:
        batches: the most that are kept; the oldest goes first, be it with uses left.
        uses: how often each is yielded in all.
    """

    batches: int = 4
    uses: int = 2

    def __post_init__(self) -> None:
        if self.batches < 1 or self.uses < 1:
            raise SettingError(f"batches and uses must be at least 1, got {self}")

    def init(self) -> list[dict[str, Any]]:
        """The batches kept, the oldest first, and how often each may be used again."""
        return []

    def step(self, held: list[dict[str, Any]], batch: Any, ctx: Context) -> Iterator[Any]:
        """One in, up to `uses` out."""
        again = held[: self.uses - 1]
        for kept in again:
            kept["left"] -= 1
        held.append({"batch": need(batch), "left": self.uses - 1})
        held[:] = [kept for kept in held if kept["left"]][-self.batches :]
        yield batch
        yield from [kept["batch"] for kept in again]
