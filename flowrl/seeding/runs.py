"""`run_seeds`: one graph with many seeds, and the Curves of all of them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import cloudpickle

from flowrl.algos.named import loaded
from flowrl.core.counted import counted, warnings
from flowrl.core.curves import Curves
from flowrl.core.items import Row
from flowrl.core.logs import log
from flowrl.core.machine import usable_cores
from flowrl.core.xla_threads import computes_on_cpu
from flowrl.errors import RunError, SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.names import main_module
from flowrl.graph.plan import Plan
from flowrl.observe.about import runtime_name
from flowrl.observe.initial import Init
from flowrl.observe.progress import Progress
from flowrl.observe.saver import first_files
from flowrl.observe.saving import check_free_for_seeds
from flowrl.observe.snapshots import Snapshots
from flowrl.observe.trained import TrainedPolicy
from flowrl.resuming import row_of
from flowrl.run_arguments import (
    Until,
    as_runtime,
    check_arguments,
    check_ends,
    check_seed,
    checked_init,
    checked_snapshots,
    checked_until,
)
from flowrl.runtime.base import Runtime, check_positive
from flowrl.runtime.driver import context, for_worker
from flowrl.runtime.members import SEEDS
from flowrl.seeding.child import Job, Work
from flowrl.seeding.lines import Lines, log_warning
from flowrl.seeding.noted import note_seeds
from flowrl.starting import run


def run_seeds(
    graph: Graph | Plan,
    *,
    seeds: int = 8,
    seed: int = 0,
    runtime: str | Runtime = "local",
    steps: int | None = None,
    until: Until = None,
    out: str | Path | None = None,
    at_once: int | None = None,
    record: Any = False,
    snapshots: bool | Snapshots = True,
    init: str | Path | TrainedPolicy | Init | None = None,
    progress: bool = True,
) -> Curves:
    """Run a graph with many seeds, wait for all runs, and return their learning curves.

    In the local runtime each run has a process of its own, as many at a time as there are cores;
    on Ray they go on one after another, in one process that starts Ray once; in the xla runtime
    they are one program. Each gives what `fl.run` gives with that seed. What a script or a notebook
    defines is sent to the processes by value. On Ctrl-C every run ends and is saved.

    Args:
        graph: graph or plan to run.
        seeds: how many consecutive seeds (default 8).
        seed: first of the seeds (default 0).
        runtime: ``local`` (default), ``ray``, ``xla``, or a value such as ``fl.RayRuntime()``.
        steps: environment steps after which each run ends; None: no limit (default None).
        until: goal of each run, as of `fl.run`; in the xla runtime of the means (default None).
        out: directory in which each run is saved as ``seed-0``, ``seed-1`` and so on (the xla
            runtime saves all in this one); None: nothing is written (default None).
        at_once: how many processes work at a time; None: as many as there are cores, or one where
            they compute on a GPU or TPU, of which the first takes most of the memory (default
            None).
        record: whether updates are kept, as `fl.run` takes it (default False).
        snapshots: how often each run is kept, as `fl.run` takes it (default True).
        init: with which weights each run begins, as `fl.run` takes it (default None).
        progress: print a line now and then, with seed, steps and return (default True).

    Returns:
        The curves of all runs that did not fail, on one grid of environment steps. Those that
        failed, or were interrupted long before the others, are named in warnings.

    Raises:
        CheckError: the graph is faulty; nothing was started.
        SettingError: an argument can't be taken.
        SaveError: a directory exists already.
        RunError: no run gave a row without failing.

    See also `Curves.load`, which reads them again.
    """
    check_positive("seeds", seeds, or_none=False)
    check_seed(seed)
    name = runtime if isinstance(runtime, str) else runtime_name(runtime)
    options: Any = {"steps": steps, "until": until, "record": record, "snapshots": snapshots}
    options["init"] = init
    if name == "xla":
        many: Any = replace(as_runtime(runtime), seeds=seeds)  # type: ignore[type-var]
        with ExitStack() as last:
            observers = [last.enter_context(closing(Progress(steps=steps)))] if progress else []
            options |= {"seed": seed, "out": out, "observers": observers}
            with run(graph, runtime=many, **options) as training:
                list(training)
        return training.curves()
    every = range(seed, seed + seeds)
    runs = SeedRuns(graph, every, runtime=runtime, options=options, out=out, at_once=at_once)
    runs.follow(Lines(steps) if progress else log_warning)
    for problem in runs.problems():
        log(problem)
    return runs.curves()


@dataclass
class SeedRun:
    """What is known of the run with one seed."""

    seed: int
    rows: list[Row] = field(default_factory=list)
    reason: str | None = None
    """Why it ended, as `Run.reason` says; None while it goes on or waits."""
    error: str = ""
    """The error that ended it, if it failed."""

    @property
    def label(self) -> str:
        """What to call it."""
        return f"seed {self.seed}"


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: a row, a warning, or its end."""

    run: SeedRun
    row: Row | None = None
    """Its newest row, if that is what happened."""
    warning: str = ""


