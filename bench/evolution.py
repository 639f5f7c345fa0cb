"""`make bench`: evolution strategies on gymnax's CartPole as one XLA program, and on Ray actors.

Both run the stock graph `es`, and begin with the same policy, which balances the pole; on Ray the
runners share the pairs, as many runners as cores. Environment steps a second over so many seconds
count, and of three times the median. Writes docs/benchmarks/evolution.md.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax

import flowrl as fl

ROOT = Path(__file__).parents[1]
SECONDS, TIMES, GOAL = 20.0, 3, 10.0
SIZES = (20, 200)
"""Pairs of an update; the first are those of the stock graph, to which the gate applies."""


def graph(pairs: int, runners: int) -> fl.Graph:
    """The stock graph, whose runners play all episodes of their pairs side by side."""
    return fl.es("gymnax:CartPole-v1", pairs=pairs, num_runners=runners, envs_per_runner=pairs)


def teacher() -> fl.TrainedPolicy:
    """Train the policy that all of them begin with."""
    # Episodes of a policy that has not learned are short: they cost rounds, not steps.
    with fl.run(
        graph(SIZES[0], 1), runtime="xla", until=lambda row: row["return_mean"] >= 450, seed=0
    ) as run:
        list(run)
    return run.policy


def speed(plan: fl.Graph, runtime: str, seed: int, first: fl.TrainedPolicy) -> float:
    """Environment steps a second after the first row."""
    with fl.run(plan, runtime=runtime, seed=seed, init=first) as run:
        begun, start = next(run), time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            last = next(run)
        # By the rows' own times, for a program closes many of them at once.
        return float(
            (last["env_steps"] - begun["env_steps"]) / (last["seconds"] - begun["seconds"])
        )


def main() -> int:
    cores = os.cpu_count() or 1
    lines, ratios, first = [], [], teacher()
    for pairs in SIZES:
        found: dict[str, list[float]] = {"xla": [], "ray": []}
        for seed in range(TIMES):
            for runtime, speeds in found.items():
                plan = graph(pairs, cores if runtime == "ray" else 1)
                speeds.append(speed(plan, runtime, seed, first))
                print(f"  {pairs} pairs, {runtime}: {speeds[-1]:,.0f} steps/s", flush=True)
        xla, ray = (statistics.median(found[name]) for name in ("xla", "ray"))
        ratios.append(xla / ray)
        lines.append(f"| {pairs} | {xla:,.0f} | {ray:,.0f} | {xla / ray:.1f} |")
    write(lines, cores)
    print(f"with {SIZES[0]} pairs the program is {ratios[0]:.1f} times as fast (gate: {GOAL:g})")
    return int(ratios[0] < GOAL)


def write(lines: list[str], cores: int) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    text = f"""# Evolution strategies

Written by `make bench` ([bench/evolution.py](../../bench/evolution.py)): environment steps a second
of `fl.es` on gymnax's CartPole, from a policy on that plays for 450 steps: as one XLA program, and
with {cores} runners on Ray. The median of {TIMES} runs of {SECONDS:g} s, at commit {commit}, on
{cores} cores of {platform.machine()}, with Python {platform.python_version()} and JAX
{jax.__version__}.

| pairs | one program | Ray | ratio |
|---:|---:|---:|---:|
"""
    target = ROOT / "docs/benchmarks/evolution.md"
    target.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
