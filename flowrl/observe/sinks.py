"""Sinks for rows and events: a log of events, CSV, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, TextIO

from flowrl.core.events import Dropped, Ended, Restarted, RowClosed, Started, Warned
from flowrl.core.items import COLUMNS, Row, Tally, Trained, samples_nothing
from flowrl.core.metrics import names_of
from flowrl.errors import SettingError, address_of, install, unknown
from flowrl.graph.plan import Plan
from flowrl.observe.settings import settings_of
from flowrl.rollout.handle import EVALUATED

SECONDS = 1.0
"""The least seconds between two lines of the log that report what queues dropped."""
PATIENCE = 60.0
"""Seconds that a service may take, when a run ends, to receive what it has not received yet."""


OF_LEARNER = ("updates", "lag_mean", "lag_max")
"""The columns that each of several learners has beside its metrics."""


def columns(plan: Plan) -> list[str]:
    """Return the names of the columns of a Row of this plan.

    Rare columns, such as `restarts`, are not known before the run.
    """
    names = list(COLUMNS)
    several = len(plan.learners) > 1
    for output in plan.found.first_items.values():
        if isinstance(output, Trained):
            # `bad` marks an update that is not finite; Rows have no column for it.
            found = [n for n in output.metrics.names if n != "bad"]
            if several:
                found = [f"{n}/{output.learner}" for n in (*found, *OF_LEARNER)]
            names += [n for n in found if n not in names]
        if isinstance(output, Tally):
            names += [n for n in output.episodes if n not in names]
    if any(node.op.queue for node in plan.graph.nodes):
        names.append("dropped_steps")
    if plan.total("evaluations"):
        names += EVALUATED
    return names + [column for name in sorted(plan.found.metrics) for column in names_of(name)]


class EventLog:
    """Write ``events.jsonl``, a line for each event that is no row.

    These are the start, restarts, warnings and the end, and what queues dropped: once a second, as
    totals since the start.
    """

    kinds: ClassVar[tuple[type, ...]] = (Started, Restarted, Dropped, Warned, Ended)

    def __init__(self) -> None:
        self._lock = Lock()
        self._early: list[str] = []
        """Lines from before the file was open."""
        self._file: TextIO | None = None
        self._closed = False
        self._items: Counter[str] = Counter()
        """By queue: the items dropped since the start."""
        self._steps: Counter[str] = Counter()
        """By queue: the environment steps dropped since the start."""
        self._reported_items = 0
        """How many items had been dropped when drops were reported last."""
        self._reported_at = -math.inf
        """When drops were reported last, in seconds of `time.monotonic`."""

    def open(self, folder: Path) -> None:
        """Write into ``events.jsonl`` in this directory from now on.

        Args:
            folder: the directory of the run.
        """
        with self._lock:
            path = folder / "events.jsonl"
            if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
                # A run that was cut off left half a line, to which another would be added.
                os.truncate(path, content.rfind(b"\n") + 1)
            self._file = path.open("a", encoding="utf-8")
            for line in self._early:
                self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Report what was dropped since the last report, and write nothing more."""
        with self._lock:
            self._report_drops(0.0)
            self._closed = True
            if self._file is not None:
                self._file.close()

    def __call__(self, event: Any) -> None:
        """Handle an event of the run."""
        with self._lock:
            if self._closed:
                return
            # Drops come in masses: they are summed up instead of written one by one.
            if isinstance(event, Dropped):
                self._items[event.queue] += 1
                self._steps[event.queue] += event.steps
                self._report_drops(SECONDS)
                return
            if isinstance(event, Ended):
                self._report_drops(0.0)
            self._write(**plain_event(event))

    def _report_drops(self, seconds: float) -> None:
        """Write what was dropped, if that is new and the last report so many seconds ago."""
        items, now = self._items.total(), time.monotonic()
        if items > self._reported_items and now - self._reported_at >= seconds:
            self._reported_items, self._reported_at = items, now
            self._write("dropped", items=dict(self._items), steps=dict(self._steps))

    def _write(self, event: str, **facts: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **facts}) + "\n"
        # The first events come before there is a file.
        if self._file is None:
            self._early.append(line)
        else:
            self._file.write(line)
            self._file.flush()


