"""What many runs of one graph learned: their interquartile mean, its confidence interval, and a picture."""

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
from flowrl.errors import SaveError, unknown

Array = Any
RESAMPLES = 2_000


@dataclass(frozen=True)
class Curves:
    """The Rows of every run."""

    labels: tuple[str, ...]
    """By run: what it is called."""
    groups: tuple[str, ...]
    """By run: the settings by which it differs from others, without its seed."""
    rows: tuple[tuple[Row, ...], ...]
    """By run."""

    def of(self, column: str) -> dict[str, Array]:
        """By group: a column as ``[runs, rows]``.

        Raises:
            SaveError: there is no such column.
        """
        if self.rows and self.rows[0] and column not in self.rows[0][0]:
            raise SaveError(unknown("column", column, self.rows[0][0]))
        found: dict[str, list[list[float]]] = {}
        for group, rows in zip(self.groups, self.rows, strict=True):
            found.setdefault(group, []).append([row.get(column, np.nan) for row in rows])
        return {group: np.asarray(values) for group, values in found.items()}

    def summary(self, column: str = "return_mean") -> Mapping[str, tuple[Array, Array, Array]]:
        """By group: the interquartile mean over its runs ``[rows]``, and the bounds of its 95 % interval (Agarwal et al. 2021).

        The interval is that of the percentile bootstrap: of means over as many runs, drawn with replacement.
        """
        return {
            group: _bootstrapped(values) for group, values in self.of(column).items() if values.size
        }

    def text(self) -> str:
        """Every run's Rows, a JSON object a line, each with the `run` that it is of."""
        each = (
            (label, row) for label, rows in zip(self.labels, self.rows, strict=True) for row in rows
        )
        return "".join(
            f"{json.dumps({'run': label, **{k: v if math.isfinite(v) else None for k, v in row.items()}})}\n"
            for label, row in each
        )

    def __str__(self) -> str:
        lines = [f"{'return, last row':<28}{'runs':>6}{'IQM':>10}{'95 % interval':>22}"]
        for group, (mean, low, high) in self.summary().items():
            runs = sum(g == group for g in self.groups)
            lines.append(
                f"{group or 'all seeds':<28}{runs:>6}{mean[-1]:>10.1f}{f'{low[-1]:.1f} to {high[-1]:.1f}':>22}"
            )
        return "\n".join(lines) + "\n"

    def picture(self, path: str | Path, column: str = "return_mean") -> None:
        """Draw the interquartile means over environment steps, each with its interval, into a file such as ``curves.svg`` or ``curves.png``.

        Raises:
            SaveError: matplotlib is not installed, or there is no such column.
        """
        self._draw(path, column)

    def svg(self, column: str = "return_mean") -> str:
        """The same as the text of an SVG.

        Raises:
            SaveError: matplotlib is not installed, or there is no such column.
        """
        text = io.StringIO()
        self._draw(text, column, format="svg", metadata={"Date": None})
        return text.getvalue()

    def _draw(self, to: Any, column: str, **how: Any) -> None:
        try:
            import matplotlib as mpl
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SaveError(
                f"a picture needs matplotlib ({error}): pip install 'flowrl[jax-envs]'"
            ) from None
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
            figure.savefig(to, **how)


def _bootstrapped(values: Array) -> tuple[Array, Array, Array]:
    """The interquartile mean of ``[runs, rows]`` over the runs, and the bounds of its interval; runs without a number do not count."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(values), size=(RESAMPLES, len(values)))
    means = np.stack([_iqm(column[drawn]) for column in values.T], axis=1)
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return np.stack([_iqm(column[None])[0] for column in values.T]), low, high


def _iqm(x: Array) -> Array:
    """The mean of the middle half of ``[n, runs]``, those at its ends by their share; NaN with any NaN."""
    x = np.sort(x, axis=1)
    count = x.shape[1]
    edges = np.clip(np.arange(count + 1), count / 4, 3 * count / 4)
    weight = np.diff(edges)
    return (x * weight).sum(axis=1) / weight.sum()
