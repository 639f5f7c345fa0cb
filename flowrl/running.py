"""`fl.run`: open a graph in a runtime, give its Rows, stop when told to, save."""

from __future__ import annotations

import importlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from flowrl.core.events import Ended, Observer, RowClosed, Started, Stream, Tap, Warned
from flowrl.core.importing import forbid_while_importing
from flowrl.core.items import Row
from flowrl.core.profile import Profile, to_text
from flowrl.errors import GraphError, SaveError, SettingError, unknown
from flowrl.graph import values
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.observe.curves import Curves
from flowrl.observe.explain import Explanation, explain
from flowrl.observe.record import Record, Recorder
from flowrl.observe.saving import RECORDS, RunDir, TrainedPolicy, check_free, failure
from flowrl.observe.sinks import EventLog
from flowrl.observe.trace import Trace
from flowrl.observe.tracing import Tracing
from flowrl.rollout.runners import Runners
from flowrl.runtime.base import Audit, Runtime, interrupts_wait, noting
from flowrl.runtime.members import MemberRows

PROFILE_SECONDS = 10.0
"""How often a run's directory is told where its time goes, so that `flowrl explain` tells of runs that go on or were killed."""
RUNTIMES = {
    "local": ("flowrl.runtime.local", "LocalRuntime"),
    "ray": ("flowrl.runtime.ray", "RayRuntime"),
    "xla": ("flowrl.runtime.xla", "XlaRuntime"),
}


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
    """Run a graph: iterate over the result for its Rows, and use it as a context manager so that everything is shut down.

    Args:
        graph: what to run. It is compiled first, unless it is a plan already.
        runtime: ``local``, ``ray``, ``xla``, or a runtime such as ``fl.RayRuntime(address=...)``.
        seed: of every random number in the run.
        steps: stop with the first Row that has this many environment steps.
        until: stop with the first Row of which this is true.
        out: a directory, made anew, for rows, graph, plan and policy; they are written as the run goes and when it is closed.
        observers: told of the run's events. Where none takes warnings, these go to the logger ``flowrl``.
        trace: a file for what every process did and when, of the last of the run; Perfetto opens it; if its name ends in
            ``.svg``, a picture of a stretch of it.
        otlp: the address of a collector of OpenTelemetry that the same is sent to, such as ``http://localhost:4318``.
        record: keep updates in `out`, so that `flowrl replay` can run them again and `flowrl why` tell what they were made of; True for
            `fl.Record()`, which keeps the first and those that stand out.

    Raises:
        CheckError: the graph is faulty; nothing was started.
        SettingError: an argument can't be taken.
        RuntimeFailed: the runtime can't start.
        SaveError: `out` exists already.

    >>> import flowrl as fl
    >>> with fl.run(fl.ppo("CartPole-v1", fl.PPOSettings(batch_size=256, rollout_length=32)), steps=512) as run:
    ...     updates = [row["updates"] for row in run]
    >>> updates
    [1, 2, 3]
    """
    forbid_while_importing()
    if not 0 <= seed < 2**32:
        raise SettingError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise SettingError(f"steps must be a whole number of at least 1, got {steps!r}")
    if not isinstance(graph, Graph | Plan):
        raise SettingError(f"run takes a graph, such as fl.ppo('CartPole-v1'), got {graph!r}")
    if until is not None and not callable(until):
        raise SettingError(
            f"until must be a function of a Row, such as lambda row: row['return_mean'] >= 475; got {until!r}"
        )
    plan = graph if isinstance(graph, Plan) else graph.compile()
    if not isinstance(observers, Iterable):
        raise SettingError(f"observers must be a list of them, got {observers!r}")
    observers = tuple(observers)
    for observer in observers:
        if (
            isinstance(observer, type)
            or not callable(observer)
            or not isinstance(getattr(observer, "kinds", None), tuple)
        ):
            raise SettingError(
                f"observers: {observer!r} is none; it needs `kinds`, a tuple of the events that it takes, and is called with each, as fl.Csv(path) is"
            )
    if not isinstance(record, bool | Record):
        raise SettingError(
            f"record must be True, False or one such as fl.Record(every=100), got {record!r}"
        )
    if record:
        if out is None:
            raise SettingError(
                "record keeps updates in the run's directory; give out='runs/mine' too"
            )
        observers = (
            *observers,
            Recorder(Path(out) / RECORDS, Record() if record is True else record, seed),
        )
    return Run(
        plan,
        as_runtime(runtime),
        seed,
        steps,
        until,
        out,
        observers,
        Tracing(trace, otlp) if trace or otlp else None,
    )


