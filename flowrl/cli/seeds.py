"""`flowrl run --seeds N` in the runtimes in which each seed is a run of its own."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import RunError, SettingError

if TYPE_CHECKING:
    from flowrl.graph.plan import Plan
    from flowrl.seeding.runs import SeedRuns


def train_seeds(args: argparse.Namespace, planned: Plan, options: Mapping[str, Any]) -> int:
    """Train with many seeds, and print a table of their last returns.

    Args:
        args: the parsed arguments.
        planned: plan of the graph.
        options: runtime, goal and directory of the runs, and which updates are recorded.

    Returns:
        2 if a run failed, 1 if one did not reach its goal, else 0.

    Raises:
        SettingError: an argument is of one run only.
    """
    from flowrl.observe.saving import to_json
    from flowrl.seeding.runs import Lines, SeedRuns

    for name in ("trace", "otlp"):
        if getattr(args, name) is not None:
            raise SettingError(f"--{name} is of one run; leave it out, or leave out --seeds")
    runs = SeedRuns(
        planned,
        range(args.seed, args.seed + args.seeds),
        runtime=options["runtime"],
        options={"steps": args.steps, "until": options["until"], "record": options["record"]},
        out=options["out"],
        to=args.to,
    )
    lines = Lines(args.steps, args.until)
    try:
        with closing(iter(runs)) as events:
            for event in events:
                if not args.json:
                    lines(event)
                elif event.row is not None:
                    print(to_json({"seed": event.run.seed, **event.row}), flush=True)
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
        lines.append(f"  compare  {shlex.join(['flowrl', 'compare', str(out)])}\n")
    lines += [f"  {problem}\n" for problem in runs.problems()]
    return "".join(lines).rstrip("\n")
