"""`Run`: a graph that is open in a runtime: its Rows, until a goal, and what is saved of it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax

from flowrl.core.controls import Controls
from flowrl.core.curves import Curves
from flowrl.core.events import Ended, Observer, RowClosed, Started, Stream, Warned, with_warnings
from flowrl.core.garbage import rarely_collected
from flowrl.core.items import Row, reached
from flowrl.core.profile import Profile
from flowrl.core.texts import plural
from flowrl.errors import GraphError, LostError
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.refs import resource_and_part
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.observe.about import FILE, about, ending, goal_of, to_text
from flowrl.observe.advice import advice
from flowrl.observe.explain import Explanation, explain
from flowrl.observe.goal import reaches
from flowrl.observe.initial import Init, beginning
from flowrl.observe.learned import learner_of, policy_of
from flowrl.observe.saver import Results, Resumed, Saver, first_files
from flowrl.observe.saving import RunDir
from flowrl.observe.snapshots import Snapshots, packages
from flowrl.observe.trace import Trace
from flowrl.observe.tracing import Tracing
from flowrl.observe.trained import TrainedPolicy
from flowrl.ops.report import Report
from flowrl.rl.policies import Weights
from flowrl.runtime.audit import Audit
from flowrl.runtime.base import Runtime
from flowrl.runtime.closing import interrupts_wait, noting
from flowrl.runtime.members import MemberRows

LOSSES = 3
"""So many losses of a process without a row more than at the first of them end a run."""


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
        snapshots: Snapshots | None,
        resumed: Resumed | None = None,
        init: Init | None = None,
    ) -> None:
        """Open the graph in the runtime; `run` describes the arguments.

        Raises:
            RunError: the runtime can't start.
            SaveError: the directory can't be made.
        """
        self.plan, self.graph = plan, plan.graph
        self.started = time.time()
        self.goal = goal_of(steps, until)
        """When it ends, as text; empty if it goes on until it is closed."""
        noted = None if init is None else init.noted()
        self._about = partial(
            about, plan, runtime, seed, steps, until, self.started, snapshots, noted
        )
        # What goes on has weights of its own.
        goes_on = resumed is not None and resumed.rows
        self._begin = None if init is None or goes_on else beginning(init)
        saver = None if out is None else Saver(out, plan, self._about(), snapshots, resumed)
        self._resumed = resumed
        """What it goes on from; None for a new run."""
        self.rows: list[Row] = [] if resumed is None else [*resumed.rows]
        """The rows so far."""
        self._considered = len(self.rows)
        """The rows of which it is known whether they make the policy the best so far."""
        self.reason: str | None = None
        """``until``, ``steps``, ``closed``, ``interrupted``, ``failed``; None while it goes on."""
        self._steps, self._until = steps, until
        self.controls = Controls()
        """By which other threads pause, stop and keep it."""
        self.page: Any = None
        """Its live page, a `Page`, if `ui` was given."""
        self._goal = ""
        """The goal that was reached, while rows that closed already are still being returned."""
        self.history = None if saver is None else saver.history
        """Where the time went, over time; None without `out`."""
        self._saver, self._tracing, self._runtime, self._seed = saver, tracing, runtime, seed
        self._losses: deque[int] = deque(maxlen=LOSSES)
        """The rows that there were when a process was lost, of the newest losses."""
        self._stream = Stream((*(saver.observers if saver else ()), *with_warnings(observers)))
        self._warned_of_cut = False
        """Whether there was a warning that evaluated episodes were cut."""
        self._results: Results | None = None
        self._measured: tuple[Profile, Profile] | None = None
        """What can be asked for after the end."""
        self._open()
        self._iterator: Iterator[Row] = iter(self._session)
        self._stream.emit(Started(plan, self.profile, self.rows[0] if self.rows else None))
        # Its process may have been killed after its last row, and before it was saved.
        if self._goal:
            self._end(self._goal, None)

    def _open(self) -> None:
        """Open the session, then the directory, which is not made for a run that can't start."""
        if self._tracing is not None:
            self._tracing.start()
        try:
            if self._saver is not None and self._saver.warning:
                self._stream.emit(Warned(self._saver.warning))
            for text in advice(self.plan):
                self._stream.emit(Warned(text))
            with rarely_collected():
                self._session = self._runtime.open(self.plan, self._seed, self._stream)
        except BaseException as error:
            self.reason = "failed"
            if self._tracing is not None:
                self._tracing.close()
            self._stream.emit(Ended(self.reason, error))
            self._stream.close()
            raise
        try:
            self._session.steps = self._steps
            if self._resumed is not None and self._resumed.rows:
                self._take(self._resumed.snapshot.state)
            if self._begin is not None:
                self._session.change(learner_of(self.graph)[0], self._begin)
            if self._saver is not None:
                self._saver.open(self._profiles)
            if self.rows:
                self._note_goal(self.rows[-1])
        except BaseException as error:
            self._end("failed", error)
            raise

    def _take(self, state: Any) -> None:
        """Go on from the state of a snapshot."""
        self._session.take(state)
        if self._saver is not None and self._saver.best is not None:
            self._saver.best.take(state["best"], self._policy_with)

    # -- rows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        if self.reason is None and not self._goes_on():
            self.close()
        if self.reason is not None:
            raise StopIteration
        try:
            # Rounds, rows and snapshots belong together: an interrupt waits for the end of all.
            with interrupts_wait() as pressed:
                row = self._kept_row()
            self._session.interrupted |= pressed()
        except BaseException as error:
            self._end(_reason_of(error), error)
            raise
        # A program closes several rows at once: the run ends with the last of them.
        if self._goal and not self._session.pending_rows:
            self._end(self._goal, None)
        return row

    def _goes_on(self) -> bool:
        """Wait while the run is paused, and return whether it is to go on then."""
        try:
            return self.controls.wait()
        except BaseException as error:
            self._end(_reason_of(error), error)
            raise

    def _kept_row(self) -> Row:
        """Return the next row, once the snapshot that is due after it is written.

        If a process is lost meanwhile, the run goes on from the newest snapshot.
        """
        while True:
            try:
                # Until the first row most functions are traced.
                with nullcontext() if self.rows else rarely_collected():
                    row = next(self._iterator)
                self._add_row(row)
                if not (self._note_goal(row) or self._session.pending_rows):
                    self._keep()
            except LostError as error:
                self._recover(error)
            else:
                return row

    def _recover(self, error: LostError) -> None:
        """Go back to the newest snapshot, again if a process is lost on the way there.

        Raises:
            LostError: there are no snapshots, or the run comes no further between its losses.
        """
        lost: LostError | None = error
        while lost is not None:
            if self._saver is None or self._saver.snapshots is None or self._loses_again():
                raise lost
            try:
                self._go_back(lost, self._saver)
            except LostError as again:
                lost = again
            else:
                lost = None

    def _loses_again(self) -> bool:
        """Note a loss, and return whether a run comes no further between its losses."""
        self._losses.append(len(self.rows))
        return len(self._losses) == LOSSES and self._losses[0] >= max(self._losses)

    def _go_back(self, error: LostError, saver: Saver) -> None:
        """Open the session again with what the newest snapshot holds; its rows come again.

        Raises:
            FlowrlError: it can't be opened again.
        """
        for end in (self._session.rest, self._session.close):
            noting(error, end)()
        snapshot = saver.go_back(packages(self.graph), self.warn)
        steps, what = reached(self.rows[snapshot.row - 1]) if snapshot.row else (0, "steps")
        again = len(self.rows) - snapshot.row
        self.warn(
            f"{error}; the run goes on from row {snapshot.row:,}, {steps:,} {what}, its newest "
            f"snapshot, and makes the {again:,} {plural(again, 'row')} after it again"
        )
        self._goal = ""
        del self.rows[snapshot.row :]
        self._considered = snapshot.row
        self._session = self._runtime.open(self.plan, self._seed, self._stream)
        self._session.steps = self._steps
        if snapshot.row:
            self._take(snapshot.state)
        else:
            if saver.best is not None:
                saver.best.take(None, self._policy_with)
            if self._begin is not None:
                self._session.change(learner_of(self.graph)[0], self._begin)
        saver.history.go_on()
        self._iterator = iter(self._session)

    def _note_goal(self, row: Row) -> bool:
        """Note which goal a row reaches, and return whether one was reached."""
        if self._until is not None and reaches(self._until, row):
            self._goal = "until"
        elif self._steps is not None and row["env_steps"] >= self._steps:
            self._goal = self._goal or "steps"
        return bool(self._goal)

    def warn(self, text: str) -> None:
        """Emit a warning on this run."""
        self._stream.emit(Warned(f"{self.graph.name}: {text}"))

    def _keep(self, at_end: bool = False) -> None:
        """Write a snapshot if one is due."""
        # A row that an interrupt took away after it was made can't be in a snapshot.
        lost = self._session.rows.totals["row"] > len(self.rows)
        if self._saver is None or lost or not self._session.between_rounds:
            return
        due = self.controls.take_snapshot() or at_end
        if warning := self._saver.keep(len(self.rows), self._session.kept, due):
            self.warn(warning)

    def _keep_at_end(self) -> None:
        """Write a last snapshot, unless an error left the run between two states."""
        if self.reason != "failed" and self.rows:
            self._keep(at_end=True)

    def _take_pending_rows(self) -> None:
        """Take the rows that closed already: a program's policy is that of the last of them."""
        while self._session.pending_rows:
            self._add_row(next(self._iterator))

    def _add_row(self, row: Row) -> None:
        """Keep a row, and emit its events."""
        self.rows.append(row)
        self._stream.emit(RowClosed(row))
        if not self._session.pending_rows:
            self._consider()
        if (cut := row.get("eval/cut_episodes", 0)) > 0 and not self._warned_of_cut:
            self._warned_of_cut = True
            self.warn(
                f"{cut:g} evaluated episodes did not end within the max_steps of Evaluate and were "
                "cut; their returns until then count. The column eval/cut_episodes goes on "
                "counting them"
            )

    def _consider(self) -> None:
        """Keep the policy if the rows that closed together make it the best so far."""
        count, self._considered = len(self.rows) - self._considered, len(self.rows)
        if self._saver is None or self._saver.best is None:
            return
        made, rows = self._session.rows, self.rows
        if isinstance(made, MemberRows):
            # The policy is that of one of the runs, so their means say nothing of it.
            rows = made.rows[made.best]
        best = self._saver.best
        best.consider(rows[-count:], self._evaluated if best.evaluated else lambda: self.policy)

    def _evaluated(self) -> TrainedPolicy | None:
        """Return the policy that played the last evaluation, if it is still there."""
        reporting = next(node.op for node in self.graph.nodes if node.op.reports)
        name = str(learner_of(self.graph)[1].runners)
        # An evaluation comes with the episodes of the runners that are reported.
        if isinstance(reporting, Report) and resource_and_part(name)[0] != reporting.runners:
            name = str(reporting.runners)
        with self._session.handle(name) as runners:
            weights = jax.device_get(runners.evaluated())
        return None if weights is None else self._policy_with(weights)

    # -- what there is to use

    @property
    def policy(self) -> TrainedPolicy:
        """The policy with its newest weights.

        Raises:
            GraphError: the graph has no learner, or several.
        """
        return self.policies[learner_of(self.graph)[0]]

    @property
    def policies(self) -> dict[str, TrainedPolicy]:
        """The policies with their newest weights, by the names of their learners."""
        if self._results is not None:
            return self._results.policies
        found = {}
        for name, resource in self.graph.resources.items():
            if isinstance(resource, Learner):
                handle: LearnerHandle
                with self._session.handle(name) as handle:
                    weights = jax.device_get(handle.weights()[0])
                    found[name] = policy_of(self.graph, handle.core, weights, resource)
        return found

    def _policy_with(self, weights: Weights) -> TrainedPolicy:
        """Return the policy with these weights."""
        handle: LearnerHandle
        with self._session.handle(learner_of(self.graph)[0]) as handle:
            return policy_of(self.graph, handle.core, weights)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Pass the events of the run to an observer, too, from now on; return what ends that."""
        self._stream.add(observer)
        return partial(self._stream.remove, observer)

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
        folder.finish(results.policies, results.reports())

    def close(self) -> None:
        """End the run: shut everything down, and save into `out` if it was given.

        Rows and policy stay available.
        """
        self._end("closed", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and not self.rows and self.reason is None:
            self.warn(
                "it was closed before its first row: a run goes on only while its rows are asked "
                "for; write `for row in run: ...`, or list(run)"
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
                self._keep_at_end,
                self._measure,
                self._take_pending_rows,
                self._session.rest,
            ):
                last.callback(noting(error, ending))
        if error is None:
            self._session.interrupted |= pressed()
            self._session.raise_interrupt()

    def _measure(self) -> None:
        """Measure all but the last snapshot, whose seconds come once, however long a run is."""
        self._measured = self._profiles()

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
        if self._measured is not None:
            return self._measured
        whole = self._session.profile()
        return whole, self._session.steady(whole)

    def _results_so_far(self) -> Results:
        """Return what there is now."""
        whole, steady = self._profiles()
        many = isinstance(self._session.rows, MemberRows) and bool(self.rows)
        return Results(
            self.policies, self._session.audit(), whole, steady, self.curves() if many else None
        )


def _reason_of(error: BaseException) -> str:
    """Return the reason for which an error ends a run."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
