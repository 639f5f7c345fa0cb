"""Snapshots of a run: all that lasts of it, in its directory, from which it can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import flowrl
from flowrl.core.blocks import DRAFT, Blocks, Packer, Unpacker, open_regular, sync, write_whole
from flowrl.core.encoding import EncodingError, decoded, encoded, whole
from flowrl.errors import SaveError, SettingError
from flowrl.graph.graph import Graph

FOLDER = "snapshots"
"""The folder in a run's directory. The manifest leaves it out: its files have their own sums."""
NEWEST = "newest.txt"
"""The file in it that holds the name of the newest snapshot."""
FORMAT = 1
"""The number of the format, which rises when older versions could not read what is written."""
MOST_TEXT = 1 << 28
"""The most bytes of a snapshot's JSON."""


Kept = Callable[[], AbstractContextManager[Any]]
"""A function that returns a context with what lasts, in which this stays as it is."""


@dataclass(frozen=True)
class Snapshots:
    """How often a run is kept so that it can be resumed, and how many snapshots stay.

    A snapshot is also made at the end of a run, at Ctrl-C and, of `flowrl run`, at SIGTERM. With
    each the best policy so far is written into the folder ``best``, where
    `fl.load(path, which="best")` finds it.

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
        is_number = isinstance(self.every, Real) and not isinstance(self.every, bool)
        if not is_number or not 0 <= self.every < math.inf:
            raise SettingError(f"every must be a number of seconds, at least 0, got {self.every!r}")
        # As a plain number it can be written to ``run.json``.
        object.__setattr__(self, "every", float(self.every))
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
        graph: the text of the graph.
        plan: the text of its plan.
        row: the rows of the snapshot from which the run goes on (default 0: it is a new one).
    """

    def __init__(
        self, settings: Snapshots, path: Path, graph: str, plan: str, row: int = 0
    ) -> None:
        self.settings = settings
        self.folder = path / FOLDER
        self.blocks = Blocks(self.folder / "blocks")
        self.texts = {"graph": graph, "plan": plan}
        self.last = time.monotonic()
        """When the last one was written, or the run began."""
        self.newest_row = row
        """The row after which the newest one was made."""
        self.used: dict[Path, set[str] | None] = {}
        """By snapshot: the blocks that it needs; None where it can't be read."""

    def due(self) -> bool:
        """Return whether enough time has passed since the last one."""
        return time.monotonic() - self.last >= self.settings.every

    def write(self, row: int, rows_bytes: int, state: Kept) -> None:
        """Write a snapshot, and remove those that are too many.

        Args:
            row: the rows until now.
            rows_bytes: the size of ``rows.jsonl``.
            state: returns a context with what lasts, in which this stays as it is.

        Raises:
            EncodingError: something can't be kept.
            OSError: it can't be written; those that are there stay as they are.
        """
        if row == self.newest_row:
            return
        # Also where it fails: a full disk must not be tried after each row.
        self.last = time.monotonic()
        # What lies beyond the newest one is of a future that was given up when the run was resumed,
        # for it was damaged. It goes first: a block that is written again might repair it.
        for file in snapshot_files(self.folder):
            if _row_of(file) > self.newest_row:
                file.unlink(missing_ok=True)
        try:
            self._write(row, rows_bytes, state)
        finally:
            # After a failure, too: what was written in vain would keep the disk full.
            self._remove_old()
        self.last = time.monotonic()

    def _write(self, row: int, rows_bytes: int, state: Kept) -> None:
        """Write the blocks, then what names them, then what names that; each waits for the disk."""
        packer = Packer(self.blocks)
        with state() as kept:
            text_of_state = encoded(kept, packer.put)
        small = packer.end()
        sync(self.blocks.folder)
        facts = {
            "flowrl": flowrl.__version__,
            "row": row,
            "rows_bytes": rows_bytes,
            **self.texts,
            "small": small,
            "blocks": packer.sizes,
            "state": text_of_state,
        }
        text = json.dumps(facts, allow_nan=False, separators=(",", ":")).encode()
        if len(text) > MOST_TEXT:
            raise EncodingError(
                f"it has {len(text):,} bytes beside its arrays, and {MOST_TEXT:,} are the most"
            )
        header = {"format": FORMAT, "bytes": len(text), "sha256": _sum(FORMAT, text)}
        file = self.folder / f"row-{row:010}.json"
        write_whole(file, json.dumps(header).encode() + b"\n" + text)
        sync(self.folder)
        self.used[file] = set(packer.sizes)
        self.newest_row = row
        # So that it is noticed if the newest one goes missing.
        write_whole(self.folder / NEWEST, _naming(file.name))
        sync(self.folder)

    def _remove_old(self) -> None:
        """Remove the oldest snapshots, drafts, and the blocks that no other snapshot needs."""
        files = snapshot_files(self.folder)
        stay = files[: self.settings.keep]
        for file in [*files[len(stay) :], *self.folder.glob(f"row-*.json{DRAFT}")]:
            file.unlink(missing_ok=True)
        self.used = {file: self._blocks_of(file) for file in stay}
        wanted: set[str] = set()
        for blocks in self.used.values():
            # Nobody knows which blocks this one needs, and it may be readable again.
            if blocks is None:
                return
            wanted |= blocks
        self.blocks.keep_only(wanted)

    def _blocks_of(self, file: Path) -> set[str] | None:
        """Return the blocks that a snapshot needs; None where it can't be read."""
        if file not in self.used:
            try:
                return set(_read(file)["blocks"])
            except SaveError:
                return None
        return self.used[file]


