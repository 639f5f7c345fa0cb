"""`make bench`: how long a run takes to its first row, and what another learning rate costs.

Writes docs/benchmarks/starting.md.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

import flowrl as fl

ROOT = Path(__file__).parents[1]
TURNS = 5
GRAPHS = ("ppo", "impala", "dqn")
PROGRAM = "gymnax:CartPole-v1"
"""The environment of the one XLA program."""
XLA = ("--runtime", "xla", "--untuned", "--env")
PROGRAMS = {
    "ppo": ("ppo", *XLA, PROGRAM),
    "dqn": ("dqn", *XLA, PROGRAM),
    "sac": ("sac", *XLA, "gymnax:Pendulum-v1"),
    "sac, 16 environments": ("sac", *XLA, "gymnax:Pendulum-v1", "--set", "envs_per_runner=16"),
}
RATES = (1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5)


def seconds_to_row(number: int, home: str, *run: str) -> float:
    """The seconds of `flowrl run` until a row is printed, with a home directory."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    command = [sys.executable, "-m", "flowrl", "run", *run, "--json"]
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--out", f"{home}/run-{time.time_ns()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**env, "HOME": home, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(number):
            json.loads(process.stdout.readline())
        seconds = time.perf_counter() - began
        process.terminate()
        process.communicate()
    return seconds


def resident() -> float:
    """The memory of this process in MB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20


def rates(
    graph: str, env: str = "CartPole-v1", runtime: str = "local"
) -> list[tuple[float, float]]:
    """By learning rate, the seconds to the first row in one process, and the MB that it added."""
    found = []
    for rate in RATES:
        before, began = resident(), time.perf_counter()
        flow = getattr(fl, graph)(env).set("learner.optimizer.lr", rate)
        with fl.run(flow, runtime=runtime) as run:
            next(run)
        found.append((time.perf_counter() - began, resident() - before))
    return found


def table(runs: dict[str, tuple[str, ...]], row: int) -> list[str]:
    """A table of the seconds of each run to a row, in a first and in a second process."""
    lines = ["| | first process | second process |", "|---|---:|---:|"]
    for name, run in runs.items():
        first, second = [], []
        for _ in range(TURNS):
            with tempfile.TemporaryDirectory() as home:
                first.append(seconds_to_row(row, home, *run))
                second.append(seconds_to_row(row, home, *run))
        medians = statistics.median(first), statistics.median(second)
        lines.append(f"| {name} | {medians[0]:.1f} s | **{medians[1]:.1f} s** |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    lines = table({graph: (graph, "--env", "CartPole-v1") for graph in GRAPHS}, 1)
    programs = table(PROGRAMS, 3)
    more = [
        "| | first learning rate | another one | memory for another one |",
        "|---|---:|---:|---:|",
    ]
    measured = {graph: rates(graph) for graph in GRAPHS}
    measured["ppo, one XLA program"] = rates("ppo", PROGRAM, "xla")
    for name, ((alone, _), *others) in measured.items():
        seconds = statistics.median(each for each, _ in others)
        memory = statistics.median(each for _, each in others)
        more.append(f"| {name} | {alone:.2f} s | **{seconds:.2f} s** | {memory:.1f} MB |")
        print(more[-1], flush=True)
    about = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    text = f"""# Starting

Written by `make bench` ([bench/starting.py](../../bench/starting.py)): {about},
jax {jax.__version__}.

## In a new process

From `flowrl run GRAPH --env CartPole-v1` to its first row: in a home directory in which nothing was
compiled before, and in the same one once more. Medians of {TURNS}.

{chr(10).join(lines)}

## One XLA program in a new process

To its third row, before which the program was compiled. A row is what `Report` of the graph says:
200 updates for sac.

{chr(10).join(programs)}

## Another learning rate in the same process

From `fl.run` to the first row in a process whose functions others compiled before, and what it
grew by. Medians of {len(RATES) - 1} further
learning rates, for none of which anything is compiled. The XLA program is that of {PROGRAM}.

{chr(10).join(more)}
"""
    (ROOT / "docs/benchmarks/starting.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
