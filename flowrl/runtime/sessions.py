"""Folders of Ray's sessions: those of flowrl's drivers that are gone are removed at the next start.

Ray itself leaves the folder of every session that it starts, with logs and, where a driver was
killed, the objects that it had moved to the disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

MARK = "flowrl.lock"
"""The file in the folder of a session that flowrl started. Its driver holds a lock on it, which
ends with the driver however that ends."""


def begun(addresses: Mapping[str, Any], stop: Callable[[], None]) -> Callable[[], None]:
    """Mark a session that was started here, and remove those whose drivers are gone.

    Args:
        addresses: what `ray.init` returned of the session.
        stop: ends the session.

    Returns:
        A function that ends the session, whose folder stays until the next start.
    """
    folder = Path(addresses["session_dir"])
    # A folder that nothing can be written to, or no locks, are no reason for a run not to start.
    try:
        lock = _mark(folder)
    except OSError:
        return stop
    for mark in folder.parent.glob(f"session_*/{MARK}"):
        if mark.parent != folder:
            _remove_if_gone(mark)
    return partial(_end, stop, lock)


def _mark(folder: Path) -> TextIO:
    """Mark a session's folder, and return the file whose lock lasts as long as it is open."""
    draft = folder / f"{MARK}.draft"
    lock = draft.open("w", encoding="utf-8")
    try:
        # It gets its name once it is locked: before, it would look like that of a driver that is
        # gone.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.replace(folder / MARK)
    except OSError:
        lock.close()
        raise
    return lock


def _remove_if_gone(mark: Path) -> None:
    """Remove the folder of a session of this user's whose driver is gone."""
    # Another process may remove it at the same time.
    with suppress(OSError):
        with mark.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(mark.parent, ignore_errors=True)


def _end(stop: Callable[[], None], lock: TextIO) -> None:
    try:
        stop()
    finally:
        lock.close()