def snapshot_files(folder: Path) -> list[Path]:
    """Return the files of a folder's snapshots, the newest first."""
    files = [file for file in folder.glob("row-*.json") if _NAME.fullmatch(file.name)]
    return sorted(files, key=_row_of, reverse=True)


_NAME = re.compile(r"row-[0-9]{10,18}\.json")


def _row_of(file: Path) -> int:
    return int(file.stem.removeprefix("row-"))


def _sum(number: int, text: bytes) -> str:
    """Return the SHA-256 sum of a snapshot's JSON and the number of its format."""
    return hashlib.sha256(b"%d\n%b" % (number, text)).hexdigest()


def _naming(name: str) -> bytes:
    """Return what stands in the file that names the newest snapshot."""
    return f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n".encode()


class _NewerError(SaveError):
    """A snapshot is whole, and of a format that this version does not know."""


def _read(file: Path) -> dict[str, Any]:
    """Return the JSON of a snapshot.

    Raises:
        SaveError: it is damaged, or of a newer format.
    """
    with _reading(file), open_regular(file) as data:
        line = data.readline(4096)
        header = json.loads(line)
        size, number = whole(header["bytes"]), whole(header["format"])
        # The size first, so that a file that is too large takes no memory.
        is_so_long = size <= MOST_TEXT and size + len(line) == file.stat().st_size
        text = data.read(size) if is_so_long else b""
        if len(text) != size or _sum(number, text) != header["sha256"]:
            raise SaveError("it is not what was written: its size or SHA-256 sum differs")
        if number != FORMAT:
            raise _NewerError(
                f"{file} has format {number}, and this flowrl reads format {FORMAT}: install a "
                "newer one"
            )
        found: dict[str, Any] = json.loads(text, object_pairs_hook=_without_doubles)
        if whole(found["row"]) != _row_of(file):
            raise SaveError(f"it is not what was written: it is of row {found['row']}")
        whole(found["rows_bytes"])
        return found


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise a SaveError that names the file, whatever fails."""
    try:
        yield
    except _NewerError:
        raise
    except SaveError as error:
        raise SaveError(f"{file.name}: {error.message}") from None
    except Exception as error:  # noqa: BLE001 - files of others may hold anything
        raise SaveError(f"{file.name}: it is not what was written: {error!r}") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON.

    Raises:
        ValueError: it has a key twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object with a key twice")
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
    with _reading(file):
        unpacker = Unpacker(Blocks(file.parent / "blocks"), found["small"], found["blocks"])
        state = decoded(found["state"], unpacker.get, allow)
        texts = found["graph"], found["plan"]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a graph that is no text")
        return Snapshot(file, found["row"], found["rows_bytes"], *texts, state)


def packages(graph: Graph) -> set[str]:
    """Return the packages whose classes a graph is made of, which its snapshots may hold."""
    parts = [node.op for node in graph.nodes] + [*graph.resources.values()]
    return {type(part).__module__.partition(".")[0] for part in parts}


def start_of(path: Path) -> Snapshot:
    """Return what stands for a snapshot of the start of a run, which has no row and no state."""
    return Snapshot(path / FOLDER, 0, 0, "", "", None)


def newest_snapshot(
    path: Path, allow: Collection[str], damaged: Callable[[str], None]
) -> Snapshot | None:
    """Return the newest good snapshot of a run; None if there is none.

    Args:
        path: the run's directory.
        allow: packages whose classes may be made, beside flowrl.
        damaged: is called with a text for each newer one that is not good.

    Raises:
        SaveError: a whole one is of a newer format. To go on from an older one would remove it.
    """
    files = snapshot_files(path / FOLDER)
    if problem := _missing(path / FOLDER, files):
        damaged(problem)
    for file in files:
        try:
            return read_snapshot(file, allow)
        except _NewerError:
            raise
        except SaveError as error:
            damaged(f"{error.message}; the snapshot before it is taken")
    return None


def _missing(folder: Path, files: list[Path]) -> str:
    """Return what is wrong if the newest snapshot is not among the files."""
    named = folder / NEWEST
    if not files and not named.exists():
        return ""
    try:
        with open_regular(named) as file:
            line = file.read(200)
    except SaveError as error:
        problem = error.message
    else:
        name = line.partition(b" ")[0].decode(errors="replace")
        if line == _naming(name):
            is_there = name in [file.name for file in files]
            return "" if is_there else f"{folder / name} is missing; the one before it is taken"
        problem = f"{named} is not what was written"
    return f"{problem}; so nobody knows whether a newer snapshot is missing"
