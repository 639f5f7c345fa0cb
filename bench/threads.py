"""`make bench`: one thread of XLA, and one a core. Writes docs/benchmarks/threads.md.

Both are taken in turn in one process, so that what differs is the number alone.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import flowrl as fl
from flowrl.core.machine import usable_cores
from flowrl.core.xla_threads import LARGE
from flowrl.graph.graph import Graph

TARGET = Path(__file__).parents[1] / "docs/benchmarks/threads.md"
TURNS, SECONDS = 5, 4.0

WIDE = (256, 256)
OFF: dict[str, Any] = {"envs_per_runner": 1, "report_every": 20}
SAC: dict[str, Any] = {
    **OFF,
    "rollout_length": 1,
    "batch_size": 256,
    "updates_per_step": 1,
    "learning_starts": 300,
}
DQN: dict[str, Any] = {
    **OFF,
    "hidden": WIDE,
    "rollout_length": 4,
    "updates_per_step": 0.25,
    "learning_starts": 300,
}
CASES: dict[str, tuple[str, Graph]] = {
    "ppo": ("local", fl.ppo("CartPole-v1")),
    "ppo, minibatches of 1,024": (
        "local",
        fl.ppo("CartPole-v1", envs_per_runner=32, batch_size=4096, minibatch_size=1024),
    ),
    "ppo, 256-256, minibatches of 1,024": (
        "local",
        fl.ppo(
            "CartPole-v1",
            envs_per_runner=32,
            batch_size=4096,
            minibatch_size=1024,
            policy=fl.Policy(fl.networks.MLP, hidden=WIDE),
        ),
    ),
    "impala": ("local", fl.impala("CartPole-v1")),
    "dqn, 256-256, 32 transitions": ("local", fl.dqn("CartPole-v1", batch_size=32, **DQN)),
    "dqn, 256-256, 256 transitions": ("local", fl.dqn("CartPole-v1", batch_size=256, **DQN)),
    "sac, 256-256, 256 transitions": ("local", fl.sac("Pendulum-v1", **SAC)),
    "ppo, 4 environments": ("xla", fl.ppo("gymnax:CartPole-v1", envs_per_runner=4)),
    "ppo, 256 environments": (
        "xla",
        fl.ppo("gymnax:CartPole-v1", envs_per_runner=256, batch_size=32_768, minibatch_size=8_192),
    ),
    "impala ": ("xla", fl.impala("gymnax:CartPole-v1")),
    "dqn, 256-256, 32 transitions ": (
        "xla",
        fl.dqn("gymnax:CartPole-v1", batch_size=32, **DQN),
    ),
    "sac, 256-256, 256 transitions ": ("xla", fl.sac("gymnax:Pendulum-v1", **SAC)),
}
"""By name: the runtime and the graph."""
RUNTIMES = {"local": fl.LocalRuntime, "xla": fl.XlaRuntime}


def speed(graph: Graph, runtime: str, threads: int) -> float:
    """Environment steps a second, from the third row on."""
    with fl.run(graph, runtime=RUNTIMES[runtime](threads=threads)) as run:
        rows = [next(run) for _ in range(3)]
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            rows.append(next(run))
        return (rows[-1]["env_steps"] - rows[2]["env_steps"]) / (time.perf_counter() - began)


def measured(name: str) -> str:
    """Measure a case, and return its line of the table."""
    runtime, graph = CASES[name]
    cores = usable_cores()
    speeds: dict[int, list[float]] = {1: [], cores: []}
    for turn in range(TURNS + 1):
        for threads, found in speeds.items():
            rate = speed(graph, runtime, threads)
            # The first turn compiles.
            if turn:
                found.append(rate)
    plan = graph.compile()
    medians = {threads: statistics.median(found) for threads, found in speeds.items()}
    number = plan.threads or cores
    ratios = [a / b for a, b in zip(speeds[1], speeds[cores], strict=True)]
    line = (
        f"| {name.strip()} | {runtime} | {plan.operations / 1e6:,.1f} | {medians[1]:,.0f} | "
        f"{medians[cores]:,.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}) | {number} | {medians[number] / max(medians.values()):.2f} |"
    )
    print(line, flush=True)
    return line


def main(names: Iterable[str]) -> None:
    """Measure all cases, or some, and write the page if it is all."""
    chosen = list(names)
    lines = [measured(name) for name in chosen or CASES]
    if not chosen:
        TARGET.write_text(page(lines), encoding="utf-8")


def page(lines: list[str]) -> str:
    cores = usable_cores()
    head = f"| graph | runtime | million operations | 1 thread | {cores} threads | 1 : {cores} |"
    return f"""# Threads of XLA

Written by `make bench` ([bench/threads.py](../../bench/threads.py)): {cores} cores
({platform.machine()}), Python {platform.python_version()}, jax {jax.__version__}.

XLA hands even small operations to a pool of as many threads as there are cores, and waits for the
slowest. A run whose gradient steps have fewer than {LARGE / 1e6:,.0f} million operations gets one
thread: those are six times the network's parameters and the rows of a minibatch. `threads=` of a
runtime overrides it. Environment steps a second, {TURNS} turns of {SECONDS:g} s each in one
process: medians, and the ratios of neighbours with their range. "Of the best" is the median of what
is chosen, of the better median.

{head} chosen | of the best |
|---|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    main(sys.argv[1:])
