"""The seeds of the runs in one directory, which are noted before any of them begins."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from flowrl.errors import SaveError

FILE = "seeds.json"
"""The file that lists the seeds of the runs in a directory, also those that have not begun."""


def noted_seeds(folder: Path) -> list[int]:
    """Return the seeds that were noted in a directory of runs.

    Raises:
        SaveError: the file is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        return [int(seed) for seed in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise SaveError(f"{file} is damaged: {error}") from None


def note_seeds(folder: Path, seeds: Iterable[int]) -> None:
    """Note seeds in a directory of runs, beside those that were noted there before.

    Raises:
        SaveError: it can't be written, or the file that is there is damaged.
    """
    every = sorted({*noted_seeds(folder), *seeds})
    draft = folder / f"{FILE}.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(every) + "\n", encoding="utf-8")
        draft.replace(folder / FILE)
    except OSError as error:
        raise SaveError(f"can't write to {folder}: {error.strerror}") from None
