"""Whether a run is traced, and where its trace goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flowrl.core.clock import TRACE
from flowrl.errors import SaveError, SettingError
from flowrl.observe.otlp import send
from flowrl.observe.picture import svg
from flowrl.observe.trace import Trace


class Tracing:
    """Has clocks keep spans, in this process and in those that are started meanwhile, until it is closed; then brings the trace to where it goes.

    Args:
        file: for Perfetto, or for a picture.
        otlp: the address of a collector.

    Raises:
        SettingError: there is no folder for the file, or its name ends in neither ``.json`` nor ``.svg``.
    """

    def __init__(self, file: str | Path | None, otlp: str | None) -> None:
        self.file, self.otlp = None if file is None else Path(file), otlp
        self.trace: Callable[[], Trace] | None = None
        """What was seen, once it is known."""
        if self.file is not None and not self.file.absolute().parent.is_dir():
            raise SettingError(
                f"trace: there is no folder {self.file.absolute().parent} for {self.file.name}"
            )
        if self.file is not None and (
            self.file.suffix not in (".json", ".svg") or self.file.is_dir()
        ):
            raise SettingError(
                f"trace: {self.file} must be a file whose name ends in .json (Perfetto opens it) or .svg (a picture)"
            )
        self.before = os.environ.get(TRACE)
        os.environ[TRACE] = "1"

    def close(self) -> None:
        """End it.

        Raises:
            SaveError: the file can't be written.
            RuntimeFailed: the collector does not take it.
        """
        if not self.before:
            os.environ.pop(TRACE, None)
        if self.trace is None:
            return
        trace = self.trace()
        if self.file is not None:
            write(trace, self.file)
        if self.otlp is not None:
            send(trace, self.otlp)


def write(trace: Trace, path: Path) -> None:
    """Write a trace for Perfetto; a stretch of it as a picture, if the file's name ends in ``.svg``.

    Raises:
        SaveError: the file can't be written.
    """
    try:
        path.write_text(svg(trace) if path.suffix == ".svg" else trace.perfetto(), encoding="utf-8")
    except OSError as error:
        raise SaveError(
            f"the trace could not be written to {path}: {error.strerror}; name a file in a folder that is there"
        ) from error