class SeedRuns:
    """Runs of one graph with many seeds, in processes of their own: an iterator of events.

    Args:
        graph: graph or plan to run.
        seeds: the seeds.
        runtime: runtime of every run, by name or as it is.
        options: more arguments of `fl.run`, such as ``steps``.
        out: directory in which each run is saved as ``seed-0`` and so on; None: nowhere.
        at_once: most processes at a time; None: as many as there are cores, one on a GPU.
        to: sinks of every run's rows, as ``--to`` takes them.
        ended: where runs are resumed that were begun: those of them that have reached their goal.
        goal: where runs are resumed: to which ``steps`` and ``until``, as `Work` has it.

    Raises:
        FlowrlError: the graph is faulty, an argument can't be taken, or a directory exists.
    """

    def __init__(
        self,
        graph: Graph | Plan,
        seeds: Sequence[int],
        *,
        runtime: Any,
        options: Mapping[str, Any],
        out: str | Path | None = None,
        at_once: int | None = None,
        to: Sequence[str] = (),
        ended: Sequence[SeedRun] | None = None,
        goal: Mapping[str, Any] | None = None,
    ) -> None:
        check_positive("at_once", at_once)
        check_arguments(graph, seeds[0], options.get("steps"), options.get("until"))
        if seeds[-1] >= SEEDS:
            raise SettingError(f"seed {seeds[-1]} is above 2**32 - 1; take a lower first seed")
        runtime = as_runtime(runtime)
        # What is faulty here is an error now, once, and not in every process.
        plan = graph if isinstance(graph, Plan) else graph.compile()
        checked_until(options.get("until"), plan)
        checked_snapshots(options.get("snapshots", True), plan)
        init = checked_init(options.get("init"), plan)
        if init is not None and ended is None:
            init.weights()
        folder = None if out is None else Path(out).absolute()
        if folder is not None:
            first_files(plan)
            if ended is None:
                check_free_for_seeds(folder, seeds)
        elif options.get("record"):
            raise SettingError("record keeps updates in the runs' directories; give out=, too")
        self.options, self.goal = options, goal
        self.runs = {seed: SeedRun(seed) for seed in seeds}
        """By seed: its run."""
        self.runs |= {each.seed: each for each in ended or ()}
        self._folder = folder
        left = [seed for seed, each in self.runs.items() if each.reason is None]
        # Ray is started once, for all runs one after another.
        is_ray = runtime_name(runtime) == "ray"
        shares = [left] if is_ray else [[seed] for seed in left]
        work = Work(plan.graph, runtime, options, folder, to, _of_main(plan.graph), goal)
        job = _job(work, getattr(runtime, "imports", ()))
        self._jobs = deque(replace(job, seeds=share) for share in shares)
        # Where a run computes is known for this process alone: on Ray a learner may have a GPU.
        threads = None if is_ray else getattr(runtime, "threads", None) or plan.threads
        on_cpu = computes_on_cpu(threads)
        # The first process with a GPU takes most of its memory, even one that computes on the CPU.
        self._variables = {"JAX_PLATFORMS": "cpu"} if on_cpu and not is_ray else {}
        self._at_once = at_once or (usable_cores() if on_cpu else 1)
        check_ends(len(left) if ended is None else 0, 1 if is_ray else self._at_once, options)
        self._last: list[Event] = []
        """What happened while the runs were ended."""

    def follow(self, show: Callable[[Event], None]) -> None:
        """Run all, and show every event, also those of runs that Ctrl-C or an error ends.

        Whatever ends this, the runs are ended and saved before it goes on.

        Args:
            show: function that is called with each event.
        """
        try:
            with closing(iter(self)) as events:
                for event in events:
                    show(event)
        finally:
            for event in self._last:
                show(event)

    def __iter__(self) -> Generator[Event]:
        """Start the runs, and yield what happens until all have ended.

        Where this is closed, or an error or Ctrl-C ends it, all runs are ended and saved first; a
        second Ctrl-C ends them at once.
        """
        inbox: SimpleQueue[tuple[_Child, dict[str, Any] | None]] = SimpleQueue()
        working: set[_Child] = set()
        if self._folder is not None:
            note_seeds(self._folder, self.runs)
        try:
            while self._jobs or working:
                while self._jobs and len(working) < self._at_once:
                    child = _Child(self._jobs.popleft(), inbox, self._variables)
                    # From here on a Ctrl-C ends it, too.
                    working.add(child)
                    child.start()
                yield from self._events(*inbox.get(), working)
        finally:
            self._jobs.clear()
            self._end(working, inbox)

    def _events(
        self, child: _Child, message: dict[str, Any] | None, working: set[_Child]
    ) -> Iterator[Event]:
        """Note what a process reported, and yield it as events. None is the end of the process."""
        if message is None:
            working.discard(child)
            status = child.wait()
            for seed in child.seeds:
                if self.runs[seed].reason is None:
                    text = child.error or f"its process ended with status {status}"
                    yield from self._ended(seed, "failed", text)
        elif "earlier" in message:
            self.runs[message["seed"]].rows.append(row_of(message["earlier"]))
        elif "row" in message:
            each, row = self.runs[message["seed"]], row_of(message["row"])
            # A run that went back to a snapshot makes the rows after it again.
            del each.rows[int(row["row"]) - 1 :]
            each.rows.append(row)
            yield Event(each, row=each.rows[-1])
        elif "warning" in message:
            yield Event(self.runs[message["seed"]], warning=message["warning"])
        elif "ended" in message:
            yield from self._ended(message["seed"], message["ended"], message.get("error", ""))
        else:
            child.error = message["error"]

    def _ended(self, seed: int, reason: str, error: str) -> Iterator[Event]:
        self.runs[seed].reason, self.runs[seed].error = reason, error
        yield Event(self.runs[seed])

    def _end(self, working: set[_Child], inbox: SimpleQueue[Any]) -> None:
        """End all processes, wait until their runs are saved, and note how they ended."""
        try:
            for child in list(working):
                if child.is_started:
                    child.end()
                else:
                    working.discard(child)
                    child.kill()
            while working:
                child, message = inbox.get()
                for seed in child.seeds if message is None else ():
                    if self.runs[seed].reason is None:
                        self._last += self._ended(seed, "interrupted", "")
                self._last += self._events(child, message, working)
        except BaseException:
            for child in working:
                child.kill()
            raise
        for each in self.runs.values():
            each.reason = each.reason or "interrupted"

    # -- what there is in the end

    def problems(self) -> list[str]:
        """Return a line for each run that failed, and those on what the curves leave out."""
        failed = [f"{x.label} failed: {x.error}" for x in self._that(failed=True)]
        return [*failed, *warnings(*self._counted())]

    def curves(self) -> Curves:
        """Return the curves of all runs that count, as `Curves.load` has them.

        Raises:
            RunError: there is none.
        """
        groups, _ = self._counted()
        if not groups:
            raise RunError(f"no run has a result: {'; '.join(self.problems())}")
        return Curves.of_runs(groups)

    def _counted(self) -> tuple[list[tuple[str, list[SeedRun]]], list[str]]:
        """Return the runs that count, as one group, and why others that did not fail do not."""
        return counted(self._that(failed=False), lambda runs: [("", runs)] if runs else [])

    def _that(self, *, failed: bool) -> list[SeedRun]:
        """Return the runs that failed, or those that did not."""
        return [x for x in self.runs.values() if (x.reason == "failed") == failed]


