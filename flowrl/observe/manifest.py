"""The manifest of a run's directory, by which every file of it is checked."""

from __future__ import annotations

import json
from pathlib import Path

import flowrl
from flowrl.core.blocks import write_whole
from flowrl.core.file_sums import check_files, facts_of
from flowrl.core.saved_rows import no_directory, way_to_runs
from flowrl.errors import SaveError
from flowrl.observe.snapshots import FOLDER

MANIFEST = "manifest.json"
"""The file that lists all others of a run's directory with their sizes and SHA-256 sums."""
RECORDS = "records"
"""The folder of recorded updates."""
LEFT_OUT = (RECORDS, FOLDER)
"""The folders that the manifest leaves out: what is in them has checksums of its own, may be
removed, and may be large."""


def seal(root: Path) -> None:
    """Write the manifest of a run's directory, last, and in one atomic step.

    It holds the size and the SHA-256 sum of every file but records and snapshots.
    """
    found = [
        p
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != MANIFEST and p.relative_to(root).parts[0] not in LEFT_OUT
    ]
    files = {p.relative_to(root).as_posix(): facts_of(p) for p in found}
    text = json.dumps({"flowrl": flowrl.__version__, "files": files}, indent=1) + "\n"
    # The manifest gets its name when it is on disk, because its presence means a whole run.
    write_whole(root / MANIFEST, text.encode())


def verify(root: Path) -> None:
    """Check every file of a run against its manifest.

    Raises:
        SaveError: there is no manifest, or a file is missing or differs.
    """
    if not root.is_dir():
        raise SaveError(no_directory(root))
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        hint = ""
        if (root.parent / MANIFEST).is_file():
            hint = f"; its run's directory is {root.parent}"
        elif not (root / "graph.txt").is_file():
            hint = f"; {way_to_runs(root)}"
        raise SaveError(
            f"{root} has no {MANIFEST}: it is no run's directory, or its run was killed before it "
            f"could save{hint}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise SaveError(
            f"{root / MANIFEST} is damaged: it is not the JSON that was written; copy the run's "
            "directory again from where it was written, or train it again"
        ) from None
    check_files(root, files, MANIFEST)
