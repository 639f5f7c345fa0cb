"""`make bench`: what flowrl predicts of six changes, and what they then bring.

Writes docs/benchmarks/what_if.md.

The graphs sleep where they are slow, so that the machine is not what limits them. The predictions
come from one run of the graph as it is.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import jax  # noqa: E402

import flowrl as fl  # noqa: E402
import planted  # noqa: E402
from flowrl.observe.explain import Explanation  # noqa: E402

SECONDS = 12.0
CASES = [
    (
        "impala, steps of 4 ms",
        lambda: planted.impala(0.004),
        "one more runner",
        lambda g: g.set("runners.num_runners", 3),
    ),
    (
        "impala, steps of 4 ms",
        lambda: planted.impala(0.004),
        "twice the environments",
        lambda g: g.set("runners.envs_per_runner", 4),
    ),
    (
        "ppo, steps of 4 ms",
        lambda: planted.ppo(0.004),
        "one more runner",
        lambda g: g.set("runners.num_runners", 3).set("batch.batch_size", 60),
    ),
    (
        "ppo, steps of 4 ms",
        lambda: planted.ppo(0.004),
        "twice the environments",
        lambda g: g.set("runners.envs_per_runner", 4).set("batch.batch_size", 80),
    ),
    (
        "impala, a sync of 50 ms",
        planted.slow_sync,
        "twice the batch",
        lambda g: g.set("batch.batch_size", 80),
    ),
    (
        "impala, a gradient step of 50 ms",
        planted.slow_loss_in_minibatches,
        "twice the batch",
        lambda g: g.set("batch.batch_size", 80),
    ),
]
"""Graph, change, and the graph with it."""


def measured(graph: fl.Graph) -> Explanation:
    """How fast it is once it is compiled."""
    with fl.run(graph, runtime="ray") as run:
        next(run)
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            next(run)
    return run.explain()


def main() -> None:
    lines, before = [], {}
    for name, build, change, edit in CASES:
        if name not in before:
            before[name] = measured(build())
        base = before[name]
        predicted = next(w.steps_per_second for w in base.what_if if w.change.startswith(change))
        got = measured(edit(build())).steps_per_second
        forecast = "none" if predicted is None else f"{predicted:,.0f}"
        off = float("nan") if predicted is None else predicted / got - 1
        lines.append(
            f"| {name} | {change} | {base.steps_per_second:,.0f} | {forecast} | {got:,.0f} | "
            f"{off:+.1%} |"
        )
        print(lines[-1], flush=True)
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax "
        f"{jax.__version__}"
    )
    text = f"""# What if

Written by `make bench` ([bench/what_if.py](../../bench/what_if.py)): {machine}.

`flowrl explain` predicts what three changes would bring, by the service times that a run measured.
Here are six predictions and what was then measured, in environment steps a second; the graphs sleep
where they are slow, so that the cores are not what limits them. {SECONDS:.0f} s each.

| graph | change | before | predicted | measured | off by |
|---|---|---:|---:|---:|---:|
""" + "\n".join(lines)
    (ROOT / "docs/benchmarks/what_if.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
