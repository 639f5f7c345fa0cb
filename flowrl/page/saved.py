"""The source of a saved run, which has ended, was killed, or goes on in another process."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import repeat
from pathlib import Path
from threading import Lock
from typing import Any

from flowrl.core.growing_lines import GrowingLines, last_object
from flowrl.core.row_json import numbers_of
from flowrl.core.saved_rows import no_directory, way_to_runs
from flowrl.errors import SaveError
from flowrl.graph.graph import Graph
from flowrl.observe import history
from flowrl.observe.about import FILE, goal_of
from flowrl.observe.saver import UNREADABLE
from flowrl.observe.saving import profiles
from flowrl.page.moment import moment, without_nan
from flowrl.page.past import evenly
from flowrl.page.routes import Runs
from flowrl.page.source import MOST_EVENTS, MOST_ROWS, Cursor, ends_at, event_of


class SavedRun:
    """The source of a run's directory. Its files are read again when they have changed.

    Args:
        path: the directory.

    Raises:
        SaveError: it is no run's, or one from before runs held their pictures.
    """

    every: float = 1.0
    """The seconds between two looks of a page."""
    number = 0
    """The number of the newest event, which only a look at the file would show."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise SaveError(no_directory(path))
        if not (self.path / "rows.jsonl").is_file():
            raise SaveError(f"{path} has no rows.jsonl: it holds no run; {way_to_runs(self.path)}")
        if not (self.path / "graph.json").is_file():
            raise SaveError(
                f"{path} has no graph.json, which a page draws: an older flowrl saved it; "
                "flowrl explain and flowrl compare read it"
            )
        self._read: dict[str, tuple[Any, Any]] = {}
        """By file: what changes with it, and what was made of it."""
        self._rows = GrowingLines(self.path / "rows.jsonl")
        self._events = GrowingLines(self.path / "events.jsonl")
        self._lock = Lock()
        """Several pages may look at once."""

    def facts(self) -> dict[str, Any]:
        """Return the graph, its plan, and where it was saved."""
        plan = (self.path / "plan.txt").read_text(encoding="utf-8")
        return {"graph": self._drawn(), "plan": plan, "verbs": (), "path": str(self.path)}

    def control(self, verb: str, node: str = "") -> bool:
        """Return False: what this process does not run it can't control."""
        return False

    def _drawn(self) -> dict[str, Any]:
        """Return the graph as plain data."""
        found: dict[str, Any] = self._again("graph.json", lambda: self._json("graph.json"))
        return found

    def item(self, node: str) -> dict[str, Any] | None:
        """Return an empty dict, for the items of a run are not saved; None if there is no node."""
        return {} if any(node == known["name"] for known in self._drawn()["nodes"]) else None

    def graph(self) -> Graph:
        """Return the graph, parsed from its text.

        Raises:
            FlowrlError: it can't be read back.
        """
        file = self.path / "graph.txt"
        text = file.read_text(encoding="utf-8")
        if text.startswith(UNREADABLE):
            why = text.partition("\n")[0].removeprefix(UNREADABLE)
            raise SaveError(f"the graph of {self.path} can't be read back from its text: {why}")
        return Graph.from_text(text, source=str(file))

    def summary(self) -> dict[str, Any]:
        """Return a line about the run; of its rows only the last one is read."""
        about = self._about()
        row = self._again("rows.jsonl", lambda: last_object(self.path / "rows.jsonl"))
        return {
            "name": str(self.path),
            "state": self.state(),
            "graph": about.get("graph"),
            "goal": goal_of(about.get("steps"), about.get("until")),
            **ends_at(numbers_of(row)),
            "started": _seconds(about.get("started")),
        }

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return new rows and events, and where the time went."""
        rows, events = self._rows, self._events
        with self._lock:
            rows.look()
            events.look()
            moved = cursor.rows > len(rows) or cursor.begun != rows.begun
            again = moved or cursor == Cursor()
            new = range(0 if again else cursor.rows, len(rows))
            numbers = range(cursor.events, len(events))[-MOST_EVENTS:]
            found = {
                "state": self.state(),
                "fresh": cursor == Cursor(),
                "again": again,
                "rows": list(map(numbers_of, rows.parsed(evenly(new, MOST_ROWS)))),
                "count": len(rows),
                "events": list(map(_shown, numbers, events.parsed(numbers), repeat(self._drawn()))),
                "now": self._again("profile.json", self._moment),
                "past": len(self.entries()),
            }
            return Cursor(len(rows), len(events), rows.begun), without_nan(found)

    def row(self, number: int) -> dict[str, Any]:
        """Return the row of this number, counted from 1; the newest if it has not closed yet."""
        with self._lock:
            self._rows.look()
            count = len(self._rows)
            if not (number and count):
                return {}
            return numbers_of(self._rows.parsed([min(number, count) - 1])[0])

    def entries(self) -> list[history.Entry]:
        """Return the history of the run; it is empty where an older flowrl saved it."""
        # What can't be read of it must not hide the rest of a run.
        with suppress(SaveError):
            return list(self._again(history.FILE, lambda: history.entries_of(self.path)))
        return []

    def state(self) -> str:
        """Return ``running``, the reason for which it ended, or ``killed``."""
        ended = self._about().get("ended")
        if isinstance(ended, dict) and (reason := ended.get("reason")):
            return str(reason)
        with (self.path / "rows.jsonl").open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return "running"
        return "killed"

    def _again(self, name: str, read: Any) -> Any:
        """Return what is made of a file, which is read again only if it has changed."""
        try:
            found = (self.path / name).stat()
            key = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            key = (0, 0, 0)
        if self._read.get(name, (None, None))[0] != key:
            self._read[name] = key, read()
        return self._read[name][1]

    def _about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the run."""
        return dict(self._again(FILE, lambda: self._json(FILE)))

    def _json(self, name: str) -> dict[str, Any]:
        """Return what a file of JSON holds; nothing where it is not there."""
        with suppress(OSError, ValueError, TypeError):
            return dict(json.loads((self.path / name).read_text(encoding="utf-8")))
        return {}

    def _moment(self) -> dict[str, Any]:
        """Return where the time of the run went, without its beginning."""
        try:
            whole, steady = profiles(self.path)
        except SaveError as error:
            return {**NOTHING, "findings": [error.message]}
        return moment(steady, whole)


