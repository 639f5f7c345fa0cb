"""The live progress of a run on a terminal, and plain lines where the output is no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from flowrl.core.events import Ended, Restarted, RowClosed, Started, Warned
from flowrl.core.items import Row, reached, samples_nothing
from flowrl.core.profile import Profile
from flowrl.core.texts import decimal
from flowrl.observe.table import Window, live_table

PLAIN_SECONDS = 5.0
"""The least seconds between two lines where the output is no terminal."""
QUIET_SECONDS = 15.0
"""The most seconds without a line there: until a row closes, others say that the run goes on."""


class Progress:
    """An observer that shows steps, return and steps/s, and on a terminal what every node does.

    If the goal is a number of steps, the time that is left is shown too. Whoever makes one closes
    it if the run is refused before it begins, for such a run sends no event.

    Args:
        console: where it is shown; standard error by default.
        steps: the goal in environment steps; None if there is none.
    """

    kinds: ClassVar[tuple[type, ...]] = (Started, RowClosed, Restarted, Warned, Ended)

    def __init__(self, console: Console | None = None, steps: int | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.steps = steps
        self.row: Row | None = None
        """The newest Row."""
        self.first = 1
        """The number of the first Row that came, whose speed is that of compiling."""
        self.window: Window | None = None
        """The last seconds of the run; None before it starts and after it ends."""
        self.shown = False
        """Whether the newest Row was written as a plain line."""
        self.began = self.written = time.perf_counter()
        """When this observer was made, and when the last plain line was written."""
        self.restarted = -math.inf
        """When a line on a restart was written."""
        # A thread of rich asks `_render` for what to show.
        self.live = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=2, transient=True
        )
        self._profile: Callable[[], Profile] | None = None
        self._closed = Event()
        if self.console.is_terminal:
            self.live.start()
        else:
            Thread(target=self._beat, daemon=True).start()

    def __call__(self, event: Any) -> None:
        """Handle an event of the run."""
        match event:
            case Started(profile=profile):
                self.written, self.window = time.perf_counter(), Window(profile)
                self._profile = profile
                self.window.look()
            case RowClosed(row=row):
                self._add(row)
            case Restarted():
                self._restarted(event)
            case Warned(text=text):
                self._print(f"warning: {text}", style="yellow")
            case Ended():
                # The last Row is shown in any case.
                if not self.console.is_terminal and self.row is not None and not self.shown:
                    self._print(line(self.row, self.steps, self.first))
                self.close()

    def close(self) -> None:
        """Stop the live display and leave the terminal as it was."""
        self._closed.set()
        self.live.stop()

    def _beat(self) -> None:
        """Write that the run goes on wherever no line was written for `QUIET_SECONDS`."""
        while not self._closed.wait(min(1.0, QUIET_SECONDS)):
            now = time.perf_counter()
            if now - self.written < QUIET_SECONDS:
                continue
            self.written = now
            with suppress(Exception):  # a run that is starting or ending has no profile
                self._print(alive(self._profile() if self._profile else None, now - self.began))

    def _print(self, text: str, style: str | None = None) -> None:
        """Print a line as it is: without wrapping, and without rich's markup and colours."""
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _add(self, row: Row) -> None:
        """Keep a Row for the live display, or write it if the output is no terminal."""
        is_first = self.row is None
        if is_first:
            self.first = int(row["row"])
        self.row = row
        self.shown = is_first or time.perf_counter() - self.written >= PLAIN_SECONDS
        if not self.console.is_terminal and self.shown:
            self.written = time.perf_counter()
            self._print(line(row, self.steps, self.first))

    def _restarted(self, event: Restarted) -> None:
        """Write that a worker was restarted; of many in a short time only the first."""
        if time.perf_counter() - self.restarted < PLAIN_SECONDS:
            return
        self.restarted = time.perf_counter()
        because = event.because.partition("\n")[0].rstrip(".")
        lost = f"{event.lost_steps:,} steps lost"
        where = f"{event.resource}, {event.worker}"
        self._print(f"warning: {where} was restarted, {lost}: {because}", style="yellow")

    def _render(self) -> Text | Group:
        """Return what the terminal shows now."""
        try:
            profile = self.window.look() if self.window is not None else None
        except Exception:  # noqa: BLE001 - a run that is ending has no profile any more
            profile = self.window = None
        if profile is None or self.row is None:
            return self._totals()
        return Group(self._totals(), "", live_table(profile, self.row["lag_mean"]))

    def _totals(self) -> Text | Group:
        """Return the numbers of the newest Row under their names."""
        if self.row is None:
            return Text(f"starting, {time.perf_counter() - self.began:.0f} s")
        row = self.row
        goal = f" of {self.steps:,}" if self.steps else ""
        cells = {
            "steps": f"{row['env_steps']:,.0f}{goal}",
            "return": number(return_of(row)),
            "length": number(row["length_mean"]),
            "episodes": f"{row['episodes']:,.0f}",
            "updates": f"{row['updates']:,.0f}",
            "steps/s": f"{row['steps_per_second']:,.0f}",
            "time": duration(row["seconds"]),
        }
        if samples_nothing(row):
            for name in ("steps", "length", "episodes", "steps/s"):
                del cells[name]
        if self.steps:
            cells["left"] = left(row, self.steps, self.first)
        widths = [max(map(len, cell)) for cell in cells.items()]
        # Two lines of text are drawn in a tenth of the time of a table.
        return Group(
            Text(_padded(cells, widths), "dim", no_wrap=True),
            Text(_padded(cells.values(), widths), "bold", no_wrap=True),
        )


