"""The summary that `flowrl run` and `flowrl resume` print when a run has ended."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.running import Run


def summary(
    run: Run,
    until: str | None,
    out: Path,
    registered: Mapping[str, Sequence[str]],
    places: Sequence[str],
    trace: str | None,
) -> str:
    """Describe how a run ended, where its results are, and what to do next.

    Args:
        run: the run, which has ended.
        until: its goal, as the user wrote it.
        out: its directory.
        registered: what ``--import`` must name, by the id of each environment that needs it.
        places: the other places that its rows were written to.
        trace: the file of its trace.
    """
    from flowrl.observe.progress import result

    row = run.rows[-1] if run.rows else None
    rows = ", ".join([str(out / "rows.jsonl"), *places])
    lines = [result(run.reason, until, row), f"  rows    {rows}"]
    if trace is not None:
        lines.append(f"  trace   {trace}")
    if (out / "records").is_dir():
        from flowrl.algos.named import imports_for

        needed = imports_for((out / "graph.txt").read_text(encoding="utf-8"))
        rerun = shlex.join([program(), "rerun", str(out), *_import_options(needed)])
        lines.append(f"  records {rerun}")
    if run.reason == "failed":
        lines.append(f"  why     {shlex.join([program(), 'why', str(out)])}")
    if run.reason != "until" and (until or run.reason != "steps"):
        later = [] if run.reason != "steps" or not row else _later_goal(row, until)
        if command := resume_command(out, [out], registered, later):
            lines.append(f"  resume  {command}")
    if row and (out / "policy").is_dir():
        lines += _policies(out, registered)
    return "\n".join(lines)


def resume_command(
    path: Path,
    runs: Sequence[Path],
    registered: Mapping[str, Sequence[str]],
    more: Sequence[str] = (),
) -> str:
    """Return the command that goes on with runs, empty where they have no snapshot.

    Args:
        path: the directory that it names.
        runs: the directory of each run.
        registered: what ``--import`` must name, by the id of each environment that needs it.
        more: more words of the command.
    """
    from flowrl.algos.named import imports_for
    from flowrl.observe.saver import UNREADABLE
    from flowrl.observe.snapshots import FOLDER, snapshot_files

    kept = [each for each in runs if snapshot_files(each / FOLDER)]
    if not kept:
        return ""
    text = (kept[0] / "graph.txt").read_text(encoding="utf-8")
    # Only the script that makes such a graph can resume it.
    if text.startswith(UNREADABLE):
        return ""
    needed = imports_for(text)
    for env, names in registered.items():
        needed += names if env in text else ()
    options = _import_options(list(dict.fromkeys(needed)))
    return shlex.join([program(), "resume", str(path), *options, *more])


def _later_goal(row: Mapping[str, float], until: str | None) -> list[str]:
    """Return the words that let a run go on which did not reach its goal in its steps."""
    goal = ["--until", until] if until else []
    return ["--steps", str(2 * int(row["env_steps"])), *goal]


def _policies(out: Path, registered: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each policy of a run: which it is, and the command that evaluates it."""
    from flowrl.errors import SaveError
    from flowrl.observe.best import best_score

    options = _eval_options(out, registered)
    command = shlex.join([program(), "eval", str(out)])
    lines = [f"  last    {command}{options}"]
    with suppress(SaveError):
        best = best_score(out)
        after = f", {best.env_steps:,} steps" if best.env_steps else ""
        of = f"{best.column} {best.value:g} in row {best.row}{after}"
        lines.append(f"  best    {command} --best{options}  ({of})")
    return lines


def _import_options(names: Sequence[str]) -> list[str]:
    """Return the words of ``--import`` for each of these packages and files."""
    return [word for name in names for word in ("--import", name)]


def _eval_options(out: Path, registered: Mapping[str, Sequence[str]]) -> str:
    """Return what the command that evaluates a policy of a run must import, and more it needs."""
    import json

    from flowrl.algos.named import imports_for

    # Another process has to import all that the parts of the saved policy name.
    saved = json.loads((out / "policy/policy.json").read_text(encoding="utf-8"))
    env = saved["env"].strip("\"'")
    parts = " ".join(saved[part] for part in ("policy", "env", "wrappers", "env_settings"))
    needed = [*imports_for(parts), *registered.get(env, ())]
    options = _import_options(list(dict.fromkeys(needed)))
    words = "".join(f" {word}" for word in map(shlex.quote, options))
    if env == "None":
        return (
            f"{words} --env FILE.py:FUNCTION, for the environment has no name that could be "
            "saved: a function or class of a file has one"
        )
    return words


def program() -> str:
    """Return the name by which the user started this program, as short as it can be."""
    program = sys.argv[0]
    # Started by `python -m` its name says nothing of where it is.
    if os.sep not in program or program.endswith("__main__.py"):
        return "flowrl"
    # Where the PATH leads to it, its name alone is enough.
    if shutil.which(os.path.basename(program)) == program:
        return os.path.basename(program)
    relative = os.path.relpath(program)
    return program if relative.startswith("..") else relative
