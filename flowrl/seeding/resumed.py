"""Runs with many seeds that were begun, and go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from flowrl.core.items import Row, reached
from flowrl.core.saved_rows import SEED, json_lines
from flowrl.errors import SaveError, SettingError
from flowrl.observe.about import FILE, read
from flowrl.observe.initial import init_of
from flowrl.observe.saving import RunDir
from flowrl.resuming import (
    facts_of,
    goal_of,
    has_reached,
    plan_of,
    row_of,
    runtime_for,
    settings_of,
)
from flowrl.seeding.noted import FILE as SEEDS
from flowrl.seeding.noted import noted_seeds
from flowrl.seeding.runs import SeedRun, SeedRuns


def is_of_seeds(folder: Path) -> bool:
    """Return whether a directory holds runs as ``seed-0`` and so on, and is none of a run."""
    if (folder / FILE).is_file():
        return False
    return (folder / SEEDS).is_file() or bool(begun(folder))


def first_run(folder: Path) -> Path:
    """Return the directory of the run with the lowest seed that has begun.

    Args:
        folder: the directory of all of them.

    Raises:
        SaveError: none has begun.
    """
    if not (seeds := begun(folder)):
        raise SaveError(f"no run in {folder} has begun; start them again")
    return folder / f"seed-{seeds[0]}"


def begun(folder: Path) -> list[int]:
    """Return the seeds of the runs in a directory that have begun."""
    found = [x for x in folder.glob("seed-*") if SEED.fullmatch(x.name) and (x / FILE).is_file()]
    return sorted(int(x.name.removeprefix("seed-")) for x in found)


def resumed_seeds(
    folder: Path,
    *,
    runtime: Any = None,
    steps: int | None = None,
    until: Callable[[Row], bool] | str | None = None,
    allow: Collection[str] = (),
    to: Sequence[str] = (),
) -> SeedRuns:
    """Return the runs of a directory: those that have not reached their goal are left to do.

    Graph and runtime are those of the run with the lowest seed that has begun. Each run keeps its
    own goal unless one is given; seeds that have not begun take that of the lowest seed.

    Args:
        folder: the directory that holds ``seed-0`` and so on.
        runtime: as of `fl.resume`.
        steps: as of `fl.resume`.
        until: as of `fl.resume`, or a comparison.
        allow: as of `fl.resume`.
        to: sinks of the rows that come, as ``--to`` takes them.

    Raises:
        SaveError: a run can't be resumed, or another process is at work on it.
        SettingError: an argument can't be taken, or all runs have reached the goal.
    """
    first = first_run(folder)
    paths = {seed: folder / f"seed-{seed}" for seed in begun(folder)}
    # An error now, once, and not of each process.
    for path in paths.values():
        RunDir.again(path).close()
    facts = facts_of(first)
    plan = plan_of(first, None, allow)
    goal = goal_of(facts, plan, steps, until)
    # One that has reached its goal needs no snapshots.
    goals = {seed: goal_of(read(x) or facts, plan, steps, until) for seed, x in paths.items()}
    ended = []
    for seed, path in paths.items():
        rows = [row_of(row) for row in json_lines(path / "rows.jsonl")]
        if has_reached(path, goals[seed], rows):
            ended.append(SeedRun(seed, rows, (read(path) or facts)["ended"]["reason"]))
    every = sorted({*paths, *noted_seeds(folder)})
    if len(ended) == len(every):
        count, what = max(reached(each.rows[-1]) for each in ended)
        later = f"--steps {2 * count}" if what == "steps" else f"--until '{what}>={2 * count}'"
        raise SettingError(
            f"all runs in {folder} have reached their goal; name a later one, such as {later}"
        )
    common = all(own == goal for own in goals.values())
    settings = {"snapshots": settings_of(facts, first), "init": init_of(facts.get("init"))}
    return SeedRuns(
        plan,
        every,
        runtime=runtime_for(runtime, facts, first),
        options={"steps": goal[0], "until": goal[1], **settings},
        out=folder,
        to=to,
        ended=ended,
        goal=dict(zip(("steps", "until"), goal if common else (None, None), strict=True)),
    )
