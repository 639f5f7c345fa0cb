"""The command line: see `flowrl --help`; also ``python -m flowrl``."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from flowrl import __version__
from flowrl.cli import commands, training, tuning
from flowrl.cli.arguments import take_config
from flowrl.cli.logged import logged
from flowrl.cli.options import (
    ENV_HELP,
    IMPORT_HELP,
    add_place,
    add_threads,
    add_ui,
    count,
    directory_argument,
    import_argument,
    output_arguments,
    ray_arguments,
    record_arguments,
    scale_arguments,
    snapshot_arguments,
)
from flowrl.cli.parsing import Parser
from flowrl.cli.playing import Command, add_eval, add_match
from flowrl.cli.policies import add_run_options, add_which
from flowrl.errors import FlowrlError, described, line_of
from flowrl.runtime import NAMES

GRAPH_HELP = (
    "a stock name, package.module:function, file.py:function, or a run's directory or graph.txt"
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their arguments."""
    top = Parser(
        "flowrl",
        description="Reinforcement learning algorithms as graphs: check, plan, draw, run.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"flowrl {__version__}")
    parts = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, text: str, act: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        added = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(act=act)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    _add_graph_commands(command)
    _add_scale(command)
    _add_run(command)
    _add_resume(command)
    _add_tune(command)
    _add_debug(command)
    _add_run_readers(command)
    return top


def _add_graph_commands(command: Command) -> None:
    """Add the commands that look at a graph without running it."""
    command("list", "list the stock graphs", commands.list_stock)
    command("env", "print versions and devices, for a report of a fault", commands.env)
    _graph_arguments(
        command("check", "check a graph and report everything that is wrong", commands.check)
    )

    plan = command("plan", "show what a run will do, in numbers", commands.plan)
    _graph_arguments(plan)
    plan.add_argument(
        "--runtime",
        choices=NAMES,
        help="xla: also show what can be part of one program",
    )
    add_place(plan)

    draw = command("draw", "draw a graph", commands.draw)
    _graph_arguments(draw)
    draw.add_argument("--format", choices=["text", "mermaid", "dot", "svg"], default="text")
    draw.add_argument(
        "-o", metavar="FILE", dest="file", help="write to this file instead of standard output"
    )

    diff = command(
        "diff", "show what differs between two graphs, and between their runs", commands.diff
    )
    _graph_arguments(diff)
    diff.add_argument(
        "other",
        metavar="OTHER",
        help="the graph to compare with, named in the same ways; --set changes this one",
    )


def _add_scale(command: Command) -> None:
    """Add the prediction of what a graph does on a cluster."""
    scale = command(
        "scale",
        "predict what a graph does on a cluster, by simulation with what a run of it measured",
        commands.scale,
    )
    _graph_arguments(scale)
    scale_arguments(scale)


def _add_run(command: Command) -> None:
    """Add the command that trains."""
    run = command("run", "train", training.run)
    _graph_arguments(run)
    run.add_argument(
        "--runtime",
        choices=NAMES,
        help="where it runs: in this process (the default), on Ray, or as one XLA program; a run's "
        "directory is repeated with its own runtime, seed, steps and goal, where none are given",
    )
    add_threads(run)
    ray_arguments(run)
    run.add_argument("--seed", type=int, help="of every random number (default 0)")
    run.add_argument(
        "--seeds",
        type=count,
        metavar="N",
        help="train with N seeds from --seed on: each in a process of its own, as many at a time "
        "as there are cores, on Ray one after another, with xla all at once in one program",
    )
    run.add_argument(
        "--steps", type=count, metavar="N", help="stop after this many environment steps"
    )
    run.add_argument(
        "--until",
        metavar="'NAME>=NUMBER'",
        help="stop when this holds for a row, such as 'return_mean>=475'",
    )
    # What `repeat` finds of a saved run's runtime.
    run.set_defaults(runtime_settings={})
    run.add_argument("--out", metavar="DIR", help="where to save; runs/GRAPH-ENV-TIME by default")
    add_run_options(run)
    snapshot_arguments(run)
    record_arguments(run)
    output_arguments(run)


def _add_resume(command: Command) -> None:
    """Add the command that goes on with a saved run."""
    resume = command(
        "resume",
        "go on with a saved run from its newest snapshot, to its goal or another one",
        training.resume,
    )
    resume.add_argument(
        "dir", metavar="DIR", help="a run's directory, or that of all runs of --seeds"
    )
    resume.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="stop after this many environment steps, counted from the run's very beginning; with "
        "this or --until the run's own goal no longer holds",
    )
    resume.add_argument("--until", metavar="'NAME>=NUMBER'", help="stop when this holds for a row")
    resume.add_argument(
        "--runtime",
        choices=[name for name in NAMES if name != "xla"],
        help="in place of the run's own one, where that is local or ray",
    )
    resume.set_defaults(runtime_settings={}, seeds=None)
    add_threads(resume)
    ray_arguments(resume)
    import_argument(
        resume, "import a package or file.py of your own that the run needs, in every process"
    )
    output_arguments(resume)


