"""`Standings`: the frozen versions in a league, how the learner fares against each, who plays."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from flowrl.core.items import MultiBatch
from flowrl.core.keeping import Keeping
from flowrl.learner.matches import Game, Matches
from flowrl.rl.policies import Weights

Array = np.ndarray[Any, Any]
Sampling = Literal["uniform", "newest", "pfsp"]
RECENT = 100
"""The number of newest games over which win rates are means."""
FIRST_ELO = 1200.0
"""The Elo rating with which a learner begins."""
K = 16.0
"""The most that one game changes an Elo rating."""
WIN, DRAW, LOSS = 1.0, 0.5, 0.0
"""The results of a game."""


@dataclass(frozen=True)
class FrozenVersion:
    """A version of a learner's policy that is never trained further."""

    version: Any
    """The learner's policy version when it was frozen."""
    weights: Weights
    elo: float
    """Its Elo rating, which begins as that of the learner."""
    results: tuple[float, ...] = ()
    """The learner's newest results against it."""

    @property
    def score(self) -> float:
        """The mean of the learner's newest results against it, draws as half a win."""
        return sum(self.results) / len(self.results) if self.results else DRAW


def expected_score(one: float, other: float) -> float:
    """Return the mean result that Elo ratings let one expect of the first of two players.

    Source: Elo (1978), The Rating of Chessplayers, Past and Present.

    >>> expected_score(1600, 1200)
    0.9090909090909091
    """
    return 1 / (1 + 10 ** ((other - one) / 400))


def chances(
    scores: Sequence[float], sampling: Sampling, power: float, newest_share: float
) -> Array:
    """Return how likely each frozen version is to be chosen as an opponent, ``[n]``.

    Args:
        scores: the learner's mean result against each of them, the newest last.
        sampling: ``uniform``, ``newest``, or ``pfsp``: by (1 - score) ** power (Vinyals et al.
            2019).
        power: the exponent of `sampling` ``pfsp``.
        newest_share: the share of choices in which it is the newest in any case.
    """
    weights = np.ones(len(scores))
    if sampling == "newest":
        weights = np.arange(len(scores)) == len(scores) - 1
    if sampling == "pfsp":
        weights = (1 - np.asarray(scores)) ** power
    # Where the learner beats all of them, none is harder than another.
    if not weights.sum():
        weights = np.ones(len(scores))
    found: Array = (1 - newest_share) * weights / weights.sum()
    found[-1] += newest_share
    return found


def columns_of(league: str, capacity: int) -> list[str]:
    """Return the names of the columns of a row that a league reports."""
    names = ["games", "excluded", *RATES, "elo"]
    names += [f"{name}/{slot}" for slot in range(capacity) for name in OF_SLOT]
    return [f"{league}/{name}" for name in names]


RATES = {"win_rate": WIN, "draw_rate": DRAW, "loss_rate": LOSS}
"""By column: the result whose share it is."""
OF_SLOT = ("version", *RATES, "elo")
"""The columns of each frozen version."""