def _padded(texts: Iterable[str], widths: Sequence[int]) -> str:
    """Return texts side by side, each padded to its width."""
    return "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))


def alive(profile: Profile | None, seconds: float) -> str:
    """Return the line of a run of which no row closed for long: what it does since it began.

    Args:
        profile: of the run; None before it has one.
        seconds: since it was started.
    """
    sampled = 0
    if profile is not None:
        sampled = sum(counts.get("sampled_steps", 0) for counts in profile.counts.values())
    what = f"{sampled:,} steps sampled" if sampled else "starting"
    return f"{what}, {duration(seconds)}"


def line(row: Row, steps: int | None, first: int = 1) -> str:
    """Return one plain line of progress.

    Args:
        row: the newest Row.
        steps: the goal in environment steps; None if there is none.
        first: the number of the first Row since the run was started or resumed (default 1).
    """
    goal = f" of {steps:,}" if steps else ""
    parts = [
        f"{row['env_steps']:>10,.0f}{goal} steps",
        f"return {number(return_of(row)):>8}",
        f"{row['steps_per_second']:>9,.0f} steps/s",
        f"{duration(row['seconds']):>8}",
    ]
    if samples_nothing(row):
        rate = row["updates"] / max(row["seconds"], 1e-9)
        parts[0] = f"{row['updates']:>10,.0f} updates"
        parts[2] = f"{rate:>9,.0f} updates/s"
    return "  ".join([*parts, f"{left(row, steps, first)} left"] if steps else parts)


def return_of(row: Row) -> float:
    """Return the mean return to show of a row: of an evaluation where nothing is sampled."""
    evaluated: float = row.get("eval/return_mean", math.nan)
    return evaluated if samples_nothing(row) else row["return_mean"]


NO_EPISODE = (
    "no episode has ended: sample more steps, or cut episodes, by wrappers= with "
    "gymnasium.wrappers.TimeLimit"
)
"""Why a run that samples has no return."""


def result(reason: str | None, until: str | None, row: Any) -> str:
    """Describe whether a run reached its goal, with its steps, time and return.

    Args:
        reason: why the run ended, as `Run.reason` says.
        until: its goal, as the user wrote it.
        row: its last row; None if there is none.
    """
    steps = "0 steps, before the first row"
    if row:
        time = duration(row["seconds"])
        count, what = reached(row)
        steps = f"{count:,} {what} in {time}, return {number(return_of(row))}"
        if not (row["episodes"] or samples_nothing(row)):
            steps += f" ({NO_EPISODE})"
    if reason == "until":
        return f"solved: {until} after {steps}"
    if reason == "steps":
        return f"not solved: {until} was not reached within {steps}" if until else f"done: {steps}"
    if reason == "interrupted":
        return f"interrupted after {steps}"
    return f"ended after {steps}"


def left(row: Row, steps: int, first: int = 1) -> str:
    """Return the time that is left to a goal, at the speed of the newest Row.

    Args:
        row: the newest Row.
        steps: the goal in environment steps.
        first: the number of the first Row since the run was started or resumed (default 1).

    Returns:
        A duration; ``-`` after the first Row, whose speed is that of compiling.
    """
    if row["row"] <= first:
        return "-"
    steps_left = max(steps - row["env_steps"], 0)
    return duration(steps_left / max(row["steps_per_second"], 1e-9))


def duration(seconds: float) -> str:
    """Format a number of seconds, with minutes and hours if there are any.

    >>> duration(42), duration(187), duration(7387)
    ('42 s', '3:07', '2:03:07')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(x: float) -> str:
    """Format a return, such as ``1,234.5``; NaN, which stands for none, as ``-``."""
    return "-" if math.isnan(x) else decimal(x)
