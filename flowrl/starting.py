"""`fl.run`: check the arguments of a run, and start it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from flowrl.core.events import Observer
from flowrl.core.importing import forbid_while_importing
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.observe.initial import Init
from flowrl.observe.record import Record
from flowrl.observe.snapshots import Snapshots
from flowrl.observe.tracing import Tracing
from flowrl.observe.trained import TrainedPolicy
from flowrl.run_arguments import (
    Until,
    as_runtime,
    check_arguments,
    check_steps,
    checked_init,
    checked_observers,
    checked_snapshots,
    checked_until,
    late_goal,
    recorder_of,
    started,
)
from flowrl.running import Run
from flowrl.runtime.base import Runtime


def run(
    graph: Graph | Plan,
    *,
    runtime: str | Runtime = "local",
    seed: int = 0,
    steps: int | None = None,
    until: Until = None,
    out: str | Path | None = None,
    observers: Iterable[Observer] = (),
    trace: str | Path | None = None,
    otlp: str | None = None,
    record: bool | Record = False,
    snapshots: bool | Snapshots = True,
    init: str | Path | TrainedPolicy | Init | None = None,
    ui: bool | int | str = False,
) -> Run:
    """Start a run of a graph, and return it: iterate over it for its rows of results.

    Use it as a context manager, so that everything is shut down.

    Args:
        graph: graph or plan to run; a graph is compiled first.
        runtime: ``local`` (default), ``ray``, ``xla``, or a value such as ``fl.RayRuntime()``.
        seed: seed of every random number in the run, from 0 to 2**32 - 1 (default 0).
        steps: number of environment steps: the run ends with the first row that reaches it; None:
            no limit (default None).
        until: comparison of a column with a number, such as ``return_mean>=475``, or a function of
            a row: the run ends with the first row of which it is true; None: no goal (default
            None). `resume` remembers a comparison; a function it has to be given again.
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
        snapshots: how often all that lasts is kept in `out`, so that `flowrl resume` can go on from
            there; True: `fl.Snapshots()`, once a minute and at the end (default True). With them
            the best policy so far is kept.
        init: directory of a saved run, or a policy, with whose weights the learner begins, and so
            its target network and its runners; `fl.Init` takes a part of them. None: its own first
            weights (default None).
        ui: whether a live page of the run is served, whose link is printed and which is `Run.page`
            then: True for a free port of this machine, a port, or ``HOST:PORT``, for which the
            environment variable ``FLOWRL_UI_TOKEN`` holds a token; False: no page (default False).

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
    check_steps(plan, steps)
    checked = checked_observers(observers)
    recorder = recorder_of(record, out, seed, plan)
    start = partial(
        Run,
        plan,
        as_runtime(runtime),
        seed,
        steps,
        checked_until(until, plan),
        out,
        checked if recorder is None else (*checked, recorder),
        Tracing(trace, otlp) if trace or otlp else None,
        checked_snapshots(snapshots, plan),
        init=checked_init(init, plan),
    )
    run: Run = started(start, ui)
    if late := late_goal(plan, steps):
        run.warn(late)
    return run
