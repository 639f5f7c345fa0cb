"""`make bench`: what seeing costs: a hop of the loop with and without observers, and whole runs.

Writes docs/benchmarks/events.md.
"""

from __future__ import annotations

import io
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import flowrl as fl
from flowrl.algos.tuned import tuned
from flowrl.core.events import OperatorRan, QueueLevel, Stream
from flowrl.core.items import Tally, steps_of
from flowrl.core.ledger import Ledger
from flowrl.graph.loop import Loop, Unit
from flowrl.graph.site import HereSite, Place
from flowrl.observe.progress import Progress
from flowrl.observe.sinks import EventLog

ROOT = Path(__file__).parents[1]
ITEMS, NODES, TURNS = 1_000, 10, 40
SETS, TURNS_OF_RUNS, SECONDS = 5, 4, 1.5
NOTHING, _, TRACED, ALL = SEEN = (
    "nothing", "table and log", "table, log and trace", "all of it",
)  # fmt: skip


class Source(fl.extend.Stateless):
    source = True

    def step(self, state: None, item: Any, ctx: Any) -> Iterator[Any]:
        for _ in range(ITEMS):
            yield None


class Pass(fl.extend.Stateless):
    writes = ("nothing",)

    def step(self, state: None, item: Any, ctx: Any) -> Iterator[Any]:
        yield item


class Bare(Loop):
    """The loop as it would be if nothing could be seen."""

    def enter(self, unit: Unit, item: Any, source: str | None) -> None:
        ledger, name = self.ledger, unit.name
        unit.ctx.source = source
        ledger.at.node = name
        items = unit.step(unit.state, item, unit.ctx)
        assert isinstance(items, Iterator)
        for out in items:
            if isinstance(out, Tally):
                self.rows.append(out)
            steps = steps_of(out)
            for edge, receiver in unit.downstream:
                ledger.put[edge] += 1
                ledger.put_steps[edge] += steps
                self.enter(receiver, out, name)
                ledger.got[edge] += 1
                ledger.got_steps[edge] += steps
            ledger.at.node = name


class Counts:
    """An observer of what comes in masses."""

    kinds = (OperatorRan, QueueLevel)

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, event: Any) -> None:
        self.seen += 1


def hops(kind: type[Loop], observers: Sequence[Any] = ()) -> Callable[[], float]:
    """What measures the microseconds of a hop."""
    passes: dict[str, Any] = {f"p{i}": Pass() for i in range(NODES)}
    graph = fl.Graph("hops").then(s=Source(), **passes)
    stream = Stream(observers)
    loop = kind(
        "hops", graph.nodes, {}, Place("hops", {}, 0, HereSite, stream=stream).site, Ledger()
    )

    def once() -> float:
        start = time.perf_counter()
        loop.run_pass()
        passed = time.perf_counter() - start
        stream.close()  # what waits is taken, beside the loop
        return 1e6 * passed / (ITEMS * NODES)

    return once


def begun(name: str, runtime: str, seen: str, folder: Path, stack: ExitStack) -> Any:
    """A run that is beyond its tenth row: by then all is compiled, for traced updates too.

    Args:
        name: of the graph.
        runtime: on which it runs.
        seen: what is on: one of `SEEN`.
        folder: a new one for what it writes.
        stack: what ends the run.
    """
    settings = {"ppo": fl.PPOSettings, "impala": fl.IMPALASettings}[name](
        **tuned(name, "CartPole-v1")
    )
    graph = getattr(fl, name)("CartPole-v1", settings)
    more: dict[str, Any] = {}
    if seen != NOTHING:
        console = Console(file=io.StringIO(), force_terminal=True, width=120)
        log = EventLog()
        log.open(folder)
        more = {"observers": [Progress(console), log]}
    if seen in (TRACED, ALL):
        more["trace"] = folder / "trace.json"
    if seen == ALL:
        more["observers"] += [fl.Csv(folder / "rows.csv"), fl.TensorBoard(folder / "board")]
        more |= {"out": folder / "run", "record": fl.Record(every=50)}
    going = stack.enter_context(fl.run(graph, runtime=runtime, seed=0, **more))
    for _ in range(10):
        next(going)
    return going