def _add_tune(command: Command) -> None:
    """Add the search for settings."""
    tune = command("tune", "search for the settings with the best result", tuning.tune)
    _graph_arguments(tune, f"{GRAPH_HELP}; or the directory of a study, which goes on")
    tune.add_argument(
        "--search",
        metavar="NAME=SPACE",
        action="append",
        default=[],
        help="a setting, named as for --set, and where it is searched: loguniform(low, high), "
        "uniform(low, high), randint(low, high) or choice(x, y, ...)",
    )
    counts = {
        "--trials": "how many (default 16)",
        "--steps": "environment steps of a trial that is not stopped early",
        "--parallel": "how many trials at once (default: one per core)",
        "--grace-steps": "stop no trial before this many environment steps (default: a ninth)",
        "--reduction": "one in N trials goes on then, and after N times as many steps (default 3)",
    }
    for name, text in counts.items():
        tune.add_argument(name, type=count, metavar="N", help=text)
    tune.add_argument(
        "--metric", metavar="NAME", help="the column that is compared (default return_mean)"
    )
    tune.add_argument("--mode", choices=["max", "min"], help="more of it is better (max), or less")
    tune.add_argument("--seed", type=int, help="of the search and of every trial (default 0)")
    tune.add_argument("--runtime", choices=NAMES, help="what each trial runs in (default local)")
    tune.add_argument(
        "--out", metavar="DIR", help="of the study; the same command with the same DIR goes on"
    )
    tune.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of a running Ray to join; all its nodes must share the study's directory",
    )


def _add_debug(command: Command) -> None:
    """Add the debugger."""
    debug = command("debug", "train step by step: stop, look, change, go back", commands.debug)
    _graph_arguments(debug)
    debug.add_argument("--seed", type=int, help="of every random number (default 0)")
    add_ui(debug)


def _add_run_readers(command: Command) -> None:
    """Add the commands that read the directory of a run."""
    explain = command(
        "explain",
        "show why a run was as fast as it was, and what would make it faster",
        commands.explain,
    )
    directory_argument(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")
    _add_pages(command)
    _add_compare(command)
    add_eval(command)
    add_match(command)
    _add_export(command)
    _add_record_readers(command)


def _add_pages(command: Command) -> None:
    """Add the commands that show runs in a browser."""
    ui = command("ui", "serve a page of saved runs, or of runs that go on", commands.ui)
    ui.add_argument("dirs", nargs="+", metavar="DIR", help="a run's directory, or one of several")
    ui.add_argument("--port", type=int, default=0, help="port to serve at (default a free one)")
    ui.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at (default this machine alone); another one needs a token in "
        "FLOWRL_UI_TOKEN",
    )
    export = command(
        "export-page", "write the page of a run as one file for browsers", commands.export_page
    )
    directory_argument(export)
    export.add_argument("-o", metavar="FILE", dest="file", required=True, help="write to this file")


