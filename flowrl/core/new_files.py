"""Files that a user names for results: they must be new, so that none is ever lost."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import SaveError


def check_new(path: str | Path, way_out: str = "name another file") -> None:
    """Make sure that a file can be written without loss.

    Args:
        path: path of the file.
        way_out: what to do where it is there already (default: name another file).

    Raises:
        SaveError: something of that name exists already.
    """
    if Path(path).exists():
        raise SaveError(f"{path} exists already, and nothing is ever overwritten; {way_out}")
