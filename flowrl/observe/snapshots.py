"""Snapshots of a run: all that lasts of it, in its directory, from which it can be resumed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import flowrl
from flowrl.core.blocks import Blocks, Packer, Unpacker, write_whole
from flowrl.core.encoding import decoded, encoded
from flowrl.errors import SaveError, SettingError

FOLDER = "snapshots"
"""The folder in a run's directory. The manifest leaves it out: its files have their own sums."""
NEWEST = "newest.txt"
"""The file in it that holds the name of the newest snapshot."""
FORMAT = 1
"""The number of the format, which rises when older versions could not read what is written."""
MOST_TEXT = 1 << 30
"""The most bytes of a snapshot's JSON."""


@dataclass(frozen=True)
class Snapshots:
    """How often a run is kept so that it can be resumed, and how many snapshots stay.

    A snapshot is also made at the end of a run, at Ctrl-C and at SIGTERM. With each the best policy
    so far is written into the folder ``best``, where `fl.load(path, which="best")` finds it.

    Args:
        every: least seconds between two snapshots; 0: one after every row (default 60).
        keep: how many of the newest stay (default 3).
        best: column of a row by which policies are compared; more is better. None:
            ``eval/return_mean`` where the graph has `Evaluate`, and else ``return_mean`` (default
            None).

    With a column of `Evaluate` the best policy has the weights that played the evaluation; with any
    other column those after the last update of the row, while ``return_mean`` is of the last 100
    episodes, which older weights played. In the xla runtime several rows come from the device at
    once: of these only the last one counts, or the last one with an evaluation. Of many seeds it is
    the best policy of the run whose newest return is the highest at the time.

    Raises:
        SettingError: one of them is no such number.
    """

    every: float = 60.0
    keep: int = 3
    best: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, Real) or not self.every >= 0:
            raise SettingError(f"every must be a number of seconds, at least 0, got {self.every!r}")
        if type(self.keep) is not int or self.keep < 1:
            raise SettingError(
                f"keep must be a whole number, at least 1, got {self.keep!r}; for no snapshots at "
                "all take snapshots=False"
            )
        if self.best is not None and not isinstance(self.best, str):
            raise SettingError(f"best must be the name of a column, got {self.best!r}")


@dataclass(frozen=True)
class Snapshot:
    """What a run was between two of its rows."""

    path: Path
    """The file that it was read from."""
    row: int
    """The rows until then."""
    rows_bytes: int
    """The size of ``rows.jsonl`` until then."""
    graph: str
    """The text of the graph."""
    plan: str
    """The text of its plan."""
    state: Any
    """What `Session.keep` returned."""


class SnapshotWriter:
    """Writes the snapshots of one run.

    Args:
        settings: how often, and how many stay.
        path: the run's directory.
        facts: the texts of graph and plan.
    """

    def __init__(self, settings: Snapshots, path: Path, graph: str, plan: str) -> None:
        self.settings = settings
        self.folder = path / FOLDER
        self.blocks = Blocks(self.folder / "blocks")
        self.texts = {"graph": graph, "plan": plan}
        self.last = time.monotonic()
        """When the last one was written, or the run began."""
        self.newest_row = -1
        """The row after which the newest one was made."""
        self.used: dict[Path, set[str]] = {}
        """By snapshot: the blocks that it needs, as far as they are known."""

    def due(self) -> bool:
        """Return whether enough time has passed since the last one."""
        return time.monotonic() - self.last >= self.settings.every

    def write(self, row: int, rows_bytes: int, keep: Callable[[], Any]) -> None:
        """Write a snapshot, and remove those that are too many.

        Args:
            row: the rows until now.
            rows_bytes: the size of ``rows.jsonl``.
            keep: returns what lasts.

        Raises:
            EncodingError: something can't be kept.
            OSError: it can't be written; those that are there stay as they are.
        """
        if row == self.newest_row:
            return
        # Also where it fails: a full disk must not be tried after each row.
        self.last = time.monotonic()
        packer = Packer(self.blocks)
        state = encoded(keep(), packer.put)
        small = packer.end()
        text = json.dumps(
            {
                "flowrl": flowrl.__version__,
                "row": row,
                "rows_bytes": rows_bytes,
                **self.texts,
                "small": small,
                "blocks": packer.sizes,
                "state": state,
            },
            allow_nan=False,
            separators=(",", ":"),
        ).encode()
        header = {
            "format": FORMAT,
            "bytes": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
        }
        file = self.folder / f"row-{row:010}.json"
        write_whole(file, json.dumps(header).encode() + b"\n" + text)
        # So that it is noticed if the newest one goes missing.
        write_whole(self.folder / NEWEST, file.name.encode())
        self.used[file] = set(packer.sizes)
        self.newest_row, self.last = row, time.monotonic()
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove the oldest snapshots, and the blocks that none of the others needs."""
        files = snapshot_files(self.folder)
        # What lies beyond the newest one is of a future that was given up when it was resumed.
        beyond = [file for file in files if _row_of(file) > self.newest_row]
        stay = [file for file in files if file not in beyond][: self.settings.keep]
        for file in files:
            if file not in stay:
                file.unlink(missing_ok=True)
        self.blocks.keep_only(set().union(*map(self._blocks_of, stay)))

    def _blocks_of(self, file: Path) -> set[str]:
        """Return the blocks that a snapshot needs; none where it is damaged."""
        if file not in self.used:
            try:
                self.used[file] = set(_read(file)["blocks"])
            except SaveError:
                self.used[file] = set()
        return self.used[file]


def snapshot_files(folder: Path) -> list[Path]:
    """Return the files of a folder's snapshots, the newest first."""
    return sorted(folder.glob("row-*.json"), reverse=True)