def plain_event(event: Any) -> dict[str, Any]:
    """Return what the log holds of an event, as plain data; ``event`` is its kind.

    Of the end of a run that failed ``where`` is the address of the error, empty if it has none.
    """
    kind = type(event).__name__.lower()
    match event:
        case Started(plan=plan):
            counters = ("sampled_steps", "updates", "gradient_steps")
            return {
                "event": kind,
                "graph": plan.graph.name,
                "plan": str(plan).partition("\n")[0],
                "per_row": {name: plan.per_row(name) for name in counters},
            }
        case Ended(reason=reason, error=error):
            kind_of = type(error).__name__
            text = None if error is None else f"{kind_of}: {error}" if str(error) else kind_of
            return {"event": kind, "reason": reason, "error": text, "where": address_of(error)}
    return {"event": kind, **event._asdict()}


class Sink(ABC):
    """An observer that writes the rows of one run somewhere.

    A service of metrics puts each row at a step, and refuses or misplaces one that goes back. So
    the rows of a run are all counted the same way: in environment steps, or in updates if the first
    of them has updates but no environment steps, as where a phase without sampling comes first.

    A run that goes back to its newest snapshot, because a process was lost, makes the rows after it
    again, and a sink gets these too, at the steps that they had: they are what the policy comes
    from, and what a service has can't be taken back. ``rows.jsonl`` holds each row once.
    """

    kinds: ClassVar[tuple[type, ...]] = (Started, RowClosed, Ended)
    begun = False
    """Whether the run has begun."""
    place = ""
    """Where the rows go, as a user is shown it."""
    _counted = ""
    """The column that counts the steps of all rows; empty before the first row."""

    def __call__(self, event: Any) -> None:
        """Handle an event of the run."""
        match event:
            case Started(plan=plan, first=first):
                self._count_like(first)
                self.begin(plan)
                self.begun = True
            case RowClosed(row=row):
                self._count_like(row)
                self.add(row)
            # A run that failed before it began has nothing to end.
            case Ended(reason=reason) if self.begun:
                self.end(reason)

    def _count_like(self, first: Row | None) -> None:
        """Choose what counts the steps of a run by its first row, unless that is chosen already."""
        if first is not None and not self._counted:
            self._counted = "updates" if samples_nothing(first) else "env_steps"

    def step(self, row: Row) -> int:
        """Return the step at which a service of metrics puts a Row.

        It goes back only where rows are made again, after the loss of a process.
        """
        return round(row[self._counted])

    @abstractmethod
    def begin(self, plan: Plan) -> None:
        """Prepare for the rows of a run that begins.

        Args:
            plan: of the run.
        """

    @abstractmethod
    def add(self, row: Row) -> None:
        """Write a Row."""

    @abstractmethod
    def end(self, reason: str) -> None:
        """Finish writing, after the last Row.

        Args:
            reason: why the run ended: ``until``, ``steps``, ``closed``, ``interrupted`` or
                ``failed``.
        """


