"""The process of one run, or of several one after another, that `SeedRuns` starts.

It reads what to do from its standard input, and writes a JSON object a line: rows, warnings and
ends. When its standard input is closed it ends its run, which is saved: so it also ends when the
process that started it is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from flowrl.algos.named import file_module
from flowrl.core.events import Tap, Warned
from flowrl.core.importing import importing
from flowrl.core.row_json import row_json
from flowrl.errors import described
from flowrl.graph.graph import Graph
from flowrl.observe.about import FILE, runtime_name
from flowrl.observe.sinks import sink
from flowrl.resuming import resume
from flowrl.run_arguments import as_runtime
from flowrl.running import Run
from flowrl.runtime.driver import DriverContext
from flowrl.starting import run

Send = Callable[..., None]
"""A function that writes a message."""


@dataclass(frozen=True)
class Work:
    """What to run. It is unpickled once the process imports as the one that started it does."""

    graph: Graph
    runtime: Any
    """The runtime, by name or as it is."""
    options: Mapping[str, Any]
    """More arguments of `fl.run`, such as ``steps``."""
    out: Path | None
    """Where each run is saved as ``seed-0`` and so on; None: nowhere."""
    to: Sequence[str]
    """Sinks of rows, as ``--to`` takes them."""
    main: Mapping[str, Any]
    """By name: what the graph uses of the script that was started."""
    goal: Mapping[str, Any] | None
    """To which ``steps`` and ``until`` runs that were begun go on; None in both: each to its own.

    It is None where no run was begun.
    """


@dataclass(frozen=True)
class Job:
    """What a process needs before it can unpickle its work, and that."""

    seeds: Sequence[int]
    """The seeds of its runs, one after another."""
    context: DriverContext
    files: Sequence[str]
    """Files that were imported by their paths."""
    main: tuple[str | None, str | None]
    """The file of the script that was started, and its name as a module."""
    argv: Sequence[str]
    """The command line that the user gave, which every saved run notes."""
    work: bytes
    """A pickled `Work`."""


def main() -> None:
    """Do one job."""
    # Standard output is for messages only: what anything else prints goes to standard error.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        try:
            messages.write(json.dumps(message) + "\n")
            messages.flush()
        except BrokenPipeError:
            # The process that started this one was killed: that is no fault of the run.
            raise KeyboardInterrupt from None

    try:
        job: Job = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own process wrote it
        with _ends_with_its_input():
            _do(job, send)
    except KeyboardInterrupt:
        pass
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises when it is imported
        # Where the process that started this one is gone, nobody is there to read it.
        with suppress(KeyboardInterrupt):
            send(error=described(error))


@contextmanager
def _ends_with_its_input() -> Iterator[None]:
    """Raise KeyboardInterrupt, once, when standard input is closed or SIGTERM comes."""
    ended = threading.Event()

    def interrupt() -> None:
        if not ended.is_set():
            ended.set()
            os.kill(os.getpid(), signal.SIGINT)

    def watch() -> None:
        # After the job nothing comes but the end of the input.
        os.read(0, 1)
        interrupt()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: interrupt())
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _do(job: Job, send: Send) -> None:
    """Do a job, after this process was made like the one that started it."""
    sys.argv = list(job.argv)
    job.context.enter()
    for file in job.files:
        file_module(file)
    _be_main(*job.main)
    with importing("a process for a seed"):
        work: Work = pickle.loads(job.work)  # noqa: S301 - our own process wrote it
    for name, value in work.main.items():
        setattr(sys.modules["__main__"], name, value)
    with _ray_started_once(work) as runtime:
        for seed in job.seeds:
            _train(work, runtime, seed, send)


def _be_main(file: str | None, name: str | None) -> None:
    """Let what the script defines have the same names in saved texts as in the script's process."""
    module = sys.modules["__main__"]
    if file is not None:
        module.__file__ = file
    module.__spec__ = None if name is None else ModuleSpec(name, None)


@contextmanager
def _ray_started_once(work: Work) -> Iterator[Any]:
    """Yield the runtime; start Ray, if that is the runtime, for all runs of this process."""
    runtime: Any = as_runtime(work.runtime)
    if runtime_name(runtime) != "ray":
        yield runtime
        return
    from flowrl.runtime.joining import STARTED
    from flowrl.runtime.ray import start

    stop = start(runtime.address, runtime.init, work.graph.name, bool(runtime.place))
    # Each run gets the runtime as the user gave it, which it notes in its run.json.
    STARTED.append((runtime.address, runtime.init))
    try:
        yield runtime
    finally:
        STARTED.pop()
        stop()


def _started(
    work: Work, runtime: Any, seed: int, out: Path | None, observers: Sequence[Any]
) -> Run:
    """Start the run of a seed, or go on with it if it was begun."""
    if work.goal is not None and out is not None and (out / FILE).is_file():
        return resume(out, work.graph, runtime=runtime, observers=observers, **work.goal)
    given = {**work.options, "out": out, "observers": observers}
    return run(work.graph, runtime=runtime, seed=seed, **given)


def _train(work: Work, runtime: Any, seed: int, send: Send) -> None:
    """Train with one seed, and send its rows and its end."""
    out = None if work.out is None else work.out / f"seed-{seed}"
    try:
        warnings = Tap(lambda event: send(seed=seed, warning=event.text), Warned)
        sinks = [sink(text, out) for text in work.to] if out is not None else []
        with _started(work, runtime, seed, out, [warnings, *sinks]) as training:
            for row in training.rows:
                send(seed=seed, earlier=json.loads(row_json(row)))
            for row in training:
                send(seed=seed, row=json.loads(row_json(row)))
        send(seed=seed, ended=training.reason)
    except KeyboardInterrupt:
        send(seed=seed, ended="interrupted")
        raise
    except Exception as error:  # noqa: BLE001 - the other seeds go on, whatever this one raised
        send(seed=seed, ended="failed", error=described(error))
