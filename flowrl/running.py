"""`fl.run`: open a graph in a runtime, return its Rows, stop at a goal, save."""

from __future__ import annotations

import importlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from flowrl.core.curves import Curves
from flowrl.core.events import Ended, Observer, RowClosed, Started, Stream, Tap, Warned
from flowrl.core.garbage import rarely_collected
from flowrl.core.importing import forbid_while_importing
from flowrl.core.items import Row
from flowrl.core.profile import Profile
from flowrl.errors import GraphError, SettingError, unknown
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.observe.about import FILE, about, ending, to_text
from flowrl.observe.explain import Explanation, explain
from flowrl.observe.record import Record, Recorder
from flowrl.observe.saver import Results, Saver, first_files
from flowrl.observe.saving import RECORDS, RunDir
from flowrl.observe.trace import Trace
from flowrl.observe.tracing import Tracing
from flowrl.observe.trained import TrainedPolicy
from flowrl.rollout.runners import Runners
from flowrl.runtime.audit import Audit
from flowrl.runtime.base import Runtime
from flowrl.runtime.closing import interrupts_wait, noting
from flowrl.runtime.members import MemberRows

RUNTIMES = {
    "local": ("flowrl.runtime.local", "LocalRuntime"),
    "ray": ("flowrl.runtime.ray", "RayRuntime"),
    "xla": ("flowrl.runtime.xla", "XlaRuntime"),
}
"""By name of a runtime: its module and class, imported when it is used."""


def run(
    graph: Graph | Plan,
    *,
    runtime: str | Runtime = "local",
    seed: int = 0,
    steps: int | None = None,
    until: Callable[[Row], bool] | None = None,
    out: str | Path | None = None,
    observers: Iterable[Observer] = (),
    trace: str | Path | None = None,
    otlp: str | None = None,
    record: bool | Record = False,
) -> Run:
    """Start a run of a graph, and return it: iterate over it for its rows of results.

    Use it as a context manager, so that everything is shut down.

    Args:
        graph: graph or plan to run; a graph is compiled first.
        runtime: ``local`` (default), ``ray``, ``xla``, or a value such as ``fl.RayRuntime()``.
        seed: seed of every random number in the run, from 0 to 2**32 - 1 (default 0).
        steps: number of environment steps: the run ends with the first row that reaches it; None:
            no limit (default None).
        until: function of a row: the run ends with the first row of which it is true; None: no goal
            (default None).
        out: new directory for rows, graph, plan and policy, written as the run goes and when it is
            closed; None: nothing is written (default None).
        observers: objects that are called with the run's events, such as `Csv` (default none).
            Where none takes warnings, these go to the logger ``flowrl``.
        trace: new file for what every process did and when, of the last part of the run; None: no
            file (default None). Perfetto opens it; if its name ends in ``.svg``, it is a picture of
            a stretch of it.
        otlp: address of a collector of OpenTelemetry that receives the same, such as
            ``http://localhost:4318``; None: nothing is sent (default None).
        record: whether updates are kept in `out`, so that `flowrl rerun` can run them again and
            `flowrl why` can report their batches; True: `fl.Record()` (default False).

    Raises:
        CheckError: the graph is faulty; nothing was started.
        SettingError: an argument can't be taken.
        RunError: the runtime can't start.
        SaveError: `out` or the file of `trace` exists already.

    >>> import flowrl as fl
    >>> graph = fl.ppo("CartPole-v1", fl.PPOSettings(batch_size=256, rollout_length=32))
    >>> with fl.run(graph, steps=512) as run:
    ...     updates = [row["updates"] for row in run]
    >>> updates
    [1, 2, 3]
    """
    forbid_while_importing()
    check_arguments(graph, seed, steps, until)
    plan = graph if isinstance(graph, Plan) else graph.compile()
    checked = _checked_observers(observers)
    recorder = _recorder(record, out, seed)
    return Run(
        plan,
        as_runtime(runtime),
        seed,
        steps,
        until,
        out,
        checked if recorder is None else (*checked, recorder),
        Tracing(trace, otlp) if trace or otlp else None,
    )


