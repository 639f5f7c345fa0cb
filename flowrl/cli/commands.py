"""What each command of the command line does: a function of its arguments that returns the exit status."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import SettingError, unknown

if TYPE_CHECKING:
    from flowrl.core.items import Row
    from flowrl.graph.graph import Graph
    from flowrl.running import Run


def list_stock(_: argparse.Namespace) -> int:
    """The stock graphs, a line each."""
    from flowrl.algos import STOCK

    for name in STOCK:
        module = importlib.import_module(f"flowrl.algos.{name}")
        print(f"{name:<8} {(module.__doc__ or '').splitlines()[0]}")
    return 0


def check(args: argparse.Namespace) -> int:
    """Say what is wrong with a graph."""
    graph, _ = _graph(args)
    graph.check()
    stages = len(graph.stages())
    print(
        f"{graph.name} is sound: {len(graph.nodes)} operators, {len(graph.resources)} resources, {stages} stage{'s' * (stages > 1)}"
    )
    return 0


def plan(args: argparse.Namespace) -> int:
    """Print the plan; 2 if it was to be a program and can't."""
    plan = _graph(args)[0].compile()
    print(plan, end="")
    if args.runtime == "xla":
        from flowrl.runtime.xla import told

        good, text = told(plan)
        print(text, end="")
        return 0 if good else 2
    return 0


def draw(args: argparse.Namespace) -> int:
    """Draw a graph."""
    drawn = _graph(args)[0].draw(args.format)
    if args.file is None:
        print(drawn, end="")
    else:
        Path(args.file).write_text(drawn, encoding="utf-8")
    return 0


def diff(args: argparse.Namespace) -> int:
    """Print two graphs, or runs, side by side."""
    from flowrl.observe.diff import diff as side_by_side

    def side(name: str, changes: list[str]) -> tuple[Graph, Path | None]:
        path = Path(name) if Path(name).is_dir() else None
        named = {"graph": name, "env": None if path else args.env, "changes": changes}
        return _graph(argparse.Namespace(**{**vars(args), **named}))[0], path

    (one, ran), (other, also) = side(args.graph, []), side(args.other, args.changes)
    print(side_by_side(one, other, (args.graph, args.other), (ran, also)), end="")
    return 0


def _share_cores(runs: int) -> None:
    """Let each core be a device of its own, as many as divide the runs: XLA itself finds little to share in small networks. Not once JAX is up."""
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        os.environ["XLA_FLAGS"] = (
            f"{flags} {flag}={max(n for n in range(1, cores + 1) if runs % n == 0)}".strip()
        )


def run(args: argparse.Namespace) -> int:
    """Train; 1 if a goal was not reached."""
    if args.seeds is not None and args.runtime == "xla":
        _share_cores(args.seeds)
    from flowrl.observe.progress import Progress
    from flowrl.observe.saving import to_json
    from flowrl.observe.sinks import columns, sink
    from flowrl.running import run as start

    graph, about = _graph(args)
    planned = graph.compile()
    until = parse_until(args.until, columns(planned)) if args.until else None
    out = (
        Path(args.out)
        if args.out
        else _fresh(
            "-".join(
                [
                    graph.name,
                    *([_slug(about.env)] if about.env else []),
                    time.strftime("%Y%m%d-%H%M%S"),
                ]
            )
        )
    )
    runtime, record = _runtime(args), args.record
    if args.record_every is not None:
        from flowrl.observe.record import Record

        record = Record(every=args.record_every)
    goal = " or ".join(
        [*([args.until] if args.until else []), *([f"{args.steps:,} steps"] if args.steps else [])]
    )
    where = f" on {about.env}" if about.env else ""
    seeds = (
        f"seed {args.seed}"
        if args.seeds is None
        else f"seeds {args.seed} to {args.seed + args.seeds - 1} at once"
    )
    print(
        f"{graph.name}{where}, {about.settings}; {args.runtime} runtime, {seeds}; until {goal or 'Ctrl-C'}",
        file=sys.stderr,
    )
    sinks = [sink(text, out) for text in args.to]
    observers: list[Any] = [*sinks]
    with ExitStack() as last:
        if not args.json:
            observers.append(Progress(steps=args.steps))
            last.callback(observers[-1].close)
        if (
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        ):  # as in what a script starts by &: it must be possible to end it, and save
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(
            signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)
        )  # what ends a job saves as Ctrl-C does
        try:
            ran = start(
                planned,
                runtime=runtime,
                seed=args.seed,
                steps=args.steps,
                until=until,
                out=out,
                observers=observers,
                trace=args.trace,
                otlp=args.otlp,
                record=record,
            )
        except KeyboardInterrupt:
            print(
                "interrupted while it was being opened; nothing was trained or saved",
                file=sys.stderr,
            )
            raise
        last.pop_all()
    try:
        with ran:
            for row in ran:
                if args.json:
                    print(to_json(row), flush=True)
    finally:
        if ran.reason is not None:
            many = f"\n{ran.curves()}" if args.seeds and ran.rows else ""
            print(
                f"{ran.explain().short()}{many}\n{summary(ran, args.until, out, about.registered, [s.place for s in sinks], args.trace)}",
                file=sys.stderr,
            )
    return 0 if ran.reason == "until" or not args.until else 1


