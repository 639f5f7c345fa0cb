"""Learning curves of many runs: the interquartile mean, its confidence interval, and a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.counted import STEPS, counted, over_of, warnings
from flowrl.core.figures import drawn
from flowrl.core.items import Row
from flowrl.core.logs import log
from flowrl.core.new_files import check_new
from flowrl.core.row_json import row_json
from flowrl.core.saved_rows import aligned, grouped, read_runs
from flowrl.errors import SaveError, unknown

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
            column: name of the column. A run without it has NaN, and so have the means of its
                group; the table shows a dash, the picture no line.

        Raises:
            SaveError: no run has such a column.
        """
        known = dict.fromkeys(name for rows in self.rows for row in rows[:1] for name in row)
        if known and column not in known:
            raise SaveError(unknown("column", column, known))
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

        Each has the label of its run as `run`. NaN becomes null, an infinite number a text.
        """
        lines = []
        for label, rows in zip(self.labels, self.rows, strict=True):
            lines += [row_json({"run": label, **row}) + "\n" for row in rows]
        return "".join(lines)

    @staticmethod
    def load(directories: str | Path | Iterable[str | Path]) -> Curves:
        """Load the rows of saved runs.

        Runs of one graph, one runtime and equal settings are a group; those with equal seeds, too,
        are groups by the directories given. A group is named by what differs from other groups.
        Its runs are put on one grid of environment steps: that of the run that ends first, at most
        1,000 rows of it. Columns are interpolated linearly between the rows of a run that have a
        number, up to the last step that all runs of the group reached; before the first of these
        rows (no episode has ended yet, say) there is NaN.

        A run that failed or has no rows is left out, as is one that was interrupted, closed early
        or killed, or goes on, if it has less than 95 % of the steps at which the curves of the
        others end. One warning names them all; another names a group whose curves end before 95 %
        of the steps of its median run, such as by a run that reached its goal.

        Args:
            directories: directory of a run, or one that holds those of runs as ``seed-0``,
                ``seed-1`` and so on; or several such directories.

        Raises:
            SaveError: a directory holds no run, a file in it is damaged, or no run is left.

        See also `fl.run_seeds`.
        """
        if isinstance(directories, str | Path):
            directories = [directories]
        groups, left_out = counted(read_runs(directories), grouped)
        if not groups:
            raise SaveError(f"there is no run to compare: {'; '.join(left_out)}")
        for line in warnings(groups, left_out):
            log(line)
        return Curves.of_runs(groups)

    @staticmethod
    def of_runs(groups: Iterable[tuple[str, Sequence[Any]]]) -> Curves:
        """Return the curves of runs on a grid of environment steps for each group.

        Args:
            groups: a label and the runs of each group; a run has a `label` and its `rows`.
        """
        labels, names, rows = [], [], []
        for name, runs in groups:
            labels += [run.label for run in runs]
            names += [name] * len(runs)
            rows += aligned([run.rows for run in runs])
        return Curves(tuple(labels), tuple(names), tuple(rows))

    def ending(self, column: str = "return_mean") -> list[dict[str, Any]]:
        """Return the last value of each group: the lines of the table.

        Args:
            column: name of the column (default ``return_mean``).

        Returns:
            By group: ``group``, its name; ``runs``, their number; ``steps``, the environment steps
            of the last row; ``iqm``, the interquartile mean over its runs; ``low`` and ``high``,
            the bounds of its 95 % interval, which are NaN for a single run.

        Raises:
            SaveError: there is no such column.
        """
        steps, found = self.of(self._over), []
        for group, values in self.of(column).items():
            if not values.size:
                continue
            # Of a curve only its last point is needed, and each costs a bootstrap.
            (iqm,), (low,), (high,) = _bootstrapped(values[:, -1:])
            if len(values) == 1:
                low = high = np.nan
            ends = {"group": group, "runs": len(values), "steps": steps[group][:, -1].mean()}
            found.append(ends | {"iqm": iqm, "low": low, "high": high})
        return found

    def table(self, column: str = "return_mean") -> str:
        """Return the last value of each group as a table, which `print` of the curves shows, too.

        Args:
            column: name of the column (default ``return_mean``).

        Raises:
            SaveError: there is no such column.
        """
        endings = self.ending(column)
        names = [str(end["group"]) or self._only_name() for end in endings]
        head = f"{column}, last row"
        wide = max([28, len(head) + 2, *(len(name) + 2 for name in names)])
        lines = [
            f"{head:<{wide}}{'runs':>6}{'steps':>14}{'interquartile mean':>20}{'95 % interval':>24}"
        ]
        for name, end in zip(names, endings, strict=True):
            interval = "-"
            if not math.isnan(end["low"]):
                interval = f"{_number(end['low'])} to {_number(end['high'])}"
            numbers = f"{end['runs']:>6}{end['steps']:>14,.0f}{_number(end['iqm']):>20}"
            lines.append(f"{name:<{wide}}{numbers}{interval:>24}")
        return "\n".join(lines) + "\n"

    @property
    def _over(self) -> str:
        """The column over which curves are drawn: updates where no run has sampled anything."""
        runs = [rows for rows in self.rows if rows]
        return over_of(runs) if runs else STEPS

    def _only_name(self) -> str:
        """Return what to call the only group, which has no name."""
        return "all seeds" if len(self.labels) > 1 else self.labels[0]

    def __str__(self) -> str:
        return self.table()

    def picture(self, path: str | Path, column: str = "return_mean") -> None:
        """Draw the interquartile means over environment steps, each with its interval.

        Args:
            path: path of a new file, such as ``curves.svg`` or ``curves.png``.
            column: name of the column that is drawn (default ``return_mean``).

        Raises:
            SaveError: the file exists already, matplotlib is not installed, or there is no such
                column.
        """
        check_new(path)
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
        self._draw(text, column, format="svg")
        return text.getvalue()

    def _repr_svg_(self) -> str | None:
        # A notebook shows this, or the plain representation where it is None.
        try:
            return self.svg()
        except SaveError:
            return None

    def _draw(self, to: Any, column: str, **options: Any) -> None:
        """Draw into a file or a stream, with these options of matplotlib's `savefig`."""
        with drawn(to, **options) as figure:
            axes = figure.subplots()
            steps = self.of(self._over)
            for group, (mean, low, high) in self.summary(column).items():
                x = steps[group].mean(axis=0)
                (line,) = axes.plot(x, mean, label=group or None)
                axes.fill_between(x, low, high, alpha=0.25, color=line.get_color(), linewidth=0)
            what = "updates" if self._over == "updates" else "environment steps"
            axes.set(xlabel=what, ylabel=f"{column}, IQM and 95 % interval")
            axes.grid(alpha=0.3)
            if any(self.groups):
                # One with long names may be larger than the axes, which must not shrink for it.
                axes.legend(frameon=False).set_in_layout(False)


def _number(x: float) -> str:
    """Return a number as text, NaN as a dash."""
    if math.isnan(x):
        return "-"
    return f"{x:,.1f}" if abs(x) >= 10 else f"{x:.4g}"


def _bootstrapped(values: Array) -> tuple[Array, Array, Array]:
    """Return the interquartile mean over runs, and the bounds of its interval, each ``[rows]``.

    Args:
        values: a column ``[runs, rows]``. A row in which any run has NaN has a NaN mean.
    """
    # With a fixed seed the same runs give the same interval.
    rng = np.random.default_rng(0)
    indices = rng.integers(len(values), size=(RESAMPLES, len(values)))
    means = np.stack([_iqm(column[indices]) for column in values.T], axis=1)
    bounds = [2.5, 97.5]
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(means, bounds, axis=0)
        # Between infinite means nothing can be interpolated.
        if np.isinf(means).any():
            low, high = np.percentile(means, bounds, axis=0, method="nearest")
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
    # An infinite value outside the middle half counts as little as any other.
    inside = weight > 0
    with np.errstate(invalid="ignore"):
        means = (ordered[:, inside] * weight[inside]).sum(axis=1) / weight.sum()
    return np.where(np.isnan(x).any(axis=1), np.nan, means)
