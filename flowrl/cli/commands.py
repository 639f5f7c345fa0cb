"""The commands of the command line: functions of the parsed arguments that return the exit status.

Every command may raise a FlowrlError, which `main` prints.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.cli.arguments import (
    changes_of,
    graph_of,
    import_named,
    place_of,
)
from flowrl.core.machine import usable_cores
from flowrl.core.new_files import check_new, write_new
from flowrl.core.texts import plural
from flowrl.errors import SettingError

if TYPE_CHECKING:
    from flowrl.graph.graph import Graph


REPORTED = ("networkx", "ale-py", "gymnax", "brax", "jaxmarl", "jax2onnx", "onnxruntime", "optuna")
"""More packages whose versions `flowrl env` prints; all but the first come with extras."""


def list_stock(_: argparse.Namespace) -> int:
    """Print the names and first lines of the stock graphs."""
    from flowrl.algos import STOCK

    width = max(map(len, STOCK))
    for name in STOCK:
        module = importlib.import_module(f"flowrl.algos.{name}")
        print(f"{name:<{width}} {(module.__doc__ or '').splitlines()[0]}")
    return 0


def env(_: argparse.Namespace) -> int:
    """Print what a report of a fault needs: versions, extras, devices and the machine."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import jax

    import flowrl
    from flowrl.observe.about import PACKAGES

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    lines = {
        "flowrl": flowrl.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cores": str(usable_cores()),
        "devices": ", ".join(
            f"{device.platform} ({device.device_kind})" for device in jax.devices()
        ),
    }
    lines |= {name: installed(name) for name in (*PACKAGES, *REPORTED)}
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:<{width}}  {text}")
    return 0


def help_settings(args: argparse.Namespace) -> int:
    """Print every setting of a graph with its meaning, unit and default."""
    from flowrl.algos.named import find
    from flowrl.algos.tuned import tuned

    import_named(args)
    source = find(args.graph, args.allow)
    if not source.settings:
        print(f"{source.name} has no settings; change its nodes: --set NODE.FIELD=VALUE")
        return 0
    meanings = documented(source.kind or source.build)
    width = max(map(len, source.settings))
    print(f"settings of {source.name}, for --set NAME=VALUE:")
    for name, default in source.settings.items():
        print(f"  {name:<{width}}  {meanings.get(name, f'default {default!r}')}")
    of_file = None if args.loaded is None else args.loaded.env
    env = args.env or of_file or source.env
    if env is not None and (best := tuned(args.graph, env)):
        print(f"tuned for {env}: {', '.join(f'{k}={v}' for k, v in best.items())}")
    return 0


def documented(target: Any) -> dict[str, str]:
    """Return what the `Args:` section of a docstring says about each argument, on one line each."""
    meanings: dict[str, str] = {}
    name = ""
    _, _, section = (inspect.getdoc(target) or "").partition("Args:\n")
    for line in section.splitlines():
        if not line.startswith(" "):
            break
        started = re.match(r" {4}(\w+): (.*)", line)
        if started:
            name = started[1]
            meanings[name] = started[2]
        elif name:
            meanings[name] += f" {line.strip()}"
    return meanings


def check(args: argparse.Namespace) -> int:
    """Check a graph, and print that it is sound."""
    graph, _ = graph_of(args)
    graph.check()
    stages = len(graph.stages())
    print(
        f"{graph.name} is sound: {len(graph.nodes)} operators, {len(graph.resources)} resources, "
        f"{stages} {plural(stages, 'stage')}"
    )
    return 0


def plan(args: argparse.Namespace) -> int:
    """Print the plan; return 2 if it should be one XLA program and can't."""
    graph, about = graph_of(args)
    planned = graph.compile()
    # They are no part of the plan, which a script may read.
    if about.settings != "default settings":
        print(f"{graph.name}: {about.settings}", file=sys.stderr)
    print(planned, end="")
    if args.place:
        from flowrl.runtime.placement import group_lines

        print(group_lines(planned, place_of(args)), end="")
    if args.runtime == "xla":
        from flowrl.runtime.fusable import program_report

        possible, text = program_report(planned)
        print(text, end="")
        return 0 if possible else 2
    return 0


def draw(args: argparse.Namespace) -> int:
    """Draw a graph on standard output or into a file."""
    drawing = graph_of(args)[0].draw(args.format)
    if args.file is None:
        print(drawing, end="")
    else:
        write_new(args.file, drawing, "name another file: -o FILE")
    return 0


