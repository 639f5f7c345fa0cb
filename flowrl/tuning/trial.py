"""One trial at work: a run of the graph with its settings, in a directory of its own."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.algos.named import Source, build
from flowrl.core.events import Tap, Warned
from flowrl.core.row_json import numbers_of
from flowrl.envs.gym_envs import Make
from flowrl.errors import FlowrlError
from flowrl.graph.graph import Graph
from flowrl.observe import about
from flowrl.observe.manifest import MANIFEST
from flowrl.observe.saving import FAILURE
from flowrl.running import Run
from flowrl.runtime.base import Runtime
from flowrl.starting import run
from flowrl.tuning.journal import STUDY, Options, Trial
from flowrl.tuning.spaces import Point, Space, values_of

REPORT_SECONDS = 1.0
"""The most seconds between two reports: comparing every row would cost more than it brings."""
NO_NUMBER = (
    "no row has a number in {}, such as the return of an episode that ended; take more steps"
)
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
"""What the system says where a disk, or what this user may have of it, is full."""


@dataclass(frozen=True)
class Job:
    """What all trials of a study have in common; the processes of trials get it from the driver."""

    options: Options
    source: Source
    env: Make | None
    tuned: Mapping[str, Any]
    settings: Mapping[str, Any]
    """As values, of which `options` has the texts; so has it of what is searched."""
    search: Mapping[str, Space]
    runtime: str | Runtime
    folder: str
    """The absolute path of the study's directory."""

    @property
    def milestones(self) -> list[int]:
        """The steps at which trials are compared, in increasing order."""
        found = []
        steps = self.options.grace_steps
        while steps < self.options.steps:
            found.append(steps)
            steps *= self.options.reduction
        return found

    def changes(self, points: Mapping[str, Point]) -> dict[str, Any]:
        """Return all settings and fields of a trial but the tuned ones, as values."""
        return {**self.settings, **values_of(self.search, points)}

    def graph(self, points: Mapping[str, Point]) -> Graph:
        """Return the graph with the settings of a trial."""
        return build(self.source, self.env, self.tuned, list(self.changes(points).items()))


class Attempt:
    """A trial at work, which reports how it goes.

    Args:
        job: what it has in common with the others.
        points: its own.
        directory: of its run, within the study's.
    """

    def __init__(self, job: Job, points: Mapping[str, Point], directory: str) -> None:
        self.job, self.run = job, None
        self.began = time.perf_counter()
        self.env_steps = 0
        self.value: float | None = None
        self.error = ""
        self.ended = False
        self.next_milestones = job.milestones
        try:
            self.run = self._start(points, Path(job.folder) / directory)
        except Exception as error:  # noqa: BLE001 - a trial that fails does not end the study
            self._fail(error)

    def _start(self, points: Mapping[str, Point], directory: Path) -> Run:
        """Start the run."""
        job = self.job
        if not (Path(job.folder) / STUDY).is_file():
            raise FlowrlError(
                f"this node does not see the study's directory {job.folder}; name one with --out "
                "(out=) that all nodes share"
            )
        # Its events file keeps the warnings; here those of many trials would be mixed.
        silent = Tap(lambda _: None, Warned)
        return run(
            job.graph(points),
            runtime=job.runtime,
            seed=job.options.seed,
            steps=job.options.steps,
            out=directory,
            observers=[silent],
        )

    def report(self) -> dict[str, Any]:
        """Train until there is something to compare, or the end.

        Returns:
            How it goes: ``env_steps``, ``value``, ``seconds``; at the end also ``state``, and
            ``error``.
        """
        until = time.perf_counter() + REPORT_SECONDS
        try:
            while not self.ended and not self._has_report(until):
                self._advance()
        except Exception as error:  # noqa: BLE001 - a trial that fails does not end the study
            self._fail(error)
        found: dict[str, Any] = {
            "env_steps": self.env_steps,
            "value": self.value,
            "seconds": round(time.perf_counter() - self.began, 3),
        }
        if self.ended:
            found |= {"state": "failed" if self.error else "done", "error": self.error}
        return found

    def _advance(self) -> None:
        """Take the next row."""
        assert self.run is not None  # noqa: S101 - one that could not start has ended
        row = next(self.run)
        self.env_steps = int(row["env_steps"])
        # Not every row has every column, and before the first episode has ended a return is no
        # number.
        value = float(row.get(self.job.options.metric, math.nan))
        if math.isfinite(value):
            self.value = value
        self.ended = self.run.reason is not None
        if self.ended and self.value is None:
            self.error = NO_NUMBER.format(self.job.options.metric)

    def _has_report(self, until: float) -> bool:
        """Return whether the newest row is to be compared with those of other trials."""
        if self.value is None:
            return False
        passed = [steps for steps in self.next_milestones if steps <= self.env_steps]
        if not passed and time.perf_counter() < until:
            return False
        del self.next_milestones[: len(passed)]
        return True

    def _fail(self, error: Exception) -> None:
        """End with an error."""
        self.ended = True
        is_ours = isinstance(error, FlowrlError)
        self.error = str(error) if is_ours else f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """End the run and save it, if it goes on."""
        if self.run is not None:
            with suppress(Exception):  # one whose directory can't be written, say
                self.run.close()


def is_of_full_disk(error: str) -> bool:
    """Return whether the text of an error says that a disk is full.

    That is no fault of the trial that it ended, so the trial is tried again.
    """
    # The text, because the error itself may be of another process, or have become one of flowrl.
    return any(reason in error for reason in FULL)


def ending_on_disk(folder: Path, trial: Trial, metric: str) -> dict[str, Any] | None:
    """Return how a trial ended whose end was not noted, from its own directory.

    Args:
        folder: the study's directory.
        trial: the trial.
        metric: the column that trials are compared by.

    Returns:
        Its end as `Journal.end` takes it; None if it was cut off, and has to start again.
    """
    directory = folder / trial.directory
    # A run writes its manifest last, so whatever that is in must be whole. One of many runs has
    # the ends of several trials, which are noted together or not at all.
    is_whole = bool(trial.directory) and (directory / MANIFEST).is_file()
    if not is_whole or (directory / "members.jsonl").is_file():
        return None
    ended = json.loads((directory / about.FILE).read_text(encoding="utf-8"))["ended"]
    found = {"trial": trial.number, "env_steps": ended["env_steps"], "seconds": ended["seconds"]}
    if ended["reason"] == "failed":
        if not (directory / FAILURE).is_file():
            return None
        failure = json.loads((directory / FAILURE).read_text(encoding="utf-8"))
        if is_of_full_disk(failure["text"]):
            return None
        return {**found, "state": "failed", "error": failure["text"]}
    if ended["reason"] != "steps":
        return None
    lines = (directory / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    column = [numbers_of(json.loads(line)).get(metric, math.nan) for line in lines]
    # As of a trial that is going on, an infinite value is no result.
    numbers = [value for value in column if math.isfinite(value)]
    if not numbers:
        return {**found, "state": "failed", "error": NO_NUMBER.format(metric)}
    return {**found, "state": "done", "value": numbers[-1]}
