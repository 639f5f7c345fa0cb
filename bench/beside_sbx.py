"""`make bench`: TD3, SAC and DQN beside SBX, which is JAX too, at the same networks and ratio.

Each measurement is a process of its own, and the two libraries take turns. Writes
docs/benchmarks/sbx.md.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SBX = ROOT / ".venv-sbx/bin/python"
PAIRS = 3
BEFORE, STEPS = 600, 2_000
"""Environment steps before the measurement, and within it."""
CASES = {"td3": (1, 8), "sac": (1, 8), "dqn": (4,)}
"""For each algorithm, environment steps between two calls that train."""
PROGRAMS = {"td3": 1, "sac": 1, "dqn": 4}
"""The environment steps between two updates, where the whole is measured as one XLA program."""
ENVS = {"td3": "Pendulum-v1", "sac": "Pendulum-v1", "dqn": "CartPole-v1"}
PAGE = """# Beside SBX

Written by `make bench` ([beside_sbx.py](../../bench/beside_sbx.py)). TD3 and SAC on Pendulum-v1
with one gradient step of 256 transitions for each environment step, and DQN on CartPole-v1 with one
of 32 transitions for every 4; one environment, and networks of 256 and 256 in both libraries.
SBX {version} trains by XLA, too. Both train in calls: one for so many environment steps, with as
many gradient steps in it (for DQN one). Environment steps a second over {steps:,} steps after the
first {before:,}, each in a process of its own, {pairs} times in turn, on {machine} with {cores}
cores: medians; ratios are those of runs beside each other, with their range.

| algorithm | steps between calls | flowrl | SBX | ratio |
|---|---:|---:|---:|---:|
{lines}

With the environments of gymnax flowrl is one XLA program (`--runtime xla`), which trains after so
many steps; SBX steps Gymnasium's, as above.

| algorithm | steps between updates | flowrl, one program | SBX | ratio |
|---|---:|---:|---:|---:|
{programs}
"""


def sbx(name: str, every: int) -> float:
    """Return environment steps a second of SBX."""
    import sbx as library

    common: dict[str, Any] = {"learning_starts": 200, "train_freq": every, "seed": 0}
    common["policy_kwargs"] = {"net_arch": [256, 256]}
    if name == "dqn":
        model = library.DQN("MlpPolicy", ENVS[name], batch_size=32, gradient_steps=1, **common)
    else:
        kind = {"td3": library.TD3, "sac": library.SAC}[name]
        common |= {"learning_rate": 1e-3, "batch_size": 256, "gradient_steps": every}
        model = kind("MlpPolicy", ENVS[name], **common)
    model.learn(BEFORE, log_interval=10**9)
    start = time.perf_counter()
    model.learn(STEPS, log_interval=10**9, reset_num_timesteps=False)
    return STEPS / (time.perf_counter() - start)


def flowrl(name: str, every: int, program: bool = False) -> float:
    """Return environment steps a second of flowrl, in the local runtime or as one program."""
    import flowrl as fl

    env = f"gymnax:{ENVS[name]}" if program else ENVS[name]
    # All rows of a larger chunk would come at the same time.
    runtime = fl.XlaRuntime(chunk=1) if program else "local"

    common: dict[str, Any] = {
        "learning_starts": 200,
        "rollout_length": every,
        "envs_per_runner": 1,
        "updates_per_step": 1 / every,
        "report_every": max(1, 100 // every),
    }
    if name == "dqn":
        graph = fl.dqn(env, hidden=(256, 256), batch_size=32, **common)
    else:
        makes: dict[str, Callable[..., Any]] = {"td3": fl.td3, "sac": fl.sac}
        graph = makes[name](env, lr=1e-3, batch_size=256 * every, **common)
        graph = graph.set("train.minibatch_size", 256)
    with fl.run(graph, runtime=runtime, steps=BEFORE + STEPS) as run:
        times = [(row["env_steps"], time.perf_counter()) for row in run]
    first, start = next(x for x in times if x[0] >= BEFORE)
    last, end = times[-1]
    return (last - first) / (end - start)


def measured(library: str, name: str, every: int) -> float:
    """Return what a process of one of the two libraries prints."""
    python = SBX if library == "sbx" else sys.executable
    command = [python, __file__, library, name, str(every)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return float(said.splitlines()[-1])


def line(ours_is: str, name: str, every: int) -> str:
    """Measure an algorithm in turn, and return its line of a table."""
    pairs = []
    for _ in range(PAIRS):
        pairs.append((measured(ours_is, name, every), measured("sbx", name, every)))
        print(f"  {name}, {every} steps, {ours_is}: {pairs[-1][0]:,.0f}, SBX {pairs[-1][1]:,.0f}")
    ours, theirs = (statistics.median(x) for x in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"| {name} | {every} | {ours:,.0f} | {theirs:,.0f} | {ratio} |"


def main() -> None:
    """Measure one of them, as the arguments say, or all in turn and write the page."""
    if sys.argv[1:]:
        library, name, every = sys.argv[1:]
        measure: dict[str, Callable[[str, int], float]] = {
            "sbx": sbx,
            "flowrl": flowrl,
            "program": partial(flowrl, program=True),
        }
        print(measure[library](name, int(every)))
        return
    lines = [line("flowrl", name, every) for name, sizes in CASES.items() for every in sizes]
    programs = [line("program", name, every) for name, every in PROGRAMS.items()]
    version = subprocess.run(
        [SBX, "-c", "import sbx; print(sbx.__version__)"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    page = PAGE.format(
        version=version, steps=STEPS, before=BEFORE, pairs=PAIRS, machine=platform.machine(),
        cores=os.cpu_count(), lines="\n".join(lines), programs="\n".join(programs),
    )  # fmt: skip
    (ROOT / "docs/benchmarks/sbx.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