def check_arguments(graph: Any, seed: int, steps: Any, until: Any) -> None:
    """Refuse arguments of `run` that it can't take."""
    if not 0 <= seed < 2**32:
        raise SettingError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise SettingError(f"steps must be a whole number of at least 1, got {steps!r}")
    if not isinstance(graph, Graph | Plan):
        raise SettingError(f"run takes a graph, such as fl.ppo('CartPole-v1'), got {graph!r}")
    if until is not None and not callable(until):
        raise SettingError(
            "until must be a function of a Row, such as lambda row: row['return_mean'] >= 475; got "
            f"{until!r}"
        )


def _checked_observers(observers: Any) -> tuple[Observer, ...]:
    """Return the observers, or refuse what is none."""
    if not isinstance(observers, Iterable):
        raise SettingError(f"observers must be a list of them, got {observers!r}")
    checked = tuple(observers)
    for observer in checked:
        if (
            isinstance(observer, type)
            or not callable(observer)
            or not isinstance(getattr(observer, "kinds", None), tuple)
        ):
            raise SettingError(
                f"observers: {observer!r} is none; it needs `kinds`, a tuple of the events that it "
                "takes, and is called with each, as fl.Csv(path) is"
            )
    return checked


def _recorder(record: Any, out: str | Path | None, seed: int) -> Recorder | None:
    """Return the observer that keeps updates in the run's directory, if this is wanted."""
    if not isinstance(record, bool | Record):
        raise SettingError(
            f"record must be True, False or one such as fl.Record(every=100), got {record!r}"
        )
    if not record:
        return None
    if out is None:
        raise SettingError("record keeps updates in the run's directory; give out='runs/mine' too")
    return Recorder(Path(out) / RECORDS, Record() if record is True else record, seed)


def as_runtime(runtime: str | Runtime) -> Runtime:
    """Return a runtime by its name, or as it is.

    Raises:
        SettingError: the name is unknown.
    """
    if not isinstance(runtime, str):
        return runtime
    if runtime not in RUNTIMES:
        raise SettingError(unknown("runtime", runtime, RUNTIMES))
    module, name = RUNTIMES[runtime]
    made: Runtime = getattr(importlib.import_module(module), name)()
    return made


