"""`make since COMMIT=...`: whether flowrl became slower than it was at an earlier commit.

Both are measured on this machine in turn, each run in a process of its own, so that a page of
docs/benchmarks that another machine wrote says nothing here. Writes docs/benchmarks/since.md.

Names of cases after the commit (`bench/since.py COMMIT 'es, gymnax'`) measure those only, in more
turns; the page keeps its other lines, and is left as it is if it is beside another commit.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flowrl as fl

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs/benchmarks/since.md"
TURNS, MORE_TURNS, SECONDS, ROWS = 3, 9, 4.0, 3
"""Turns, those of named cases, seconds of one, and rows before it, in which JAX compiles."""
MEASURE = "--measure"
OFF: dict[str, Any] = {
    "envs_per_runner": 1,
    "rollout_length": 1,
    "learning_starts": 300,
    "report_every": 20,
}
STEPS: dict[str, Any] = {"updates_per_step": 1, "batch_size": 256}
WIDE: dict[str, Any] = {
    "hidden": (256, 256),
    "rollout_length": 4,
    "updates_per_step": 0.25,
    "batch_size": 32,
}
EARLY: dict[str, Any] = {"learning_starts": 300, "report_every": 20}
BROAD: dict[str, Any] = {"envs_per_runner": 256, "batch_size": 32_768, "minibatch_size": 8_192}
CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "ppo, CartPole": ("local", lambda: fl.ppo("CartPole-v1")),
    "impala, CartPole": ("local", lambda: fl.impala("CartPole-v1")),
    "dqn, 256-256": ("local", lambda: fl.dqn("CartPole-v1", **{**OFF, **WIDE})),
    "td3, 256-256": ("local", lambda: fl.td3("Pendulum-v1", **OFF, **STEPS)),
    "sac, 256-256": ("local", lambda: fl.sac("Pendulum-v1", **OFF, **STEPS)),
    "rainbow, CartPole": ("local", lambda: fl.rainbow("CartPole-v1", **EARLY)),
    "ppo, 4 environments": ("xla", lambda: fl.ppo("gymnax:CartPole-v1", envs_per_runner=4)),
    "ppo, 256 environments": ("xla", lambda: fl.ppo("gymnax:CartPole-v1", **BROAD)),
    "impala, gymnax": ("xla", lambda: fl.impala("gymnax:CartPole-v1")),
    "es, gymnax": ("xla", lambda: fl.es("gymnax:CartPole-v1")),
    "td3, 256-256, gymnax": ("xla", lambda: fl.td3("gymnax:Pendulum-v1", **OFF, **STEPS)),
    "sac, 256-256, gymnax": ("xla", lambda: fl.sac("gymnax:Pendulum-v1", **OFF, **STEPS)),
    "dqn, 256-256, gymnax": ("xla", lambda: fl.dqn("gymnax:CartPole-v1", **{**OFF, **WIDE})),
    "rainbow, gymnax": ("xla", lambda: fl.rainbow("gymnax:CartPole-v1", **EARLY)),
    "apex, 2 runners": ("ray", lambda: fl.apex("CartPole-v1", num_runners=2, **EARLY)),
    "impala, 2 runners": ("ray", lambda: fl.impala("CartPole-v1", num_runners=2)),
}
"""By name: the runtime and the graph."""


def speed(name: str) -> float:
    """Return the environment steps a second of a case, once it is compiled."""
    runtime, graph = CASES[name]
    with fl.run(graph(), runtime=runtime) as run:
        for _ in range(ROWS):
            row = next(run)
        first, began = row["env_steps"], time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            row = next(run)
        return (row["env_steps"] - first) / (time.perf_counter() - began)


def measured_at(tree: Path, name: str) -> float:
    """Measure a case in a process with the flowrl of a tree."""
    command = [sys.executable, str(Path(__file__)), MEASURE, name]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    # A warning of one of the two commits is no reason to measure neither.
    done = subprocess.run(
        command, check=False, env=env, cwd=tree, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{name} in {tree}:\n{done.stderr[-2_000:]}")
    return float(done.stdout.split()[-1])


def line(tree: Path, name: str, turns: int) -> str:
    """Measure a case at both commits in turn, and return its line of the table."""
    pairs: list[tuple[float, float]] = []
    for turn in range(turns):
        # The two take turns at being first, too: a machine that slows down favours neither.
        order = (tree, ROOT) if turn % 2 else (ROOT, tree)
        found = {place: measured_at(place, name) for place in order}
        pairs.append((found[tree], found[ROOT]))
    before, now = (statistics.median(x) for x in zip(*pairs, strict=True))
    ratios = sorted(now / before for before, now in pairs)
    text = (
        f"| {name} | {CASES[name][0]} | {turns} | {before:,.0f} | {now:,.0f} | "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
    )
    print(text, flush=True)
    return text


def page(commit: str, lines: Sequence[str]) -> str:
    """Return the page as text."""
    return f"""# Beside an earlier commit

Written by `make since COMMIT={commit}` ([since.py](../../bench/since.py)): {os.cpu_count()} cores
({platform.machine()}), Python {platform.python_version()}. Machines differ more than commits do, so
the flowrl of commit {commit} and that of today take turns on one, each run in a process of its own:
environment steps a second over {SECONDS:g} s in each turn, after the first {ROWS} rows. Medians;
ratios are those of runs beside each other, with their range. Lines with more turns were measured
again later. The other pages are by `make bench`, which may have run on another machine.

| graph | runtime | turns | then | now | now : then |
|---|---|---:|---:|---:|---:|
{chr(10).join(lines)}
"""


def main(args: Sequence[str]) -> None:
    """Measure a case, or all or some cases beside a commit."""
    if args[:1] == [MEASURE]:
        print(speed(args[1]))
        return
    commit, *names = args
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "flowrl"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), commit], check=True)
        try:
            turns = MORE_TURNS if names else TURNS
            lines = {name: line(tree, name, turns) for name in names or CASES}
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    kept = lines_of(commit)
    if names and not kept:
        return
    lines = {**kept, **lines}
    TARGET.write_text(page(commit, [lines[x] for x in CASES if x in lines]), encoding="utf-8")


def lines_of(commit: str) -> dict[str, str]:
    """Return the lines of the page by case, if it is beside this commit."""
    text = TARGET.read_text(encoding="utf-8")
    found = {x.split(" | ")[0][2:]: x for x in text.splitlines()}
    return {x: found[x] for x in CASES if x in found} if f"COMMIT={commit}`" in text else {}


if __name__ == "__main__":
    main(sys.argv[1:])
