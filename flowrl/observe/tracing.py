"""Whether a run is traced, and where its trace goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flowrl.clock import TRACE
from flowrl.errors import SettingError
from flowrl.observe.otlp import send
from flowrl.observe.trace import Trace


class Tracing:
    """Has clocks keep spans, in this process and in those that are started meanwhile, until it is closed; then brings the trace to where it goes.

    Args:
        to: a file, or the address of a collector.
    """

    def __init__(self, to: str | Path) -> None:
        self.to = to
        self.trace: Callable[[], Trace] | None = None
        """What was seen, once it is known."""
        if not str(to).startswith(("http://", "https://")) and not Path(to).absolute().parent.is_dir():
            raise SettingError(f"trace: there is no folder {Path(to).absolute().parent} for {Path(to).name}")
        self.before = os.environ.get(TRACE)
        os.environ[TRACE] = "1"

    def close(self) -> None:
        """End it.

        Raises:
            SaveError: the file can't be written.
            RuntimeFailed: the collector does not take it.
        """
        os.environ.pop(TRACE)
        if self.before is not None:
            os.environ[TRACE] = self.before
        if self.trace is not None:
            if str(self.to).startswith("http"):
                send(self.trace(), str(self.to))
            else:
                self.trace().write(self.to)