class Standings(Keeping):
    """The frozen versions of a league by slot, the learner's results, and who is chosen.

    The first versions stay in the first slots. Once all slots are taken, a new one takes the slot
    of the oldest of the others.

    Args:
        name: the name of the league.
        seed: the run's.
        capacity: slots.
        keep_first: how many of the first versions stay for ever.
        draw_return: the return of an episode that is a draw.
        matches: follows the learner's episodes.
    """

    lasting = ("random", "frozen", "elo", "recent", "games", "excluded", "matches")
    remade = ("name", "capacity", "keep_first", "draw_return")

    def __init__(
        self,
        name: str,
        seed: int,
        capacity: int,
        keep_first: int,
        draw_return: float,
        matches: Matches,
    ) -> None:
        self.name = name
        self.capacity, self.keep_first = capacity, keep_first
        self.draw_return = draw_return
        self.matches = matches
        self.random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.frozen: list[FrozenVersion] = []
        """By slot: a frozen version."""
        self.elo = FIRST_ELO
        """The learner's Elo rating."""
        self.recent: tuple[float, ...] = ()
        """The learner's newest results, whoever was the opponent."""
        self.games = 0
        """Episodes that count, since the start of the run."""
        self.excluded = 0
        """Episodes that do not count, for the opponent changed within them."""

    def close(self) -> None:
        """Do nothing: there are no processes and no files."""

    def begin(self, weights: Weights, version: Any) -> None:
        """Begin with one frozen version, the learner's first."""
        self.frozen = [FrozenVersion(version, weights, self.elo)]

    def add(self, weights: Weights, version: Any) -> bool:
        """Add a version of the learner; return whether it is not there yet."""
        if int(version) in self._slots():
            return False
        new = FrozenVersion(version, weights, self.elo)
        if len(self.frozen) < self.capacity:
            self.frozen.append(new)
        else:
            slot = self._in_order()[self.keep_first]
            self.frozen[slot] = new
        return True

    def _slots(self) -> dict[int, int]:
        """Return the slot of each version."""
        return {int(each.version): slot for slot, each in enumerate(self.frozen)}

    def _in_order(self) -> list[int]:
        """Return the slots by their versions, the oldest first."""
        return [slot for _, slot in sorted(self._slots().items())]

    def choose(
        self, number: int, sampling: Sampling, power: float, newest_share: float
    ) -> list[FrozenVersion]:
        """Choose an opponent for each of a number of runners; `chances` has the other arguments."""
        order = [self.frozen[slot] for slot in self._in_order()]
        likely = chances([each.score for each in order], sampling, power, newest_share)
        return [order[i] for i in self.random.choice(len(order), number, p=likely)]

    def note(self, item: MultiBatch, learner: str, opponent: str) -> None:
        """Take the results of the episodes that ended in a round of rollouts.

        Args:
            item: the batches of both policies.
            learner: the name of the learner's policy.
            opponent: the name of the opponent's.
        """
        self.record(self.matches.ended(item[learner], item[opponent]))

    def record(self, games: Iterable[Game]) -> None:
        """Take the results of games, in their order."""
        for game in games:
            if game.version is None:
                self.excluded += 1
                continue
            won, drawn = game.total > self.draw_return, game.total == self.draw_return
            result = WIN if won else DRAW if drawn else LOSS
            self.games += 1
            self.recent = (*self.recent, result)[-RECENT:]
            # One that left the league may go on playing until the next opponents are chosen.
            slot = self._slots().get(game.version)
            if slot is not None:
                self._record(slot, result)

    def _record(self, slot: int, result: float) -> None:
        """Take a result against the version in a slot."""
        other = self.frozen[slot]
        gain = K * (result - expected_score(self.elo, other.elo))
        results = (*other.results, result)[-RECENT:]
        self.elo += gain
        self.frozen[slot] = replace(other, elo=other.elo - gain, results=results)

    def columns(self) -> dict[str, float]:
        """Return what a row reports, by the names of `columns_of`; NaN where there is nothing."""
        found = dict.fromkeys(columns_of(self.name, self.capacity), math.nan)
        overall = {"games": self.games, "excluded": self.excluded, "elo": self.elo}
        found |= {f"{self.name}/{name}": float(x) for name, x in overall.items()}
        found |= {f"{self.name}/{name}": x for name, x in _rates(self.recent).items()}
        for slot, each in enumerate(self.frozen):
            of_slot = {"version": float(each.version), "elo": each.elo, **_rates(each.results)}
            found |= {f"{self.name}/{name}/{slot}": x for name, x in of_slot.items()}
        return found


def _rates(results: Sequence[float]) -> dict[str, float]:
    """Return the share of each result; NaN where there is none."""
    if not results:
        return dict.fromkeys(RATES, math.nan)
    return {name: results.count(result) / len(results) for name, result in RATES.items()}


class StandingsStub:
    """What stands for the standings in the abstract trace: the newest version is always chosen.

    Args:
        name: the name of the league.
        capacity: slots.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.names = columns_of(name, capacity)
        self.newest: FrozenVersion | None = None

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def begin(self, weights: Weights, version: Any) -> None:
        """Begin with the learner's first version."""
        self.newest = FrozenVersion(version, weights, FIRST_ELO)

    def add(self, weights: Weights, version: Any) -> bool:
        """Take the learner's newest version; return whether it is another one."""
        is_new = self.newest is None or version != self.newest.version
        self.newest = FrozenVersion(version, weights, FIRST_ELO)
        return is_new

    def choose(self, number: int, *how: Any) -> list[FrozenVersion | None]:
        """Choose the newest version for each runner."""
        return [self.newest] * number

    def note(self, *what: Any) -> None:
        """Do nothing: shapes have no results."""

    def columns(self) -> dict[str, float]:
        """Return the columns of a row, without numbers."""
        return dict.fromkeys(self.names, math.nan)
