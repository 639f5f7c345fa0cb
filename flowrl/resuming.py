"""`fl.resume`: go on with a saved run from its newest good snapshot."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.core.events import Observer
from flowrl.core.importing import forbid_while_importing
from flowrl.core.items import Row, reached
from flowrl.core.row_json import numbers_of
from flowrl.errors import SaveError, SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.plan import OF_MACHINE, Plan
from flowrl.observe.about import OF_PYTHON, differences, read, runtime_name, settings_of_runtime
from flowrl.observe.about import goal_of as goal_text
from flowrl.observe.initial import init_of
from flowrl.observe.manifest import MANIFEST
from flowrl.observe.saver import UNREADABLE, Resumed
from flowrl.observe.saving import RunDir
from flowrl.observe.snapshots import (
    FOLDER,
    Snapshot,
    Snapshots,
    newest_snapshot,
    packages,
    start_of,
)
from flowrl.observe.tracing import Tracing
from flowrl.run_arguments import (
    RUNTIMES,
    as_runtime,
    check_arguments,
    check_steps,
    checked_observers,
    checked_until,
    started,
)
from flowrl.running import Run
from flowrl.runtime.base import Runtime

StepsAndUntil = tuple[int | None, Callable[[Row], bool] | None]
"""The environment steps at which a run ends, and the function of a row; None for none."""


def resume(
    path: str | Path,
    graph: Graph | Plan | None = None,
    *,
    runtime: str | Runtime | None = None,
    steps: int | None = None,
    until: Callable[[Row], bool] | str | None = None,
    observers: Iterable[Observer] = (),
    trace: str | Path | None = None,
    otlp: str | None = None,
    allow: Collection[str] = (),
    ui: bool | int | str = False,
) -> Run:
    """Go on with a saved run from its newest good snapshot, and return it as `run` does.

    It has the same graph, seed, runtime and goal, and goes on in the same directory: its rows come
    after those that are there. What happened after the snapshot happens again. Until the run is
    open, nothing in the directory changes.

    Args:
        path: directory of the run.
        graph: graph of the run, where its text can't be read back; None: the saved one (default
            None).
        runtime: runtime in place of the run's own, ``local`` or ``ray``; None: its own (default
            None).
        steps: number of environment steps at which the run ends, counted from its very beginning;
            None: as before, unless `until` is given (default None).
        until: as of `run`, where the run ends; None: as before, unless `steps` is given
            (default None).
        observers: as of `run` (default none).
        trace: as of `run`; of what comes from now on (default None).
        otlp: as of `run` (default None).
        allow: packages beyond flowrl that the saved graph may be made of (default none).
        ui: as of `run` (default False).

    Raises:
        SaveError: there is no such run or no good snapshot, another process is at work on it, or
            the graph or its plan is another one now.
        SettingError: an argument can't be taken, or the goal is reached already.
    """
    forbid_while_importing()
    checked = checked_observers(observers)
    found = resumable(path, graph, runtime=runtime, steps=steps, until=until, allow=allow)
    return found.start(observers=checked, trace=trace, otlp=otlp, ui=ui)


@dataclass(frozen=True)
class Resumable:
    """A saved run that can go on. Its directory is locked until it is closed, or the run ends."""

    plan: Plan
    facts: Mapping[str, Any]
    """How it was started, as ``run.json`` says."""
    runtime: Runtime
    goal: StepsAndUntil
    settings: Snapshots
    resumed: Resumed
    """What it goes on from."""
    warnings: tuple[str, ...]
    """What is to be said of it."""

    def start(
        self,
        observers: Iterable[Observer] = (),
        trace: str | Path | None = None,
        otlp: str | None = None,
        ui: bool | int | str = False,
    ) -> Run:
        """Open the run, and return it; `resume` describes the arguments."""
        try:
            start = partial(
                Run,
                self.plan,
                self.runtime,
                self.facts["seed"],
                *self.goal,
                self.resumed.folder.path,
                tuple(observers),
                Tracing(trace, otlp) if trace or otlp else None,
                self.settings,
                self.resumed,
                init_of(self.facts.get("init")),
            )
            run: Run = started(start, ui)
        except BaseException:
            self.close()
            raise
        for text in self.warnings:
            run.warn(text)
        return run

    def close(self) -> None:
        """Let other processes resume it."""
        self.resumed.folder.close()


def resumable(
    path: str | Path,
    graph: Graph | Plan | None = None,
    *,
    runtime: str | Runtime | None = None,
    steps: int | None = None,
    until: Callable[[Row], bool] | str | None = None,
    allow: Collection[str] = (),
) -> Resumable:
    """Return a saved run that can go on, before anything of it is started or changed.

    Args:
        path: directory of the run.
        graph: as of `resume`.
        runtime: as of `resume`.
        steps: as of `resume`.
        until: as of `resume`, or a comparison such as ``return_mean>=475``.
        allow: as of `resume`.

    Raises:
        SaveError: as of `resume`.
        SettingError: as of `resume`.
    """
    root = Path(path)
    with ExitStack() as on_failure:
        # Locked first, so that what is read now is what there is when the run goes on.
        folder = RunDir.again(root)
        on_failure.callback(folder.close)
        facts = facts_of(root)
        plan = plan_of(root, graph, allow)
        goal = goal_of(facts, plan, steps, until)
        check_arguments(plan.graph, facts["seed"], *goal)
        check_steps(plan, goal[0])
        snapshot, warnings = _snapshot(root, plan)
        rows = _rows(root, snapshot)
        # A function of Python is not saved, so it may be the run's own goal.
        other = steps not in (None, facts["steps"]) or (
            isinstance(until, str) and until != facts["until"]
        )
        own = goal_text(facts["steps"], facts["until"]) or "to go on without end"
        _check_unfinished(root, goal, rows, own if other else "")
        found = Resumable(
            plan,
            facts,
            runtime_for(runtime, facts, root),
            goal,
            settings_of(facts, root),
            Resumed(folder, snapshot, rows),
            (*_differences(facts), *warnings),
        )
        on_failure.pop_all()
    return found


# -- what a directory says


def facts_of(root: Path) -> dict[str, Any]:
    """Return how a run was started.

    Args:
        root: directory of the run.

    Raises:
        SaveError: there is no such run, or it kept no snapshots.
    """
    facts = read(root)
    if facts is None:
        raise SaveError(f"{root} has no run.json, which says how its run was started; restore it")
    if facts.get("snapshots") is None:
        raise SaveError(
            f"{root} was kept without snapshots; start it again from its beginning: flowrl run "
            f"{root}"
        )
    return facts


def plan_of(root: Path, graph: Graph | Plan | None, allow: Collection[str]) -> Plan:
    """Return the plan of a run, after comparing it with the one that was saved.

    Args:
        root: directory of the run.
        graph: its graph; None: the saved one.
        allow: packages beyond flowrl that the saved one may be made of.

    Raises:
        SaveError: it is another one, and the error shows where; or its text can't be read back.
    """
    saved = {name: _text(root / name) for name in ("graph.txt", "plan.txt")}
    if graph is None and saved["graph.txt"].startswith(UNREADABLE):
        why = saved["graph.txt"].partition("\n")[0].removeprefix(UNREADABLE)
        raise SaveError(
            f"the graph of {root} can't be read back from its text ({why}); resume it from the "
            f"script that makes the graph: fl.resume({str(root)!r}, graph)"
        )
    if graph is None:
        graph = Graph.from_text(saved["graph.txt"], allow=allow, source=str(root / "graph.txt"))
    plan = graph if isinstance(graph, Plan) else graph.compile()
    for name, text in {"graph.txt": plan.graph.text(strict=False), "plan.txt": str(plan)}.items():
        # What can't be read back begins with a comment that says so.
        then = [line for line in _comparable(saved[name]) if not line.startswith("# ")]
        if (now := _comparable(text)) != then:
            lines = difflib.unified_diff(then, now, f"{root / name}", "now", lineterm="", n=1)
            raise SaveError(
                f"{root} can't be resumed, for its {name[:-4]} is another one now:\n"
                + "\n".join(lines)
            )
    return plan


def _comparable(text: str) -> list[str]:
    """Return the lines of a graph or a plan without what is of the machine that made it."""
    return OF_MACHINE.sub("", text).splitlines()


def _text(file: Path) -> str:
    """Return the text of a file of a run.

    Raises:
        SaveError: it can't be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SaveError(f"{file} can't be read ({error}); restore it from a copy") from None


