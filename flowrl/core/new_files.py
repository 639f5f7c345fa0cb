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


def write_new(path: str | Path, data: str | bytes, way_out: str = "name another file") -> None:
    """Write a new file, and make its directory if it is not there.

    Args:
        path: path of the file.
        data: what it will hold; text is written as UTF-8.
        way_out: what to do where it is there already (default: name another file).

    Raises:
        SaveError: something of that name exists already, or it can't be written.
    """
    file = Path(path)
    check_new(file, way_out)
    if file.parent.exists() and not file.parent.is_dir():
        raise SaveError(f"{path} can't be written: {file.parent} is no directory; {way_out}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # One that somebody else has made meanwhile is an error, too.
        with file.open("xb") as opened:
            opened.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise SaveError(f"{path} can't be written: {error.strerror}; {way_out}") from None
