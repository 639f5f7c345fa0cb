"""`Saver`: it keeps a run in a directory while the run goes on, and seals it at the end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from flowrl.core.curves import Curves
from flowrl.core.encoding import EncodingError
from flowrl.core.events import Observer, RowClosed
from flowrl.core.items import Row
from flowrl.core.profile import Profile, to_text
from flowrl.core.row_json import row_json
from flowrl.errors import SaveError
from flowrl.graph import values
from flowrl.graph.plan import Plan
from flowrl.learner.learner import Learner
from flowrl.observe import about
from flowrl.observe.best import Best, best_of
from flowrl.observe.drawn import drawn
from flowrl.observe.explain import explain
from flowrl.observe.history import History
from flowrl.observe.saved_policies import save_policy
from flowrl.observe.saving import RunDir, check_free, failure
from flowrl.observe.sinks import EventLog
from flowrl.observe.snapshots import (
    FOLDER,
    Kept,
    Snapshot,
    Snapshots,
    SnapshotWriter,
    newest_snapshot,
    start_of,
)
from flowrl.observe.trained import TrainedPolicy

UNREADABLE = "# This text can't be read back: "
"""How the text of a graph begins that no graph can be made of."""
PROFILE_SECONDS = 10.0
"""Seconds between two profiles in a run's directory, for `flowrl explain` of runs that go on."""


@dataclass(frozen=True)
class Results:
    """What can be asked of a run beside its rows, at one moment."""

    policies: dict[str, TrainedPolicy]
    """The policies by learner."""
    audit: Any
    """The conservation audit."""
    profile: Profile
    """The profile of the whole run."""
    steady: Profile
    """The profile of the run without its beginning, in which it is compiled."""
    curves: Curves | None
    """The Rows of every run, where many go on at once."""

    def reports(self) -> dict[str, str]:
        """Return the texts on the run, by name of the file that holds each."""
        explanation = explain(self.steady)
        reports = {
            "audit.txt": str(self.audit),
            "explain.txt": str(explanation),
            "profile.json": to_text(self.profile, explanation.profile),
        }
        if self.curves is not None:
            reports |= {"curves.txt": str(self.curves), "members.jsonl": self.curves.text()}
            # Without matplotlib there is no picture.
            with suppress(SaveError):
                reports["curves.svg"] = self.curves.svg()
        return reports


@dataclass(frozen=True)
class Resumed:
    """A run that was saved, and goes on."""

    folder: RunDir
    """Its directory, which is locked."""
    snapshot: Snapshot
    """The snapshot from which it goes on."""
    rows: tuple[Row, ...]
    """The rows until then."""


