"""`Matches`: which episodes of a learner ended, how, and against which version of its opponent."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flowrl.core.items import Batch
from flowrl.core.keeping import Keeping
from flowrl.core.remote import near

Array = np.ndarray[Any, Any]
NONE = np.iinfo(np.int32).max
"""The oldest version of an episode in which no opponent acted yet; the newest is then -1."""
FIELDS = ("reward", "valid", "terminated", "truncated")
COLUMNS = ("version", "last_version", "cut", "env", "first")


class Game(NamedTuple):
    """An episode of one of the learner's agents that ended."""

    total: float
    """The sum of its rewards."""
    version: int | None
    """The policy version of its opponent; None where that changed within the episode."""


class Side(NamedTuple):
    """What a batch says of how one policy's episodes went, in arrays of the host."""

    data: dict[str, Array]
    columns: dict[str, Array]
    ends: Array
    """``bool[T, B]``, the rows that end an episode."""
    goes_on: Array
    """``bool[B]``, whether the last row is of an episode that has not ended."""

    @staticmethod
    def of(batch: Batch) -> Side:
        """Return what matters of a batch of several agents' runners."""
        data = near({name: batch.data[name] for name in FIELDS})
        columns = near({name: batch.columns[name] for name in COLUMNS})
        valid, every = data["valid"], np.arange(batch.shape[1])
        ends = valid & (data["terminated"] | data["truncated"])
        # The last valid row; where there is none it is row 0, which is no end.
        last = np.where(valid, np.arange(len(valid))[:, None], 0).max(axis=0)
        ends[last[columns["cut"]], every[columns["cut"]]] = False
        return Side(data, columns, ends, valid.any(axis=0) & ~ends[last, every])


class Matches(Keeping):
    """Follows the episodes of a learner's agents over rollouts, and the versions they play against.

    An episode is against the version that its opponents had in all rollouts that it is part of, and
    for turns that were still open when the first of these rollouts began. Where these differ it has
    no version.

    Args:
        columns: the columns of all the learner's batches: agents of environments.
        agents: the agents of an environment for which the learner acts.
        opponents: those for which the opponent acts.
    """

    lasting = ("totals", "oldest", "newest", "follows")
    remade = ("agents", "opponents")

    def __init__(self, columns: int, agents: int, opponents: int) -> None:
        self.agents, self.opponents = agents, opponents
        self.totals = np.zeros(columns)
        """By column: the rewards of the unfinished episode."""
        self.oldest = np.full(columns, NONE, np.int32)
        self.newest = np.full(columns, -1, np.int32)
        """By column: the oldest and the newest version that played in the unfinished episode."""
        self.follows = np.full(columns, -1, np.int32)
        """By column: the `first` of the rollout that continues the last one."""

    def ended(self, learner: Batch, opponent: Batch) -> list[Game]:
        """Return the episodes that ended in a batch, by row, and by column within a row.

        Args:
            learner: the batch of the learner's policy.
            opponent: the batch of the opponent's policy, of the same environments.
        """
        own, other = Side.of(learner), Side.of(opponent)
        at = own.columns["env"]
        self._forget(at[self.follows[at] != own.columns["first"]])
        self.follows[at] = own.columns["first"] + len(own.ends)
        now, oldest, newest = self._versions(other)
        # What acted before this rollout, or acts in it, is part of the first episode that ends.
        self.oldest[at] = np.minimum(self.oldest[at], oldest)
        self.newest[at] = np.maximum(self.newest[at], newest)
        sums = np.cumsum(own.data["reward"], axis=0, dtype=np.float64)
        games, begun = [], np.zeros(len(at))
        for row, column in np.argwhere(own.ends).tolist():
            i = at[column]
            total = self.totals[i] + sums[row, column] - begun[column]
            pure = self.oldest[i] == self.newest[i]
            games.append(Game(float(total), int(self.newest[i]) if pure else None))
            begun[column] = sums[row, column]
            self.totals[i] = 0
            self.oldest[i] = self.newest[i] = now[column]
        self.totals[at] += sums[-1] - begun
        # Between two episodes nobody has played yet.
        over = own.ends.any(axis=0) & ~own.goes_on & ~self._by_column(other.goes_on).any(axis=1)
        self._forget(at[over])
        return games

    def _versions(self, other: Side) -> tuple[Array, Array, Array]:
        """Return, by the learner's columns, the version of the rollout, the oldest and newest."""
        now = self._by_column(other.columns["last_version"])[:, 0]
        open_before = self._by_column(other.columns["version"])
        oldest, newest = open_before.min(axis=1), open_before.max(axis=1)
        return now, np.minimum(now, oldest), np.maximum(now, newest)

    def _by_column(self, x: Array) -> Array:
        """Return what the opponents' columns hold ``[B']`` by the learner's: ``[B, opponents]``."""
        # Both policies' columns are in the order of the same environments.
        return np.repeat(x.reshape(-1, self.opponents), self.agents, axis=0)

    def _forget(self, at: Array) -> None:
        """Begin new episodes in these columns."""
        self.totals[at] = 0
        self.oldest[at], self.newest[at] = NONE, -1
