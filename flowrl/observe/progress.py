"""The live progress line of a run, and the plain lines that take its place where the output is no terminal."""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from flowrl.core.events import Ended, RowClosed, Started, Warned
from flowrl.core.items import Row
from flowrl.observe.table import Window, live_table

PLAIN_SECONDS = 5.0
"""How often a line is written where the output is no terminal."""


class Progress:
    """Shows steps, return, steps/s, and the time left when the goal is a number of steps; and on a terminal what every node does.

    Args:
        console: where to; standard error by default.
        steps: the goal in environment steps, if there is one.
    """

    kinds: ClassVar[tuple[type, ...]] = (Started, RowClosed, Warned, Ended)

    def __init__(self, console: Console | None = None, steps: int | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.steps = steps
        self.row: Row | None = None
        self.window: Window | None = None
        self.shown = False
        self.began = self.told = time.perf_counter()
        self.live = Live(
            get_renderable=self._shown, console=self.console, refresh_per_second=8, transient=True
        )
        if self.console.is_terminal:
            self.live.start()

    def __call__(self, event: Any) -> None:
        """Take an event of the run."""
        match event:
            case Started(profile=profile):
                self.told, self.window = time.perf_counter(), Window(profile)
            case RowClosed(row=row):
                self._show(row)
            case Warned(text=text):
                self.console.print(
                    f"warning: {text}",
                    style="yellow",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
            case Ended():
                if not self.console.is_terminal and self.row is not None and not self.shown:
                    self.console.print(
                        line(self.row, self.steps), highlight=False, markup=False, soft_wrap=True
                    )
                self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.live.stop()

    def _show(self, row: Row) -> None:
        first, self.row = self.row is None, row
        self.shown = first or time.perf_counter() - self.told >= PLAIN_SECONDS
        if not self.console.is_terminal and self.shown:
            self.told = time.perf_counter()
            self.console.print(line(row, self.steps), highlight=False, markup=False, soft_wrap=True)

    def _shown(self) -> Table | Group:
        try:
            seen = self.window.look() if self.window is not None else None
        except Exception:  # noqa: BLE001 - a run that is ending can't be asked any more
            seen = self.window = None
        if seen is None or self.row is None:
            return self._totals()
        return Group(self._totals(), "", live_table(seen, self.row["lag_mean"]))

    def _totals(self) -> Table:
        table = Table.grid(padding=(0, 2))
        if self.row is None:
            table.add_row(f"compiling, {time.perf_counter() - self.began:.0f} s")
            return table
        r = self.row
        named = {
            "steps": f"{r['env_steps']:,.0f}" + (f" of {self.steps:,}" if self.steps else ""),
            "return": number(r["return_mean"]),
            "length": number(r["length_mean"]),
            "episodes": f"{r['episodes']:,.0f}",
            "updates": f"{r['updates']:,.0f}",
            "steps/s": f"{r['steps_per_second']:,.0f}",
            "time": duration(r["seconds"]),
        }
        if self.steps:
            named["left"] = left(r, self.steps)
        table.add_row(*(f"[dim]{k}[/]" for k in named))
        table.add_row(*(f"[bold]{v}[/]" for v in named.values()))
        return table


def line(row: Row, steps: int | None) -> str:
    """One plain line of progress."""
    of = f" of {steps:,}" if steps else ""
    parts = [
        f"{row['env_steps']:>10,.0f}{of} steps",
        f"return {number(row['return_mean']):>8}",
        f"{row['steps_per_second']:>9,.0f} steps/s",
        f"{duration(row['seconds']):>8}",
    ]
    return "  ".join([*parts, f"{left(row, steps)} left"] if steps else parts)


def left(row: Row, steps: int) -> str:
    """The time that is left to a goal of so many steps, at the speed since the last Row; the first one's holds the compiling."""
    if row["row"] < 2:
        return "-"
    return duration(max(steps - row["env_steps"], 0) / max(row["steps_per_second"], 1e-9))


def duration(seconds: float) -> str:
    """``42 s``, ``3:07``, ``2:03:07``.

    >>> duration(42), duration(187), duration(7387)
    ('42 s', '3:07', '2:03:07')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(x: float) -> str:
    """A return as it is shown: ``1,234.5``, and ``-`` where there is none."""
    return "-" if math.isnan(x) else f"{x:,.1f}"
