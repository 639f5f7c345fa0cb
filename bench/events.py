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
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import flowrl as fl
from flowrl.algos.tuned import tuned
from flowrl.core.events import OperatorRan, QueueLevel, Stream
from flowrl.core.items import steps_of
from flowrl.core.ledger import Ledger
from flowrl.graph.loop import Loop, Unit
from flowrl.graph.site import HereSite, Place
from flowrl.observe.progress import Progress
from flowrl.observe.sinks import EventLog

ROOT = Path(__file__).parents[1]
ITEMS, NODES, TURNS = 1_000, 10, 40
PAIRS, SECONDS = 6, 6.0


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

    def enter(self, unit: Unit, item: Any, source: str | None, rows: list[Any]) -> None:
        ledger, name = self.ledger, unit.name
        unit.ctx.source = source
        ledger.at.node = name
        items = unit.step(unit.state, item, unit.ctx)
        assert isinstance(items, Iterator)
        for out in items:
            if isinstance(out, fl.Row):
                rows.append(out)
            steps = steps_of(out)
            for edge, receiver in unit.downstream:
                ledger.put[edge] += 1
                ledger.put_steps[edge] += steps
                self.enter(receiver, out, name, rows)
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
    graph = fl.Graph("hops").then(s=Source(), **{f"p{i}": Pass() for i in range(NODES)})
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


def run(name: str, runtime: str, seeing: bool, seed: int) -> float:
    """Steps a second, from the tenth row on: by then all is compiled, for traced updates too."""
    settings = {"ppo": fl.PPOSettings, "impala": fl.IMPALASettings}[name](
        **tuned(name, "CartPole-v1")
    )
    graph = getattr(fl, name)("CartPole-v1", settings)
    with tempfile.TemporaryDirectory() as folder:
        out, more = Path(folder) / "run", {}
        if seeing:
            console = Console(file=io.StringIO(), force_terminal=True, width=120)
            observers = [
                Progress(console),
                fl.Csv(Path(folder) / "rows.csv"),
                fl.TensorBoard(Path(folder) / "board"),
            ]
            more = {
                "out": out,
                "observers": observers,
                "trace": Path(folder) / "trace.json",
                "record": fl.Record(every=50),
            }
        with fl.run(graph, runtime=runtime, seed=seed, **more) as going:
            first = [next(going) for _ in range(10)][-1]
            began = time.perf_counter()
            while time.perf_counter() - began < SECONDS:
                row = next(going)
            return (row["env_steps"] - first["env_steps"]) / (time.perf_counter() - began)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % interval by the bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return statistics.median(ratios), float(low), float(high)


def main() -> None:
    table = Progress(Console(file=io.StringIO(), force_terminal=True, width=120))
    kinds = {
        "a loop in which nothing can be seen": hops(Bare),
        "nobody listens": hops(Loop),
        "the table and the log (JSONL)": hops(Loop, [table, EventLog()]),
        "an observer of every advance": hops(Loop, [Counts()]),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(TURNS):
        for name, once in kinds.items():
            found[name].append(once())
    table.close()  # which gives standard output back
    bare = statistics.median(found["a loop in which nothing can be seen"])
    lines = [
        f"| {name} | {statistics.median(x):.2f} | {statistics.median(x) - bare:+.2f} |"
        for name, x in found.items()
    ]
    print("\n".join(lines), flush=True)
    whole = []
    for name, runtime in (("ppo", "local"), ("impala", "local"), ("ppo", "ray"), ("impala", "ray")):
        ratios = []
        for i in range(PAIRS):
            both = {
                seeing: run(name, runtime, seeing, i)
                for seeing in ((True, False) if i % 2 else (False, True))
            }
            ratios.append(both[True] / both[False])
            print(
                f"  {name}, {runtime}, pair {i + 1} of {PAIRS}: {both[True]:,.0f} and "
                f"{both[False]:,.0f}, ratio {ratios[-1]:.3f}",
                flush=True,
            )
        middle, low, high = interval(ratios)
        whole.append(f"| {name}, {runtime} | **{middle:.3f}** ({low:.3f} to {high:.3f}) |")
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

CartPole-v1 with tuned settings: with the table, the log, CSV, TensorBoard, a trace, a saved run and
a record of every 50th update, beside a run with none of it. Ratios of steps a second in {PAIRS}
pairs in turn, {SECONDS:.0f} s each: the median, and its 95 % bootstrap interval.

| | with all of it : without |
|---|---:|
{chr(10).join(whole)}
"""
    (ROOT / "docs/benchmarks/events.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
