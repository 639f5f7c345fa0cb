"""The source of a saved run, which has ended, was killed, or goes on in another process."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from flowrl.core.saved_rows import json_lines, way_to_runs
from flowrl.errors import SaveError
from flowrl.observe import history
from flowrl.observe.about import FILE
from flowrl.observe.saving import profiles
from flowrl.page.moment import moment, without_nan
from flowrl.page.past import past_moment, past_of
from flowrl.page.source import MOST_EVENTS, MOST_ROWS, Cursor, text_of, thinned


class SavedRun:
    """The source of a run's directory. Its files are read again when they have changed.

    Args:
        path: the directory.

    Raises:
        SaveError: it is no run's, or one from before runs held their pictures.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise SaveError(f"there is no directory {path}")
        if not (self.path / "rows.jsonl").is_file():
            raise SaveError(f"{path} has no rows.jsonl: it holds no run; {way_to_runs(self.path)}")
        if not (self.path / "graph.json").is_file():
            raise SaveError(
                f"{path} has no graph.json, which a page draws: an older flowrl saved it; "
                "flowrl explain and flowrl compare read it"
            )
        self._read: dict[str, tuple[Any, Any]] = {}
        """By file: what changes with it, and what was made of it."""

    def facts(self) -> dict[str, Any]:
        """Return the graph, its plan, and where it was saved."""
        graph = json.loads((self.path / "graph.json").read_text(encoding="utf-8"))
        plan = (self.path / "plan.txt").read_text(encoding="utf-8")
        return {"graph": graph, "plan": plan, "verbs": (), "path": str(self.path)}

    def control(self, verb: str) -> bool:
        """Return False: what this process does not run it can't control."""
        return False

    def title(self) -> tuple[str, str]:
        """Return the directory, and what the run does."""
        return str(self.path), self.state()

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return new rows and events, and where the time went."""
        rows = self.rows()
        events = self._again("events.jsonl", lambda: list(self._events()))
        again = cursor.rows > len(rows) or cursor == Cursor()
        found = {
            "state": self.state(),
            "fresh": cursor == Cursor(),
            "again": again,
            "rows": thinned(rows[0 if again else cursor.rows :], MOST_ROWS),
            "count": len(rows),
            "events": events[cursor.events :][-MOST_EVENTS:],
            "now": self._again("profile.json", self._moment),
            "past": len(self.entries()),
        }
        return Cursor(len(rows), len(events)), without_nan(found)

    def past(self) -> list[dict[str, Any]]:
        """Return when each moment was that is remembered of the run."""
        return past_of(self.entries())

    def past_moment(self, number: int) -> dict[str, Any] | None:
        """Return what the run did at one of these moments.

        Args:
            number: its index; for any other number the moment is None.
        """
        return past_moment(self.entries(), self.rows(), number)

    def entries(self) -> list[history.Entry]:
        """Return the history of the run; it is empty where an older flowrl saved it."""
        # What can't be read of it must not hide the rest of a run.
        with suppress(SaveError):
            return list(self._again(history.FILE, lambda: history.entries_of(self.path)))
        return []

    def state(self) -> str:
        """Return ``running``, the reason for which it ended, or ``killed``."""
        about = self._again(FILE, lambda: self._json(FILE))
        if reason := about.get("ended", {}).get("reason"):
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

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows so far."""
        found: list[dict[str, Any]] = self._again(
            "rows.jsonl", lambda: list(json_lines(self.path / "rows.jsonl"))
        )
        return found

    def _json(self, name: str) -> dict[str, Any]:
        """Return what a file of JSON holds; nothing where it is not there."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.path / name).read_text(encoding="utf-8")))
        return {}

    def _moment(self) -> dict[str, Any]:
        """Return where the time of the run went, without its beginning."""
        try:
            return moment(profiles(self.path)[1])
        except SaveError as error:
            return {**NOTHING, "findings": [error.message]}

    def _events(self) -> Iterator[dict[str, Any]]:
        if not (self.path / "events.jsonl").is_file():
            return
        for number, line in enumerate(json_lines(self.path / "events.jsonl"), 1):
            when = datetime.fromisoformat(line["time"]).timestamp()
            yield {"number": number, "text": text_of(line), "kind": line["event"], "time": when}


NOTHING: dict[str, Any] = {
    "seconds": 0.0, "rows": 0, "env_steps": 0, "nodes": {}, "edges": [], "workers": {}, "facts": {},
    "findings": [], "steps_per_second": None, "bottleneck": None, "what_if": [],
}  # fmt: skip
"""What `moment` returns of a run of which nothing was measured."""


def saved_runs(path: str | Path) -> list[SavedRun]:
    """Return the run in a directory, or all runs in the directories within it.

    Raises:
        SaveError: there is none that a page can show.
    """
    root = Path(path)
    if (root / "rows.jsonl").is_file() or not root.is_dir():
        return [SavedRun(root)]
    found = sorted(file.parent for file in root.rglob("graph.json"))
    runs = [SavedRun(folder) for folder in found if (folder / "rows.jsonl").is_file()]
    if not runs:
        raise SaveError(f"{path} has no runs in it; {way_to_runs(root)}")
    return runs
