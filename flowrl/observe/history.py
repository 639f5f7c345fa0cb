"""`History`: what a run did over time, as a bounded number of profiles that are evenly spread."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, ClassVar, NamedTuple

from flowrl.core.events import RowClosed
from flowrl.core.profile import Profile
from flowrl.core.saved_rows import json_lines
from flowrl.errors import SaveError

FILE = "profiles.jsonl"
"""The file of a run's directory that holds its history."""
FIRST_INTERVAL = 1.0
"""The seconds between two moments, until the history is full for the first time."""
MOST = 240
"""From so many moments on a history is full."""
MOST_BYTES = 1_000_000
"""So is one that needs more bytes than this."""
DIGITS = 5
"""The decimals of seconds that are kept; more would make the file a half larger."""


class Entry(NamedTuple):
    """A run up to a moment."""

    opening: int
    """How often the run had been opened again until then; clocks count from the last time on."""
    seconds: float
    """Seconds since the run was opened first, without those in which it was closed."""
    env_steps: int
    """Environment steps until then."""
    rows: int
    """Rows until then."""
    text: str
    """The line of the file."""

    @property
    def profile(self) -> Profile:
        """The profile of the run since it was opened, or opened again."""
        return Profile.of(json.loads(self.text)["profile"])

    @property
    def whole(self) -> Profile:
        """The same, with what was counted since the very beginning of the run."""
        data = json.loads(self.text)
        return Profile.of({**data["profile"], "counts": data["counts"]})


class History:
    """Profiles of a run over time. It is an observer of the run, which makes them in its thread.

    It remembers one at a row, but at most one each interval. When it is full, every second one is
    dropped and the interval doubles at least. So a history of any length costs about as much.
    """

    kinds: ClassVar[tuple[type, ...]] = (RowClosed,)

    def __init__(self) -> None:
        self.interval = FIRST_INTERVAL
        """The seconds between two moments."""
        self._profile: Callable[[], Profile] = Profile
        self._entries: list[Entry] = []
        self._begin: Profile | None = None
        """The profile at the moment when the run was opened; None while it is closed."""
        self._opening, self._offset, self._due = 0, 0.0, 0.0
        self._file: Path | None = None
        self._is_written = True
        """Whether the file holds all entries."""
        self._lock = Lock()

    def open(
        self, profile: Callable[[], Profile], folder: Path | None = None, rows: int = 0
    ) -> None:
        """Remember profiles from now on.

        Args:
            profile: returns the profile of the run so far; any thread may call it.
            folder: directory of the run, whose file goes on; None to keep no file (default None).
            rows: the rows of a run that was saved and goes on; what its file holds of later ones is
                removed (default 0).
        """
        self._profile = profile
        if folder is not None:
            self._file = folder / FILE
            # What is damaged there must not keep a run from going on.
            with suppress(SaveError):
                self._entries = entries_of(folder)
            self.interval = _interval(self._entries)
            if self._file.is_file():
                self.cut(rows)
        self.go_on()

    def cut(self, rows: int) -> None:
        """Remember nothing until the run goes on, and forget what came after so many rows."""
        with self._lock:
            self._begin = None
            self._entries = [entry for entry in self._entries if entry.rows <= rows]
            self._is_written = False

    def go_on(self) -> None:
        """Remember profiles of a run that was opened, or opened again after `cut`."""
        # Where a run was opened again counts go on and clocks begin, so both are taken from here.
        begin = self._profile()
        with self._lock:
            if self._entries:
                last = self._entries[-1]
                self._opening, self._offset = last.opening + 1, last.seconds
            self._begin, self._due = begin, time.perf_counter() + self.interval

    def entries(self) -> list[Entry]:
        """Return what is remembered, the oldest first. Any thread may call it."""
        with self._lock:
            return [*self._entries]

    def __call__(self, event: RowClosed) -> None:
        """Remember the profile at a row, if that is due."""
        begin = self._begin
        if begin is None or time.perf_counter() < self._due:
            return
        profile = self._profile()
        with self._lock:
            # Meanwhile the run may have ended, or have been opened again.
            if self._begin is begin:
                self._add(profile, begin)

    def close(self, profile: Profile | None) -> None:
        """Remember the end of a run and nothing more.

        Args:
            profile: of the whole run; None where it is not known.
        """
        with self._lock:
            begin, self._begin = self._begin, None
            rows = self._entries[-1].rows if self._entries else 0
            if begin is not None and profile is not None and profile.rows > rows:
                mine = [entry.seconds for entry in self._entries if entry.opening == self._opening]
                # A last part that is too short says little.
                if mine and self._offset + profile.seconds - mine[-1] < self.interval / 2:
                    self._entries.pop()
                    self._is_written = False
                self._add(profile, begin)
            self._write("")

    def _add(self, profile: Profile, begin: Profile) -> None:
        """Remember a profile. Needs the lock."""
        seconds = round(self._offset + profile.seconds, DIGITS)
        entry = Entry(self._opening, seconds, profile.env_steps, profile.rows, "")
        head = {name: x for name, x in entry._asdict().items() if name != "text"}
        counts, since = profile.plain()["counts"], _rounded((profile - begin).plain())
        text = json.dumps({**head, "profile": since, "counts": counts}) + "\n"
        self._entries.append(entry._replace(text=text))
        if len(self._entries) >= MOST or sum(len(x.text) for x in self._entries) > MOST_BYTES:
            self._entries = self._entries[::-2][::-1]
            self.interval = max(2 * self.interval, _interval(self._entries))
            self._is_written = False
        self._due = time.perf_counter() + self.interval
        self._write(text)

    def _write(self, text: str) -> None:
        """Write a line to the file, or all lines where it lacks any of those before."""
        if self._file is None or (self._is_written and not text):
            return
        try:
            if self._is_written:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(text)
                return
            # Who reads the directory of a run that goes on never finds half of a file.
            draft = self._file.with_name(f"{FILE}.draft")
            draft.write_text("".join(entry.text for entry in self._entries), encoding="utf-8")
            draft.replace(self._file)
            self._is_written = True
        except OSError:
            # The next one may find room on the disk, and writes all lines again.
            self._is_written = False


