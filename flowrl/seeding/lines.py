"""What is printed of runs with many seeds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from flowrl.core.logs import log
from flowrl.observe.progress import PLAIN_SECONDS, line, result

if TYPE_CHECKING:
    from flowrl.seeding.runs import Event


class Lines:
    """Prints a line of progress for each run now and then, and how each one ended.

    Args:
        steps: environment steps at which each run ends; None if there is no such number.
        until: the goal of each run, as the user wrote it; None if there is none.
    """

    def __init__(self, steps: int | None, until: str | None = None) -> None:
        self.steps = steps
        self.until = until
        self.written: dict[int, float] = {}
        """By seed: when its last line was written."""

    def __call__(self, event: Event) -> None:
        """Print what happened, unless it is one of many rows."""
        each = event.run
        if event.warning:
            text = f"warning: {event.warning}"
        elif event.row is not None:
            now = time.perf_counter()
            if now - self.written.get(each.seed, -PLAIN_SECONDS) < PLAIN_SECONDS:
                return
            self.written[each.seed] = now
            text = line(event.row, self.steps)
        elif each.reason == "failed":
            text = f"failed: {each.error}"
        else:
            text = result(each.reason, self.until, each.rows[-1] if each.rows else None)
        print(f"{each.label}: {text}", file=sys.stderr, flush=True)  # noqa: T201 - its purpose


def log_warning(event: Event) -> None:
    """Log a warning of a run, where nothing else is printed of it."""
    if event.warning:
        log(f"{event.run.label}: {event.warning}")
