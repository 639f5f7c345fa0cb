"""What a run leaves on disk: a directory with rows, graph, plan and policy, sealed by a manifest.

Nothing in it is pickled.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import flowrl
from flowrl.core.items import Row
from flowrl.core.profile import Profile, from_text
from flowrl.core.row_json import row_json
from flowrl.core.saved_rows import no_directory, way_to_runs
from flowrl.errors import SaveError
from flowrl.observe.manifest import MANIFEST, seal
from flowrl.observe.saved_policies import save_policies
from flowrl.observe.trained import TrainedPolicy

GLANCES = 20
"""How often the lock of a directory is asked for before a run is refused."""
GLANCE = 0.05
"""Seconds between two of these times."""
FAILURE = "failure.json"
"""The file that holds the error that ended a run."""
OF_SEVERAL = ("members.jsonl", "curves.txt", "curves.svg")
"""What a program of several runs writes at its end."""


# -- the directory of a run


class RunDir:
    """The new directory of one run. An existing directory is never written to.

    Args:
        path: of the directory, which must be empty or not exist.
        files: its first text files, by name.

    Raises:
        SaveError: it exists already and is not empty, or can't be made.
    """

    def __init__(self, path: str | Path, files: Mapping[str, str]) -> None:
        self.path = Path(path).absolute()
        check_free(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(f"can't make the directory {self.path}: {error.strerror}") from None
        # Whoever finds the other files finds this one, too, and that it is locked.
        try:
            self._rows = (self.path / "rows.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise SaveError(f"can't write into {self.path}: {error.strerror}") from None
        self._lock()
        for name, text in {"command.txt": _command(), **files}.items():
            self.put(name, text)

    @staticmethod
    def again(path: Path) -> RunDir:
        """Return the directory of a run that may be resumed, locked and unchanged.

        Args:
            path: of the directory.

        Raises:
            SaveError: it is no run's, another process is writing it, or it can't be written.
        """
        if not path.is_dir():
            raise SaveError(no_directory(path))
        file = path / "rows.jsonl"
        # To open it for writing would make it.
        if not file.is_file():
            raise SaveError(
                f"{path} is no run's directory, for it has no {file.name}; {way_to_runs(path)}"
            )
        self = object.__new__(RunDir)
        self.path = path
        try:
            self._rows = file.open("a", encoding="utf-8")
        except OSError as error:
            raise SaveError(f"can't write to {path}: {error.strerror}") from None
        self._lock()
        return self

    def go_on(self, rows_bytes: int, files: Mapping[str, str]) -> None:
        """Take a run that was saved back to one of its snapshots, from which it goes on.

        Args:
            rows_bytes: the size of ``rows.jsonl`` then. What came after it is removed.
            files: text files, by name, in place of those of these names.

        Raises:
            SaveError: they can't be written; everything is as it was.
        """
        command = self.path / "command.txt"
        before = command.read_text(encoding="utf-8") if command.is_file() else ""
        texts = {**files, command.name: before + _command()}
        drafts = {name: self.path / f"{name}.draft" for name in texts}
        try:
            for name, draft in drafts.items():
                draft.write_text(texts[name], encoding="utf-8")
        except OSError as error:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
            raise SaveError(
                f"{self.path} can't be written ({error.strerror}), and is as it was"
            ) from None
        # It is no whole run any more until it is sealed again.
        (self.path / MANIFEST).unlink(missing_ok=True)
        for name, draft in drafts.items():
            draft.replace(self.path / name)
        # They were written when the run ended, which it has not now.
        for name in (FAILURE, *OF_SEVERAL):
            (self.path / name).unlink(missing_ok=True)
        self.cut(rows_bytes)

    def cut(self, rows_bytes: int) -> None:
        """Remove the rows that came after these bytes of ``rows.jsonl``."""
        self._rows.flush()
        self._rows.truncate(rows_bytes)
        self._rows.seek(rows_bytes)

    def close(self) -> None:
        """Write nothing more, and let other processes resume the run."""
        self._rows.close()

    def _lock(self) -> None:
        """Keep other processes from writing this directory. The lock ends with the process.

        Raises:
            SaveError: another one is writing it.
        """
        for _ in range(GLANCES):
            with suppress(OSError):
                fcntl.flock(self._rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            # A page that looks whether the run goes on holds a shared lock for a moment.
            time.sleep(GLANCE)
        self._rows.close()
        raise SaveError(
            f"{self.path}: another process is still at work on this run; wait for it, or end it"
        )

    @property
    def rows_bytes(self) -> int:
        """The size of ``rows.jsonl``."""
        return self._rows.tell()

    def sync(self) -> None:
        """Return once the rows are on disk, where a loss of power leaves them."""
        self._rows.flush()
        os.fsync(self._rows.fileno())

    def add(self, row: Row) -> None:
        """Write one Row to ``rows.jsonl`` and flush it."""
        self._rows.write(row_json(row) + "\n")
        self._rows.flush()

    def put(self, name: str, text: str) -> None:
        """Write a text file in one atomic step, in place of any earlier one of this name."""
        # Who reads the directory of a run that goes on never finds half a file.
        draft = self.path / f"{name}.draft"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path / name)

    def finish(self, policies: Mapping[str, TrainedPolicy], files: Mapping[str, str]) -> None:
        """Write the policies and more text files, then the manifest of all files.

        Args:
            policies: what was trained, by learner.
            files: text files by name.
        """
        # The lock ends with the file of the rows, so nobody resumes a run that is being saved.
        with closing(self):
            self._rows.flush()
            for name, text in files.items():
                self.put(name, text)
            save_policies(policies, self.path)
            seal(self.path)


def check_free(path: str | Path) -> None:
    """Make sure that a run can be saved in a directory.

    Raises:
        SaveError: there is a file of that name, or a directory that is not empty.
    """
    root = Path(path)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise SaveError(
            f"{root} exists already, and nothing is ever overwritten; name another directory"
        )


def check_free_for_seeds(folder: Path, seeds: Iterable[int]) -> None:
    """Make sure that runs can be saved in a directory as ``seed-0`` and so on.

    Raises:
        SaveError: there is such a directory already, or the directory is that of one run.
    """
    if (folder / "graph.txt").exists():
        raise SaveError(
            f"{folder} is the directory of one run; name another one for the runs of several seeds"
        )
    for seed in seeds:
        check_free(folder / f"seed-{seed}")


def _command() -> str:
    """Return the command line of this process, its flowrl version and its directory's name."""
    program = Path(sys.argv[0])
    name = [program.name]
    if program.name == "__main__.py":
        name = ["python", "-m", program.parent.name]
    command = shlex.join([*name, *sys.argv[1:]])
    return f"{command}\n# flowrl {flowrl.__version__}, in {Path.cwd().name}\n"