class _Child:
    """A process that works at a job, and a thread that receives its messages.

    Args:
        job: what it works at.
        inbox: where its messages go.
        variables: environment variables that it gets beside those of this process.
    """

    def __init__(
        self, job: Job, inbox: SimpleQueue[tuple[_Child, Any]], variables: Mapping[str, str]
    ) -> None:
        self.seeds = job.seeds
        self.job = pickle.dumps(job)
        self.inbox = inbox
        self.variables = variables
        self.error = ""
        """An error that is none of a single run's."""
        self.process: subprocess.Popen[bytes] | None = None
        self.thread = Thread(target=self._talk, daemon=True)

    def start(self) -> None:
        """Start the process, and the thread that talks with it."""
        # It imports from where this process does. In a session of its own it gets no Ctrl-C of
        # the terminal's, of which a second one would not let it save.
        path = [os.path.abspath(place) for place in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from flowrl.seeding.child import main; main()"
        self.process = subprocess.Popen(  # noqa: S603 - all words are ours
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.variables},
            start_new_session=True,
        )
        self.thread.start()

    @property
    def is_started(self) -> bool:
        """Whether the thread puts messages into the inbox, or has put all."""
        return self.thread.ident is not None

    def _talk(self) -> None:
        """Send the job, then put every message into the inbox, and None at the end."""
        assert self.process is not None  # noqa: S101 - it was started before this thread
        assert self.process.stdin is not None  # noqa: S101 - both are pipes
        assert self.process.stdout is not None  # noqa: S101
        try:
            # A process that has died takes no job; its status says so. One that is to end while it
            # gets its job has its input closed by `end`: that is the ValueError.
            with suppress(BrokenPipeError, ValueError):
                self.process.stdin.write(self.job)
                self.process.stdin.flush()
            with self.process.stdout as messages:
                for text in messages:
                    # Only the last line of a process that was killed can be half a line.
                    with suppress(ValueError):
                        self.inbox.put((self, json.loads(text)))
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        finally:
            # Whatever happened: who reads the inbox waits for this.
            self.inbox.put((self, None))

    def end(self) -> None:
        """Let the process end its run and save it."""
        assert self.process is not None  # noqa: S101 - the thread was started after it
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self) -> int:
        """Wait for the process, and return its status."""
        assert self.process is not None  # noqa: S101 - it was started
        return self.process.wait()

    def kill(self) -> None:
        """End the process at once, if there is one yet."""
        if self.process is not None:
            self.process.kill()


