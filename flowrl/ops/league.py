"""Operators for self-play: `AddOpponent` and `ChooseOpponents`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from flowrl.core.items import Filling, MultiBatch
from flowrl.errors import ContractError, SettingError, a
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref
from flowrl.graph.settings import check_at_least_1, check_not_negative
from flowrl.learner.league import LeagueHandle
from flowrl.learner.standings import Sampling


@dataclass(frozen=True)
class AddOpponent(Operator):
    """Freeze the learner's newest version as an opponent, and pass the item on.

    Args:
        every: items between two frozen versions (default 10).
        league: name of the league that gets them (default ``league``).

    Raises:
        SettingError: `every` is below 1.
    """

    every: int = 10
    league: Ref[LeagueHandle] = "league"

    writes: ClassVar[tuple[str, ...]] = ("league",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "every")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return whose versions it freezes, and how often."""
        learner = getattr(plan.graph.resources[str(self.league)], "learner", "")
        return f"{learner} -> {self.league}", plan.a_row(plan.counts(node)["frozen"], "version")

    def init(self) -> dict[str, int]:
        """Return the items since the last frozen version."""
        return {"items": Filling(0, self.every)}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Freeze a version with every n-th item, then yield the item."""
        held["items"] = Filling.after(held["items"], self.every)
        if held["items"] == 0:
            ctx[self.league].add()
        yield item


@dataclass(frozen=True)
class ChooseOpponents(Operator):
    """Keep the score of a league, choose the opponents of its runners, and pass the item on.

    It stands after `ParallelSample`, where an item holds the batches of all policies. Each runner
    gets an opponent of its own, which plays from the next requested rollout on. An episode in which
    the opponent changed does not count.

    Args:
        every: items between two choices (default 1).
        sampling: how opponents are chosen: ``uniform``; ``newest``, the newest frozen version; or
            ``pfsp``, prioritised fictitious self-play (Vinyals et al. 2019): each with a
            probability proportional to (1 - score) ** power, where the score is the learner's mean
            result of the newest 100 games against it, draws as half a win (default ``pfsp``).
        power: exponent of ``pfsp``: 0 is uniform, and more prefers the hardest (default 2.0).
        newest_share: share of the choices in which it is the newest frozen version in any case
            (default 0.0).
        league: name of the league (default ``league``).

    Raises:
        SettingError: a setting is out of its range.
        ContractError: the item does not hold the batches of all policies.
    """

    every: int = 1
    sampling: Sampling = "pfsp"
    power: float = 2.0
    newest_share: float = 0.0
    league: Ref[LeagueHandle] = "league"

    writes: ClassVar[tuple[str, ...]] = ("league",)

    def __post_init__(self) -> None:
        check_at_least_1(self, "every")
        check_not_negative(self, "power")
        if self.sampling not in ("uniform", "newest", "pfsp"):
            raise SettingError(f"sampling must be uniform, newest or pfsp, got {self.sampling!r}")
        if not 0 <= self.newest_share <= 1:
            raise SettingError(f"newest_share must be from 0 to 1, got {self.newest_share}")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return for whom it chooses, and how many opponents."""
        runners = getattr(plan.graph.resources[str(self.league)], "runners", "")
        number = plan.counts(node)["matches"]
        return f"{self.league} -> {runners} ({self.sampling})", plan.a_row(number, "opponent")

    def init(self) -> dict[str, int]:
        """Return the items since the last choice."""
        return {"items": Filling(0, self.every)}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Keep the score and choose with every n-th item, then yield the item."""
        if not isinstance(item, MultiBatch):
            raise ContractError(
                f"needs the batches of all policies, got {a(item)}; put it right after "
                "ParallelSample, before any Select"
            )
        held["items"] = Filling.after(held["items"], self.every)
        league = ctx[self.league]
        league.match(item)
        if held["items"] == 0:
            league.assign(self.sampling, self.power, self.newest_share)
        yield item