def _shown(index: int, line: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """Return an event as a page shows it, from its line of ``events.jsonl``."""
    when = datetime.fromisoformat(line["time"]).timestamp()
    return {"number": index + 1, "time": when, **event_of(line, drawn)}


def _seconds(text: Any) -> float | None:
    """Return a time that ``run.json`` notes in seconds since the epoch; None if it has none."""
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


NOTHING: dict[str, Any] = {
    "seconds": 0.0, "rows": 0, "env_steps": 0, "nodes": {}, "edges": [], "workers": {}, "facts": {},
    "resources": {}, "findings": [], "sliders": [], "what_if": [], "steps_per_second": None,
    "bottleneck": None,
}  # fmt: skip
"""What `moment` returns of a run of which nothing was measured."""


class SavedRuns:
    """The runs in directories, to which others may be added while a page is open.

    Args:
        paths: directories of runs, or directories that have such in them.

    Raises:
        SaveError: there is no run in one of them that a page can show.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = [Path(path) for path in paths]
        self._known: dict[Path, tuple[str, SavedRun]] = {}
        """Each run that was ever found, and its id."""
        self._lock = Lock()
        for path in self.paths:
            for run in saved_runs(path):
                self._note(run.path)

    def look(self, runs: Runs) -> None:
        """Bring runs by their ids up to date: a run that comes back has its id again."""
        with self._lock:
            now = [folder for path in self.paths for folder in _folders(path)]
            for folder in now:
                # A directory may be removed while it is looked at.
                with suppress(SaveError):
                    self._note(folder)
            there = dict(self._known[folder] for folder in now if folder in self._known)
            for name, _ in self._known.values():
                if name not in there:
                    runs.pop(name, None)
            runs.update(there)

    def _note(self, folder: Path) -> None:
        if folder not in self._known:
            self._known[folder] = str(len(self._known) + 1), SavedRun(folder)


def saved_runs(path: str | Path) -> list[SavedRun]:
    """Return the run in a directory, or all runs in the directories within it.

    Raises:
        SaveError: there is none that a page can show.
    """
    root = Path(path)
    if (root / "rows.jsonl").is_file() or not root.is_dir():
        return [SavedRun(root)]
    runs = [SavedRun(folder) for folder in _folders(root)]
    if not runs:
        raise SaveError(f"{path} has no runs in it; {way_to_runs(root)}")
    return runs


def _folders(root: Path) -> list[Path]:
    """Return the directories of runs that a page can show: this one, or those within it."""
    return sorted(_found(root))


def _found(root: Path) -> Iterator[Path]:
    for folder, within, files in os.walk(root):
        if {"graph.json", "rows.jsonl"} <= {*files}:
            # A run's own directory may hold many files, and no other run.
            within.clear()
            yield Path(folder)