def turn(going: Any) -> tuple[float, float]:
    """The steps of a run in its turn, and the seconds that they took."""
    began, steps = time.perf_counter(), going.counts()["trained_steps"]
    while time.perf_counter() - began < SECONDS:
        next(going)
    return going.counts()["trained_steps"] - steps, time.perf_counter() - began


def rates(name: str, runtime: str) -> list[float]:
    """The steps a second of one set of runs, one for each of `SEEN`, that go on in turn."""
    measured = np.zeros((len(SEEN), 2))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = []
        # What is traced is made last: clocks that are made meanwhile keep spans too.
        for number, seen in enumerate(SEEN):
            (folder / str(number)).mkdir()
            runs.append(begun(name, runtime, seen, folder / str(number), stack))
        for number in range(TURNS_OF_RUNS):
            # Each comes first, second, third and last equally often.
            for each in np.roll(range(len(SEEN)), number):
                measured[each] += turn(runs[each])
    return [float(rate) for rate in measured[:, 0] / measured[:, 1]]


def main() -> None:
    table = Progress(Console(file=io.StringIO(), force_terminal=True, width=120))
    kinds = {
        "a loop in which nothing can be seen": hops(Bare),
        "nobody listens": hops(Loop),
        "the table and the log (JSONL)": hops(Loop, [table, EventLog()]),
        "an observer of every advance": hops(Loop, [Counts()]),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    with closing(table):  # until then it has standard output, and the text of an error
        for _ in range(TURNS):
            for name, once in kinds.items():
                found[name].append(once())
    bare = statistics.median(found["a loop in which nothing can be seen"])
    lines = [
        f"| {name} | {statistics.median(x):.2f} | {statistics.median(x) - bare:+.2f} |"
        for name, x in found.items()
    ]
    print("\n".join(lines), flush=True)
    whole = []
    for name, runtime in (("ppo", "local"), ("impala", "local"), ("ppo", "ray"), ("impala", "ray")):
        ratios = []
        for number in range(SETS):
            nothing, *others = rates(name, runtime)
            ratios.append([other / nothing for other in others])
            text = ", ".join(f"{ratio:.3f}" for ratio in ratios[-1])
            print(f"  {name}, {runtime}, set {number + 1} of {SETS}: {text}", flush=True)
        cells = [
            f"**{np.median(each):.3f}** ({min(each):.3f} to {max(each):.3f})"
            for each in zip(*ratios, strict=True)
        ]
        whole.append(f"| {name}, {runtime} | {' | '.join(cells)} |")
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax "
        f"{jax.__version__}"
    )
    text = f"""# What seeing costs

Written by `make bench` ([bench/events.py](../../bench/events.py)): {machine}.

## A hop

Microseconds for an item to go through one node that only passes it on, in one process; the median
of {TURNS} turns of {ITEMS * NODES:,} hops each.

| | microseconds | more than without |
|---|---:|---:|
{chr(10).join(lines)}

Clocks by node are always on, and are all that the table, the report and `flowrl explain` need. An
observer of every advance takes its events in a thread of its own; what it can't take in time is
dropped, counted and logged.

## Whole runs

CartPole-v1 with tuned settings: runs with the table and the log (JSONL), with a trace too, and with
all there is: CSV, TensorBoard, a saved run and a record of every 50th update as well. Each is
beside a run with none of it. The four are alive at the same time and go on in turn, {SECONDS:g} s
each, {TURNS_OF_RUNS} times; the ratios are those of their steps a second. The median of {SETS} such
sets, and their range: two runs of the same settings differ by up to 3 %, however long they go on.

| | {" | ".join(f"{seen} : nothing" for seen in SEEN[1:])} |
|---|---:|---:|---:|
{chr(10).join(whole)}
"""
    (ROOT / "docs/benchmarks/events.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
