"""The arguments of `fl.run` and `fl.resume`: each is checked, and made into what a run takes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.events import Observer
from flowrl.core.items import Row
from flowrl.errors import SettingError, unknown
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.observe.best import column_of
from flowrl.observe.goal import parse_until
from flowrl.observe.initial import Init
from flowrl.observe.learned import learner_of
from flowrl.observe.manifest import RECORDS
from flowrl.observe.record import Record, Recorder
from flowrl.observe.sinks import columns
from flowrl.observe.snapshots import Snapshots
from flowrl.runtime.base import Runtime

Until = Callable[[Row], bool] | str | None
"""A goal of a run: a function of a Row, or a comparison such as ``return_mean>=475``."""
UNSAMPLED = {"env_steps": 0.0, "episodes": 0.0, "return_mean": math.nan, "length_mean": math.nan}
"""By column: what it is in each row of a graph that samples no environments."""
RUNTIMES = {
    "local": ("flowrl.runtime.local", "LocalRuntime"),
    "ray": ("flowrl.runtime.ray", "RayRuntime"),
    "xla": ("flowrl.runtime.xla", "XlaRuntime"),
}
"""By name of a runtime: its module and class, imported when it is used."""


def check_seed(seed: Any) -> None:
    """Refuse what is no seed of random numbers."""
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 2**32:
        raise SettingError(f"seed must be a whole number from 0 to 2**32 - 1, got {seed!r}")


def check_arguments(graph: Any, seed: Any, steps: Any, until: Any) -> None:
    """Refuse arguments of `run` that it can't take."""
    check_seed(seed)
    whole = isinstance(steps, int) and not isinstance(steps, bool)
    if steps is not None and (not whole or steps < 1):
        raise SettingError(f"steps must be a whole number of at least 1, got {steps!r}")
    if not isinstance(graph, Graph | Plan):
        raise SettingError(f"run takes a graph, such as fl.ppo('CartPole-v1'), got {graph!r}")
    if until is not None and not isinstance(until, str) and not callable(until):
        raise SettingError(
            "until must be a comparison such as 'return_mean>=475', or a function of a Row, such "
            f"as lambda row: row['return_mean'] >= 475; got {until!r}"
        )


def checked_until(
    until: Until, plan: Plan, argument: str = "until"
) -> Callable[[Row], bool] | None:
    """Return a goal as a function of a Row.

    A run notes a comparison as it was written, so `resume` need not be given it again.

    Args:
        until: the goal.
        plan: the plan of the run.
        argument: what errors call the goal.

    Raises:
        SettingError: a text is no comparison, names no column that rows of this plan have, or one
            that stays as it is because the graph samples no environments.
    """
    if not isinstance(until, str):
        return until
    names = columns(plan)
    goal = parse_until(until, names, argument)
    column = goal.comparison.name
    if column in UNSAMPLED and _samples_nothing(plan):
        always = UNSAMPLED[column]
        if not goal.comparison.holds(always):
            # Such a run would go on for ever, and its rows would not say why.
            other = ", or its evaluations: 'eval/return_mean>=475'"
            raise SettingError(
                f"{argument} {until!r}: no node of {plan.graph.name} samples environments, so "
                f"{column} is {always:g} in every row; let it end by its updates: 'updates>=10_000'"
                f"{other if 'eval/return_mean' in names else ''}"
            )
    return goal


def _samples_nothing(plan: Plan) -> bool:
    """Return whether a graph takes no environment steps, and updates all the same."""
    samples = any(
        counters["sampled_steps"] or counters["most_sampled_steps"]
        for traffic in plan.found.steady.values()
        for counters in traffic.counts.values()
    )
    return plan.found.exact and bool(plan.total("updates")) and not samples


def check_steps(plan: Plan, steps: int | None) -> None:
    """Refuse a number of environment steps as the goal of a graph that samples none.

    Raises:
        SettingError: with a goal that it can reach.
    """
    if steps is not None and _samples_nothing(plan):
        raise SettingError(
            f"steps={steps:,}: no node of {plan.graph.name} samples environments, so it takes no "
            "steps; let it end by its updates: until=lambda row: row['updates'] >= 10_000, or "
            "--until 'updates>=10_000'"
        )


def late_goal(plan: Plan, steps: int | None) -> str:
    """Return why a run goes on long after a number of environment steps; empty if it does not.

    A run ends at the end of a row, and rows count updates.
    """
    idle = plan.found.idle_steps
    if steps is None or not plan.total("draws") or steps > idle:
        return ""
    return (
        f"steps={steps:,} come before the first update, which waits for {idle:,} environment "
        "steps; the run ends with its first row, after that update. Let learning start earlier "
        "(learning_starts), or give the run more steps"
    )


def checked_observers(observers: Any) -> tuple[Observer, ...]:
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


def recorder_of(record: Any, out: str | Path | None, seed: int, plan: Plan) -> Recorder | None:
    """Return the observer that keeps updates in the run's directory, if this is wanted."""
    if not isinstance(record, bool | Record):
        raise SettingError(
            f"record must be True, False or one such as fl.Record(every=100), got {record!r}"
        )
    if not record:
        return None
    if out is None:
        raise SettingError("record keeps updates in the run's directory; give out='runs/mine' too")
    if 0 < plan.total("updates") <= plan.total("applied_gradients"):
        raise SettingError(
            "record keeps the batch of an update, and each update of this graph applies gradients "
            "whose batches are gone by then; leave record out, or train by TrainOneStep",
            plan.graph.name,
        )
    return Recorder(Path(out) / RECORDS, Record() if record is True else record, seed)


def checked_snapshots(snapshots: Any, plan: Plan) -> Snapshots | None:
    """Return how often snapshots are made, None for never, or refuse what does not say so."""
    if not isinstance(snapshots, bool | Snapshots):
        raise SettingError(
            "snapshots must be True, False or some such as fl.Snapshots(every=60), got "
            f"{snapshots!r}"
        )
    if isinstance(snapshots, Snapshots):
        if snapshots.best is not None:
            learner_of(plan.graph, f"best={snapshots.best!r}")
            column_of(snapshots.best, plan)
        return snapshots
    return Snapshots() if snapshots else None


def check_ends(runs: int, at_once: int, options: Mapping[str, Any]) -> None:
    """Make sure that runs end where others begin after them.

    Args:
        runs: how many there are.
        at_once: how many go on at a time.
        options: arguments of `fl.run`, among them ``steps`` and ``until``.

    Raises:
        SettingError: some would never begin.
    """
    if runs > at_once and options.get("steps") is None and options.get("until") is None:
        raise SettingError(
            f"{at_once} of {runs} runs go on at a time, and without a goal they never end, so the "
            "others would never begin; give steps= or until= (--steps, --until)"
        )


def checked_init(init: Any, plan: Plan) -> Init | None:
    """Return what a run begins with, None for its own weights, or refuse what is none."""
    if init is None:
        return None
    learner_of(plan.graph, "init")
    return init if isinstance(init, Init) else Init(init)


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


def started(start: Callable[[], Any], ui: bool | int | str) -> Any:
    """Start a run, with its live page if `ui` asks for one, and return it."""
    if ui is False:
        return start()
    # Starlette and uvicorn are imported only where there is a page.
    from flowrl.page.serving import with_page

    return with_page(ui, start)