def goal_of(
    facts: Mapping[str, Any],
    plan: Plan,
    steps: int | None,
    until: Callable[[Row], bool] | str | None,
) -> StepsAndUntil:
    """Return the goal that is given, or else that of the run.

    Args:
        facts: how the run was started.
        plan: its plan.
        steps: environment steps that are given; None for none.
        until: a function of a row, or a comparison, that is given; None for none.

    Raises:
        SettingError: the run's own goal was not saved, or the one that is given is none.
    """
    if steps is None and until is None:
        steps, until = facts["steps"], facts["until"]
        if until == OF_PYTHON:
            raise SettingError(
                "the goal of this run was a function of Python, which is not saved; name a goal: "
                "fl.resume(..., until=...), --until or --steps"
            )
    return steps, checked_until(until, plan, "--until")


def has_reached(root: Path, goal: StepsAndUntil, rows: Sequence[Row]) -> bool:
    """Return whether a run has reached a goal, and is saved.

    Args:
        root: directory of the run.
        goal: the goal to which it would go on.
        rows: its rows.
    """
    # One that was killed while it was being saved has a last row, but perhaps no policy.
    return (root / MANIFEST).is_file() and _is_beyond(goal, rows)


def _is_beyond(goal: StepsAndUntil, rows: Sequence[Row]) -> bool:
    """Return whether the last row has reached a goal."""
    if not rows:
        return False
    steps, until = goal
    enough = steps is not None and rows[-1]["env_steps"] >= steps
    return enough or (until is not None and until(rows[-1]))


