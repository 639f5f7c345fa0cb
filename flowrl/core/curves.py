"""Learning curves of many runs: the interquartile mean, its confidence interval, and a picture."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.items import Row
from flowrl.errors import SaveError, install, unknown

Array = Any
RESAMPLES = 2_000
"""How many bootstrap samples an interval is computed from."""


@dataclass(frozen=True)
class Curves:
    """The rows of many runs, in groups of runs that differ only in their seeds."""

    labels: tuple[str, ...]
    """The name of each run."""
    groups: tuple[str, ...]
    """The group of each run, named by its settings that differ from those of other groups."""
    rows: tuple[tuple[Row, ...], ...]
    """The rows of each run."""

    def of(self, column: str) -> dict[str, Array]:
        """Return a column by group, as an array ``[runs, rows]``.

        Args:
            column: name of the column. A row without it counts as NaN.

        Raises:
            SaveError: there is no such column.
        """
        if self.rows and self.rows[0] and column not in self.rows[0][0]:
            raise SaveError(unknown("column", column, self.rows[0][0]))
        by_group: dict[str, list[list[float]]] = {}
        for group, rows in zip(self.groups, self.rows, strict=True):
            by_group.setdefault(group, []).append([row.get(column, np.nan) for row in rows])
        return {group: np.asarray(values) for group, values in by_group.items()}

    def summary(self, column: str = "return_mean") -> Mapping[str, tuple[Array, Array, Array]]:
        """Return the interquartile mean over runs and its 95 % interval (Agarwal et al. 2021).

        The interval is that of the percentile bootstrap: of means over as many runs, sampled with
        replacement.

        Args:
            column: name of the column (default ``return_mean``).

        Returns:
            The mean ``[rows]``, and the lower and the upper bound ``[rows]``, by group.

        Raises:
            SaveError: there is no such column.
        """
        return {
            group: _bootstrapped(values) for group, values in self.of(column).items() if values.size
        }

    def text(self) -> str:
        """Return the Rows of all runs, one JSON object per line.

        Each has the label of its run as `run`. Numbers that are not finite become null.
        """
        lines = []
        for label, rows in zip(self.labels, self.rows, strict=True):
            for row in rows:
                numbers = {k: v if math.isfinite(v) else None for k, v in row.items()}
                lines.append(json.dumps({"run": label, **numbers}) + "\n")
        return "".join(lines)

    def __str__(self) -> str:
        lines = [f"{'return, last row':<28}{'runs':>6}{'IQM':>10}{'95 % interval':>22}"]
        for group, (mean, low, high) in self.summary().items():
            name, runs = group or "all seeds", self.groups.count(group)
            interval = f"{low[-1]:.1f} to {high[-1]:.1f}"
            lines.append(f"{name:<28}{runs:>6}{mean[-1]:>10.1f}{interval:>22}")
        return "\n".join(lines) + "\n"

    def picture(self, path: str | Path, column: str = "return_mean") -> None:
        """Draw the interquartile means over environment steps, each with its interval.

        Args:
            path: path of the file, such as ``curves.svg`` or ``curves.png``.
            column: name of the column that is drawn (default ``return_mean``).

        Raises:
            SaveError: matplotlib is not installed, or there is no such column.
        """
        self._draw(path, column)

    def svg(self, column: str = "return_mean") -> str:
        """Return the picture that `picture` draws as the text of an SVG.

        Args:
            column: name of the column that is drawn (default ``return_mean``).

        Raises:
            SaveError: matplotlib is not installed, or there is no such column.
        """
        text = io.StringIO()
        # Without a date the same curves give the same text.
        self._draw(text, column, format="svg", metadata={"Date": None})
        return text.getvalue()

    def _repr_svg_(self) -> str | None:
        # A notebook shows this, or the plain representation where it is None.
        try:
            return self.svg()
        except SaveError:
            return None

    def _draw(self, to: Any, column: str, **options: Any) -> None:
        """Draw into a file or a stream, with these options of matplotlib's `savefig`."""
        try:
            import matplotlib as mpl
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SaveError(
                f"a picture needs matplotlib ({error}): {install('jax-envs')}"
            ) from None
        # With a fixed salt the same curves give the same ids in an SVG.
        with mpl.rc_context({"svg.hashsalt": "flowrl"}):
            figure = Figure(figsize=(6, 3.6), layout="constrained")
            axes = figure.subplots()
            steps = self.of("env_steps")
            for group, (mean, low, high) in self.summary(column).items():
                x = steps[group].mean(axis=0)
                (line,) = axes.plot(x, mean, label=group or None)
                axes.fill_between(x, low, high, alpha=0.25, color=line.get_color(), linewidth=0)
            axes.set(xlabel="environment steps", ylabel=f"{column}, IQM and 95 % interval")
            axes.grid(alpha=0.3)
            if any(self.groups):
                axes.legend(frameon=False)
            figure.savefig(to, **options)


def _bootstrapped(values: Array) -> tuple[Array, Array, Array]:
    """Return the interquartile mean over runs, and the bounds of its interval, each ``[rows]``.

    Args:
        values: a column ``[runs, rows]``. A row in which any run has NaN has a NaN mean.
    """
    # With a fixed seed the same runs give the same interval.
    rng = np.random.default_rng(0)
    indices = rng.integers(len(values), size=(RESAMPLES, len(values)))
    means = np.stack([_iqm(column[indices]) for column in values.T], axis=1)
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return np.stack([_iqm(column[None])[0] for column in values.T]), low, high


def _iqm(x: Array) -> Array:
    """Return the mean of the middle half of the runs ``[n]``; NaN where any run is NaN.

    Args:
        x: values ``[n, runs]``. Those at the ends of the middle half count by their share in it.
    """
    ordered = np.sort(x, axis=1)
    count = x.shape[1]
    edges = np.clip(np.arange(count + 1), count / 4, 3 * count / 4)
    weight = np.diff(edges)
    return (ordered * weight).sum(axis=1) / weight.sum()
