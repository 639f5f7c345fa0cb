"""Switching the traces of runs on, and writing them to a file or a collector."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flowrl.core.clock import TRACE
from flowrl.core.new_files import check_new
from flowrl.errors import SaveError, SettingError
from flowrl.observe.otlp import send
from flowrl.observe.picture import svg
from flowrl.observe.trace import Trace


class Tracing:
    """Traces a run from the moment that this is made until it is closed.

    In that time clocks keep spans, in this process and in those that are started. Then the trace is
    written to a file, and sent to a collector.

    Args:
        file: the file to write, ``.json`` for Perfetto or ``.svg`` for a picture; None for none.
        otlp: the address of a collector of OpenTelemetry; None for none.

    Raises:
        SettingError: there is no folder for the file, or its name ends in neither ``.json`` nor
            ``.svg``.
        SaveError: the file exists already.
    """

    def __init__(self, file: str | Path | None, otlp: str | None) -> None:
        self.file, self.otlp = None if file is None else Path(file).absolute(), otlp
        self.trace: Callable[[], Trace] | None = None
        """Returns the trace; None until the run is set up."""
        if self.file is not None and not self.file.parent.is_dir():
            raise SettingError(f"trace: there is no folder {self.file.parent} for {self.file.name}")
        if self.file is not None and (
            self.file.suffix not in (".json", ".svg") or self.file.is_dir()
        ):
            raise SettingError(
                f"trace: {self.file} must be a file whose name ends in .json (Perfetto opens it) "
                "or .svg (a picture)"
            )
        if self.file is not None:
            check_new(self.file, "name another file for the trace")
        self.before: str | None = None
        """What the environment variable was, so that a user's own setting outlives the run."""

    def start(self) -> None:
        """Let this process trace, and those that the run starts, which inherit the variable."""
        self.before = os.environ.get(TRACE)
        os.environ[TRACE] = "1"

    def close(self) -> None:
        """Stop tracing, write the trace to the file, and send it to the collector.

        Raises:
            SaveError: the file can't be written.
            RunError: the collector does not take it.
        """
        if not self.before:
            os.environ.pop(TRACE, None)
        # A run that failed before it was set up has no trace.
        if self.trace is None:
            return
        trace = self.trace()
        if self.file is not None:
            write(trace, self.file)
        if self.otlp is not None:
            send(trace, self.otlp)


def write(trace: Trace, path: Path) -> None:
    """Write a trace to a file.

    Args:
        trace: of a run.
        path: of the file. If its name ends in ``.svg``, a part of the trace is drawn as a picture,
            else all of it is written for Perfetto.

    Raises:
        SaveError: the file can't be written.
    """
    try:
        path.write_text(svg(trace) if path.suffix == ".svg" else trace.perfetto(), encoding="utf-8")
    except OSError as error:
        raise SaveError(
            f"the trace could not be written to {path}: {error.strerror}; "
            "name a file in a folder that is there"
        ) from error
