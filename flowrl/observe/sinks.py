"""Where rows and events go beside the screen: a log of events, CSV, TensorBoard, Weights & Biases, MLflow."""

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
from flowrl.core.items import COLUMNS, Row, Trained
from flowrl.core.metrics import names_of
from flowrl.errors import SettingError, unknown
from flowrl.graph.plan import Plan
from flowrl.observe.settings import settings_of
from flowrl.rollout.handle import EVALUATED

SECONDS = 1.0
"""Between two lines of a log that tell what queues dropped."""
PATIENCE = 60.0
"""Seconds that a service may take to get what it has not yet got, when a run ends."""


def columns(plan: Plan) -> list[str]:
    """The names that a Row of this plan has."""
    names = list(COLUMNS)
    for form in plan.found.forms.values():
        if isinstance(form, Trained):
            names += [n for n in form.metrics.names if n not in (*names, "bad")]
    if any(node.op.queue for node in plan.graph.nodes):
        names.append("dropped_steps")
    if plan.total("evaluations"):
        names += EVALUATED
    return names + [column for name in sorted(plan.found.metrics) for column in names_of(name)]


class EventLog:
    """Writes ``events.jsonl``, a line for each event that is no row: the start, restarts, warnings, the end; drops once a second, in sums."""

    kinds: ClassVar[tuple[type, ...]] = (Started, Restarted, Dropped, Warned, Ended)

    def __init__(self) -> None:
        self._lock = Lock()
        self._early: list[str] = []
        """Lines from before there was a file."""
        self._file: TextIO | None = None
        self._closed = False
        self._items: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        """By queue, dropped since the start."""
        self._told = (0, -math.inf)
        """How many items had been dropped by the last line that told it, and when that was."""

    def open(self, folder: Path) -> None:
        """Write into this directory from now on."""
        with self._lock:
            self._file = (folder / "events.jsonl").open("a", encoding="utf-8")
            for line in self._early:
                self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Write nothing more."""
        with self._lock:
            self._drops(0.0)
            self._closed = True
            if self._file is not None:
                self._file.close()

    def __call__(self, event: Any) -> None:
        """Take an event of the run."""
        with self._lock:
            if self._closed:
                return
            if isinstance(event, Dropped):
                self._items[event.queue] += 1
                self._steps[event.queue] += event.steps
                self._drops(SECONDS)
                return
            if isinstance(event, Ended):
                self._drops(0.0)
            self._write(type(event).__name__.lower(), **_told(event))

    def _drops(self, seconds: float) -> None:
        items, now = self._items.total(), time.monotonic()
        if items > self._told[0] and now - self._told[1] >= seconds:
            self._told = (items, now)
            self._write("dropped", items=dict(self._items), steps=dict(self._steps))

    def _write(self, event: str, **facts: Any) -> None:
        line = (
            json.dumps(
                {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "event": event,
                    **facts,
                }
            )
            + "\n"
        )
        if self._file is None:
            self._early.append(line)
        else:
            self._file.write(line)
            self._file.flush()


def _told(event: Any) -> dict[str, Any]:
    """An event as a log has it."""
    match event:
        case Started(plan=plan):
            counters = ("sampled_steps", "updates", "gradient_steps")
            return {
                "graph": plan.graph.name,
                "plan": str(plan).partition("\n")[0],
                "per_row": {name: plan.per_row(name) for name in counters},
            }
        case Ended(reason=reason, error=error):
            return {
                "reason": reason,
                "error": None if error is None else f"{type(error).__name__}: {error}",
            }
    facts: dict[str, Any] = event._asdict()
    return facts


class Sink(ABC):
    """Takes a run's rows somewhere. One sink is for one run."""

    kinds: ClassVar[tuple[type, ...]] = (Started, RowClosed, Ended)
    begun = False
    place = ""
    """Where rows go, for a person to find them."""

    def __call__(self, event: Any) -> None:
        """Take an event of the run."""
        match event:
            case Started(plan=plan):
                self.begin(plan)
                self.begun = True
            case RowClosed(row=row):
                self.add(row)
            case Ended(reason=reason) if self.begun:
                self.end(reason)

    @abstractmethod
    def begin(self, plan: Plan) -> None:
        """The run begins."""

    @abstractmethod
    def add(self, row: Row) -> None:
        """Take a Row."""

    @abstractmethod
    def end(self, reason: str) -> None:
        """The run is over."""