def diff(args: argparse.Namespace) -> int:
    """Print two graphs, or runs, side by side."""
    from flowrl.observe.diff import diff as side_by_side

    def side(name: str, **more: Any) -> tuple[Graph, Path | None]:
        directory = Path(name) if Path(name).is_dir() else None
        # A run's directory holds its environment, so --env is for the other kinds of names.
        named = {"graph": name, "env": None if directory else args.env, **more}
        return graph_of(argparse.Namespace(**{**vars(args), **named}))[0], directory

    # --config is the first graph; --set changes the second.
    first, first_run = side(args.graph, changes=[])
    second, second_run = side(args.other, loaded=None, save_config=None)
    names = (args.config or args.graph, args.other)
    print(side_by_side(first, second, names, (first_run, second_run)), end="")
    return 0


def scale(args: argparse.Namespace) -> int:
    """Print what is predicted of a graph on clusters, and draw it if wanted."""
    import json

    from flowrl.observe.scale import scale as predicted

    if args.picture is not None:
        check_new(args.picture, "name another file: --picture FILE")
    found = predicted(
        graph_of(args)[0],
        args.run,
        args.runners,
        args.nodes,
        cores=args.cores_per_node,
        bandwidth=args.network,
        price=args.price,
    )
    print(json.dumps(found.plain()) if args.json else found, end="\n" if args.json else "")
    if args.picture is not None:
        found.picture(args.picture)
        print(f"the picture is in {args.picture}", file=sys.stderr)
    return 0


# -- looking at one run step by step, and at runs that are saved


def debug(args: argparse.Namespace) -> int:
    """Train step by step."""
    from flowrl.debugging.prompt import debug as step

    step(graph_of(args)[0], seed=args.seed or 0, ui=args.ui)
    return 0


def explain(args: argparse.Namespace) -> int:
    """Print why a run was as fast as it was."""
    import json

    from flowrl.observe.explain import explain as explained_of
    from flowrl.observe.explain import plain
    from flowrl.observe.saving import profiles

    explained = explained_of(profiles(args.dir)[1])
    print(json.dumps(plain(explained)) if args.json else explained, end="\n" if args.json else "")
    return 0


def ui(args: argparse.Namespace) -> int:
    """Serve a page of runs until Ctrl-C."""
    from threading import Event

    from flowrl.page.serving import serve_saved

    page = serve_saved(args.dirs, host=args.host, port=args.port)
    print(f"page of these runs: {page.printed}\nCtrl-C ends it", flush=True)
    try:
        # Not without end: a signal that another thread gets wakes nobody.
        while not Event().wait(1.0):
            pass
    except KeyboardInterrupt:
        page.close()
    return 0


def export_page(args: argparse.Namespace) -> int:
    """Write the page of a run as one file."""
    from flowrl.page.export import exported

    way_out = "name another file: -o FILE"
    check_new(args.file, way_out)
    write_new(args.file, exported(args.dir), way_out)
    print(f"wrote {args.file}; a browser opens it")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print the last returns of saved runs in groups, and draw their curves if wanted."""
    from flowrl.core.curves import Curves
    from flowrl.core.row_json import row_json

    if args.picture is not None:
        check_new(args.picture, "name another file: --picture FILE")
    curves = Curves.load(args.dirs)
    if args.json:
        for end in curves.ending(args.column):
            print(row_json({"column": args.column, **end}))
    else:
        print(curves.table(args.column), end="")
    if args.picture is not None:
        curves.picture(args.picture, args.column)
        print(f"the picture is in {args.picture}", file=sys.stderr)
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a saved policy as a file that acts without flowrl, and print what it takes."""
    from flowrl.observe.saved_policies import load

    import_named(args)
    policy = load(args.dir, policy=args.policy, which=args.which, allow=args.allow)
    print(policy.export(args.file or f"{Path(args.dir).resolve().name}.stablehlo"))
    return 0


def rerun(args: argparse.Namespace) -> int:
    """Run a recorded update again; return 1 if the result differs."""
    from flowrl.observe.record import NEWEST, listed
    from flowrl.observe.rerun import rerun as again

    import_named(args)
    if args.update is None:
        if args.changes or args.learner:
            option = "--set changes" if args.changes else "--learner says whose is"
            raise SettingError(
                f"{option} an update that is run again; name it: --update N\n"
                f"{listed(args.dir, NEWEST)}"
            )
        print(listed(args.dir))
        return 0
    changes = changes_of(args.changes, args.allow)
    result = again(args.dir, args.update, changes, learner=args.learner, allow=args.allow)
    print(result)
    return 0 if result.equal else 1


def why(args: argparse.Namespace) -> int:
    """Print what made up the batch of an update, or what ended a run."""
    from flowrl.observe.why import why as reason_of

    print(reason_of(args.dir, args.update, args.learner))
    return 0