def _row_of(file: Path) -> int:
    digits = file.stem.removeprefix("row-")
    return int(digits) if digits.isdigit() else -1


def _read(file: Path) -> dict[str, Any]:
    """Return the JSON of a snapshot.

    Raises:
        SaveError: it is damaged, or of a newer format.
    """
    try:
        with file.open("rb") as data:
            header = json.loads(data.readline(4096))
            if header["format"] > FORMAT:
                raise SaveError(
                    f"{file} has format {header['format']}, and this flowrl reads up to {FORMAT}: "
                    "install a newer one"
                )
            size = int(header["bytes"])
            text = data.read(size + 1) if size < MOST_TEXT else b""
        if len(text) != size or hashlib.sha256(text).hexdigest() != header["sha256"]:
            raise SaveError(f"{file} is not what was written: its size or SHA-256 sum differs")
        found: dict[str, Any] = json.loads(text)
    except OSError as error:
        raise SaveError(f"{file} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SaveError(f"{file} is not what was written: {error!r}") from None
    return found


def read_snapshot(file: Path, allow: Collection[str] = ()) -> Snapshot:
    """Read a snapshot after checking every byte of it.

    Args:
        file: the snapshot's own file.
        allow: packages whose classes may be made, beside flowrl.

    Raises:
        SaveError: it is damaged, of a newer format, or needs another package.
    """
    found = _read(file)
    blocks = Blocks(file.parent / "blocks")
    try:
        sizes = {str(name): int(size) for name, size in found["blocks"].items()}
        unpacker = Unpacker(blocks, found["small"], sizes)
        state = decoded(found["state"], unpacker.get, allow)
        numbers = int(found["row"]), int(found["rows_bytes"])
        return Snapshot(file, *numbers, found["graph"], found["plan"], state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SaveError(f"{file} is not what was written: {error!r}") from None


def newest_snapshot(
    path: Path, allow: Collection[str], damaged: Callable[[str], None]
) -> Snapshot | None:
    """Return the newest good snapshot of a run; None if there is none.

    Args:
        path: the run's directory.
        allow: packages whose classes may be made, beside flowrl.
        damaged: is called with a text for each newer one that is not good.
    """
    files, named = snapshot_files(path / FOLDER), path / FOLDER / NEWEST
    name = named.read_bytes()[:100].decode(errors="replace") if named.is_file() else ""
    if name not in [file.name for file in files] and (files or name):
        damaged(
            f"{path / FOLDER / name} is missing; the snapshot before it is taken"
            if name
            else f"{named} is missing, so that nobody knows whether there was a newer snapshot"
        )
    for file in files:
        try:
            return read_snapshot(file, allow)
        except SaveError as error:
            damaged(f"{error.message}; the snapshot before it is taken")
    return None
