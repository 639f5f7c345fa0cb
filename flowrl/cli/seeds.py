"""`flowrl run --seeds N` in the runtimes in which each seed is a run of its own."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flowrl.cli.ending import program
from flowrl.errors import RunError, SettingError

if TYPE_CHECKING:
    from flowrl.graph.plan import Plan
    from flowrl.seeding.runs import Event, SeedRuns


def train_seeds(
    args: argparse.Namespace, planned: Plan, options: Mapping[str, Any], rows: TextIO
) -> int:
    """Train with many seeds, and print a table of their last returns.

    Args:
        args: the parsed arguments.
        planned: plan of the graph.
        options: runtime, goal and directory of the runs, and which updates are recorded.
        rows: where rows go in JSON, if that is asked for.

    Returns:
        2 if a run failed, 1 if one did not reach its goal, else 0.

    Raises:
        SettingError: an argument is of one run only.
    """
    from flowrl.observe.saving import to_json
    from flowrl.observe.sinks import SINKS
    from flowrl.seeding.runs import Lines, SeedRuns

    for name in ("trace", "otlp"):
        if getattr(args, name) is not None:
            raise SettingError(f"--{name} is of one run; leave it out, or leave out --seeds")
    for text in args.to:
        name, _, place = text.partition(":")
        # What has its name in brackets is written into the run's directory without one.
        if place and name in SINKS and SINKS[name][0].startswith("["):
            raise SettingError(
                f"--to {text} would get the rows of all seeds at one place; write --to {name}, "
                "which goes into the directory of each run"
            )
    runs = SeedRuns(
        planned,
        range(args.seed, args.seed + args.seeds),
        runtime=options["runtime"],
        options={
            "steps": args.steps,
            **{name: options[name] for name in ("until", "record", "init", "snapshots")},
        },
        out=options["out"],
        to=args.to,
    )

    def print_row(event: Event) -> None:
        if event.row is not None:
            line = to_json({"seed": event.run.seed, **event.row})
            print(line, file=rows, flush=True)

    try:
        runs.follow(print_row if args.json else Lines(args.steps, args.until))
    finally:
        print(_summary(runs, options["out"]), file=sys.stderr)
    reasons = [each.reason for each in runs.runs.values()]
    if "failed" in reasons:
        return 2
    return 1 if args.until and set(reasons) != {"until"} else 0


def _summary(runs: SeedRuns, out: Path) -> str:
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
    lines += [f"  {problem}\n" for problem in runs.problems()]
    return "".join(lines).rstrip("\n")
