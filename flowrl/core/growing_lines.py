"""Files of JSON lines that grow while they are read, and of which few lines are parsed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.saved_rows import damaged_line

BLOCK = 4_194_304
"""The most bytes of a file that are held at a time."""
END = 65_536
"""The bytes at the end of a file in which its last line is looked for."""
NEWLINE, OPENS, CLOSES = b"\n{}"


class GrowingLines:
    """The JSON objects in the lines of a file, found by number; only those asked for are parsed.

    It holds where lines end and none of the objects, and reads only what was added since it looked
    last. A file that was cut meanwhile, as one of a run that was resumed is, is read again: its
    last line has changed, for rows and events hold the time. What comes out is what
    `flowrl.core.saved_rows.json_lines` yields, except that a line that is damaged within is
    noticed only once it is asked for.

    Args:
        path: path of the file; one that is not there has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = 0
        """How often the file was read again from its beginning, because it was cut."""
        self._ends = array("q")
        """Where each whole line ends."""
        self._size = 0
        """The bytes of the whole lines."""
        self._last = b""
        """The last whole line, which shows whether the file still holds what was found."""
        self._unended: dict[str, Any] | None = None
        """The object in what follows them; None where that is half written."""
        self._unended_line = b""
        """The bytes of that object, for they show the same."""
        self._seen: tuple[int, ...] = ()
        """What changes with the file, as it was at the last look."""

    def __len__(self) -> int:
        return len(self._ends) + (self._unended is not None)

    def look(self) -> None:
        """Find the lines that were added.

        Raises:
            SaveError: a line other than the last is damaged.
        """
        seen: tuple[int, ...] = ()
        rest = b""
        try:
            found = self.path.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return
            with self.path.open("rb") as file:
                known = self._last + self._unended_line
                file.seek(self._size - len(self._last))
                if file.read(len(known)) != known:
                    self._begin_again()
                file.seek(self._size)
                while block := file.read(BLOCK):
                    rest = self._after_lines(rest + block)
        except FileNotFoundError:
            seen, rest = (), b""
            self._begin_again()
        # The last line of a killed run may be half written.
        self._unended = _object(rest)
        self._unended_line = rest if self._unended is not None else b""
        self._seen = seen

    def parsed(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return the objects in these lines, of which the first has number 0.

        Raises:
            SaveError: one of them is damaged.
        """
        found = []
        with self.path.open("rb") as file:
            for number in numbers:
                if number == len(self._ends) and self._unended is not None:
                    found.append(self._unended)
                    continue
                begin = self._ends[number - 1] + 1 if number else 0
                file.seek(begin)
                one = _object(file.read(self._ends[number] - begin))
                if one is None:
                    raise damaged_line(self.path, number + 1)
                found.append(one)
        return found

    def _begin_again(self) -> None:
        """Forget all lines, if there were any."""
        if len(self):
            self.begun += 1
        self._ends, self._size, self._last = array("q"), 0, b""
        self._unended, self._unended_line = None, b""

    def _after_lines(self, data: bytes) -> bytes:
        """Note where the lines in new bytes end, and return what follows the last of them."""
        characters = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(characters == NEWLINE)
        if not ends.size:
            return data
        begins = np.concatenate([[0], ends[:-1] + 1])
        # To parse all lines is what takes long; what is no object at all shows without that.
        whole = (characters[begins] == OPENS) & (characters[ends - 1] == CLOSES)
        if not whole.all():
            raise damaged_line(self.path, len(self._ends) + int(whole.argmin()) + 1)
        self._ends.frombytes((self._size + ends).astype(np.int64).tobytes())
        size = int(ends[-1]) + 1
        self._last = data[begins[-1] : size]
        self._size += size
        return data[size:]


def last_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the last whole line of a file, without reading what is before it.

    It is empty where there is none.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - END))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    # The first of them may begin before that.
    whole = lines if size <= END else lines[1:]
    return next((found for line in reversed(whole) if (found := _object(line)) is not None), {})


def _object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None where it holds none."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return None
