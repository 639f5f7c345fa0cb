"""The command line: ``flowrl list | check | plan | draw | diff | run | explain | eval | replay | why``, also ``python -m flowrl``."""

from __future__ import annotations

import argparse
import importlib
import itertools
import operator
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flowrl.errors import FlowrlError, SettingError, unknown

if TYPE_CHECKING:
    from flowrl.graph.graph import Graph
    from flowrl.items import Row
    from flowrl.running import Run

GRAPH_HELP = "a stock name, package.module:function, file.py:function, or a run's directory or graph.txt"


class _Parser(argparse.ArgumentParser):
    """Shows the commands where none is given."""

    def error(self, message: str) -> NoReturn:
        if "COMMAND" in message:
            self.print_help(sys.stderr)
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = _Parser("flowrl", description="Reinforcement learning algorithms as graphs: check, plan, draw, run.", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(act=act)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    def graph(made: argparse.ArgumentParser) -> None:
        made.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
        made.add_argument("--env", metavar="ID", help="the environment")
        made.add_argument(
            "--set", metavar="NAME=VALUE", action="append", default=[], dest="changes", help="a setting of the graph's function, or node.field"
        )
        made.add_argument("--untuned", action="store_true", help="leave the tuned settings for this environment out")
        made.add_argument(
            "--import",
            metavar="PACKAGE",
            action="append",
            default=[],
            dest="allow",
            help="import a package: environments it registers, code a saved graph needs",
        )

    def recorded(made: argparse.ArgumentParser) -> None:
        made.add_argument("dir", metavar="DIR", help="a run's directory")
        made.add_argument("--update", type=_count, metavar="N", help="which: the learner's version before it, and 1")
        made.add_argument("--learner", metavar="NAME", help="whose, if there are several")

    command("list", "the stock graphs, a line each", _list)
    graph(command("check", "check a graph and say everything that is wrong with it", _check))
    made = command("plan", "what a run will do, in numbers", _plan)
    graph(made)
    made.add_argument("--runtime", choices=["local", "ray", "xla"], default="local", help="xla: also what can be part of one program")
    made = command("draw", "draw a graph", _draw)
    graph(made)
    made.add_argument("--format", choices=["text", "mermaid", "dot", "svg"], default="text")
    made.add_argument("-o", metavar="FILE", dest="file", help="write there instead of to standard output")
    made = command("diff", "what differs between two graphs, and the runs that they left", _diff)
    graph(made)
    made.add_argument("other", metavar="OTHER", help="what it is compared with, likewise; --set changes this one")
    made = command("run", "train", _run)
    graph(made)
    made.add_argument("--runtime", choices=["local", "ray", "xla"], default="local")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--seeds", type=_count, metavar="N", help="so many runs at once, by one program (needs --runtime xla)")
    made.add_argument("--steps", type=_count, metavar="N", help="stop after this many environment steps")
    made.add_argument("--until", metavar="'NAME>=NUMBER'", help="stop when this holds for a row, such as 'return_mean>=475'")
    made.add_argument("--out", metavar="DIR", help="where to save; runs/GRAPH-ENV-TIME by default")
    made.add_argument("--record", action="store_true", help="keep the first update and those that stand out, for flowrl replay and why")
    made.add_argument("--record-every", type=_count, metavar="N", help="and also every so many")
    made.add_argument("--json", action="store_true", help="one JSON object per row on standard output, and nothing else there")
    made.add_argument("--trace", metavar="TO", help="a file that Perfetto opens, or the address of an OpenTelemetry collector")
    made.add_argument(
        "--to",
        metavar="SINK",
        action="append",
        default=[],
        help="rows also go to csv[:FILE], tensorboard[:DIR], wandb:PROJECT or mlflow:EXPERIMENT",
    )
    made = command("explain", "why a run was as fast as it was, and what would make it faster", _explain)
    made.add_argument("dir", metavar="DIR", help="a run's directory")
    made.add_argument("--json", action="store_true", help="as JSON")
    made = command("eval", "play greedy episodes with a saved policy", _eval)
    made.add_argument("dir", metavar="DIR", help="a run's directory")
    made.add_argument("--episodes", type=_count, default=20, metavar="N")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--import", metavar="PACKAGE", action="append", default=[], dest="allow", help="a package or file.py that may be imported for the policy"
    )
    made = command("replay", "run a recorded update again, without Ray and the environment; without --update, list those there are", _replay)
    recorded(made)
    made.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], dest="changes", help="and once more so: learner.loss.clip=0.3")
    made.add_argument("--import", metavar="PACKAGE", action="append", default=[], dest="allow", help="a package or file.py of your own that it needs")
    recorded(command("why", "which runners, environments and seeds made the batch of an update; without --update, what ended the run", _why))
    return top


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
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith("in "))
    hint = "" if debug or isinstance(error, FlowrlError) else "\n(--debug shows where)"
    print(f"flowrl: {kind}{error}{notes}{hint}", file=sys.stderr)


