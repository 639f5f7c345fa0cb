"""The command line: see `flowrl --help`; also ``python -m flowrl``."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from flowrl.cli import commands
from flowrl.errors import FlowrlError

Command = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]
"""Makes a command: its name, what it does, and what is called."""

GRAPH_HELP = (
    "a stock name, package.module:function, file.py:function, or a run's directory or graph.txt"
)

ENV_HELP = (
    "the environment: an id, file.py:function, package.module:Class, gymnax:NAME or brax:NAME"
)


class _Parser(argparse.ArgumentParser):
    """Shows the commands where none is given."""

    def error(self, message: str) -> NoReturn:
        if "COMMAND" in message:
            self.print_help(sys.stderr)
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = _Parser(
        "flowrl",
        description="Reinforcement learning algorithms as graphs: check, plan, draw, run.",
        allow_abbrev=False,
    )
    parts = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, text: str, act: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        made = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(act=act)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    command("list", "the stock graphs, a line each", commands.list_stock)
    _graph(
        command("check", "check a graph and say everything that is wrong with it", commands.check)
    )
    made = command("plan", "what a run will do, in numbers", commands.plan)
    _graph(made)
    made.add_argument(
        "--runtime",
        choices=["local", "ray", "xla"],
        default="local",
        help="xla: also what can be part of one program",
    )
    made = command("draw", "draw a graph", commands.draw)
    _graph(made)
    made.add_argument("--format", choices=["text", "mermaid", "dot", "svg"], default="text")
    made.add_argument(
        "-o", metavar="FILE", dest="file", help="write there instead of to standard output"
    )
    made = command(
        "diff", "what differs between two graphs, and the runs that they left", commands.diff
    )
    _graph(made)
    made.add_argument(
        "other", metavar="OTHER", help="what it is compared with, likewise; --set changes this one"
    )
    made = command("run", "train", commands.run)
    _graph(made)
    made.add_argument("--runtime", choices=["local", "ray", "xla"], default="local")
    made.add_argument(
        "--working-dir",
        metavar="DIR",
        help="copy this folder to every node of the Ray cluster, for modules of your own in it",
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--seeds",
        type=_count,
        metavar="N",
        help="so many runs at once, by one program (needs --runtime xla)",
    )
    made.add_argument(
        "--steps", type=_count, metavar="N", help="stop after this many environment steps"
    )
    made.add_argument(
        "--until",
        metavar="'NAME>=NUMBER'",
        help="stop when this holds for a row, such as 'return_mean>=475'",
    )
    made.add_argument("--out", metavar="DIR", help="where to save; runs/GRAPH-ENV-TIME by default")
    made.add_argument(
        "--record",
        action="store_true",
        help="keep the first update and those that stand out, for flowrl replay and why",
    )
    made.add_argument("--record-every", type=_count, metavar="N", help="and also every so many")
    made.add_argument(
        "--json",
        action="store_true",
        help="one JSON object per row on standard output, and nothing else there",
    )
    made.add_argument(
        "--trace",
        metavar="FILE",
        help="write what every process did and when: Perfetto opens it; a picture, if it ends in .svg",
    )
    made.add_argument(
        "--otlp",
        metavar="ENDPOINT",
        help="send the same to a collector of OpenTelemetry, such as http://localhost:4318",
    )
    made.add_argument(
        "--to",
        metavar="SINK",
        action="append",
        default=[],
        help="rows also go to csv[:FILE], tensorboard[:DIR], wandb:PROJECT or mlflow:EXPERIMENT",
    )
    _seeing(command)
    return top


def _seeing(command: Command) -> None:
    """The commands that look at a run."""
    made = command("debug", "train step by step: stop, look, change, go back", commands.debug)
    _graph(made)
    made.add_argument("--seed", type=int, default=0)
    made = command(
        "explain",
        "why a run was as fast as it was, and what would make it faster",
        commands.explain,
    )
    made.add_argument("dir", metavar="DIR", help="a run's directory")
    made.add_argument("--json", action="store_true", help="as JSON")
    made = command(
        "eval", "play episodes with a saved policy, greedily unless --sampled", commands.evaluate
    )
    made.add_argument("dir", metavar="DIR", help="a run's directory")
    made.add_argument("--env", metavar="ENV", help=f"in place of the saved one; {ENV_HELP}")
    made.add_argument("--episodes", type=_count, default=20, metavar="N")
    made.add_argument(
        "--sampled",
        action="store_true",
        help="draw actions from the policy (from action values: epsilon-greedily, with 0.05)",
    )
    made.add_argument(
        "--max-steps",
        type=_count,
        metavar="N",
        help="of an episode, which is cut after so many; 30,000 by default",
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--import",
        metavar="PACKAGE",
        action="append",
        default=[],
        dest="allow",
        help="a package or file.py that may be imported for the policy",
    )
    made = command(
        "replay",
        "run a recorded update again, without Ray and the environment; without --update, list those there are",
        commands.replay,
    )
    _recorded(made)
    made.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="changes",
        help="and once more so: learner.loss.clip_ratio=0.3",
    )
    made.add_argument(
        "--import",
        metavar="PACKAGE",
        action="append",
        default=[],
        dest="allow",
        help="a package or file.py of your own that it needs",
    )
    _recorded(
        command(
            "why",
            "which runners, environments and seeds made the batch of an update; without --update, what ended the run",
            commands.why,
        )
    )


def _graph(made: argparse.ArgumentParser) -> None:
    """Which graph, and how it is changed."""
    made.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    made.add_argument("--env", metavar="ENV", help=ENV_HELP)
    made.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="changes",
        help="a setting of the graph's function, or node.field",
    )
    made.add_argument(
        "--untuned", action="store_true", help="leave the tuned settings for this environment out"
    )
    made.add_argument(
        "--import",
        metavar="PACKAGE",
        action="append",
        default=[],
        dest="allow",
        help="import a package or file.py, in every process: environments it registers, code a saved graph needs",
    )


def _recorded(made: argparse.ArgumentParser) -> None:
    """Which recorded update."""
    made.add_argument("dir", metavar="DIR", help="a run's directory")
    made.add_argument(
        "--update", type=_count, metavar="N", help="which: the learner's version before it, and 1"
    )
    made.add_argument("--learner", metavar="NAME", help="whose, if there are several")


def _count(text: str) -> int:
    try:
        number = float(text.replace("_", "").replace(",", ""))
    except ValueError:
        number = 0.0
    if not number.is_integer() or number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 where all went well, 1 where a goal was not reached, 2 after a mistake, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        return int(args.act(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - a user sees one message, never a traceback, unless asked for
        _complain(error, debug=args.debug)
        return 2


def _complain(error: Exception, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    kind = "" if isinstance(error, FlowrlError) else f"{type(error).__name__}: "
    notes = "".join(
        f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith("in ")
    )
    hint = "" if debug or isinstance(error, FlowrlError) else "\n(--debug shows where)"
    print(f"flowrl: {kind}{error}{notes}{hint}", file=sys.stderr)