class Run:
    """A graph at work: an iterator of rows, and a context manager that shuts everything down."""

    graph: Graph
    """The graph that runs."""
    plan: Plan
    """The graph's plan."""

    def __init__(
        self,
        plan: Plan,
        runtime: Runtime,
        seed: int,
        steps: int | None,
        until: Callable[[Row], bool] | None,
        out: str | Path | None,
        observers: tuple[Observer, ...],
        tracing: Tracing | None,
    ) -> None:
        """Open the graph in the runtime; `run` describes the arguments.

        Raises:
            RunError: the runtime can't start.
            SaveError: the directory can't be made.
        """
        self.plan = plan
        self.graph = plan.graph
        self._about = partial(about, plan, runtime, seed, steps, until, time.time())
        saver = None if out is None else Saver(out, plan, self._about())
        self.rows: list[Row] = []
        """The rows so far."""
        self.reason: str | None = None
        """``until``, ``steps``, ``closed``, ``interrupted``, ``failed``; None while it goes on."""
        self._steps, self._until = steps, until
        self._goal = ""
        """The goal that was reached, while rows that closed already are still being returned."""
        self._saver, self._tracing = saver, tracing
        self._stream = Stream((*(saver.observers if saver else ()), *_with_warnings(observers)))
        self._warned_of_cut = False
        """Whether there was a warning that evaluated episodes were cut."""
        self._results: Results | None = None
        """What can be asked for after the end."""
        self._open(runtime, seed)
        self._iterator: Iterator[Row] = iter(self._session)
        self._stream.emit(Started(plan, self.profile))

    def _open(self, runtime: Runtime, seed: int) -> None:
        """Open the session, then the directory, which is not made for a run that can't start."""
        try:
            if self._saver is not None and self._saver.warning:
                self._stream.emit(Warned(self._saver.warning))
            for name, resource in self.graph.resources.items():
                if isinstance(resource, Runners) and (advice := resource.advice()):
                    self._stream.emit(Warned(f"{name}: {advice}"))
            with rarely_collected():
                self._session = runtime.open(self.plan, seed, self._stream)
            self._session.steps = self._steps
        except BaseException as error:
            self.reason = "failed"
            if self._tracing is not None:
                self._tracing.close()
            self._stream.emit(Ended(self.reason, error))
            self._stream.close()
            raise
        try:
            if self._saver is not None:
                self._saver.open(self._profiles)
        except BaseException as error:
            self._end("failed", error)
            raise

    # -- rows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        if self.reason is not None:
            raise StopIteration
        try:
            # Until the first row most functions are traced.
            with nullcontext() if self.rows else rarely_collected():
                row = next(self._iterator)
            self._add_row(row)
            solved = self._until is not None and self._until(row)
        except BaseException as error:
            self._end(_reason_of(error), error)
            raise
        if solved:
            self._goal = "until"
        elif self._steps is not None and row["env_steps"] >= self._steps:
            self._goal = self._goal or "steps"
        # A program closes several rows at once: the run ends with the last of them.
        if self._goal and not self._session.pending_rows:
            self._end(self._goal, None)
        return row

    def _take_pending_rows(self) -> None:
        """Take the rows that closed already: a program's policy is that of the last of them."""
        while self._session.pending_rows:
            self._add_row(next(self._iterator))

    def _add_row(self, row: Row) -> None:
        """Keep a row, and emit its events."""
        self.rows.append(row)
        self._stream.emit(RowClosed(row))
        if (cut := row.get("eval/cut_episodes", 0)) > 0 and not self._warned_of_cut:
            self._warned_of_cut = True
            self._stream.emit(
                Warned(
                    f"{self.graph.name}: {cut:g} evaluated episodes did not end within the "
                    "max_steps of Evaluate and were cut; their returns until then count. The "
                    "column eval/cut_episodes goes on counting them"
                )
            )

    # -- what there is to use

    @property
    def policy(self) -> TrainedPolicy:
        """The policy with its newest weights.

        Raises:
            GraphError: the graph has no learner, or several.
        """
        if self._results is not None and self._results.policy is not None:
            return self._results.policy
        learners = [(n, r) for n, r in self.graph.resources.items() if isinstance(r, Learner)]
        if len(learners) != 1:
            raise GraphError(
                f"{self.graph.name} has {len(learners)} learners; run.policy needs exactly one"
            )
        name, learner = learners[0]
        runners = self.graph.resources[str(learner.runners)]
        # Another resource in their place need not have these fields.
        env, wrappers, settings = (
            (runners.env, runners.wrappers, runners.env_settings)
            if isinstance(runners, Runners)
            else (None, (), {})
        )
        handle: LearnerHandle
        with self._session.handle(name) as handle:
            weights = jax.device_get(handle.weights()[0])
        spaces, loss_values = handle.core.spaces, handle.core.loss.values
        return TrainedPolicy(learner.policy, spaces, weights, env, wrappers, settings, loss_values)

    def counts(self) -> Counter[str]:
        """Return what was done so far, by counter, such as ``updates`` or ``sampled_steps``."""
        return self._session.counts()

    def audit(self) -> Audit:
        """Return the conservation audit so far."""
        return self._results.audit if self._results else self._session.audit()

    def profile(self) -> Profile:
        """Return where the time went, and what flowed, so far or until the end of the run."""
        return self._profiles()[0]

    def explain(self) -> Explanation:
        """Explain why the run is as fast as it is; its beginning is left out.

        Returns:
            Where the seconds went, the bottleneck, and what changes would bring.
        """
        return explain(self._profiles()[1])

    def curves(self) -> Curves:
        """Return the Rows of every one of many runs at once.

        Raises:
            GraphError: this is one run.
        """
        if not isinstance(self._session.rows, MemberRows):
            raise GraphError("this is one run; take fl.XlaRuntime(seeds=8) for many at once")
        return self._session.rows.curves()

    # -- saving and ending

    def save(self, path: str | Path) -> None:
        """Save rows, graph, plan and policy as they are now.

        Args:
            path: path of a new directory.

        Raises:
            SaveError: it exists already, or the policy's class has no name that leads back to it.
        """
        results = self._results or self._results_so_far()
        facts = {**self._about(), "ended": ending(self.reason, self.rows)}
        folder = RunDir(path, {**first_files(self.plan)[0], FILE: to_text(facts)})
        for row in self.rows:
            folder.add(row)
        folder.finish(results.policy, results.reports())

    def close(self) -> None:
        """End the run: shut everything down, and save into `out` if it was given.

        Rows and policy stay available.
        """
        self._end("closed", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and not self.rows and self.reason is None:
            self._stream.emit(
                Warned(
                    f"{self.graph.name} was closed before its first row: a run goes on only while "
                    "its rows are asked for; write `for row in run: ...`, or list(run)"
                )
            )
        self._end("closed" if error is None else _reason_of(error), error)

    def _end(self, reason: str, error: BaseException | None) -> None:
        """Shut everything down once, and save.

        Args:
            reason: why the run ends.
            error: what ended it, if that was an error.
        """
        if self.reason is not None:
            return
        self.reason = reason
        # Each of these is done, the last one first, whatever the others raise.
        with interrupts_wait() as pressed, ExitStack() as last:
            if self._tracing is not None:
                last.callback(noting(error, self._tracing.close))
            if self._saver is not None:
                last.callback(noting(error, partial(self._save_results, error)))
            last.callback(self._stream.close)
            last.callback(self._stream.emit, Ended(reason, error))
            for ending in (
                self._session.close,
                self._keep_results,
                self._take_pending_rows,
                self._session.rest,
            ):
                last.callback(noting(error, ending))
        if error is None:
            self._session.interrupted |= pressed()
            self._session.raise_interrupt()

    def _keep_results(self) -> None:
        """Keep what can be asked for after the end, while the resources are still open."""
        if self._tracing is not None:
            edges = [(before, node.name) for node in self.graph.nodes for before in node.after]
            self._tracing.trace = lambda: Trace.of(self.graph.name, edges, self._session.spans)
        self._results = self._results_so_far()

    def _save_results(self, error: BaseException | None) -> None:
        """Seal the directory; `error` is what ended the run, if that was an error."""
        if self._saver is not None:
            failure = error if self.reason == "failed" else None
            self._saver.close(self.rows, self._results, self.reason, failure)

    def _profiles(self) -> tuple[Profile, Profile]:
        """Return the profile of the whole run, and that of the run without its beginning."""
        if self._results is not None:
            return self._results.profile, self._results.steady
        whole = self._session.profile()
        return whole, self._session.steady(whole)

    def _results_so_far(self) -> Results:
        """Return what there is now."""
        whole, steady = self._profiles()
        try:
            policy = self.policy
        except GraphError:
            policy = None
        many = isinstance(self._session.rows, MemberRows) and bool(self.rows)
        return Results(
            policy, self._session.audit(), whole, steady, self.curves() if many else None
        )


def _with_warnings(observers: tuple[Observer, ...]) -> tuple[Observer, ...]:
    """Return the observers, with one that logs warnings if none of them takes these.

    So a warning always reaches somebody: standard error, if nobody set `logging` up.
    """
    if any(Warned in observer.kinds for observer in observers):
        return observers
    logger = logging.getLogger("flowrl")
    return (*observers, Tap(lambda event: logger.warning("flowrl: %s", event.text), Warned))


def _reason_of(error: BaseException) -> str:
    """Return the reason for which an error ends a run."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
