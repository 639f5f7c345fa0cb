"""The commands of the command line: functions of the parsed arguments that return the exit status.

Every command may raise a FlowrlError, which `main` prints.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flowrl.cli.arguments import (
    About,
    changes_of,
    file_name,
    graph_of,
    import_named,
    new_directory,
    repeat,
    runtime_of,
)
from flowrl.cli.ending import summary
from flowrl.cli.policies import first_weights
from flowrl.cli.seeds import train_seeds
from flowrl.core.machine import usable_cores
from flowrl.core.new_files import check_new
from flowrl.core.texts import plural
from flowrl.errors import SettingError

if TYPE_CHECKING:
    from flowrl.graph.graph import Graph
    from flowrl.graph.plan import Plan
    from flowrl.running import Run


REPORTED = ("networkx", "ale-py", "gymnax", "brax", "jax2onnx", "onnxruntime", "optuna")
"""More packages whose versions `flowrl env` prints; all but the first come with extras."""


def list_stock(_: argparse.Namespace) -> int:
    """Print the names and first lines of the stock graphs."""
    from flowrl.algos import STOCK

    for name in STOCK:
        module = importlib.import_module(f"flowrl.algos.{name}")
        print(f"{name:<8} {(module.__doc__ or '').splitlines()[0]}")
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
        check_new(args.file, "name another file: -o FILE")
        Path(args.file).write_text(drawing, encoding="utf-8")
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


# -- training


def run(args: argparse.Namespace) -> int:
    """Train; return 1 if there was a goal that was not reached."""
    # With --json whatever else prints, such as Ray or an environment, must not come between rows.
    rows = sys.stdout
    with redirect_stdout(sys.stderr if args.json else sys.stdout):
        return _train(args, rows)


def _train(args: argparse.Namespace, rows: TextIO) -> int:
    """Train, and print the rows in JSON to `rows` if that is asked for."""
    # JAX reads the number of devices when it starts, so it is set before anything asks for them.
    repeated = repeat(args)
    if args.out is not None:
        _check_free(args)
    if args.seeds is not None and args.runtime == "xla":
        _share_cores(args.seeds)
    from flowrl.observe.goal import parse_until
    from flowrl.observe.saving import to_json
    from flowrl.observe.sinks import columns, sink

    graph, about = graph_of(args)
    planned = graph.compile()
    until = parse_until(args.until, columns(planned)) if args.until else None
    out = Path(args.out) if args.out else _default_directory(graph, about)
    options = {"runtime": runtime_of(args), "record": _record(args), "until": until, "out": out}
    options |= {"init": first_weights(args), "snapshots": _snapshots(args)}
    print(_announcement(args, graph, about), file=sys.stderr)
    if repeated:
        print(repeated, file=sys.stderr)
    if args.seeds is not None and args.runtime != "xla":
        save_when_ended()
        return train_seeds(args, planned, options, rows)
    sinks = [sink(text, out) for text in args.to]
    training = _start(args, planned, sinks, options)
    try:
        with training:
            for row in training:
                if args.json:
                    print(to_json(row), file=rows, flush=True)
    finally:
        # However the run ended, its summary is printed; an error then goes on to `main`.
        if training.reason is not None:
            curves = f"\n{training.curves()}" if args.seeds and training.rows else ""
            places = [each.place for each in sinks]
            ending = summary(training, args.until, out, about.registered, places, args.trace)
            print(f"{training.explain().short()}{curves}\n{ending}", file=sys.stderr)
    return 0 if training.reason == "until" or not args.until else 1


def _check_free(args: argparse.Namespace) -> None:
    """Refuse ``--out`` where something is there already, before anything is said of the run."""
    from flowrl.observe.saving import check_free

    folders = [Path(args.out)]
    if args.seeds is not None and args.runtime != "xla":
        folders = [folders[0] / f"seed-{args.seed + i}" for i in range(args.seeds)]
    for folder in folders:
        check_free(folder)


def _share_cores(runs: int) -> None:
    """Give JAX as many CPU devices as there are cores, or fewer, so that they divide the runs.

    XLA itself finds little to do in parallel in small networks. This has no effect once JAX has
    started.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag in flags:
        return
    devices = max(n for n in range(1, usable_cores() + 1) if runs % n == 0)
    os.environ["XLA_FLAGS"] = f"{flags} {flag}={devices}".strip()


def _default_directory(graph: Graph, about: About) -> Path:
    """Return a new directory that is named by the graph, its environment and the time."""
    environment = [file_name(about.env)] if about.env else []
    return new_directory("-".join([graph.name, *environment, time.strftime("%Y%m%d-%H%M%S")]))


def _record(args: argparse.Namespace) -> Any:
    """Return which updates to record, as `fl.run` takes it."""
    if args.record_every is None:
        return args.record
    from flowrl.observe.record import Record

    return Record(every=args.record_every)


