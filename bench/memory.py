"""`make bench`: how a process grows with runs of different settings.

The exit status is 1 if the last 90 of 100 runs take 300 MB or more.

The decay of Adam's moving average is a constant of the compiled update, so each run compiles
functions of its own; what the newest few runs compiled is kept for others like them, and the rest
is released. Other graphs: `python bench/memory.py dqn`, `python bench/memory.py ppo xla`.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import flowrl as fl
from flowrl.core.xla_threads import clients

RUNS = 100
WARM = 10
LIMIT = 300.0
"""Megabytes that the runs after the first ones may take."""


def resident() -> float:
    """The memory of this process in MB, without what the allocator could return."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20


def main(name: str = "ppo", runtime: str = "local", runs: int = RUNS) -> int:
    """Run a graph with one decay after another."""
    env = "gymnax:CartPole-v1" if runtime == "xla" else "CartPole-v1"
    after = 0.0
    for number in range(runs):
        graph = getattr(fl, name)(env).set("learner.optimizer.b1", 0.9 - 1e-4 * number)
        with fl.run(graph, runtime=runtime, seed=number) as run:
            while not next(run)["updates"]:
                pass
        del run
        now = resident()
        if number + 1 == min(WARM, runs - 1):
            after = now
        programs = sum(len(client.live_executables()) for client in clients())
        print(f"run {number + 1:>3}: {now:,.0f} MB, {programs} compiled functions", flush=True)
    grown = now - after
    print(f"{name}, {runtime}: {grown:+,.0f} MB over the last {runs - min(WARM, runs - 1)} runs")
    return int(grown >= LIMIT)


if __name__ == "__main__":
    words: list[Any] = [*sys.argv[1:3], *map(int, sys.argv[3:])]
    sys.exit(main(*words))