def as_runtime(runtime: str | Runtime) -> Runtime:
    """A runtime by its name, or as it is.

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
    """A graph at work. An iterator of Rows, and a context manager that shuts everything down."""

    graph: Graph
    plan: Plan

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
        self.plan = plan
        self.graph = plan.graph
        self.rows: list[Row] = []
        """The Rows so far."""
        self.reason: str | None = None
        """Why it ended: ``until``, ``steps``, ``closed``, ``interrupted`` or ``failed``; None while it runs."""
        self._steps, self._until = steps, until
        self._goal = ""
        """Which goal was reached, while rows that were closed already are still being given."""
        self._log = EventLog()
        if not any(
            Warned in observer.kinds for observer in observers
        ):  # a warning reaches somebody: standard error, if nobody set `logging` up
            observers = (
                *observers,
                Tap(
                    lambda event: logging.getLogger("flowrl").warning("flowrl: %s", event.text),
                    Warned,
                ),
            )
        self._stream = Stream(observers if out is None else (self._log, *observers))
        self._cut = False
        """Whether it was said that evaluated episodes were cut."""
        self._final: TrainedPolicy | None = None
        self._profiled: tuple[Profile, Profile] | None = None
        self._profile_due = (
            time.perf_counter() + PROFILE_SECONDS / 10
        )  # soon, for who asks at once why it is slow
        self._audited: Audit | None = None
        files: dict[str, str] = {}
        self._dir: RunDir | None = None
        self._tracing = tracing
        try:
            if out is not None:
                files = self._files()
                check_free(out)
            self._session = runtime.open(plan, seed, self._stream)
            self._session.steps = steps
        except BaseException as error:
            self.reason = "failed"
            if self._tracing is not None:
                self._tracing.close()
            self._stream.emit(Ended(self.reason, error))
            self._stream.close()
            raise
        try:
            if out is not None:
                self._dir = RunDir(out, files)
                self._log.open(self._dir.path)
        except BaseException as error:
            self._end("failed", error)
            raise
        self._iterator: Iterator[Row] = iter(self._session)
        self._stream.emit(Started(plan, self.profile))

    # -- rows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        if self.reason is not None:
            raise StopIteration
        try:
            row = next(self._iterator)
            self._add(row)
            solved = self._until is not None and self._until(row)
        except BaseException as error:
            self._end("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
            raise
        if solved:
            self._goal = "until"
        elif self._steps is not None and row["env_steps"] >= self._steps:
            self._goal = self._goal or "steps"
        if self._goal and not self._session.coming:
            self._end(self._goal, None)
        return row

    def _rest(self) -> None:
        """The rows that were closed already and not given yet: a program's policy is that of the last of them."""
        while self._session.coming:
            self._add(next(self._iterator))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        if self._dir is not None:
            self._dir.add(row)
            if (now := time.perf_counter()) >= self._profile_due:
                whole = self._session.profile()
                self._dir.put("profile.json", to_text(whole, self._session.steady(whole)))
                self._profile_due = now + PROFILE_SECONDS
        self._stream.emit(RowClosed(row))
        if (cut := row.get("eval/cut_episodes", 0)) > 0 and not self._cut:
            self._cut = True
            text = "did not end within the max_steps of Evaluate and were cut; their returns until then count. The column eval/cut_episodes goes on"
            self._stream.emit(
                Warned(f"{self.graph.name}: {cut:g} evaluated episodes {text} counting them")
            )

    # -- what there is to use

    @property
    def policy(self) -> TrainedPolicy:
        """The policy with its newest weights.

        Raises:
            GraphError: the graph has no learner, or several.
        """
        if self._final is not None:
            return self._final
        learners = [(n, r) for n, r in self.graph.resources.items() if isinstance(r, Learner)]
        if len(learners) != 1:
            raise GraphError(
                f"{self.graph.name} has {len(learners)} learners; run.policy needs exactly one"
            )
        name, learner = learners[0]
        runners = self.graph.resources[str(learner.runners)]
        env, wrappers, settings = (
            (runners.env, runners.wrappers, runners.env_settings)
            if isinstance(runners, Runners)
            else (None, (), {})
        )
        handle: LearnerHandle
        with self._session.handle(name) as handle:
            weights = jax.device_get(handle.weights()[0])
        return TrainedPolicy(
            learner.policy,
            handle.core.spaces,
            weights,
            env,
            wrappers,
            settings,
            handle.core.loss.values,
        )

    def counts(self) -> Counter[str]:
        """What was done so far, by the counters of `Plan.per_row`."""
        return self._session.counts()

    def audit(self) -> Audit:
        """The conservation audit so far."""
        return self._audited or self._session.audit()

    def profile(self) -> Profile:
        """Where the time went so far, and what flowed. After the end of the run, that of the end."""
        return self._profiled[0] if self._profiled else self._session.profile()

    def explain(self) -> Explanation:
        """Why it is as fast as it is: where the seconds went, the bottleneck, and what changes would bring. Its beginning is left out."""
        return explain(self._profiled[1] if self._profiled else self._session.steady())

    def curves(self) -> Curves:
        """What every one of many runs at once told.

        Raises:
            GraphError: this is one run.
        """
        if not isinstance(self._session.rows, MemberRows):
            raise GraphError("this is one run; take fl.XlaRuntime(seeds=8) for many at once")
        return self._session.rows.curves()

    # -- saving and ending

    def save(self, path: str | Path) -> None:
        """Save rows, graph, plan and policy as they are now into a directory made anew.

        Raises:
            SaveError: it exists already, or the policy's class has no name that leads back to it.
        """
        policy, told = self._policy(), self._told()
        folder = RunDir(path, self._files())
        for row in self.rows:
            folder.add(row)
        folder.finish(policy, told)

    def close(self) -> None:
        """End the run: shut everything down, and save into `out` if there is one. Rows and policy stay at hand."""
        self._end("closed", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(
            "closed"
            if error is None
            else "interrupted"
            if isinstance(error, KeyboardInterrupt)
            else "failed",
            error,
        )

    def _end(self, reason: str, error: BaseException | None) -> None:
        if self.reason is not None:
            return
        self.reason = reason
        with (
            interrupts_wait() as pressed,
            ExitStack() as last,
        ):  # each of these is done, the last one first, whatever the others raise
            if self._tracing is not None:
                last.callback(noting(error, self._tracing.close))
            last.callback(noting(error, partial(self._finish, error)))
            last.callback(self._stream.close)
            last.callback(self._stream.emit, Ended(reason, error))
            for ending in (self._session.close, self._keep, self._rest, self._session.rest):
                last.callback(noting(error, ending))
        if error is None:
            self._session.interrupted |= pressed()
            self._session.raise_interrupt()

    def _keep(self) -> None:
        if self._tracing is not None:
            edges = [(before, node.name) for node in self.graph.nodes for before in node.after]
            self._tracing.trace = lambda: Trace.of(self.graph.name, edges, self._session.spans)
        whole = self._session.profile()
        self._profiled, self._audited = (whole, self._session.steady(whole)), self._session.audit()
        self._final = self._policy()

    def _policy(self) -> TrainedPolicy | None:
        """The policy, if there is one."""
        try:
            return self.policy
        except GraphError:
            return None

    def _finish(self, error: BaseException | None) -> None:
        """Seal the directory, into which observers may have written, too."""
        self._log.close()
        if self._dir is None:
            return
        try:
            self._dir.finish(
                self._final,
                self._told()
                | (failure(error) if self.reason == "failed" and error is not None else {}),
            )
        except OSError as problem:
            raise SaveError(f"{self._dir.path} could not be saved: {problem}") from problem

    def _told(self) -> dict[str, str]:
        told = {
            "audit.txt": str(self.audit()),
            "explain.txt": str(self.explain()),
            "profile.json": to_text(self.profile(), self.explain().profile),
        }
        if isinstance(self._session.rows, MemberRows) and self.rows:
            curves = self.curves()
            told |= {"curves.txt": str(curves), "members.jsonl": curves.text()}
            with suppress(SaveError):  # without matplotlib
                told["curves.svg"] = curves.svg()
        return told

    def _files(self) -> dict[str, str]:
        """The texts of a run's directory. A policy that can't be saved is an error now, not after the training."""
        for resource in self.graph.resources.values():
            if isinstance(resource, Learner):
                values.to_text(resource.policy, defaults=True, strict=True)
        try:
            text = self.graph.text()
        except SaveError as error:
            self._stream.emit(Warned(f"graph.txt can't be read back: {error}"))
            text = f"# This text can't be read back: {error}\n{self.graph.text(strict=False)}"
        return {"graph.txt": text, "plan.txt": str(self.plan)}