def entries_of(folder: Path) -> list[Entry]:
    """Return the history in a run's directory; it is empty where there is none.

    Args:
        folder: the directory.

    Raises:
        SaveError: the file is damaged.
    """
    if not (folder / FILE).is_file():
        return []
    found = []
    for number, data in enumerate(json_lines(folder / FILE), 1):
        try:
            Profile.of({**data["profile"], "counts": data["counts"]})
            opening, env_steps, rows = (int(data[x]) for x in ("opening", "env_steps", "rows"))
            seconds, text = float(data["seconds"]), json.dumps(data) + "\n"
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise SaveError(f"{folder / FILE}, line {number} is damaged: {error}") from None
        found.append(Entry(opening, seconds, env_steps, rows, text))
    return found


def part(entries: Sequence[Entry], number: int) -> Profile:
    """Return the profile of the part of a run that ends at a moment, and begins at the one before.

    Args:
        entries: the history of the run.
        number: index of the moment.
    """
    entry = entries[number]
    if number == 0 or entries[number - 1].opening != entry.opening:
        return entry.profile
    return entry.profile - entries[number - 1].profile


def _interval(entries: Sequence[Entry]) -> float:
    """Return the interval at which a history goes on, so that it stays evenly spread."""
    gaps = [after.seconds - before.seconds for before, after in pairwise(entries)]
    # Rows that take longer than the interval come further apart; a moment may come a little early.
    return max(FIRST_INTERVAL, 0.99 * median(gaps)) if gaps else FIRST_INTERVAL


def _rounded(value: Any) -> Any:
    """Return plain data with numbers of fewer decimals."""
    match value:
        case dict():
            return {name: _rounded(x) for name, x in value.items()}
        case list() | tuple():
            return [_rounded(x) for x in value]
        case float():
            return round(value, DIGITS)
    return value
