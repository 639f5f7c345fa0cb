"""Whether a run is traced, and where its trace goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flowrl.clock import TRACE
from flowrl.errors import SaveError, SettingError
from flowrl.observe.otlp import send
from flowrl.observe.picture import svg
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
                write(self.trace(), Path(self.to))


def write(trace: Trace, path: Path) -> None:
    """Write a trace for Perfetto; a stretch of it as a picture, if the file's name ends in ``.svg``.

    Raises:
        SaveError: the file can't be written.
    """
    try:
        path.write_text(svg(trace) if path.suffix == ".svg" else trace.perfetto(), encoding="utf-8")
    except OSError as error:
        raise SaveError(f"the trace could not be written to {path}: {error.strerror}; name a file in a folder that is there") from error