# -- what a process gets -----------------------------------------------------------------------


def _of_main(graph: Graph) -> dict[str, Any]:
    """Return, by name, what a graph uses of the script that was started.

    There it is written into saved texts by the script's name; the process of a run has to find it
    under that name, too.
    """
    module = main_module()
    if not module:
        return {}
    names = [name for source, name in loaded(graph.text(strict=False)) if source == module]
    script = vars(sys.modules["__main__"])
    return {name: script[name] for name in names if name in script}


def _job(work: Work, imports: Sequence[str]) -> Job:
    """Return the job of a process, which lacks only its seeds.

    Raises:
        SettingError: the graph or its goal can't be pickled.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    files = {}
    for name in cloudpickle.list_registry_pickle_by_value():
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if file.endswith(f"{name}.py"):
            files[name] = file
    with ExitStack() as afterwards:
        # The processes are on this machine and import these files, so that there is one class of
        # each name; Ray's need not have the files, and get what they define by value.
        for name in files:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
            afterwards.callback(partial(cloudpickle.register_pickle_by_value, sys.modules[name]))
        pickled = for_worker(work, work.graph.name)
    of_main = (getattr(main, "__file__", None), spec.name if spec is not None else None)
    return Job((), context(imports), list(files.values()), of_main, sys.argv, pickled)
