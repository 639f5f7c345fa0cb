"""`Goal`: a goal of a run that is written as a comparison, such as ``return_mean>=475``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.core.items import Row
from flowrl.errors import SettingError, unknown
from flowrl.observe.looking import comparison


def parse_until(text: str, names: Sequence[str], argument: str = "--until") -> Goal:
    """Return a goal such as ``return_mean>=475`` as a function of a Row.

    Args:
        text: a comparison of a column with a number.
        names: the columns that rows of this graph have.
        argument: what errors call the text.

    Raises:
        SettingError: the text is no comparison, or names no column.
    """
    # The message of `comparison` speaks of items, of which the command line knows nothing.
    try:
        goal = comparison(text)
    except SettingError:
        raise SettingError(
            f"{argument} takes a comparison such as 'return_mean>=475', got {text!r}"
        ) from None
    if math.isinf(goal.value):
        raise SettingError(
            f"{argument}: no row is compared with {goal.value}; name a finite number"
        )
    if goal.name not in names:
        raise SettingError(f"{argument}: {unknown('column', goal.name, names)}")
    return Goal(text, goal)


@dataclass(frozen=True)
class Goal:
    """A goal of a run, as a function of a Row."""

    text: str
    """The goal as the user wrote it, which a saved run notes."""
    comparison: Any
    """It compares a column with a number."""

    def __call__(self, row: Row) -> bool:
        """Return whether a row reaches it."""
        name = self.comparison.name
        return name in row and bool(self.comparison.holds(row[name]))


def reaches(until: Callable[[Row], bool], row: Row) -> bool:
    """Return whether a row reaches a goal.

    Raises:
        RuntimeError: the goal raised StopIteration, which a loop over the rows would take for
            their end.
    """
    try:
        return until(row)
    except StopIteration as error:
        raise RuntimeError("until raised StopIteration; give next() a default") from error
