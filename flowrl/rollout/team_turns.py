"""`TeamTurns`: the turns of all agents for which policies act, in the rollouts that they fill."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.core.keeping import Keeping
from flowrl.rollout.agents_vector import Seating

Array = np.ndarray[Any, Any]
COLUMNS = {"reward": np.float32, "terminated": bool, "truncated": bool, "valid": bool}
"""The fields of rollouts that are the same for every policy, and their types."""


class TeamTurns(Keeping):
    """The turns of a runner's columns: those of all its policies, one policy after another.

    One operation on an array serves the columns of all policies, each of which, a `Part`, sees its
    own part of the arrays.

    Args:
        seating: the columns.
        columns: how many of them, from the first on, are of policies that learn or are frozen;
            the others are of scripted ones, whose turns are in no rollout.
        steps: rows of a rollout.
    """

    lasting = ("open", "gained", "early", "ended")
    remade = (
        "steps", "env", "every", "acting", "reward", "terminated", "truncated",
        "row", "acts", "final", "data", "earned",
    )  # fmt: skip

    def __init__(self, seating: Seating, columns: int, steps: int) -> None:
        self.steps = steps
        self.env, self.every = seating.env[:columns], np.arange(columns)
        self.acting, self.reward = seating.acting[:columns], seating.reward[:columns]
        self.terminated = seating.terminated[:columns]
        self.truncated = seating.truncated[:columns]
        self.open = np.zeros(columns, bool)
        """Whose last turn has rewards still to come."""
        self.gained = np.zeros(columns, np.float32)
        """The reward since each agent's last turn."""
        self.early = np.zeros(columns, np.float32)
        """The reward before each column's open turn, where that is the first of its episode."""
        self.ended = np.zeros(columns, bool)
        """Whose episode ended, and has no masked row with its final observation yet."""
        self.row = np.zeros(columns, int)
        """By column: the next row to be written."""
        self.acts = np.zeros(columns, bool)
        """Whose turn it is in the next step."""
        self.final = np.zeros(columns, bool)
        """Who has a masked row to come in the next step."""
        self.data: dict[str, Array] = {}
        """The fields of the rollout that are the same for every policy, ``[T + 1, B]``.

        Its last row is none: a column that is full has it written as if it were its next one.
        """
        self.earned: Array = np.empty(0)
        """What the environments gave by row, in which episodes are counted."""

    def take(self, state: Any) -> None:
        """Go on from what was kept, in the same arrays, for others look at them."""
        own = {name: getattr(self, name) for name in self.lasting}
        super().take(state)
        for name, x in own.items():
            x[:] = getattr(self, name)
            setattr(self, name, x)

    def begin_rollout(self) -> None:
        """Begin a rollout."""
        shape = (self.steps + 1, len(self.every))
        self.data = {name: np.zeros(shape, kind) for name, kind in COLUMNS.items()}
        self.earned = np.zeros(shape, np.float32)
        self.row.fill(0)

    def block(self, running: Array) -> None:
        """Stop the environments, in ``bool[E]``, of which a column is full and must go on."""
        full = self.row == self.steps
        # This is called with every step, and most of them fill no column.
        if full.any():
            full &= self.acting | self.ended
            running[self.env[full]] = False

    def ask(self, running: Array) -> None:
        """Note whose turn it is in the next step, and who has a masked row to come in it.

        Args:
            running: ``bool[E]``, the environments that go on.
        """
        goes_on = running[self.env]
        np.logical_and(self.acting, goes_on, out=self.acts)
        np.logical_and(self.ended, goes_on, out=self.final)

    def acted(self) -> None:
        """Count the rows of those that acted, which are written."""
        acts = self.acts
        # What an agent gained before its first turn is in its episode's return, and in no row.
        np.copyto(self.early, self.gained, where=acts)
        self.gained[acts] = 0
        self.data["valid"][self.row, self.every] = acts
        self.row += acts
        self.open |= acts

    def see(self) -> None:
        """Take what a step gave: rewards, and the turns that end with it."""
        self.gained += self.reward
        over = self.terminated | self.truncated
        closes = np.flatnonzero(self.open & (over | self.acting))
        at, gained = (self.row[closes] - 1, closes), self.gained[closes]
        self.data["reward"][at] = gained
        self.earned[at] = gained + self.early[closes]
        self.gained[closes] = 0
        self.open[closes] = False
        if over.any():
            self.data["terminated"][at] = self.terminated[closes]
            self.data["truncated"][at] = self.truncated[closes]
            self.ended[closes] = over[closes]
            # An episode that ended before the agent's first turn is in no row and no return.
            self.gained[over] = 0