class Saver:
    """Keeps a run in a directory of its own: rows and events as they come, and then the results.

    Args:
        path: the directory, which must be empty or not exist. It is made when the run is open, so
            that one that can't start leaves none.
        plan: the plan of the run.
        facts: how it was started, for ``run.json``.
        snapshots: how often all that lasts is kept; None for never.
        resumed: what the run goes on from; None for a new run.

    Raises:
        SaveError: the directory can't be used, or the policy can't be saved. This shows now, not
            after the training.
    """

    live = True
    kinds: ClassVar[tuple[type, ...]] = (RowClosed,)

    def __init__(
        self,
        path: str | Path,
        plan: Plan,
        facts: dict[str, Any],
        snapshots: Snapshots | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.resumed = resumed
        if resumed is None:
            check_free(path)
        self.files, self.warning = first_files(plan)
        self.snapshots: SnapshotWriter | None = None
        """What writes snapshots; None if nothing does, or something can't be kept."""
        if snapshots is not None:
            texts = self.files["graph.txt"], self.files["plan.txt"]
            row = resumed.snapshot.row if resumed else 0
            self.snapshots = SnapshotWriter(snapshots, self.path, *texts, row)
        self.best = best_of(snapshots, plan, self.path)
        """What keeps the best policy; None where none is kept."""
        self.facts = facts
        self.files[about.FILE] = about.to_text(facts)
        self.log = EventLog()
        self.history = History()
        """What remembers where the time went, over time."""
        self.observers: tuple[Observer, ...] = (self, self.log, self.history)
        """What takes the events of the run."""
        self.folder: RunDir | None = None
        self.written = resumed.snapshot.row if resumed else 0
        """Rows that were written."""
        # The first profile comes soon, for users who ask at once why a run is slow.
        self.next_profile = time.perf_counter() + PROFILE_SECONDS / 10

    def open(self, profiles: Callable[[], tuple[Profile, Profile]]) -> None:
        """Make the directory.

        Args:
            profiles: returns the profile of the whole run so far, and that without its beginning.

        Raises:
            SaveError: it can't be made.
        """
        self.profiles = profiles
        if self.resumed is None:
            self.folder = RunDir(self.path, self.files)
            if self.snapshots is not None:
                # Where it is missing, snapshots were removed: such a run does not begin again.
                (self.path / FOLDER).mkdir()
        else:
            now = {about.FILE: self.files[about.FILE]}
            self.resumed.folder.go_on(self.resumed.snapshot.rows_bytes, now)
            self.folder = self.resumed.folder
        self.log.open(self.path)
        self.history.open(lambda: profiles()[0], self.path, self.written)

    def keep(self, rows: int, state: Kept, at_end: bool = False) -> str:
        """Write a snapshot if one is due, and return a warning if it can't be written.

        Args:
            rows: the rows until now.
            state: returns a context with what lasts of the run, in which this stays as it is.
            at_end: whether the run ends, so that one is due unless there is one of this row.
        """
        writer, best = self.snapshots, self.best
        # Where rows could not be written, the next snapshot would not know where they end.
        if self.folder is None:
            return ""
        if self.written != rows:
            return self._suspended()
        # The best policy keeps the time where this run's snapshots can't be written.
        timer = writer or best
        if timer is None or not (at_end or timer.due()):
            return ""
        warnings = []
        # Neither keeps the other from being written.
        if writer is not None:
            warnings.append(self._write(writer, rows, partial(_with_best, state, best)))
        if best is not None:
            try:
                best.write(save_policy)
            except (OSError, ValueError, SaveError) as error:
                warnings.append(f"the best policy could not be written ({_said(error)})")
        return "; ".join(filter(None, warnings))

    def _write(self, writer: SnapshotWriter, rows: int, state: Kept) -> str:
        """Write a snapshot, and return a warning if it can't be written."""
        folder = cast("RunDir", self.folder)
        try:
            # A snapshot that is on disk names rows, which must be there, too.
            folder.sync()
            writer.write(rows, folder.rows_bytes, state)
        except EncodingError as error:
            self.snapshots = None
            if writer.newest_row:
                return f"from now on there are no snapshots of this run: {error.message}"
            # Without the folder nobody takes the run for one that can begin again.
            shutil.rmtree(self.path / FOLDER, ignore_errors=True)
            return f"this run can't be resumed: {error.message}"
        except (OSError, SaveError) as error:
            return (
                f"no snapshot could be written ({_said(error)}); the run goes on, and can be "
                "resumed from an older one if there is one"
            )
        return ""

    def _suspended(self) -> str:
        """Return a warning, once, that there are no snapshots where rows can't be written."""
        if self.snapshots is None:
            return ""
        self.snapshots = None
        return (
            "from now on there are no snapshots of this run, for a row could not be written; it "
            "can be resumed from an older one if there is one"
        )

    def go_back(self, allow: Collection[str], warn: Callable[[str], None]) -> Snapshot:
        """Go back to the newest good snapshot of this run, and return it.

        It is that of the beginning where there is none.

        Args:
            allow: packages whose classes may be made, beside flowrl.
            warn: is called with a text for each newer one that is not good.

        Raises:
            SaveError: there are only damaged ones.
        """
        warnings: list[str] = []
        found = newest_snapshot(self.path, allow, warnings.append)
        for text in warnings:
            warn(text)
        if found is None and warnings:
            raise SaveError(f"{self.path} has no good snapshot: {'; '.join(warnings)}")
        found = found or start_of(self.path)
        if self.folder is not None:
            self.folder.cut(found.rows_bytes)
        if self.snapshots is not None:
            self.snapshots.newest_row = found.row
        self.written = found.row
        self.history.cut(found.row)
        return found

    def __call__(self, event: RowClosed) -> None:
        """Write a row, and a profile now and then."""
        if self.folder is None:
            return
        self.folder.add(event.row)
        self.written += 1
        if (now := time.perf_counter()) >= self.next_profile:
            self.next_profile = now + PROFILE_SECONDS
            # The next one may find room on the disk; what it holds is for users who look meanwhile.
            with suppress(OSError):
                self.folder.put("profile.json", to_text(*self.profiles()))

    def close(
        self,
        rows: Sequence[Row],
        results: Results | None,
        reason: str | None,
        error: BaseException | None,
    ) -> None:
        """Seal the directory, into which observers may have written, too.

        Args:
            rows: all rows of the run.
            results: what is saved beside the rows.
            reason: why the run ended.
            error: the error that ended the run, if it failed.

        Raises:
            SaveError: it can't be written.
        """
        try:
            # Each of these is done, the last one first, whatever the others raise.
            with ExitStack() as last:
                if self.folder is not None:
                    last.callback(self.folder.close)
                    last.callback(self._seal, self.folder, rows, results, reason, error)
                last.callback(self.history.close, None if results is None else results.profile)
                last.callback(self.log.close)
        except OSError as problem:
            raise SaveError(f"{self.path} could not be saved: {problem}") from problem

    def _seal(
        self,
        folder: RunDir,
        rows: Sequence[Row],
        results: Results | None,
        reason: str | None,
        error: BaseException | None,
    ) -> None:
        """Write how the run ended, and with its results what seals the directory."""
        files = failure(error) if error is not None else {}
        ended = {"ended": about.ending(reason, rows)}
        files[about.FILE] = about.to_text({**self.facts, **ended})
        # A row that could not be written switched this observer off: the disk was full, say.
        if self.written < len(rows):
            files["rows.jsonl"] = "".join(row_json(row) + "\n" for row in rows)
        if results is None:
            # Its weights are lost, so there is no policy, and nothing to seal.
            for name, text in files.items():
                folder.put(name, text)
            return
        if self.best is not None:
            self.best.write(save_policy)
        folder.finish(results.policies, results.reports() | files)


def _said(error: Exception) -> str:
    """Return what went wrong, of the system's errors only the words."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def _with_best(state: Kept, best: Best | None) -> Iterator[Any]:
    """Yield what lasts of a run, and of its best policy."""
    with state() as kept:
        yield {**kept, "best": None if best is None else best.keep()}


def first_files(plan: Plan) -> tuple[dict[str, str], str]:
    """Return the first texts of a run's directory, by name of the file, and a warning or ``""``.

    Raises:
        SaveError: the policy can't be saved.
    """
    graph, warning = plan.graph, ""
    for resource in graph.resources.values():
        if isinstance(resource, Learner):
            values.to_text(resource.policy, defaults=True, strict=True)
    try:
        text = graph.text()
    except SaveError as error:
        warning = f"graph.txt can't be read back: {error}"
        text = f"{UNREADABLE}{error}\n{graph.text(strict=False)}"
    picture = json.dumps(drawn(plan), separators=(",", ":")) + "\n"
    return {"graph.txt": text, "graph.json": picture, "plan.txt": str(plan)}, warning
