"""Arguments that several commands have, or that are long to explain."""

from __future__ import annotations

import argparse
import re

ENV_HELP = (
    "the environment: an id, file.py:function, package.module:Class, gymnax:NAME, brax:NAME, "
    "jaxmarl:NAME or pettingzoo:NAME"
)
IMPORT_HELP = "a package or file.py that may be imported for the policy"


def directory_argument(command: argparse.ArgumentParser) -> None:
    """Add the directory of a run."""
    command.add_argument("dir", metavar="DIR", help="a run's directory")


def add_threads(run: argparse.ArgumentParser) -> None:
    """Add with how many threads a run computes."""
    run.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help="compute with so many threads of XLA, on the CPU even where there is a GPU (default "
        "what flowrl plan says: one for small updates, else one a core or the GPU)",
    )


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


def scale_arguments(scale: argparse.ArgumentParser) -> None:
    """Add the run that was measured, the clusters, and what is printed of them."""
    scale.add_argument(
        "--from",
        metavar="RUN_DIR",
        dest="run",
        required=True,
        help="the directory of a run of this graph, best one with --runtime ray",
    )
    scale.add_argument(
        "--runners",
        type=doubling,
        metavar="N..M",
        required=True,
        help="the runners of all nodes together: a number, several as 4,6, or 8..1024 for 8, 16, "
        "32 and so on",
    )
    scale.add_argument(
        "--nodes",
        type=doubling,
        metavar="N..M",
        default=[1],
        help="the nodes, written in the same ways (default 1); no node has less than one runner",
    )
    scale.add_argument(
        "--cores-per-node",
        type=count,
        metavar="N",
        help="cores of a node (default those of the machine of the run)",
    )
    scale.add_argument(
        "--network",
        type=bandwidth,
        metavar="SPEED",
        default="10Gb/s",
        help="what the network of a node carries each way, such as 25Gb/s or 800Mb/s (default "
        "10Gb/s)",
    )
    scale.add_argument(
        "--price", type=price, metavar="PRICE", help="of a node for an hour, in any currency"
    )
    scale.add_argument(
        "--picture", metavar="FILE", help="draw the steps per second into this file, .svg or .png"
    )
    scale.add_argument("--json", action="store_true", help="print JSON")


def doubling(text: str) -> list[int]:
    """Read numbers such as ``4``, ``4,6``, or ``8..64``, which doubles: 8, 16, 32 and 64.

    >>> doubling("8..64"), doubling("3..10"), doubling("4,6")
    ([8, 16, 32, 64], [3, 6, 10], [4, 6])
    """
    first, dots, last = text.partition("..")
    if not dots:
        return sorted({count(part) for part in text.split(",")})
    number, most = count(first), count(last)
    if number > most:
        raise argparse.ArgumentTypeError(
            f"must begin with the smaller number, got {text}; write {most}..{number}"
        )
    numbers = []
    while number < most:
        numbers.append(number)
        number *= 2
    return [*numbers, most]


def bandwidth(text: str) -> float:
    """Read a speed of a network, and return its bytes per second.

    >>> bandwidth("10Gb/s"), bandwidth("100MB/s")
    (1250000000.0, 100000000.0)
    """
    found = re.fullmatch(r"([0-9.]+) ?([MG])([bB])/s", text)
    if found is None or not (number := _number(found[1])) > 0:
        raise argparse.ArgumentTypeError(
            f"must be a speed such as 10Gb/s (bits) or 1.25GB/s (bytes), got {text}"
        )
    size = number * {"M": 1e6, "G": 1e9}[found[2]]
    return size / 8 if found[3] == "b" else size


def price(text: str) -> float:
    """Read a price, at least 0."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a price, at least 0, got {text}")
    return number


def _number(text: str) -> float:
    """Read a number; what is none becomes -1."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def count(text: str) -> int:
    """Read a whole number of at least 1, such as ``1e6``, ``10_000`` or ``10,000``."""
    # A comma before other than three digits stands for the point in many countries.
    thousands = re.fullmatch(r"\d{1,3}(,\d{3})+", text)
    try:
        number = float((text.replace(",", "") if thousands else text).replace("_", ""))
    except ValueError:
        number = 0.0
    if not number.is_integer() or number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(number)


def seconds(text: str) -> float:
    """Read a number of seconds, at least 0."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, got {text}")
    return number