# -- commands ------------------------------------------------------------------------------------------------------


def _list(_: argparse.Namespace) -> int:
    from flowrl.algos import STOCK

    for name in STOCK:
        module = importlib.import_module(f"flowrl.algos.{name}")
        print(f"{name:<8} {(module.__doc__ or '').splitlines()[0]}")
    return 0


def _check(args: argparse.Namespace) -> int:
    graph, _ = _graph(args)
    graph.check()
    stages = len(graph.stages())
    print(f"{graph.name} is sound: {len(graph.nodes)} operators, {len(graph.resources)} resources, {stages} stage{'s' * (stages > 1)}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    plan = _graph(args)[0].compile()
    print(plan, end="")
    if args.runtime == "xla":
        from flowrl.runtime.xla import told

        good, text = told(plan)
        print(text, end="")
        return 0 if good else 2
    return 0


def _draw(args: argparse.Namespace) -> int:
    drawn = _graph(args)[0].draw(args.format)
    if args.file is None:
        print(drawn, end="")
    else:
        Path(args.file).write_text(drawn, encoding="utf-8")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from flowrl.observe.diff import diff

    def side(name: str, changes: list[str]) -> tuple[Graph, Path | None]:
        path = Path(name) if Path(name).is_dir() else None
        named = {"graph": name, "env": None if path else args.env, "changes": changes}
        return _graph(argparse.Namespace(**{**vars(args), **named}))[0], path

    (one, ran), (other, also) = side(args.graph, []), side(args.other, args.changes)
    print(diff(one, other, (args.graph, args.other), (ran, also)), end="")
    return 0


def _share_cores(runs: int) -> None:
    """Let each core be a device of its own, as many as divide the runs: XLA itself finds little to share in small networks. Not once JAX is up."""
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={max(n for n in range(1, cores + 1) if runs % n == 0)}".strip()


def _run(args: argparse.Namespace) -> int:
    if args.seeds is not None and args.runtime == "xla":
        _share_cores(args.seeds)
    from flowrl.observe.progress import Progress
    from flowrl.observe.sinks import columns, sink
    from flowrl.running import run as start
    from flowrl.saving import to_json

    graph, about = _graph(args)
    plan = graph.compile()
    until = parse_until(args.until, columns(plan)) if args.until else None
    out = (
        Path(args.out)
        if args.out
        else _fresh("-".join([graph.name, *([_slug(about["env"])] if about["env"] else []), time.strftime("%Y%m%d-%H%M%S")]))
    )
    runtime: Any = args.runtime
    record: Any = args.record
    if args.record_every is not None:
        from flowrl.observe.record import Record

        record = Record(every=args.record_every)
    if args.seeds is not None:
        if args.runtime != "xla":
            raise SettingError("--seeds runs many seeds at once as one program: add --runtime xla, or start one run for each --seed")
        from flowrl.runtime.xla import XlaRuntime

        runtime = XlaRuntime(seeds=args.seeds)
    goal = " or ".join([*([args.until] if args.until else []), *([f"{args.steps:,} steps"] if args.steps else [])])
    where = f" on {about['env']}" if about["env"] else ""
    seeds = f"seed {args.seed}" if args.seeds is None else f"seeds {args.seed} to {args.seed + args.seeds - 1} at once"
    print(f"{graph.name}{where}, {about['settings']}; {args.runtime} runtime, {seeds}; until {goal or 'Ctrl-C'}", file=sys.stderr)
    observers: list[Any] = [sink(text, out) for text in args.to]
    with ExitStack() as last:
        if not args.json:
            observers.append(Progress(steps=args.steps))
            last.callback(observers[-1].close)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # what ends a job saves as Ctrl-C does
        try:
            run = start(
                plan,
                runtime=runtime,
                seed=args.seed,
                steps=args.steps,
                until=until,
                out=out,
                observers=observers,
                trace=args.trace,
                record=record,
            )
        except KeyboardInterrupt:
            print("interrupted while it was being opened; nothing was trained or saved", file=sys.stderr)
            raise
        last.pop_all()
    try:
        with run:
            for row in run:
                if args.json:
                    print(to_json(row), flush=True)
    finally:
        if run.reason is not None:
            code = [g for g in (args.graph.rpartition(":")[0],) if g.endswith(".py")] + args.allow
            many = f"\n{run.curves()}" if args.seeds and run.rows else ""
            print(f"{run.explain().short()}{many}\n{summary(run, args.until, out, code)}", file=sys.stderr)
    return 0 if run.reason == "until" or not args.until else 1


def _explain(args: argparse.Namespace) -> int:
    import json

    from flowrl.observe.explain import explain, plain
    from flowrl.saving import profiles

    explained = explain(profiles(args.dir)[1])
    print(json.dumps(plain(explained)) if args.json else explained, end="\n" if args.json else "")
    return 0


def _eval(args: argparse.Namespace) -> int:
    from flowrl.saving import load

    _imports(args)
    returns = load(args.dir, allow=args.allow).evaluate(args.episodes, seed=args.seed)
    mean, std, low, high = returns.mean(), returns.std(), returns.min(), returns.max()
    print(f"{args.episodes} episode{'s' * (args.episodes > 1)}: return mean {mean:.1f}, std {std:.1f}, min {low:.1f}, max {high:.1f}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    from flowrl.observe.record import listed
    from flowrl.observe.replay import replay

    _imports(args)
    if args.update is None:
        print(listed(args.dir))
        return 0
    done = replay(args.dir, args.update, _changes(args.changes), learner=args.learner, allow=args.allow)
    print(done)
    return 0 if done.equal else 1


def _why(args: argparse.Namespace) -> int:
    from flowrl.observe.why import why

    print(why(args.dir, args.update, args.learner))
    return 0


# -- helpers -------------------------------------------------------------------------------------------------------


def _imports(args: argparse.Namespace) -> None:
    sys.path.insert(0, "")
    for i, package in enumerate(args.allow):
        try:
            if package.endswith(".py"):
                from flowrl.graphs import file_module

                args.allow[i] = file_module(package).__name__
            else:
                importlib.import_module(package)
        except ImportError as error:
            raise SettingError(f"--import {package}: {error}") from None


def _graph(args: argparse.Namespace) -> tuple[Graph, dict[str, str]]:
    """The graph that the arguments name, and what to say of it."""
    from flowrl.algos.tuned import tuned
    from flowrl.graphs import build, find

    _imports(args)
    source = find(args.graph, args.allow)
    env = args.env or source.env
    changes = _changes(args.changes)
    best = {} if args.untuned or env is None else tuned(args.graph, env)
    graph = build(source, args.env or (env if source.takes_env else None), best, changes)
    said = f"tuned settings ({', '.join(f'{k}={v}' for k, v in best.items())})" if best else "default settings"
    if changes:
        said += f", set {', '.join(f'{k}={v}' for k, v in changes)}"
    return graph, {"env": env or "", "settings": said}


def _changes(texts: Sequence[str]) -> list[tuple[str, Any]]:
    """The settings that ``--set NAME=VALUE`` names."""
    from flowrl.graphs import parse_value

    changes = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"--set takes NAME=VALUE, got {text!r}")
        changes.append((name.strip(), parse_value(value)))
    return changes


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def _fresh(name: str) -> Path:
    """A directory below runs/ that is not there yet: of this name, or numbered."""
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(path for path in (Path("runs") / n for n in names) if not path.exists())


COMPARE: dict[str, Callable[[Any, Any], bool]] = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def parse_until(text: str, names: Sequence[str]) -> Callable[[Row], bool]:
    """A goal such as ``return_mean>=475`` as a function of a Row.

    Raises:
        SettingError: it is not of that form, or names no column.
    """
    match = re.fullmatch(r"\s*([\w./-]+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
    try:
        name, sign, number = match.groups() if match else ("", "", "")
        value = float(number)
    except ValueError:
        raise SettingError(f"--until takes a comparison such as 'return_mean>=475', got {text!r}") from None
    if name not in names:
        raise SettingError(f"--until: {unknown('column', name, names)}")
    compare = COMPARE[sign]
    return lambda row: name in row and compare(row[name], value)


def summary(run: Run, until: str | None, out: Path, code: Sequence[str]) -> str:
    """How a run ended, and what to do next. `code`: what must be imported for a policy that is not flowrl's own."""
    from flowrl.observe.progress import duration, number

    row = run.rows[-1] if run.rows else None
    steps = (
        f"{row['env_steps']:,} steps in {duration(row['seconds'])}, return {number(row['return_mean'])}" if row else "0 steps, before the first row"
    )
    head = {
        "until": f"solved: {until} after {steps}",
        "steps": f"not solved: {until} was not reached within {steps}" if until else f"done: {steps}",
        "interrupted": f"interrupted after {steps}",
    }.get(str(run.reason), f"ended after {steps}")
    lines = [head, f"  rows    {out / 'rows.jsonl'}"]
    if run.reason == "failed":
        lines.append(f"  why     flowrl why {shlex.quote(str(out))}")
    if row and (out / "policy").is_dir():
        needs = code if "load(" in (out / "policy/policy.json").read_text(encoding="utf-8") else ()
        called = sys.argv[0] if os.sep in sys.argv[0] and not sys.argv[0].endswith("__main__.py") else "flowrl"
        called = os.path.relpath(called) if called != "flowrl" and not os.path.relpath(called).startswith("..") else called
        lines += [f"  policy  {out / 'policy'}", f"  try it  {shlex.join([called, 'eval', str(out), *(x for c in needs for x in ('--import', c))])}"]
    return "\n".join(lines)
