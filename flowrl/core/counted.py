"""Which of many runs count in their curves, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from flowrl.core.items import samples_nothing

STEPS = "env_steps"
FINISHED = ("until", "steps")
"""The reasons of a run that ended when it was meant to; one whose loop was left did not."""
NEAR = 0.95
"""The share of the steps of its group that a run needs which did not end by itself.

Where curves end before this share of their median run, a warning says so.
"""

Grouped = Sequence[tuple[str, Sequence[Any]]]
"""Runs in groups, each with its label; a run has a `label`, a `reason` and `rows`."""


def counted(
    runs: Sequence[Any], grouped: Callable[[Sequence[Any]], Grouped]
) -> tuple[list[tuple[str, list[Any]]], list[str]]:
    """Return the runs that count, in groups, and a text for each that does not.

    The curves of a group end where its first run ends. So one that failed, has no rows, or was
    stopped long before the others would take from them what they have.

    Args:
        runs: each with a `label`, the `reason` for which it ended (None: it goes on or was killed)
            and its `rows`.
        grouped: function that puts runs into groups.

    Returns:
        The groups, and a text for each run that is left out: its label and why.
    """
    left_out, begun = [], []
    for run in runs:
        if run.reason == "failed":
            left_out.append(f"{run.label} failed")
        elif not run.rows:
            left_out.append(f"{run.label} has no rows: {_without_rows(run)}")
        else:
            begun.append(run)
    groups = []
    for name, alike in grouped(begun):
        column = over_of(run.rows for run in alike)
        least = NEAR * _end_of(alike, column)
        near = []
        for run in alike:
            steps = run.rows[-1][column]
            if run.reason in FINISHED or steps >= least:
                near.append(run)
            else:
                text = f"{run.label} {_stopped(run)} after {steps:,.0f} steps, before the others"
                left_out.append(text)
        groups.append((name, near))
    return groups, left_out


def warnings(groups: Grouped, left_out: Sequence[str]) -> list[str]:
    """Return a line that names the runs that are left out, and one for each group that is cut.

    Args:
        groups: the runs that count.
        left_out: the texts of those that do not.
    """
    lines = [f"left out of the curves: {'; '.join(left_out)}"] if left_out else []
    for name, runs in groups:
        if not runs:
            continue
        column = over_of(run.rows for run in runs)
        ends = [run.rows[-1][column] for run in runs]
        end, middle = min(ends), median(ends)
        first = runs[ends.index(end)]
        if end < NEAR * middle:
            of = f" of {name}" if name else ""
            lines.append(
                f"the curves{of} end at {end:,.0f} steps, where {first.label} ends, but half of "
                f"their runs have {middle:,.0f} steps or more"
            )
    return lines


def _end_of(runs: Sequence[Any], column: str) -> float:
    """Return the steps at which the curves of a group end by those of its runs that finished.

    Where none has finished, this is where the run is that got furthest.
    """
    finished = [run for run in runs if run.reason in FINISHED]
    ends: list[float] = [run.rows[-1][column] for run in finished or runs]
    return min(ends) if finished else max(ends)


def over_of(runs: Iterable[Sequence[Mapping[str, float]]]) -> str:
    """Return the column over which runs are drawn and compared with one another.

    It is that of the environment steps, or of the updates where none of the runs samples anything.

    Args:
        runs: the rows of each, of which it has some.
    """
    return "updates" if all(samples_nothing(rows[-1]) for rows in runs) else STEPS


def _without_rows(run: Any) -> str:
    """Return why a run has no rows."""
    if run.reason is None:
        return "its run ended before the first, or has only begun"
    return "its run ended before the first"


def _stopped(run: Any) -> str:
    """Return how a run ended that did not end by itself."""
    ways = {"interrupted": "was interrupted", "closed": "was closed early"}
    return ways.get(run.reason, "goes on or was killed")