class Csv(Sink):
    """Rows as a CSV file, a line each as they come. Empty where a row has no such column, ``nan`` where it has no such number.

    The columns are those that the plan knows. If a row has more, such as `restarts`, the file is written anew with them.

    Args:
        path: of the file.

    Raises:
        SettingError: it is there already.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.place = Path(path), str(path)
        if self.path.exists():
            raise SettingError(
                f"Csv: {self.path} exists already, and nothing is ever overwritten; name another file"
            )

    def begin(self, plan: Plan) -> None:
        """Make the file, with its first line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open("x", columns(plan))
        self.writer.writeheader()
        self.file.flush()

    def _open(self, mode: str, names: list[str]) -> None:
        self.names = names
        self.file = self.path.open(mode, encoding="utf-8", newline="")
        self.writer = csv.DictWriter(self.file, names, lineterminator="\n")

    def add(self, row: Row) -> None:
        """Write a line."""
        if new := [name for name in row if name not in self.names]:
            self._widen([*self.names, *new])
        self.writer.writerow(dict(row))
        self.file.flush()

    def _widen(self, names: list[str]) -> None:
        """Write the file anew, with more columns, at one stroke."""
        self.file.close()
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
    """Rows for TensorBoard, over environment steps: ``tensorboard --logdir DIR``. Numbers that are not finite are left out.

    Args:
        folder: where to; that of several runs may be one.

    Raises:
        SettingError: the package is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.place = Path(folder), str(folder)
        self.event = _package("tensorboardX.proto.event_pb2", "tensorboard").Event
        self.summary = _package("tensorboardX.proto.summary_pb2", "tensorboard").Summary
        self.sum = _package("tensorboardX.record_writer", "tensorboard").masked_crc32c

    def begin(self, plan: Plan) -> None:
        """Make a file of its own there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = (self.folder / name).open("xb", buffering=0)
        self._write(self.event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, row: Row) -> None:
        """Write all of a row as one event."""
        values = [
            self.summary.Value(tag=name, simple_value=value) for name, value in _finite(row).items()
        ]
        self._write(
            self.event(
                wall_time=time.time(),
                step=int(row["env_steps"]),
                summary=self.summary(value=values),
            )
        )

    def _write(self, event: Any) -> None:
        """One record, at one stroke: its length and the event, each with its sum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self.file.write(
            b"".join(
                (
                    length,
                    struct.pack("<I", self.sum(length)),
                    data,
                    struct.pack("<I", self.sum(data)),
                )
            )
        )

    def end(self, reason: str) -> None:
        """Close the file."""
        self.file.close()


class WandB(Sink):
    """Rows for Weights & Biases, over environment steps; the graph's settings as its configuration.

    Args:
        project: its name.
        settings: more keyword arguments for `wandb.init`, such as ``name="first"`` or ``mode="offline"``.

    Raises:
        SettingError: the package is not installed.
    """

    patience = PATIENCE

    def __init__(self, project: str, **settings: Any) -> None:
        self.wandb = _package("wandb", "wandb")
        self.settings, self.place = {"project": project, **settings}, f"wandb:{project}"

    def begin(self, plan: Plan) -> None:
        """Begin a run there."""
        config = {
            "graph": plan.graph.name,
            **settings_of(plan.graph),
            **self.settings.get("config", {}),
        }
        self.run = self.wandb.init(**{**self.settings, "config": config})

    def add(self, row: Row) -> None:
        """Log it."""
        self.run.log(_finite(row), step=int(row["env_steps"]))

    def end(self, reason: str) -> None:
        """End the run there, as failed if it was."""
        self.run.summary["reason"] = reason
        self.run.finish(exit_code=int(reason == "failed"))


class MLflow(Sink):
    """Rows for MLflow, over environment steps; the graph's settings as its parameters. ``loss/policy`` is ``loss.policy`` there.

    For its files ``loss`` can't be a number and a folder at once.

    Args:
        experiment: its name; it is made if there is none.
        name: of the run there; the graph's by default.
        uri: of the tracking server; MLFLOW_TRACKING_URI, or what MLflow itself takes, by default.

    Raises:
        SettingError: the package is not installed.
    """

    patience = PATIENCE
    MOST: ClassVar[int] = 100
    """Parameters in one call."""

    def __init__(self, experiment: str, name: str | None = None, uri: str | None = None) -> None:
        self.mlflow = _package("mlflow", "mlflow")
        self.experiment, self.name, self.uri, self.place = (
            experiment,
            name,
            uri,
            f"mlflow:{experiment}",
        )

    def begin(self, plan: Plan) -> None:
        """Begin a run there."""
        self.client = self.mlflow.MlflowClient(self.uri)
        there = self.client.get_experiment_by_name(self.experiment)
        number = (
            self.client.create_experiment(self.experiment) if there is None else there.experiment_id
        )
        self.id = self.client.create_run(number, run_name=self.name or plan.graph.name).info.run_id
        told = {"graph": plan.graph.name, **settings_of(plan.graph)}
        params = [
            self.mlflow.entities.Param(address, str(value)[:500]) for address, value in told.items()
        ]
        for start in range(0, len(params), self.MOST):
            self.client.log_batch(self.id, params=params[start : start + self.MOST])

    def add(self, row: Row) -> None:
        """Log it."""
        now, step, metric = (
            int(time.time() * 1000),
            int(row["env_steps"]),
            self.mlflow.entities.Metric,
        )
        self.client.log_batch(
            self.id,
            metrics=[
                metric(name.replace("/", "."), value, now, step)
                for name, value in _finite(row).items()
            ],
        )

    def end(self, reason: str) -> None:
        """End the run there, as failed if it was."""
        self.client.set_terminated(
            self.id, {"failed": "FAILED", "interrupted": "KILLED"}.get(reason, "FINISHED")
        )


def _finite(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if math.isfinite(value)}


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingError(
            f"{extra} needs a package that is not there ({error}): pip install 'flowrl[{extra}]'"
        ) from None


SINKS: Mapping[str, tuple[str, Callable[[str, Path], Sink]]] = {
    "csv": ("[:FILE]", lambda rest, out: Csv(rest or out / "rows.csv")),
    "tensorboard": ("[:DIR]", lambda rest, out: TensorBoard(rest or out / "tensorboard")),
    "wandb": (":PROJECT", lambda rest, _: WandB(rest)),
    "mlflow": (":EXPERIMENT", lambda rest, _: MLflow(rest)),
}
"""By name: what may or must follow it, and what makes it of that and the run's directory."""


def sink(text: str, out: Path) -> Sink:
    """A sink as the command line names it: ``csv``, ``tensorboard:DIR``, ``wandb:PROJECT``.

    Args:
        text: its name, and what it needs or may have behind a colon.
        out: the directory of the run, for those that write files.

    Raises:
        SettingError: there is none of that name, it lacks what it needs, or its package is not installed.
    """
    name, _, rest = text.partition(":")
    if name not in SINKS:
        raise SettingError(
            f"--to: {unknown('sink', name, [n + form for n, (form, _) in SINKS.items()])}"
        )
    form, make = SINKS[name]
    if form.startswith(":") and not rest:
        raise SettingError(f"--to {name} needs a name behind it: --to {name}{form}")
    return make(rest, out)
