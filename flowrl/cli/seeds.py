"""`flowrl run --seeds N`, and its `resume`, where each seed is a run of its own."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flowrl.cli.arguments import runtime_in_place_of
from flowrl.cli.ending import program, resume_command
from flowrl.errors import RunError, SettingError

if TYPE_CHECKING:
    from flowrl.graph.plan import Plan
    from flowrl.seeding.runs import Event, SeedRuns


def train_seeds(
    args: argparse.Namespace,
    planned: Plan,
    options: Mapping[str, Any],
    registered: Mapping[str, Sequence[str]],
    rows: TextIO,
) -> int:
    """Train with many seeds, and print a table of their last returns.

    Args:
        args: the parsed arguments.
        planned: plan of the graph.
        options: runtime, goal and directory of the runs, which updates are recorded, with which
            weights they begin, and how they are kept.
        registered: what ``--import`` must name, by the id of each environment that needs it.
        rows: where rows go in JSON, if that is asked for.

    Returns:
        2 if a run failed, 1 if one did not reach its goal, else 0.

    Raises:
        SettingError: an argument is of one run only.
    """
    from flowrl.seeding.runs import SeedRuns

    _check_of_seeds(args)
    of_each = {name: options[name] for name in ("until", "record", "init", "snapshots")}
    runs = SeedRuns(
        planned,
        range(args.seed, args.seed + args.seeds),
        runtime=options["runtime"],
        options={"steps": args.steps, **of_each},
        out=options["out"],
        to=args.to,
    )
    return _follow(args, runs, options["out"], registered, rows)


def resume_seeds(
    args: argparse.Namespace,
    folder: Path,
    registered: Mapping[str, Sequence[str]],
    rows: TextIO,
) -> int:
    """Go on with each run of many seeds that has not reached its goal.

    Args:
        args: the parsed arguments, which get the goal of the runs.
        folder: the directory that holds the runs.
        registered: as of `train_seeds`.
        rows: as of `train_seeds`.

    Returns:
        As `train_seeds`.

    Raises:
        SaveError: one of them can't be resumed.
        SettingError: an argument can't be taken, or all have reached the goal.
    """
    from flowrl.observe.goal import Goal
    from flowrl.seeding.resumed import first_run, resumed_seeds

    _check_of_seeds(args)
    tables = sorted(folder.glob("seed-*/rows.csv")) if "csv" in args.to else []
    if tables:
        raise SettingError(
            f"--to csv: {tables[0]} exists already, and nothing is ever overwritten; move it away, "
            "or leave out --to csv"
        )
    own = runtime_in_place_of(args, first_run(folder))
    given = {"steps": args.steps, "until": args.until, "allow": args.allow, "to": args.to}
    runs = resumed_seeds(folder, runtime=own, **given)
    # Where each run has a goal of its own, none is that of all.
    goal = runs.goal or {}
    args.steps, until = goal.get("steps"), goal.get("until")
    args.until = until.text if isinstance(until, Goal) else None
    left = [str(each.seed) for each in runs.runs.values() if each.reason is None]
    goals = [*filter(None, [args.until, args.steps and f"{args.steps:,} steps"])]
    if not goals and any(runs.options[name] is not None for name in goal):
        goals = ["its own goal"]
    print(
        f"{folder} goes on: seed {', '.join(left)} of {len(runs.runs)} seeds, each from its newest "
        f"snapshot; until {' or '.join(goals) or 'Ctrl-C'}",
        file=sys.stderr,
    )
    return _follow(args, runs, folder, registered, rows)


def _check_of_seeds(args: argparse.Namespace) -> None:
    """Refuse arguments that are of one run.

    Raises:
        SettingError: there is one.
    """
    from flowrl.observe.sinks import SINKS

    way_out = "or leave out --seeds" if "graph" in args else "or resume one seed's own directory"
    for name in ("trace", "otlp", "ui"):
        if getattr(args, name) not in (None, False):
            raise SettingError(f"--{name} is of one run; leave it out, {way_out}")
    for text in args.to:
        name, _, place = text.partition(":")
        # What has its name in brackets is written into the run's directory without one.
        if place and name in SINKS and SINKS[name][0].startswith("["):
            raise SettingError(
                f"--to {text} would get the rows of all seeds at one place; write --to {name}, "
                "which goes into the directory of each run"
            )


def _follow(
    args: argparse.Namespace,
    runs: SeedRuns,
    out: Path,
    registered: Mapping[str, Sequence[str]],
    rows: TextIO,
) -> int:
    """Run all until they end, print how they ended, and return the exit status."""
    from flowrl.core.row_json import row_json
    from flowrl.seeding.lines import Lines, log_warning

    def print_row(event: Event) -> None:
        log_warning(event)
        if event.row is not None:
            line = row_json({"seed": event.run.seed, **event.row})
            print(line, file=rows, flush=True)

    try:
        runs.follow(print_row if args.json else Lines(args.steps, args.until))
    finally:
        print(_summary(runs, out, registered), file=sys.stderr)
    reasons = [each.reason for each in runs.runs.values()]
    if "failed" in reasons:
        return 2
    return 1 if args.until and set(reasons) != {"until"} else 0


def _summary(runs: SeedRuns, out: Path, registered: Mapping[str, Sequence[str]]) -> str:
    """Describe how the runs ended, and where their results are."""
    lines = []
    try:
        lines.append(str(runs.curves()))
    except RunError as error:
        lines.append(f"{error}\n")
    saved = [each for each in runs.runs.values() if (out / f"seed-{each.seed}").is_dir()]
    if saved:
        lines.append(f"  runs     {out / 'seed-*'}\n")
        lines.append(f"  compare  {shlex.join([program(), 'compare', str(out)])}\n")
    cut = [out / f"seed-{each.seed}" for each in saved if each.reason not in ("until", "steps")]
    if command := resume_command(out, cut, registered):
        lines.append(f"  resume   {command}\n")
    lines += [f"  {problem}\n" for problem in runs.problems()]
    return "".join(lines).rstrip("\n")
