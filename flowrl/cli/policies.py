"""The options about saved policies: with which one a run begins, and which one is taken."""

from __future__ import annotations

import argparse
from typing import Any

from flowrl.errors import SettingError


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Add with which weights a run begins, and how its best policy is found.

    Args:
        run: the command that trains.
    """
    run.add_argument(
        "--init",
        metavar="DIR",
        help="begin with the weights of the policy that this run saved; only weights are taken",
    )
    run.add_argument(
        "--init-only",
        metavar="PREFIX",
        action="append",
        default=[],
        help="of these only the ones whose names begin so, such as encoder/",
    )
    run.add_argument(
        "--best",
        metavar="COLUMN",
        help="keep the policy of the row with the highest value in this column (default "
        "eval/return_mean where the graph evaluates, else return_mean)",
    )


def add_which(command: argparse.ArgumentParser) -> None:
    """Add which policy of a run is taken.

    Args:
        command: one that takes the directory of a run.
    """
    command.add_argument(
        "--best",
        action="store_const",
        const="best",
        default="last",
        dest="which",
        help="take the best policy of the run in place of the last",
    )
    command.add_argument(
        "--policy",
        metavar="NAME",
        help="the policy of this learner, where the run had several",
    )


def first_weights(args: argparse.Namespace) -> Any:
    """Return what a run begins with, as `fl.run` takes it; None for its own first weights.

    Raises:
        SettingError: ``--init-only`` stands without ``--init``.
    """
    if args.init is None:
        if args.init_only:
            raise SettingError("--init-only takes a part of the weights of --init DIR; add that")
        return None
    from flowrl.observe.initial import Init

    return Init(args.init, tuple(args.init_only))


def repeat_init(args: argparse.Namespace, saved: dict[str, Any]) -> str:
    """Take from a saved run with which weights it began, if the arguments leave that open.

    Args:
        args: the parsed arguments, which are changed.
        saved: its ``run.json``.

    Returns:
        What is to be said of it; empty if nothing is.
    """
    noted = saved.get("init")
    if noted is None or args.init is not None:
        return ""
    from flowrl.observe.initial import OF_PYTHON

    if noted["policy"] == OF_PYTHON:
        return "it began with a policy of Python, so it begins with weights of its own now"
    args.init, args.init_only = noted["policy"], [*noted["only"]]
    return f"begins with weights of {args.init}"
