"""The size and the checksum of a file, by which it is known whether it is what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import SaveError


def facts_of(path: Path) -> dict[str, Any]:
    """Return the size of a file in bytes, and its SHA-256 sum."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def check_files(root: Path, files: Mapping[str, Any], listed_in: str, way_out: str = "") -> None:
    """Make sure that files are there, and are what was written.

    Args:
        root: the folder that their names begin at.
        files: what `facts_of` returned of each when it was written, by name.
        listed_in: the name of the file that says so, for errors.
        way_out: what else to do than to restore it (default: nothing).

    Raises:
        SaveError: one is missing, or differs.
    """
    for name, facts in files.items():
        path = root / name
        if not path.is_file():
            raise SaveError(
                f"{path} is missing, though {listed_in} lists it; restore it from a copy{way_out}"
            )
        if facts_of(path) != facts:
            raise SaveError(
                f"{path} is not what was written: its size or SHA-256 sum differs from that in "
                f"{listed_in}; restore it from a copy{way_out}"
            )