class Csv(Sink):
    """Write rows to a CSV file, a line for each when it closes.

    A cell is empty where a row has no such column, and ``nan`` where the number is not known. The
    columns are those that the plan knows. If a row has more, such as `restarts`, the file is
    written again with them.

    Args:
        path: path of the file, which must be new.

    Raises:
        SettingError: the file exists already.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.place = Path(path).absolute(), str(path)
        if self.path.exists():
            raise SettingError(
                f"Csv: {self.path} exists already, and nothing is ever overwritten; "
                "name another file"
            )

    def begin(self, plan: Plan) -> None:
        """Make the file, and write its first line, the columns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open("x", columns(plan))
        self.writer.writeheader()
        self.file.flush()

    def _open(self, mode: str, names: list[str]) -> None:
        self.names = names
        self.file = self.path.open(mode, encoding="utf-8", newline="")
        self.writer = csv.DictWriter(self.file, names, lineterminator="\n")

    def add(self, row: Row) -> None:
        """Write a Row as a line, with new columns if it has any."""
        if new := [name for name in row if name not in self.names]:
            self._widen([*self.names, *new])
        # The line is flushed at once, so that a killed run has its rows.
        self.writer.writerow(dict(row))
        self.file.flush()

    def _widen(self, names: list[str]) -> None:
        """Write the file again with more columns, and replace it in one atomic step."""
        self.file.close()
        # A process that is killed meanwhile leaves the old file whole.
        draft = self.path.with_name(f"{self.path.name}.draft")
        with (
            self.path.open(encoding="utf-8", newline="") as old,
            draft.open("w", encoding="utf-8", newline="") as new,
        ):
            writer = csv.DictWriter(new, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        draft.replace(self.path)
        self._open("a", names)

    def end(self, reason: str) -> None:
        """Close the file."""
        self.file.close()


class TensorBoard(Sink):
    """Write rows for TensorBoard, over steps as `Sink` counts them: ``tensorboard --logdir DIR``.

    Numbers that are not finite are left out.

    Args:
        folder: folder where the files are written; several runs may share it.

    Raises:
        SettingError: the package is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.place = Path(folder).absolute(), str(folder)
        self.event = _package("tensorboardX.proto.event_pb2", "tensorboard").Event
        self.summary = _package("tensorboardX.proto.summary_pb2", "tensorboard").Summary
        self.sum = _package("tensorboardX.record_writer", "tensorboard").masked_crc32c

    def begin(self, plan: Plan) -> None:
        """Make a file for this run in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        # Nothing is buffered, so that a killed run has its rows.
        self.file = (self.folder / name).open("xb", buffering=0)
        self._write(self.event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, row: Row) -> None:
        """Write all numbers of a Row as one event."""
        values = [
            self.summary.Value(tag=name, simple_value=value) for name, value in _finite(row).items()
        ]
        summary, step = self.summary(value=values), self.step(row)
        self._write(self.event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        """Write one record in a single call: its length and the event, each with its checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        length_sum = struct.pack("<I", self.sum(length))
        data_sum = struct.pack("<I", self.sum(data))
        # A process that is killed between two calls would leave half a record.
        self.file.write(b"".join((length, length_sum, data, data_sum)))

    def end(self, reason: str) -> None:
        """Close the file."""
        self.file.close()


class WandB(Sink):
    """Send rows to Weights & Biases, over steps as `Sink` counts them.

    The graph's settings are the configuration of the run there.

    Args:
        project: name of the project.
        settings: more keyword arguments for `wandb.init`, such as ``name="first"`` or
            ``mode="offline"``.

    Raises:
        SettingError: the package is not installed.
    """

    patience = PATIENCE

    def __init__(self, project: str, **settings: Any) -> None:
        self.wandb = _package("wandb", "wandb")
        self.settings, self.place = {"project": project, **settings}, f"wandb:{project}"

    def begin(self, plan: Plan) -> None:
        """Begin a run of the service, with the settings of the graph."""
        config = {
            "graph": plan.graph.name,
            **settings_of(plan.graph),
            **self.settings.get("config", {}),
        }
        self.run = self.wandb.init(**{**self.settings, "config": config})

    def add(self, row: Row) -> None:
        """Send the finite numbers of a Row."""
        self.run.log(_finite(row), step=self.step(row))

    def end(self, reason: str) -> None:
        """End the run of the service, as failed if this run failed."""
        self.run.summary["reason"] = reason
        self.run.finish(exit_code=int(reason == "failed"))


class MLflow(Sink):
    """Send rows to MLflow, over steps as `Sink` counts them.

    The graph's settings are the parameters of the run there. A metric such as ``loss/policy`` is
    called ``loss.policy`` there, because in MLflow's files ``loss`` can't be a number and a folder
    at once.

    Args:
        experiment: name of the experiment, which is made if there is none.
        name: name of the run there; None: the graph's name (the default).
        uri: address of the tracking server; None: MLFLOW_TRACKING_URI, or what MLflow itself takes
            (the default).

    Raises:
        SettingError: the package is not installed.
    """

    patience = PATIENCE
    MOST: ClassVar[int] = 100
    """The most parameters in one call."""

    def __init__(self, experiment: str, name: str | None = None, uri: str | None = None) -> None:
        self.mlflow = _package("mlflow", "mlflow")
        self.experiment, self.name, self.uri = experiment, name, uri
        self.place = f"mlflow:{experiment}"

    def begin(self, plan: Plan) -> None:
        """Begin a run of the service, with the settings of the graph."""
        self.client = self.mlflow.MlflowClient(self.uri)
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            experiment_id = self.client.create_experiment(self.experiment)
        else:
            experiment_id = experiment.experiment_id
        name = self.name or plan.graph.name
        self.id = self.client.create_run(experiment_id, run_name=name).info.run_id
        settings = {"graph": plan.graph.name, **settings_of(plan.graph)}
        # MLflow limits the length of a parameter's value.
        params = [
            self.mlflow.entities.Param(address, str(value)[:500])
            for address, value in settings.items()
        ]
        for start in range(0, len(params), self.MOST):
            self.client.log_batch(self.id, params=params[start : start + self.MOST])

    def add(self, row: Row) -> None:
        """Send the finite numbers of a Row."""
        now, step = int(time.time() * 1000), self.step(row)
        metrics = [
            self.mlflow.entities.Metric(name.replace("/", "."), value, now, step)
            for name, value in _finite(row).items()
        ]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self, reason: str) -> None:
        """End the run of the service, as failed if this run failed."""
        status = {"failed": "FAILED", "interrupted": "KILLED"}.get(reason, "FINISHED")
        self.client.set_terminated(self.id, status)


def _finite(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if math.isfinite(value)}


def _package(name: str, extra: str) -> Any:
    """Import a package that an extra of flowrl installs.

    Raises:
        SettingError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingError(
            f"{extra} needs a package that is not there ({error}): {install(extra)}"
        ) from None


SINKS: Mapping[str, tuple[str, Callable[[str, Path], Sink]]] = {
    "csv": ("[:FILE]", lambda rest, out: Csv(rest or out / "rows.csv")),
    "tensorboard": ("[:DIR]", lambda rest, out: TensorBoard(rest or out / "tensorboard")),
    "wandb": (":PROJECT", lambda rest, _: WandB(rest)),
    "mlflow": (":EXPERIMENT", lambda rest, _: MLflow(rest)),
}
"""By name: what may (in brackets) or must follow the name, and a function that makes the sink from
that and from the run's directory."""


def sink(text: str, out: Path) -> Sink:
    """Return a sink that the command line names: ``csv``, ``tensorboard:DIR``, ``wandb:PROJECT``.

    Args:
        text: the name of the sink, and after a colon what it needs or may have.
        out: the directory of the run, for those that write files.

    Raises:
        SettingError: there is no sink of that name, it lacks what it needs, or its package is not
            installed.
    """
    name, _, rest = text.partition(":")
    if name not in SINKS:
        known = [n + suffix for n, (suffix, _) in SINKS.items()]
        raise SettingError(f"--to: {unknown('sink', name, known)}")
    suffix, make = SINKS[name]
    if suffix.startswith(":") and not rest:
        raise SettingError(f"--to {name} needs a name after it: --to {name}{suffix}")
    return make(rest, out)
