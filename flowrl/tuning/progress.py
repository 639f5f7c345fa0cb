"""What a study shows while it goes on: a line for each trial that ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich.console import Console

from flowrl.core.texts import plural
from flowrl.observe.progress import QUIET_SECONDS, duration
from flowrl.tuning.journal import Journal, Options, Trial
from flowrl.tuning.spaces import Point


class Progress(AbstractContextManager["Progress"]):
    """Writes how a study goes to standard error.

    Args:
        options: of the study.
        journal: its trials.
        shown: whether anything is written.
    """

    def __init__(self, options: Options, journal: Journal, *, shown: bool) -> None:
        self.options, self.journal = options, journal
        self.console = Console(stderr=True, quiet=not shown)
        self.began = self.written = time.perf_counter()
        self._closed = Event()

    def __enter__(self) -> Self:
        o, path = self.options, self.journal.path
        started = f"{plural(o.trials, 'trial')} of {o.steps:,} steps"
        where = f" on {o.env}" if o.env else ""
        self._print(f"{o.graph}{where}: {o.trials} {started}, {o.mode} {o.metric}, in {path}")
        for name, space in o.search.items():
            self._print(f"  {name} from {space}")
        if ended := self._ended():
            self._print(f"goes on: {ended} of {o.trials} trials have ended before")
        Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        if isinstance(error, KeyboardInterrupt):
            self._print(
                f"interrupted: {self._ended()} of {self.options.trials} trials have ended; "
                f"go on with: flowrl tune {self.journal.path}"
            )

    def __call__(self, trial: Trial) -> None:
        """Write how a trial ended."""
        count = f"{self._ended():>3} of {self.options.trials}"
        found = best(self.journal.trials, self.options.mode)
        so_far = "" if found is None else f"; best {number(found.value)} (trial {found.number})"
        self._print(f"{count}  {describe(trial, self.options.metric)}{so_far}")

    def _ended(self) -> int:
        """Return how many trials have ended."""
        return sum(trial.ended for trial in self.journal.trials)

    def _beat(self) -> None:
        """Write what goes on wherever no line was written for long."""
        while not self._closed.wait(min(1.0, QUIET_SECONDS)):
            if time.perf_counter() - self.written >= QUIET_SECONDS:
                self._print(self._at_work())

    def _at_work(self) -> str:
        """Return which trials go on, and how far they are."""
        running = [trial for trial in self.journal.trials if trial.state == "running"]
        each = [f"trial {trial.number} at {trial.env_steps:,} steps" for trial in running]
        seconds = duration(time.perf_counter() - self.began)
        return f"{', '.join(each) or 'starting'}; {seconds}"

    def _print(self, text: str) -> None:
        self.written = time.perf_counter()
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(trial: Trial, metric: str) -> str:
    """Return a line on a trial that ended."""
    facts = f"{trial.env_steps:,} steps, {duration(trial.seconds)}"
    result = f"{metric} {number(trial.value)} after {facts}"
    if trial.state == "failed":
        result = trial.error.partition("\n")[0]
    return f"trial {trial.number} {trial.state}: {settings_text(trial.settings)}: {result}"


def settings_text(settings: Mapping[str, Point]) -> str:
    """Return the settings of a trial, such as ``lr=0.00031, epochs=4``."""
    return ", ".join(f"{name}={point_text(point)}" for name, point in settings.items())


def point_text(point: Point) -> str:
    """Return a point, a fractional number with four digits."""
    return f"{point:.4g}" if isinstance(point, float) else str(point)


def number(value: float | None) -> str:
    """Return a metric with four digits at least; ``-`` where there is none.

    >>> number(None), number(0.01234567), number(1234.5)
    ('-', '0.01235', '1234')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ranked(trials: Sequence[Trial], mode: str) -> list[Trial]:
    """Return the trials that have a value, the best one first.

    Those that were stopped come after those that were not: their value is of fewer steps.
    """
    sign = -1.0 if mode == "max" else 1.0
    found = [
        (trial.state != "done", sign * trial.value, trial.number, trial)
        for trial in trials
        if trial.state in ("done", "stopped") and trial.value is not None
    ]
    # Numbers are unlike, so trials themselves are never compared.
    return [trial for *_, trial in sorted(found)]


def best(trials: Sequence[Trial], mode: str) -> Trial | None:
    """Return the best trial; None if none has a value."""
    return next(iter(ranked(trials, mode)), None)
