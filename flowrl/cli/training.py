"""The commands that train: `flowrl run`, and `flowrl resume`, which goes on with a saved run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flowrl.cli.arguments import (
    About,
    file_name,
    graph_of,
    import_for_environments,
    new_directory,
    repeat,
    runtime_in_place_of,
    runtime_of,
)
from flowrl.cli.ending import summary
from flowrl.cli.policies import first_weights
from flowrl.cli.seeds import resume_seeds, train_seeds
from flowrl.core.machine import usable_cores, variables_kept
from flowrl.errors import SettingError

if TYPE_CHECKING:
    from flowrl.graph.graph import Graph
    from flowrl.resuming import Resumable
    from flowrl.running import Run

XLA_FLAGS = "XLA_FLAGS"
"""The environment variable in which JAX looks for the number of its devices."""


def run(args: argparse.Namespace) -> int:
    """Train; return 1 if there was a goal that was not reached."""
    # With --json whatever else prints, such as Ray or an environment, must not come between rows.
    rows = sys.stdout
    with redirect_stdout(sys.stderr if args.json else sys.stdout), variables_kept([XLA_FLAGS]):
        return _train(args, rows)


def resume(args: argparse.Namespace) -> int:
    """Go on with a saved run, or with many seeds; return 1 if a goal was not reached."""
    rows = sys.stdout
    with redirect_stdout(sys.stderr if args.json else sys.stdout), variables_kept([XLA_FLAGS]):
        return _go_on(args, rows)


def _train(args: argparse.Namespace, rows: TextIO) -> int:
    """Train, and print the rows in JSON to `rows` if that is asked for."""
    # JAX reads the number of devices when it starts, so it is set before anything asks for them.
    repeated = repeat(args)
    snapshots = _snapshots(args)
    if args.out is not None:
        _check_free(args)
    if args.seeds is not None and args.runtime == "xla":
        _share_cores(args.seeds)
    from flowrl.run_arguments import checked_until
    from flowrl.starting import run as start

    graph, about = graph_of(args)
    planned = graph.compile()
    until = checked_until(args.until or None, planned, "--until")
    out = Path(args.out) if args.out else _default_directory(graph, about)
    options = {"runtime": runtime_of(args), "record": _record(args), "until": until, "out": out}
    options |= {"init": first_weights(args), "snapshots": snapshots}
    print(_announcement(args, graph, about), file=sys.stderr)
    if repeated:
        print(repeated, file=sys.stderr)
    if args.seeds is not None and args.runtime != "xla":
        save_when_ended()
        return train_seeds(args, planned, options, about.registered, rows)

    def started(**given: Any) -> Run:
        return start(planned, seed=args.seed, steps=args.steps, **options, **given)

    return _follow(args, started, out, about.registered, rows)


def _go_on(args: argparse.Namespace, rows: TextIO) -> int:
    """Go on with what a directory holds, and print the rows in JSON to `rows` if wanted."""
    folder = Path(args.dir)
    registered = import_for_environments(args)
    from flowrl.seeding.resumed import is_of_seeds

    if is_of_seeds(folder):
        save_when_ended()
        return resume_seeds(args, folder, registered, rows)
    # The cores are shared before JAX starts, which finding the run does.
    _share_cores_again(folder)
    from flowrl.observe.goal import Goal
    from flowrl.resuming import resumable

    given = {"steps": args.steps, "until": args.until, "allow": args.allow}
    found = resumable(folder, runtime=runtime_in_place_of(args, folder), **given)
    with closing(found):
        args.steps, until = found.goal
        args.until = until.text if isinstance(until, Goal) else None
        args.seeds = found.facts["runtime_settings"].get("seeds")
        print(_announcement_of(args, found), file=sys.stderr)
        return _follow(args, found.start, folder, registered, rows)


def _follow(
    args: argparse.Namespace,
    start: Callable[..., Run],
    out: Path,
    registered: Mapping[str, Sequence[str]],
    rows: TextIO,
) -> int:
    """Start a run, show it until it ends, and return the exit status.

    Args:
        args: the parsed arguments, with the goal of the run.
        start: starts it, given observers, and where its trace goes.
        out: its directory.
        registered: what ``--import`` must name, by the id of each environment that needs it.
        rows: where rows go in JSON, if that is asked for.
    """
    from flowrl.core.row_json import row_json
    from flowrl.observe.sinks import sink

    if len(set(args.to)) < len(args.to):
        raise SettingError("--to names a sink twice; name each place once")
    sinks = [sink(text, out) for text in args.to]
    training = _start(args, start, sinks)
    # One that was killed while it was being saved has nothing left to do, and no speed.
    ended_at_once = training.reason is not None
    try:
        with training:
            for row in training:
                if args.json:
                    _print_row(row_json(row), rows, training)
    finally:
        # However the run ended, its summary is printed; an error then goes on to `main`.
        if training.reason is not None:
            curves = f"{training.curves()}\n" if args.seeds and training.rows else ""
            places = [each.place for each in sinks]
            ending = summary(training, args.until, out, registered, places, args.trace)
            explained = "" if ended_at_once else training.explain().short()
            explained += "\n" if explained else ""
            print(f"{explained}{curves}{ending}", file=sys.stderr)
        if training.page is not None:
            training.page.close()
    return 0 if training.reason == "until" or not args.until else 1


def _print_row(text: str, rows: TextIO, training: Run) -> None:
    """Print a row as JSON, and close the run where nobody reads on, which is no failure of it."""
    try:
        print(text, file=rows, flush=True)
    except BrokenPipeError:
        training.close()
        raise


def _check_free(args: argparse.Namespace) -> None:
    """Refuse ``--out`` where something is there already, before anything is said of the run."""
    from flowrl.observe.saving import check_free, check_free_for_seeds

    if args.seeds is not None and args.runtime != "xla":
        check_free_for_seeds(Path(args.out), range(args.seed, args.seed + args.seeds))
    else:
        check_free(args.out)


def _share_cores(runs: int) -> None:
    """Give JAX as many CPU devices as there are cores, or fewer, so that they divide the runs.

    XLA itself finds little to do in parallel in small networks. This has no effect once JAX has
    started.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get(XLA_FLAGS, "")
    if flag in flags:
        return
    devices = max(n for n in range(1, usable_cores() + 1) if runs % n == 0)
    os.environ[XLA_FLAGS] = f"{flags} {flag}={devices}".strip()


