"""`Queue`, the only asynchronous edge, and `MixIn`, which may come after one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from flowrl.errors import ContractError, SettingError
from flowrl.graph.bounds import Bounds
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.graph.settings import check_at_least_1
from flowrl.learner.learner import LearnerHandle
from flowrl.ops.batch import need
from flowrl.rollout.handle import RunnersHandle

ON_STALE = ("drop", "pace", "error")
"""What may happen to a batch that is too old."""


@dataclass(frozen=True)
class Queue(Stateless):
    """Bounded queue between two stages, which run side by side.

    The nodes before it are one stage, those after it another.

    Args:
        capacity: items that the queue holds, at least 1 (default 16).
        full: what happens to an item that comes when the queue is full: it waits (``block``, so the
            stage before waits too), or the oldest or the newest item is dropped (``drop_oldest``,
            ``drop_newest``) (default ``block``).
        order: which item comes out first: the oldest (``fifo``) or the newest (``lifo``) (default
            ``fifo``).
        max_lag: largest policy lag, in updates, of a batch that comes out; None: any lag (default
            None).
        on_stale: what happens to a batch beyond `max_lag`: it is dropped (``drop``), or it ends the
            run with an error (``error``); or sampling waits for learning, so that no batch can
            become so old (``pace``) (default ``drop``).
        learner: name of the learner whose policy version is compared with the batch's (default
            ``learner``).
        runners: name of the runners whose requests are delayed by ``pace`` (default ``runners``).

    Raises:
        SettingError: a setting is out of its range, or settings contradict each other.
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
        # The bounds refuse what no queue can do.
        _ = self.queue
        if self.on_stale not in ON_STALE:
            raise SettingError(
                f"on_stale must be one of {', '.join(ON_STALE)}, got {self.on_stale!r}"
            )
        if self.on_stale == "pace" and (
            self.max_lag is None or (self.full, self.order) != ("block", "fifo")
        ):
            raise SettingError(
                "on_stale='pace' needs max_lag, full='block' and order='fifo': "
                "what is dropped or overtaken has no bound to keep"
            )

    @property
    def queue(self) -> Bounds:
        """The bounds of what it may hold."""
        return Bounds(self.capacity, self.full, self.order, self.max_lag)

    def prepare(self, ctx: Context) -> None:
        """Pass the runners the number of updates per rollout, if requests are paced."""
        if self.on_stale == "pace" and (updates := self._updates_per_rollout(ctx)):
            ctx[self.runners].pace(self.max_lag or 0, updates)

    def _updates_per_rollout(self, ctx: Context) -> Fraction | None:
        """Return the updates per rollout; None while the plan is being made."""
        rollouts = ctx.planned(self.runners, "requests")
        return Fraction(ctx.planned(self.learner, "updates"), rollouts) if rollouts else None

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Any]:
        """Yield an item that was taken out, unless it is too old."""
        if self.max_lag is None or (lag := ctx[self.learner].lag(need(batch))) <= self.max_lag:
            yield batch
            return
        if self.on_stale == "drop":
            ctx.drop()
            return
        # While the plan is being made nothing is paced yet: there a stale batch is no error.
        if self.on_stale == "pace" and not self._updates_per_rollout(ctx):
            yield batch
            return
        way = "sample faster"
        if self.on_stale == "pace":
            way = "more updates come of a rollout than the plan says"
        raise ContractError(
            f"a batch is {lag} updates old, more than max_lag={self.max_lag}; {way}, "
            "or let it be dropped (on_stale='drop')"
        )


@dataclass(frozen=True)
class MixIn(Operator):
    """Use recent batches again (IMPACT, Luo et al. 2020).

    Each batch that comes is yielded, and after it the oldest ones that have uses left.

    Args:
        batches: most batches that are kept; the oldest is dropped first, even if it has uses left
            (default 4).
        uses: times that each batch is yielded, the first time included (default 2).

    Raises:
        SettingError: one of them is below 1.
    """

    batches: int = 4
    uses: int = 2

    def __post_init__(self) -> None:
        check_at_least_1(self, "batches", "uses")

    def init(self) -> list[dict[str, Any]]:
        """Return the list of batches kept, the oldest first, each with its uses left."""
        return []

    def step(self, held: list[dict[str, Any]], batch: Any, ctx: Context) -> Iterator[Any]:
        """Yield the batch, and up to `uses` - 1 older ones again."""
        again = held[: self.uses - 1]
        for kept in again:
            kept["left"] -= 1
        held.append({"batch": need(batch), "left": self.uses - 1})
        held[:] = [kept for kept in held if kept["left"]][-self.batches :]
        yield batch
        yield from [kept["batch"] for kept in again]