def _runtime(args: argparse.Namespace) -> Any:
    """The runtime that the arguments name."""
    if args.runtime != "ray" and args.working_dir is not None:
        raise SettingError(
            "--working-dir is copied to the nodes of a Ray cluster: add --runtime ray, or leave it out"
        )
    if args.seeds is not None:
        if args.runtime != "xla":
            raise SettingError(
                "--seeds runs many seeds at once as one program: add --runtime xla, or start one run for each --seed"
            )
        from flowrl.runtime.xla import XlaRuntime

        return XlaRuntime(seeds=args.seeds)
    if args.runtime != "ray":
        return args.runtime
    from flowrl.runtime.ray import RayRuntime

    init = {} if args.working_dir is None else {"runtime_env": {"working_dir": args.working_dir}}
    return RayRuntime(imports=args.imports, init=init)


def debug(args: argparse.Namespace) -> int:
    """Train step by step."""
    from flowrl.debugging.prompt import debug as step

    step(_graph(args)[0], seed=args.seed)
    return 0


def explain(args: argparse.Namespace) -> int:
    """Say why a run was as fast as it was."""
    import json

    from flowrl.observe.explain import explain as explained_of
    from flowrl.observe.explain import plain
    from flowrl.observe.saving import profiles

    explained = explained_of(profiles(args.dir)[1])
    print(json.dumps(plain(explained)) if args.json else explained, end="\n" if args.json else "")
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Play with a saved policy."""
    from flowrl.algos.named import environment
    from flowrl.observe.saving import load

    _imports(args)
    env = None if args.env is None else environment(args.env)
    bound = {} if args.max_steps is None else {"max_steps": args.max_steps}
    policy = load(args.dir, allow=args.allow, env=env)
    print(policy.evaluate(args.episodes, seed=args.seed, greedy=not args.sampled, **bound))
    return 0


def replay(args: argparse.Namespace) -> int:
    """Run a recorded update again; 1 if it differs."""
    from flowrl.observe.record import NEWEST, listed
    from flowrl.observe.rerun import replay as again

    _imports(args)
    if args.update is None:
        if args.changes:
            raise SettingError(
                f"--set changes an update that is run again; name it: --update N\n{listed(args.dir, NEWEST)}"
            )
        print(listed(args.dir))
        return 0
    done = again(
        args.dir,
        args.update,
        _changes(args.changes, args.allow),
        learner=args.learner,
        allow=args.allow,
    )
    print(done)
    return 0 if done.equal else 1


def why(args: argparse.Namespace) -> int:
    """Say what made an update, or ended a run."""
    from flowrl.observe.why import why as told

    print(told(args.dir, args.update, args.learner))
    return 0


# -- helpers -------------------------------------------------------------------------------------------------------


def _imports(args: argparse.Namespace) -> None:
    """Import what the user names. `args.allow` then holds modules, `args.imports` what was named: a file by its path."""
    sys.path.insert(0, "")
    args.imports = tuple(args.allow)
    for i, package in enumerate(args.allow):
        try:
            if package.endswith(".py"):
                from flowrl.algos.named import file_module

                args.allow[i] = file_module(package).__name__
            else:
                importlib.import_module(package)
        except ImportError as error:
            raise SettingError(f"--import {package}: {error}") from None


@dataclass(frozen=True)
class About:
    """What to say of a graph that arguments name."""

    env: str
    settings: str
    registered: Mapping[str, Sequence[str]]
    """By id of an environment that is known only because of what was imported for this graph: what that was, as ``--import`` takes it."""


def _graph(args: argparse.Namespace) -> tuple[Graph, About]:
    """The graph that the arguments name, and what to say of it."""
    import gymnasium as gym

    from flowrl.algos.named import build, environment, find
    from flowrl.algos.tuned import tuned
    from flowrl.envs.gym_envs import FAMILIES

    before = dict(gym.registry)
    _imports(args)
    source = find(args.graph, args.allow)
    env = args.env or source.env
    changes = _changes(args.changes, args.allow)
    best = {} if args.untuned or env is None else tuned(args.graph, env)
    wanted = env if source.takes_env or args.env else None
    graph = build(source, None if wanted is None else environment(wanted), best, changes)
    said = (
        f"tuned settings ({', '.join(f'{k}={v}' for k, v in best.items())})"
        if best
        else "default settings"
    )
    if changes:
        said += f", set {', '.join(f'{k}={v}' for k, v in changes)}"
    where, colon, _ = args.graph.rpartition(":")
    own = [where if where.endswith(".py") else where.partition(".")[0]] if colon else []
    new = [
        id_
        for id_, spec in gym.registry.items()
        if before.get(id_) is not spec and spec.namespace not in FAMILIES
    ]
    return graph, About(env or "", said, dict.fromkeys(new, (*own, *args.imports)))


def _changes(texts: Sequence[str], allow: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """The settings that ``--set NAME=VALUE`` names."""
    from flowrl.algos.named import parse_value

    changes = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"--set takes NAME=VALUE, got {text!r}")
        name = name.strip()
        changes.append((name, parse_value(value, allow=allow, source=f"--set {name}")))
    return changes


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def _fresh(name: str) -> Path:
    """A directory below runs/ that is not there yet: of this name, or numbered."""
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(path for path in (Path("runs") / n for n in names) if not path.exists())


def parse_until(text: str, names: Sequence[str]) -> Callable[[Row], bool]:
    """A goal such as ``return_mean>=475`` as a function of a Row.

    Raises:
        SettingError: it is not of that form, or names no column.
    """
    from flowrl.observe.looking import comparison

    try:
        goal = comparison(text)
    except SettingError:
        raise SettingError(
            f"--until takes a comparison such as 'return_mean>=475', got {text!r}"
        ) from None
    if goal.name not in names:
        raise SettingError(f"--until: {unknown('column', goal.name, names)}")
    return lambda row: goal.name in row and goal.holds(row[goal.name])


def summary(
    run: Run,
    until: str | None,
    out: Path,
    registered: Mapping[str, Sequence[str]],
    places: Sequence[str],
    trace: str | None,
) -> str:
    """How a run ended, where everything is, and what to do next.

    Args:
        run: that ended.
        until: its goal.
        out: its directory.
        registered: by id of an environment that is not known by itself, what must be imported for it.
        places: where its rows went too.
        trace: the file of its trace.
    """
    from flowrl.algos.named import imports_for
    from flowrl.observe.progress import duration, number

    row = run.rows[-1] if run.rows else None
    steps = (
        f"{row['env_steps']:,} steps in {duration(row['seconds'])}, return {number(row['return_mean'])}"
        if row
        else "0 steps, before the first row"
    )
    head = {
        "until": f"solved: {until} after {steps}",
        "steps": f"not solved: {until} was not reached within {steps}"
        if until
        else f"done: {steps}",
        "interrupted": f"interrupted after {steps}",
    }.get(str(run.reason), f"ended after {steps}")
    lines = [head, f"  rows    {', '.join([str(out / 'rows.jsonl'), *places])}"]
    if trace is not None:
        lines.append(f"  trace   {trace}")
    if (out / "records").is_dir():
        needs = imports_for((out / "graph.txt").read_text(encoding="utf-8"))
        lines.append(f"  records {shlex.join(['flowrl', 'replay', str(out), *_by_import(needs)])}")
    if run.reason == "failed":
        lines.append(f"  why     flowrl why {shlex.quote(str(out))}")
    if row and (out / "policy").is_dir():
        lines += [f"  policy  {out / 'policy'}", f"  try it  {_try_it(out, registered)}"]
    return "\n".join(lines)


def _by_import(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("--import", name)]


def _try_it(out: Path, registered: Mapping[str, Sequence[str]]) -> str:
    """The command that evaluates the policy of a run, with what must be imported for it."""
    import json

    from flowrl.algos.named import imports_for

    saved = json.loads((out / "policy/policy.json").read_text(encoding="utf-8"))
    env = saved["env"].strip("\"'")
    needs = [
        *imports_for(
            " ".join(saved[part] for part in ("policy", "env", "wrappers", "env_settings"))
        ),
        *registered.get(env, ()),
    ]
    called = (
        sys.argv[0]
        if os.sep in sys.argv[0] and not sys.argv[0].endswith("__main__.py")
        else "flowrl"
    )
    called = (
        os.path.relpath(called)
        if called != "flowrl" and not os.path.relpath(called).startswith("..")
        else called
    )
    command = shlex.join([called, "eval", str(out), *_by_import(list(dict.fromkeys(needs)))])
    if env == "None":
        return f"{command} --env FILE.py:FUNCTION, for the environment has no name that could be saved: a function or class of a file has one"
    return command
