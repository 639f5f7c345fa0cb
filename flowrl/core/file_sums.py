"""The size and the checksum of a file, by which it is known whether it is what was written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def facts_of(path: Path) -> dict[str, Any]:
    """Return the size of a file in bytes, and its SHA-256 sum."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}