def failure(error: BaseException) -> dict[str, str]:
    """Return the file that describes the error that ended a run, by its name.

    It holds the kind of the error, its text, and those of its facts that are plain values.
    """
    facts = {
        k: v for k, v in getattr(error, "facts", {}).items() if isinstance(v, str | int | float)
    }
    about = {"error": type(error).__name__, "text": str(error), "facts": facts}
    return {FAILURE: json.dumps(about, indent=1) + "\n"}


def profiles(path: str | Path) -> tuple[Profile, Profile]:
    """Read where the time of a run went, whether it is saved, goes on or was killed.

    Args:
        path: the run's directory.

    Returns:
        The profile of the whole run, and that of the part from which its speed is measured.

    Raises:
        SaveError: there is no such run, or it has only begun.
    """
    try:
        return from_text((Path(path) / "profile.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SaveError(_without_profile(Path(path))) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SaveError(f"{path}/profile.json is damaged: {error}") from None


def _without_profile(path: Path) -> str:
    """Return why a directory has no profile."""
    if not path.is_dir():
        return no_directory(path)
    reason = f"it is no run's directory; {way_to_runs(path)}"
    if (path / "graph.txt").is_file():
        reason = (
            "its run has only begun, or was killed before it wrote a profile; the first comes "
            "seconds after the first row"
        )
    return f"{path} has no profile.json: {reason}"