def _snapshots(args: argparse.Namespace) -> Any:
    """Return how the run is kept, as `fl.run` takes it."""
    from flowrl.observe.snapshots import Snapshots

    return Snapshots(best=args.best)


def _announcement(args: argparse.Namespace, graph: Graph, about: About) -> str:
    """Describe in a line what is trained, on what and how, and when it ends."""
    goals = []
    if args.until:
        goals.append(args.until)
    if args.steps:
        goals.append(f"{args.steps:,} steps")
    where = f" on {about.env}" if about.env else ""
    seeds = f"seed {args.seed}"
    if args.seeds is not None:
        at_once = " at once" if args.runtime == "xla" else ""
        seeds = f"seeds {args.seed} to {args.seed + args.seeds - 1}{at_once}"
    return (
        f"{graph.name}{where}, {about.settings}; {args.runtime} runtime, {seeds}; "
        f"until {' or '.join(goals) or 'Ctrl-C'}"
    )


def _start(
    args: argparse.Namespace, planned: Plan, sinks: Sequence[Any], options: dict[str, Any]
) -> Run:
    """Start a run; close the progress line again if it can't start."""
    from flowrl.observe.progress import Progress
    from flowrl.running import run as start

    observers = [*sinks]
    with ExitStack() as on_failure:
        if not args.json:
            progress = Progress(steps=args.steps)
            observers.append(progress)
            on_failure.callback(progress.close)
        save_when_ended()
        given = {name: getattr(args, name) for name in ("seed", "steps", "trace", "otlp")}
        try:
            started = start(planned, observers=observers, **given, **options)
        except KeyboardInterrupt:
            text = "interrupted while it was being opened; nothing was trained or saved"
            print(text, file=sys.stderr)
            raise
        on_failure.pop_all()
    return started


def save_when_ended() -> None:
    """Let the signals that end a process raise KeyboardInterrupt, so that the run is saved."""
    # A shell's script lets what it starts with & ignore Ctrl-C; it must be possible to end it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A job scheduler ends a process by SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def debug(args: argparse.Namespace) -> int:
    """Train step by step."""
    from flowrl.debugging.prompt import debug as step

    step(graph_of(args)[0], seed=args.seed or 0)
    return 0


# -- looking at runs


def explain(args: argparse.Namespace) -> int:
    """Print why a run was as fast as it was."""
    import json

    from flowrl.observe.explain import explain as explained_of
    from flowrl.observe.explain import plain
    from flowrl.observe.saving import profiles

    explained = explained_of(profiles(args.dir)[1])
    print(json.dumps(plain(explained)) if args.json else explained, end="\n" if args.json else "")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print the last returns of saved runs in groups, and draw their curves if wanted."""
    import json

    from flowrl.core.curves import Curves

    if args.picture is not None:
        check_new(args.picture, "name another file: --picture FILE")
    curves = Curves.load(args.dirs)
    if args.json:
        for end in curves.ending(args.column):
            numbers = {k: v if isinstance(v, str) or isfinite(v) else None for k, v in end.items()}
            print(json.dumps({"column": args.column, **numbers}))
    else:
        print(curves.table(args.column), end="")
    if args.picture is not None:
        curves.picture(args.picture, args.column)
        print(f"the picture is in {args.picture}", file=sys.stderr)
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Play episodes with a saved policy, and print their returns."""
    import json

    from flowrl.algos.named import environment
    from flowrl.envs.gym_envs import env_name
    from flowrl.observe.saving import load

    import_named(args)
    env = None if args.env is None else environment(args.env)
    bound = {} if args.max_steps is None else {"max_steps": args.max_steps}
    policy = load(args.dir, which=args.which, allow=args.allow, env=env)
    found = policy.evaluate(
        args.episodes, seed=args.seed, greedy=not args.sampled, video=args.video, **bound
    )
    if args.json:
        played = {"env": env_name(policy.env) if policy.env else None, "seed": args.seed}
        stochastic = "epsilon-greedy" if policy.action_values else "sampled"
        played["actions"] = stochastic if args.sampled else "greedy"
        print(json.dumps({**played, **found.plain()}))
    else:
        print(found)
    if args.video:
        print(f"videos of the first episodes are in {args.video}", file=sys.stderr)
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a saved policy as a file that acts without flowrl, and print what it takes."""
    from flowrl.observe.saving import load

    import_named(args)
    policy = load(args.dir, which=args.which, allow=args.allow)
    print(policy.export(args.file or f"{Path(args.dir).resolve().name}.stablehlo"))
    return 0


def rerun(args: argparse.Namespace) -> int:
    """Run a recorded update again; return 1 if the result differs."""
    from flowrl.observe.record import NEWEST, listed
    from flowrl.observe.rerun import rerun as again

    import_named(args)
    if args.update is None:
        if args.changes:
            raise SettingError(
                "--set changes an update that is run again; name it: --update N\n"
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
