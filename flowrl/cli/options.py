"""Arguments that several commands have, or that are long to explain."""

from __future__ import annotations

import argparse

ENV_HELP = (
    "the environment: an id, file.py:function, package.module:Class, gymnax:NAME, brax:NAME, "
    "jaxmarl:NAME or pettingzoo:NAME"
)
IMPORT_HELP = "a package or file.py that may be imported for the policy"


def directory_argument(command: argparse.ArgumentParser) -> None:
    """Add the directory of a run."""
    command.add_argument("dir", metavar="DIR", help="a run's directory")


def ray_arguments(run: argparse.ArgumentParser) -> None:
    """Add which Ray a run joins, and what of it runs where."""
    run.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="join the Ray cluster with this head, or auto for the one of this machine (default "
        "RAY_ADDRESS; without it, a Ray of its own)",
    )
    run.add_argument(
        "--processes",
        type=count,
        metavar="N",
        help="how many Ray processes share the runners (default twice as many as cores)",
    )
    add_place(run)
    run.add_argument(
        "--working-dir",
        metavar="DIR",
        help="copy this folder to every node of the Ray cluster, for modules of your own in it",
    )


def add_place(command: argparse.ArgumentParser) -> None:
    """Add what of a run has Ray processes of its own."""
    command.add_argument(
        "--place",
        metavar="NAME[=ACTOR]",
        action="append",
        default=[],
        help="run this resource, or the stage that begins with this node, in a Ray process of its "
        "own, such as learner, or several, such as 'sample=Actor(count=2)'",
    )


def add_ui(run: argparse.ArgumentParser) -> None:
    """Add the live page of a run."""
    run.add_argument(
        "--ui",
        nargs="?",
        const="0",
        default=False,
        metavar="[HOST:]PORT",
        help="serve a live page of the run to this machine's browsers, and print its link; at a "
        "free port where none is named. With a HOST other machines reach it, too; it then needs a "
        "token in FLOWRL_UI_TOKEN",
    )


def snapshot_arguments(run: argparse.ArgumentParser) -> None:
    """Add how often a run is kept, so that `flowrl resume` can go on with it."""
    run.add_argument(
        "--snapshot-every",
        type=seconds,
        metavar="SECONDS",
        help="at least so many seconds between two snapshots, from which flowrl resume goes on "
        "(default 60; 0: one after every row)",
    )
    run.add_argument(
        "--keep", type=count, metavar="N", help="how many of the newest snapshots stay (default 3)"
    )
    run.add_argument(
        "--no-snapshots", action="store_true", help="make none, so that it can't be resumed"
    )


def record_arguments(run: argparse.ArgumentParser) -> None:
    """Add which updates a run records."""
    run.add_argument(
        "--record",
        action="store_true",
        help="record the first update and outliers, for flowrl rerun and flowrl why",
    )
    run.add_argument(
        "--record-every", type=count, metavar="N", help="also record every N-th update"
    )


def output_arguments(run: argparse.ArgumentParser) -> None:
    """Add where the rows and the trace of a run go."""
    run.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per row on standard output, and nothing else there",
    )
    run.add_argument(
        "--trace",
        metavar="FILE",
        help="write what every process did and when, for Perfetto; as a picture if FILE ends "
        "in .svg",
    )
    run.add_argument(
        "--otlp",
        metavar="ENDPOINT",
        help="send the same to an OpenTelemetry collector, such as http://localhost:4318",
    )
    add_ui(run)
    run.add_argument(
        "--to",
        metavar="SINK",
        action="append",
        default=[],
        help="rows also go to csv[:FILE], tensorboard[:DIR], wandb:PROJECT or mlflow:EXPERIMENT",
    )


def import_argument(command: argparse.ArgumentParser, text: str) -> None:
    """Add ``--import`` with its help."""
    command.add_argument(
        "--import", metavar="PACKAGE", action="append", default=[], dest="allow", help=text
    )


def count(text: str) -> int:
    """Read a whole number of at least 1, such as ``1e6`` or ``10_000``."""
    try:
        number = float(text.replace("_", "").replace(",", ""))
    except ValueError:
        number = 0.0
    if not number.is_integer() or number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(number)


def seconds(text: str) -> float:
    """Read a number of seconds, at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, got {text}")
    return number
