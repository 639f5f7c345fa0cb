"""`fl.resume`: go on with a saved run from its newest good snapshot."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from flowrl.core.events import Observer
from flowrl.core.importing import forbid_while_importing
from flowrl.core.items import Row
from flowrl.core.saved_rows import way_to_runs
from flowrl.errors import SaveError, SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.observe.about import OF_PYTHON, read, settings_of_runtime
from flowrl.observe.goal import parse_until
from flowrl.observe.initial import init_of
from flowrl.observe.sinks import columns
from flowrl.observe.snapshots import FOLDER, Snapshot, Snapshots, newest_snapshot
from flowrl.observe.tracing import Tracing
from flowrl.run_arguments import as_runtime, check_arguments, checked_observers
from flowrl.running import Run
from flowrl.runtime.base import Runtime


def resume(
    path: str | Path,
    graph: Graph | Plan | None = None,
    *,
    runtime: str | Runtime | None = None,
    steps: int | None = None,
    until: Callable[[Row], bool] | None = None,
    observers: Iterable[Observer] = (),
    trace: str | Path | None = None,
    otlp: str | None = None,
    allow: Collection[str] = (),
) -> Run:
    """Go on with a saved run from its newest good snapshot, and return it as `run` does.

    It has the same graph, seed, runtime and goal, and goes on in the same directory: its rows come
    after those that are there. What happened after the snapshot happens again.

    Args:
        path: directory of the run.
        graph: graph of the run, where its text can't be read back; None: the saved one (default
            None).
        runtime: runtime in place of the run's own, ``local`` or ``ray`` (default None).
        steps: number of environment steps at which the run ends, counted from its very beginning;
            None: as before (default None).
        until: function of a row at which the run ends; None: as before (default None).
        observers: as of `run` (default none).
        trace: as of `run`; of what comes from now on (default None).
        otlp: as of `run` (default None).
        allow: packages beyond flowrl that the saved graph may be made of (default none).

    Raises:
        SaveError: there is no such run or no good snapshot, another process is at work on it, or
            the graph or its plan is another one now.
        SettingError: an argument can't be taken, or the goal is reached already.
    """
    forbid_while_importing()
    root = Path(path)
    facts = _facts(root)
    plan = _plan(root, graph, allow)
    goal = _goal(facts, plan, steps, until)
    check_arguments(plan.graph, facts["seed"], *goal)
    warnings: list[str] = []
    snapshot = _snapshot(root, plan, warnings)
    rows = _rows(root, snapshot)
    if goal[0] is not None and rows and rows[-1]["env_steps"] >= goal[0]:
        raise SettingError(
            f"{root} has reached its goal of {goal[0]:,} steps: name a later one, such as "
            f"--steps {2 * goal[0]}, or steps={2 * goal[0]} in Python"
        )
    given = as_runtime(runtime) if runtime is not None else _runtime(facts, root)
    settings = facts["snapshots"]
    resumed = Run(
        plan,
        given,
        facts["seed"],
        *goal,
        root,
        checked_observers(observers),
        Tracing(trace, otlp) if trace or otlp else None,
        Snapshots(**settings),
        snapshot,
        rows,
        init_of(facts.get("init")),
    )
    for text in warnings:
        resumed.warn(text)
    return resumed


def _facts(root: Path) -> dict[str, Any]:
    """Return how a run was started.

    Raises:
        SaveError: there is no such run, or it kept no snapshots.
    """
    if not root.is_dir():
        raise SaveError(f"there is no directory {root}")
    facts = read(root)
    if facts is None:
        raise SaveError(f"{root} is no run's directory; {way_to_runs(root)}")
    if not isinstance(facts.get("snapshots"), dict):
        raise SaveError(
            f"{root} was kept without snapshots; start it again from its beginning: flowrl run "
            f"{root}"
        )
    return facts


def _plan(root: Path, graph: Graph | Plan | None, allow: Collection[str]) -> Plan:
    """Return the plan of the run, after comparing it with the one that was saved.

    Raises:
        SaveError: it is another one; the error shows where.
    """
    saved = (root / "graph.txt").read_text(encoding="utf-8")
    if graph is None:
        graph = Graph.from_text(saved, allow=allow, source=str(root / "graph.txt"))
    plan = graph if isinstance(graph, Plan) else graph.compile()
    now = {"graph.txt": plan.graph.text(strict=False), "plan.txt": str(plan)}
    for name, text in now.items():
        then = (root / name).read_text(encoding="utf-8")
        # What can't be read back begins with a comment that says so.
        then = "".join(line for line in then.splitlines(True) if not line.startswith("# "))
        if text != then:
            lines = difflib.unified_diff(
                then.splitlines(), text.splitlines(), f"{root / name}", "now", lineterm="", n=1
            )
            raise SaveError(
                f"{root} can't be resumed, for its {name[:-4]} is another one now:\n"
                + "\n".join(lines)
            )
    return plan


def _goal(
    facts: dict[str, Any], plan: Plan, steps: int | None, until: Callable[[Row], bool] | None
) -> tuple[int | None, Callable[[Row], bool] | None]:
    """Return the steps and the goal: those that are given, or else those of the run."""
    if steps is not None or until is not None:
        return steps, until
    if facts["until"] == OF_PYTHON:
        raise SettingError(
            "the goal of this run was a function of Python, which is not saved: name it again, "
            "until=..., or the steps"
        )
    saved = facts["until"]
    return facts["steps"], parse_until(saved, columns(plan)) if saved else None


def _runtime(facts: dict[str, Any], root: Path) -> Runtime:
    """Return the runtime of the run, with its settings."""
    kind = type(as_runtime(facts["runtime"]))
    made: Runtime = kind(**settings_of_runtime(facts, root, kind))
    return made


def _snapshot(root: Path, plan: Plan, warnings: list[str]) -> Snapshot:
    """Return the newest good snapshot; that of a run which has only begun where there is none.

    Raises:
        SaveError: all of them are damaged.
    """
    packages = {_package(node.op) for node in plan.graph.nodes}
    packages |= {_package(resource) for resource in plan.graph.resources.values()}
    found = newest_snapshot(root, packages, warnings.append)
    if found is not None:
        return found
    if warnings:
        raise SaveError(f"{root} has no good snapshot: {'; '.join(warnings)}")
    warnings.append("it was ended before its first snapshot, and begins again")
    return Snapshot(root / FOLDER, 0, 0, "", "", None)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _rows(root: Path, snapshot: Snapshot) -> list[Row]:
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
    return [Row({k: math.nan if x is None else x for k, x in row.items()}) for row in rows]
