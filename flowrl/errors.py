"""Every error that flowrl raises on purpose.

::

    FlowrlError                 where it happened, what is wrong, the way out
    ├── GraphError              a graph that is built wrongly: names, edges, edits
    │   └── CheckError          all problems that a check found, at once
    ├── SettingError            an unknown setting, or a value that it can't take
    ├── ContractError           an item lacks what a verb needs of it
    ├── PolicyError             a network that does not fit its spaces
    ├── EnvironmentFailed       an environment raised, or broke its declared spaces
    ├── NotFinite               NaN or infinity in a loss
    ├── RuntimeFailed           a runtime that can't start, or lost a process
    └── SaveError               a run or policy that can't be saved, verified or loaded
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class FlowrlError(Exception):
    """The base of all errors here. `where` is an address such as ``ppo.train``; the runtimes fill it in.

    `facts` holds what is known of it as plain numbers and words, which `flowrl why` reads.
    """

    def __init__(self, message: str, where: str = "", **facts: Any) -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def at(self, where: str) -> FlowrlError:
        """Name the place, unless a deeper one did so already."""
        self.where = self.where or where
        return self


class GraphError(FlowrlError):
    """A graph that is built wrongly."""


class CheckError(GraphError):
    """All problems that were found in a graph. `problems` holds one line each."""

    def __init__(self, name: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(
            "\n".join([f"{name} can't run: {count}", *(f"  {p}" for p in self.problems)])
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_check_error, (self.message, self.problems))


def _rebuild_check_error(message: str, problems: tuple[str, ...]) -> CheckError:
    error = CheckError("", problems)
    error.message = message
    return error


class SettingError(FlowrlError):
    """An unknown setting, or a value that it can't take."""


class ContractError(FlowrlError):
    """An item lacks what a verb needs of it."""


class PolicyError(FlowrlError):
    """A network that does not fit its spaces."""


class EnvironmentFailed(FlowrlError):
    """An environment raised, or broke its declared spaces."""


class NotFinite(FlowrlError):
    """NaN or infinity in a loss."""


class RuntimeFailed(FlowrlError):
    """A runtime that can't start, or that lost a process it needs."""


class SaveError(FlowrlError):
    """A run or policy that can't be saved, verified or loaded."""


def a(value: object) -> str:
    """What a value is, for messages: ``an int``, ``a Batch``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def raised(error: BaseException) -> str:
    """An error out of a user's own code: what it is, and the line of theirs that it came from."""
    return f"{type(error).__name__}: {error}{line_of(error)}"


def line_of(error: BaseException) -> str:
    """The line of a user's own code that an error came from, such as `` (mine.py:12)``; nothing if it came from none."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}flowrl{os.sep}" not in f.filename and "site-packages" not in f.filename
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The text for an unknown name: what is known, and the nearest match.

    >>> unknown("setting", "epoch", ["epochs", "lr"])
    "unknown setting 'epoch'; did you mean 'epochs'? Known: epochs, lr"
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return f"unknown {kind} '{name}'{hint} Known: {', '.join(names) or 'none'}"