def _check_unfinished(root: Path, goal: StepsAndUntil, rows: Sequence[Row], own: str) -> None:
    """Refuse to resume a run that has reached the goal to which it would go on.

    Args:
        root: directory of the run.
        goal: the goal to which it would go on.
        rows: its rows.
        own: its own goal, where the other would take its place, also if the run was killed before
            it was saved; empty where it would go on to its own.

    Raises:
        SettingError: it has.
    """
    if has_reached(root, goal, rows) or (own and _is_beyond(goal, rows)):
        count, what = reached(rows[-1])
        later = 2 * max(count, goal[0] or 0)
        which = f"this goal (its own is {own})" if own else "its goal"
        way = f"--steps {later}, or steps={later} of fl.resume"
        if what != "steps":
            way = (
                f"--until '{what}>={later}', or until=lambda row: row['{what}'] >= {later} of "
                "fl.resume"
            )
        raise SettingError(
            f"{root} has reached {which} after {count:,} {what}; name a later one, such as {way}"
        )


def _differences(facts: dict[str, Any]) -> list[str]:
    """Return warnings of what is not as it was when a run was started."""
    found = []
    if left_out := facts.get("runtime_left_out"):
        found.append(f"{' and '.join(left_out)} of its runtime were not saved in full")
    if others := differences(facts):
        found.append(
            f"versions or devices are others than when it was started ({', '.join(others)}), so "
            "its numbers may be others than those of a run that was not interrupted"
        )
    return found


def settings_of(facts: Mapping[str, Any], root: Path) -> Snapshots:
    """Return how often a run is kept.

    Args:
        facts: how it was started.
        root: its directory.

    Raises:
        SaveError: the file does not say so.
    """
    try:
        return Snapshots(**facts["snapshots"])
    except (TypeError, SettingError) as error:
        raise SaveError(f"{root / 'run.json'} is damaged: snapshots: {error}") from None


def runtime_for(given: str | Runtime | None, facts: Mapping[str, Any], root: Path) -> Runtime:
    """Return the runtime that is given, or else that of a run, with its settings.

    Args:
        given: a runtime, or its name; None for that of the run.
        facts: how the run was started.
        root: its directory.

    Raises:
        SettingError: a run can't go on in it.
    """
    if given is None:
        if facts["runtime"] not in RUNTIMES:
            raise SettingError(
                f"{root} is a run of a runtime of your own, {facts['runtime']}; give it again: "
                "fl.resume(path, runtime=...)"
            )
        own = type(as_runtime(facts["runtime"]))
        made: Runtime = own(**settings_of_runtime(dict(facts), root, own))
        return made
    other = as_runtime(given)
    if facts["runtime"] != runtime_name(other) and "xla" in (facts["runtime"], runtime_name(other)):
        raise SettingError(
            f"{root} is a run of the {facts['runtime']} runtime, and one that is a program goes on "
            "in the xla runtime alone; leave out the runtime"
        )
    return other


def _snapshot(root: Path, plan: Plan) -> tuple[Snapshot, list[str]]:
    """Return the newest good snapshot, and warnings of newer ones that are not good.

    It is that of the beginning where a run was ended before its first one.

    Raises:
        SaveError: there is none any more, or all of them are damaged.
    """
    warnings: list[str] = []
    found = newest_snapshot(root, packages(plan.graph), warnings.append)
    if found is not None:
        return found, warnings
    if warnings:
        raise SaveError(f"{root} has no good snapshot: {'; '.join(warnings)}")
    # To begin again would remove the rows that are there.
    was_saved = (root / MANIFEST).is_file() and (root / "rows.jsonl").stat().st_size
    if was_saved or not (root / FOLDER).is_dir():
        raise SaveError(
            f"{root} has no snapshot, or none any more; start it again from its beginning, in a "
            f"new directory: flowrl run {root}"
        )
    text = "it was ended before its first snapshot, and begins again"
    return start_of(root), [text]


def _rows(root: Path, snapshot: Snapshot) -> tuple[Row, ...]:
    """Return the rows until the snapshot.

    Raises:
        SaveError: they are not what was written.
    """
    file = root / "rows.jsonl"
    try:
        with file.open("rb") as data:
            lines = data.read(snapshot.rows_bytes).splitlines()
        rows = [json.loads(line) for line in lines]
        numbers = [int(row["row"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SaveError(f"{file} is not what was written: {error!r}") from None
    if numbers != list(range(1, snapshot.row + 1)):
        raise SaveError(
            f"{file} does not hold the {snapshot.row} rows until the newest snapshot; restore it "
            "from a copy"
        )
    return tuple(map(row_of, rows))


def row_of(plain: Mapping[str, Any]) -> Row:
    """Return a row that was read from JSON."""
    return Row(numbers_of(plain))