def _add_compare(command: Command) -> None:
    """Add the command that compares learning curves."""
    compare = command(
        "compare",
        "show the last return of runs, over seeds: the interquartile mean and its interval",
        commands.compare,
    )
    compare.add_argument(
        "dirs",
        metavar="DIR",
        nargs="+",
        help="a run's directory, or one that holds runs as seed-0, seed-1, ...; runs that differ "
        "only in their seed are a group",
    )
    compare.add_argument(
        "--column",
        metavar="NAME",
        default="return_mean",
        help="the column of the rows (default return_mean)",
    )
    compare.add_argument(
        "--picture", metavar="FILE", help="draw the curves into this file, .svg or .png"
    )
    compare.add_argument("--json", action="store_true", help="print one JSON object per group")


def _add_record_readers(command: Command) -> None:
    """Add the commands that read the recorded updates of a run."""
    rerun = command(
        "rerun",
        "run a recorded update again, without Ray and the environment; without --update, list "
        "the recorded updates",
        commands.rerun,
    )
    _update_arguments(rerun)
    rerun.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="changes",
        help="also run it with this setting, such as learner.loss.clip_ratio=0.3",
    )
    import_argument(rerun, "import a package or file.py of your own that the update needs")

    why = command(
        "why",
        "show which runners, environments and seeds made the batch of an update; without "
        "--update, what ended the run",
        commands.why,
    )
    _update_arguments(why)


def _add_export(command: Command) -> None:
    """Add the command that exports a saved policy."""
    export = command(
        "export", "write a saved policy as a file that acts without flowrl", commands.export
    )
    directory_argument(export)
    add_which(export)
    export.add_argument(
        "-o",
        metavar="FILE",
        dest="file",
        help="FILE.stablehlo or FILE.onnx (extra onnx); by default the name of DIR with "
        ".stablehlo, in this folder",
    )
    import_argument(export, IMPORT_HELP)


def _graph_arguments(command: argparse.ArgumentParser, text: str = GRAPH_HELP) -> None:
    """Add which graph, and how it is changed."""
    command.add_argument("graph", metavar="GRAPH", help=text)
    command.add_argument(
        "--config",
        metavar="FILE",
        help="take the graph, its environment and all its settings from this YAML or JSON file, "
        "and of a run also runtime, seeds, steps and goal; other arguments win over it, and GRAPH "
        "may be left out",
    )
    command.add_argument(
        "--save-config",
        metavar="FILE",
        help="first write such a new file with all of these; not in it are how many threads a "
        "run has and where it goes on Ray (--address, --processes, --place, --working-dir), what "
        "is recorded, and where results go",
    )
    command.add_argument("--env", metavar="ENV", help=ENV_HELP)
    command.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="changes",
        help="a setting of the graph's function, or node.field",
    )
    # Like --help, it replaces what the command does.
    command.add_argument(
        "--help-settings",
        action="store_const",
        const=commands.help_settings,
        dest="act",
        help="list the settings that --set takes by name, with their meaning, and do nothing else",
    )
    command.add_argument(
        "--untuned", action="store_true", help="leave out the tuned settings for this environment"
    )
    import_argument(
        command,
        "import a package or file.py in every process: for environments that it registers, or "
        "for code that a saved graph needs",
    )


def _update_arguments(command: argparse.ArgumentParser) -> None:
    """Add which recorded update."""
    directory_argument(command)
    command.add_argument(
        "--update",
        type=count,
        metavar="N",
        help="the number of the update: 1 more than the policy version before it",
    )
    command.add_argument("--learner", metavar="NAME", help="the learner, if there are several")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The status is 0 where all went well, 1 where a goal was not reached or a rerun differs, 2 after
    a mistake, and 130 after Ctrl-C.

    Args:
        argv: the words after ``flowrl``; those of this process by default.
    """
    args = parser().parse_args(argv)
    try:
        with logged():
            if "config" in args:
                take_config(args)
            return int(args.act(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has gone; Python must not write to it again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - a user sees a message, a traceback with --debug
        _print_error(error, debug=args.debug)
        return 2


def _print_error(error: Exception, *, debug: bool) -> None:
    """Print an error as one message, with the traceback before it if `debug`."""
    if debug:
        traceback.print_exception(error)
    hint = "" if debug or isinstance(error, FlowrlError) else "\n(--debug shows more)"
    print(f"flowrl: {described(error)}{line_of(error)}{hint}", file=sys.stderr)
