"""The files of a study, from which it goes on after its process was killed at any moment.

``study.json`` says what is searched for and never changes, but for the number of trials.
``journal.jsonl`` has a line for each thing that happened, written before anything is done that
depends on it: a trial is in it before it starts, and its end before its process goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from flowrl.errors import SaveError, SettingError
from flowrl.tuning.spaces import Point

STUDY = "study.json"
JOURNAL = "journal.jsonl"
LOCK = "lock"
ENDED = ("done", "stopped", "failed")
"""The states of a trial that has ended."""


@dataclass(frozen=True)
class Options:
    """What a study searches for, as plain values; its file holds them."""

    graph: str
    env: str | None
    settings: Mapping[str, str]
    """By name: the text of each setting that is the same in all trials."""
    search: Mapping[str, str]
    """By name: the text of the space of each setting that is searched."""
    trials: int
    steps: int
    metric: str
    mode: str
    seed: int
    runtime: str
    grace_steps: int
    reduction: int
    tuned: bool
    imports: Sequence[str]

    def check_same(self, saved: Options, path: Path) -> None:
        """Refuse to go on with a study that is another one.

        Args:
            saved: what the study's file holds.
            path: of the study.

        Raises:
            SettingError: these are other options, or there are fewer trials.
        """
        way_out = (
            f"leave it out to go on with {path}, or give the new study a directory of its own "
            "(out=, --out)"
        )
        for each in fields(self):
            mine, was = getattr(self, each.name), getattr(saved, each.name)
            if each.name == "trials":
                if mine < was:
                    raise SettingError(
                        f"{path} is a study of {was} trials, so it can't go on with {mine}; "
                        "only more can be added; or name a directory of its own (out=, --out)"
                    )
            elif mine != was:
                raise SettingError(
                    f"{path} is a study with {each.name} {was!r}, not {mine!r}; {way_out}"
                )


@dataclass(frozen=True)
class Trial:
    """One run of a study: its settings, and how it ended.

    Args:
        number: of the trial, from 0 on.
        settings: by name, the values of what is searched; an option of a `Choice` as its text.
        state: ``waiting``, ``running``, or how it ended: ``done`` after all its steps, ``stopped``
            early because others were better, or ``failed`` (default ``waiting``).
        value: the metric of its newest row in which this is a number; None if there is none
            (default None).
        env_steps: environment steps so far (default 0).
        seconds: how long it ran, in seconds (default 0.0).
        error: the message of the error that it failed with (default empty).
        directory: of its run (default empty).
        reports: steps and metric of the rows by which it was compared with others (default none).
        attempt: how often it was started; it was cut off in all but the last of them (default 0).
    """

    number: int
    settings: Mapping[str, Point]
    state: str = "waiting"
    value: float | None = None
    env_steps: int = 0
    seconds: float = 0.0
    error: str = ""
    directory: str = ""
    reports: Sequence[tuple[int, float]] = field(default=(), repr=False)
    attempt: int = 0

    @property
    def ended(self) -> bool:
        """Whether it ended."""
        return self.state in ENDED


class Journal:
    """The trials of a study, kept on disk.

    Args:
        path: of the study's directory, which has its options.

    Raises:
        SaveError: another process is at work on the study, or the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: list[Trial] = []
        """By number: each trial that was suggested."""
        self._lock = (path / LOCK).open("w")
        try:
            # The lock ends with the process, however that ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise SaveError(
                f"{path}: another process is at work on this study; wait for it, or end it"
            ) from None
        try:
            self._read()
        except BaseException:
            self._lock.close()
            raise
        self._file = (path / JOURNAL).open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.close()

    # -- what happens

    def suggest(self, points: Mapping[str, Point]) -> Trial:
        """Add a trial with these points, and return it."""
        self._happened({"trial": len(self.trials), "settings": dict(points)})
        return self.trials[-1]

    def start(self, number: int, directory: str) -> Trial:
        """Note that a trial starts, from its beginning, in a directory of its own."""
        self._happened({"start": number, "directory": directory})
        return self.trials[number]

    def report(self, number: int, env_steps: int, value: float) -> None:
        """Note the metric of a row."""
        self._happened({"report": number, "env_steps": env_steps, "value": value})

    def end(self, ended: Sequence[Mapping[str, Any]]) -> None:
        """Note how trials ended, all at once.

        Args:
            ended: for each its number as ``trial``, its state, steps, value, seconds and error.
        """
        self._happened({"ended": [dict(each) for each in ended]})

    def _happened(self, line: Mapping[str, Any]) -> None:
        """Write a line, and act on it."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._act(line)

    # -- what happened

    def _act(self, line: Mapping[str, Any]) -> None:
        """Change the trials by a line."""
        trials = self.trials
        match line:
            case {"trial": int(number), "settings": dict(points)}:
                if number != len(trials):
                    raise ValueError(f"trial {number} comes after {len(trials)} trials")
                trials.append(Trial(number, points))
            case {"start": int(number), "directory": str(directory)}:
                again = Trial(number, trials[number].settings, "running", directory=directory)
                trials[number] = replace(again, attempt=trials[number].attempt + 1)
            case {"report": int(number), "env_steps": steps, "value": value}:
                reports = (*trials[number].reports, (steps, value))
                trials[number] = replace(
                    trials[number], reports=reports, env_steps=steps, value=value
                )
            case {"ended": list(ended)}:
                for each in ended:
                    number = each["trial"]
                    facts = {name: x for name, x in each.items() if name != "trial"}
                    trials[number] = replace(trials[number], **facts)
            case _:
                raise ValueError(f"it has the line {line}")

    def _read(self) -> None:
        """Read what happened so far, and cut off a last line that was not written as a whole."""
        file = self.path / JOURNAL
        if not file.exists():
            return
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(file, whole)
        try:
            for line in content[:whole].splitlines():
                self._act(json.loads(line))
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise SaveError(f"{file} is damaged: {error}") from None


def read_options(path: Path) -> Options | None:
    """Return the options of the study in a directory; None if there is no study.

    Raises:
        SaveError: the file is damaged.
    """
    file = path / STUDY
    if not file.is_file():
        return None
    try:
        return Options(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise SaveError(f"{file} is damaged: {error}") from None


def write_options(path: Path, options: Options) -> None:
    """Write the options of a study in one atomic step."""
    draft = path / f"{STUDY}.draft"
    draft.write_text(json.dumps(asdict(options), indent=1) + "\n", encoding="utf-8")
    draft.replace(path / STUDY)


def make_directory(path: Path) -> None:
    """Make the directory of a new study.

    Raises:
        SaveError: it can't be made, or holds something already.
    """
    ours = {LOCK, JOURNAL, f"{STUDY}.draft"}  # a study that was killed at once leaves these
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = [each.name for each in path.iterdir() if each.name not in ours]
    except OSError as error:
        raise SaveError(f"can't make the directory {path}: {error.strerror}") from None
    if others:
        raise SaveError(
            f"{path} is not empty and holds no study; name a new directory with --out (out=)"
        )
