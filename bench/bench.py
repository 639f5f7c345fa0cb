"""`make bench`: flowrl beside a loop written by hand, in interleaved pairs.

Writes docs/benchmarks/local.md.

Nothing here is asserted: machines differ and are shared. Ratios of runs side by side are what
counts.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

import flowrl as fl
import handwritten
from flowrl.core.ledger import Ledger
from flowrl.core.xla_threads import computing
from flowrl.graph.loop import Loop
from flowrl.graph.site import HereSite, Place

ROOT = Path(__file__).parents[1]
PAIRS, UPDATES, SKIP = 9, 40, 5
SHOWN = (statistics.median, min, max)
STEPS = handwritten.ENVS * handwritten.STEPS


def flowrl_seconds(seed: int) -> list[float]:
    """The seconds of each update of the same algorithm in flowrl's local runtime."""
    h = handwritten
    settings = fl.PPOSettings(
        envs_per_runner=h.ENVS, rollout_length=h.STEPS, batch_size=STEPS, epochs=h.EPOCHS,
        minibatch_size=h.MINIBATCH, lr=h.LR, gamma=h.GAMMA,
        gae_lambda=h.LAM, clip_ratio=h.CLIP, value_clip=h.VALUE_CLIP, ent_coef=h.ENTROPY,
    )  # fmt: skip
    seconds = []
    with fl.run(fl.ppo("CartPole-v1", settings), seed=seed) as run:
        last = time.perf_counter()
        for _ in range(UPDATES):
            next(run)
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
    return seconds


def by_hand(seed: int, threads: int | None) -> list[float]:
    """The seconds of each update of the loop by hand with so many threads of XLA."""
    with computing(threads):
        return handwritten.train(seed, UPDATES)


def throughput() -> dict[str, list[float]]:
    """Steps per second of flowrl and of the loop by hand in turn, by the median update of a run."""
    runs: dict[str, Callable[[int], list[float]]] = {
        "flowrl, local runtime": flowrl_seconds,
        "by hand": partial(by_hand, threads=None),
        # The hand's best: flowrl's own client of XLA, which computes in the thread that calls.
        "by hand, as flowrl computes": partial(by_hand, threads=1),
    }
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(PAIRS):
        for name, run in runs.items():
            speeds[name].append(STEPS / statistics.median(run(turn)[SKIP:]))
        print(
            f"  {turn + 1} of {PAIRS}: "
            + ", ".join(f"{name} {x[-1]:,.0f}" for name, x in speeds.items()),
            flush=True,
        )
    return speeds


@dataclass(frozen=True)
class Nothing(fl.extend.Stateless):
    """Passes its item on: a hop and nothing else."""

    source = True

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item


def hop_microseconds(hops: int = 50, passes: int = 4_000) -> float:
    """What one node costs the stage loop."""
    nodes: dict[str, Any] = {f"n{i}": Nothing() for i in range(hops)}
    graph = fl.Graph("hops").then(**nodes)
    place = Place("hops", {}, 0, HereSite)
    loop = Loop("hops", graph.nodes, {}, place.site, Ledger())
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(passes):
            loop.run_pass()
        times.append((time.perf_counter() - start) / passes / hops)
    return 1e6 * statistics.median(times)


def wall(command: list[str], until: str | None = None) -> float:
    """Seconds until a command ends, or until it printed a line that begins with `until`."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stdout or ():
            if until is not None and line.startswith(until):
                seconds = time.perf_counter() - start
                process.kill()
                return seconds
    return time.perf_counter() - start


def median_of(measure: Callable[[], float], runs: int = 5) -> float:
    measure()
    return statistics.median(measure() for _ in range(runs))


def main() -> None:
    print("PPO on CartPole-v1, 32 environments x 128 steps, 10 epochs, minibatch 128")
    speeds = throughput()
    ours, *hands = speeds.values()
    lines = {name: [f"{f(x):,.0f}" for f in SHOWN] for name, x in speeds.items()}
    for name, theirs in zip(list(speeds)[1:], hands, strict=True):
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        lines[f"**flowrl : {name}**"] = [f"{f(ratios):.3f}" for f in SHOWN]
    python, module = sys.executable, [sys.executable, "-m", "flowrl"]
    out = ["run", "ppo", "--json", "--steps", "100_000", "--out"]
    rows = iter(range(100))

    def first_row() -> float:
        return wall(
            [
                *module,
                *out,
                f"{Path(os.environ.get('TMPDIR', '/tmp'))}/flowrl-bench-{os.getpid()}-{next(rows)}",
            ],
            until="{",
        )

    start_up = {
        "`import flowrl`": median_of(lambda: wall([python, "-c", "import flowrl"]))
        - median_of(lambda: wall([python, "-c", "pass"])),
        "`flowrl plan ppo`": median_of(lambda: wall([*module, "plan", "ppo"])),
        "first row of `flowrl run ppo`": median_of(first_row),
    }
    hop = hop_microseconds()
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax "
        f"{jax.__version__} on {jax.default_backend()}"
    )
    text = f"""# The local runtime beside a loop written by hand

Written by `make bench`: {machine}.

PPO on CartPole-v1, one process, 64-64 networks, 32 environments x 128 steps, 10 epochs, minibatch
128; the loop by hand is [bench/handwritten.py](../../bench/handwritten.py), with the same maths (a
test shows that one update from one batch gives the same parameters in both). {PAIRS} turns of
{UPDATES} updates each; of each run the median update counts, the first {SKIP} do not. The loop by
hand draws the noise for its actions at each step; flowrl draws a rollout's in one call. It shuffles
by `jax.random.permutation`, flowrl by sorts of single words. It computes with JAX's own threads, as
loops by hand do, and a second time as flowrl does here: in the one thread that calls.

| | steps/s, median | lowest | highest |
|---|---:|---:|---:|
{"".join(f"| {name} | {' | '.join(cells)} |" + chr(10) for name, cells in lines.items())}
The stage loop costs {hop:.2f} microseconds a hop (the median of 5 x 4,000 passes through 50 nodes
that only pass their item on).

| start-up, median of 5 | seconds |
|---|---:|
""" + "".join(f"| {name} | {seconds:.2g} |\n" for name, seconds in start_up.items())
    target = ROOT / "docs/benchmarks/local.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