def _share_cores_again(folder: Path) -> None:
    """Share the cores as `flowrl run` did, if a directory holds many runs of one program."""
    from flowrl.observe.about import read, settings_of_runtime
    from flowrl.run_arguments import as_runtime

    facts = read(folder)
    if facts is not None and facts["runtime"] == "xla":
        kind = type(as_runtime("xla"))
        seeds = settings_of_runtime(facts, folder, kind).get("seeds")
        if seeds is not None:
            _share_cores(seeds)


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
    """Return how the run is kept, as `fl.run` takes it.

    Raises:
        SettingError: the arguments contradict one another, or are out of range.
    """
    given = {"every": args.snapshot_every, "keep": args.keep, "best": args.best}
    given = {name: value for name, value in given.items() if value is not None}
    if args.no_snapshots and given:
        flag = {"every": "--snapshot-every", "keep": "--keep", "best": "--best"}[next(iter(given))]
        raise SettingError(
            f"--no-snapshots leaves no snapshots for {flag}; leave out the one or the other"
        )
    if not given:
        return not args.no_snapshots
    from flowrl.observe.snapshots import Snapshots

    return Snapshots(**given)


def _announcement(args: argparse.Namespace, graph: Graph, about: About) -> str:
    """Describe in a line what is trained, on what and how, and when it ends."""
    where = f" on {about.env}" if about.env else ""
    seeds = f"seed {args.seed}"
    if args.seeds is not None:
        at_once = " at once" if args.runtime == "xla" else ""
        seeds = f"seeds {args.seed} to {args.seed + args.seeds - 1}{at_once}"
    return (
        f"{graph.name}{where}, {about.settings}; {args.runtime} runtime, {seeds}; until "
        f"{_goal_text(args)}"
    )


def _announcement_of(args: argparse.Namespace, found: Resumable) -> str:
    """Describe in a line what goes on, from where, and when it ends."""
    from flowrl.core.items import reached
    from flowrl.observe.about import runtime_name

    resumed = found.resumed
    where = "its beginning"
    if resumed.rows:
        count, what = reached(resumed.rows[-1])
        where = f"row {len(resumed.rows):,}, {count:,} {what} ({resumed.snapshot.path})"
    return (
        f"{found.plan.graph.name} goes on from {where}; {runtime_name(found.runtime)} runtime, "
        f"seed {found.facts['seed']}; until {_goal_text(args)}"
    )


def _goal_text(args: argparse.Namespace) -> str:
    """Return what ends a run, for the line that announces it."""
    goals = [args.until] if args.until else []
    if args.steps:
        goals.append(f"{args.steps:,} steps")
    return " or ".join(goals) or "Ctrl-C"


def _start(args: argparse.Namespace, start: Callable[..., Run], sinks: Sequence[Any]) -> Run:
    """Start a run; close the progress line again if it can't start."""
    from flowrl.observe.progress import Progress

    observers = [*sinks]
    with ExitStack() as on_failure:
        if not args.json:
            progress = Progress(steps=args.steps)
            observers.append(progress)
            on_failure.callback(progress.close)
        save_when_ended()
        try:
            started = start(observers=observers, trace=args.trace, otlp=args.otlp, ui=args.ui)
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
