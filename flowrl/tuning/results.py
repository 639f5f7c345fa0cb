"""What a study leaves beside its trials: a table, a file of all trials, a picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.core.figures import drawn
from flowrl.errors import SaveError
from flowrl.tuning.journal import ENDED, Options, Trial
from flowrl.tuning.progress import number, point_text, ranked

SHOWN = 10
"""How many trials a table shows."""
COLUMNS = ("trial", "state", "value", "env_steps", "seconds")
PANEL = 2.4
"""Width of the panel of a setting, in inches."""


def write(trials: Sequence[Trial], options: Options, path: Path) -> None:
    """Write ``trials.csv``, ``results.txt``, and ``results.svg`` if matplotlib is installed."""
    (path / "trials.csv").write_text(as_csv(trials, options), encoding="utf-8")
    (path / "results.txt").write_text(table(trials, options), encoding="utf-8")
    with suppress(SaveError):
        picture(path / "results.svg", trials, options)


def as_csv(trials: Sequence[Trial], options: Options) -> str:
    """Return all trials as comma-separated values, with a column for each setting."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *options.search, "directory", "error"])
    for t in trials:
        facts = [t.number, t.state, "" if t.value is None else t.value, t.env_steps, t.seconds]
        settings = [t.settings[name] for name in options.search]
        writer.writerow([*facts, *settings, t.directory, t.error])
    return text.getvalue()


def table(trials: Sequence[Trial], options: Options) -> str:
    """Return the best trials as a table, and the errors of those that failed."""
    rows = [["trial", options.metric, "steps", "seconds", *options.search, ""]]
    for t in ranked(trials, options.mode)[:SHOWN]:
        facts = [str(t.number), number(t.value), f"{t.env_steps:,}", f"{t.seconds:.0f}"]
        points = [point_text(t.settings[name]) for name in options.search]
        rows.append([*facts, *points, "stopped early" if t.state == "stopped" else ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    failed = [t for t in trials if t.state == "failed"]
    states = [t.state for t in trials]
    counts = [f"{states.count(state)} {state}" for state in ENDED]
    lines.append(f"{len(trials)} trials: {', '.join(counts)}")
    errors = [(t.number, t.error.partition("\n")[0]) for t in failed[:SHOWN]]
    lines += [f"trial {number_of} failed: {error}" for number_of, error in errors]
    return "\n".join(lines) + "\n"


def picture(path: str | Path, trials: Sequence[Trial], options: Options) -> None:
    """Draw the metric of every trial over each setting.

    Raises:
        SaveError: matplotlib is not installed.
    """
    with drawn(path, (max(4.0, PANEL * len(options.search)), 3.2)) as figure:
        panels = figure.subplots(1, len(options.search), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, options.search, strict=True):
            _panel(axes, name, trials, options)
        panels[0].set_ylabel(options.metric)
        panels[-1].legend(frameon=False, fontsize="small")


def _panel(axes: Any, name: str, trials: Sequence[Trial], options: Options) -> None:
    """Draw the metric over one setting."""
    known = [t for t in trials if t.value is not None]
    for state, marker in (("done", "o"), ("stopped", "x")):
        found = [t for t in known if t.state == state]
        # Matplotlib would take the first text as the kind of the axis, so options are all texts.
        x = [t.settings[name] for t in found]
        y = [t.value if t.value is not None else math.nan for t in found]
        label = "all steps" if state == "done" else "stopped early"
        axes.scatter(x, y, marker=marker, s=24, alpha=0.8, label=label)
    # An axis without points has no logarithms.
    if known and options.search[name].startswith("loguniform"):
        axes.set_xscale("log")
    axes.set_xlabel(name)
    axes.grid(alpha=0.3)
