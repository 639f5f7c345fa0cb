"""`make bench`: the XLA runtime beside one `lax.scan` written by hand.

Writes docs/benchmarks/xla.md, or for a GPU xla-DEVICE.md.

Both programs are compiled once; then so many updates of each are run in turn, and the median of the
pairs' ratios counts.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Both compile each time: neither reads JAX's cache on disk.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax

import flowrl as fl
import handwritten as h
import handwritten_scan as scan
from flowrl.core.clock import by_kind
from flowrl.core.machine import usable_cores
from flowrl.core.profile import from_text
from flowrl.core.xla_threads import computing

ROOT = Path(__file__).parents[1]
CPU = jax.default_backend() == "cpu"
PAIRS = 15 if CPU else 7
SIZES = {4: 300, 256: 10, 2048: 2} if CPU else {256: 50, 4096: 50, 65536: 10}
"""Environments, and the updates of one measurement."""
THREADS: tuple[int | None, ...] = (1, None) if CPU else (None,)
"""The numbers of XLA's threads with which the scan by hand runs; None: JAX's own."""
CHUNKED = 600 if CPU else 100
"""Rows of a long chunk."""
TRIED = """
What was tried with the scan by hand on 2 cores (AMD, AVX2), beside the scan as it is:

| what, with 4 environments | speed |
|---|---:|
| layers of 2 to 4 outputs one by one, which flowrl does (with 256 environments 1.06) | 1.05 |
| XLA without its concurrent scheduler, or with that for memory | 1.00 / 0.98 |
| vectors of 128 bits | 0.99 |
| without XNNPACK | 1.01 |
| without XLA's fusions for YNNPACK | 0.80 |
| without its newer code for fusions | 0.68 |

A first layer of few inputs as a sum of products of columns acts up to 1.5 times as fast, but with
its gradient takes 1.1 to 2 times as long with up to 4 inputs, and up to 7 times with 24.
Weights' gradients of rows that were transposed first took 0.8 to 1.6 times as long, those of SAC
(256 rows, 256-256) 0.85 to 0.95 times with two threads.

What was tried with the noise of `rainbow` as a program, which took half of its time, beside a draw
of each row by JAX's default generator (threefry):

| what | speed |
|---|---:|
| Philox; XLA makes the noise again for each of its four uses and more | 1.14 |
| Philox in a loop of two steps, which makes it once (what flowrl does) | 1.58 |
| threefry in such a loop, with one word of its two / with both | 1.13 / 1.31 |
| an `optimization_barrier`, which XLA drops before it fuses: threefry / Philox | 1.04 / 1.13 |
| numbers from no generator at all | 2.2 |
"""
"""Said on the page of CPUs, for whoever looks for more."""


def graph(envs: int) -> fl.Graph:
    """The same algorithm in flowrl."""
    n = envs * scan.STEPS
    settings = fl.PPOSettings(
        envs_per_runner=envs, rollout_length=scan.STEPS, batch_size=n, epochs=scan.EPOCHS,
        minibatch_size=n // scan.MINIBATCHES, lr=h.LR, gamma=h.GAMMA,
        gae_lambda=h.LAM, clip_ratio=h.CLIP, value_clip=h.VALUE_CLIP, ent_coef=h.ENTROPY,
    )  # fmt: skip
    return fl.ppo("gymnax:CartPole-v1", settings)


def side_by_side(envs: int, updates: int) -> dict[str, Any]:
    """Steps a second of both, rows included, and the seconds that each takes to be ready."""
    hand, hand_ready = {}, []
    for threads in THREADS:
        start = time.perf_counter()
        with computing(threads):
            hand[threads] = jax.jit(scan.make(envs, updates)).lower(0).compile()
        hand_ready.append(time.perf_counter() - start)
    plan = graph(envs).compile()
    start = time.perf_counter()
    with fl.run(plan, runtime=fl.XlaRuntime(chunk=updates)) as run:
        next(run)
        ready = by_kind(run.profile().processes["this process"])["start"]
        ours: list[float] = []
        theirs: dict[int | None, list[float]] = {threads: [] for threads in THREADS}
        while run._session.pending_rows:
            next(run)
        for pair in range(PAIRS):
            start = time.perf_counter()
            for _ in range(updates):
                next(run)
            ours.append(time.perf_counter() - start)
            for threads, program in hand.items():
                start = time.perf_counter()
                with computing(threads):
                    jax.device_get(program(pair)[1])
                theirs[threads].append(time.perf_counter() - start)
    steps = updates * envs * scan.STEPS
    best = min(theirs, key=lambda threads: statistics.median(theirs[threads]))
    ratios = [b / a for a, b in zip(ours, theirs[best], strict=True)]
    print(
        f"  {envs:,} environments: ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f})",
        flush=True,
    )
    return {
        "envs": envs,
        "ours": steps / statistics.median(ours),
        "hand": steps / statistics.median(theirs[best]),
        "threads": best or usable_cores(),
        "ratios": ratios,
        "ready": ready,
        # What it compiled first serves the other number of threads, too.
        "hand_ready": hand_ready[0],
    }


def many_seeds(seeds: int = 32, steps: int = 500_000) -> tuple[float, float, float, float]:
    """Seconds of a command that runs many seeds, and of one that runs one.

    Of each all of it, and without what comes before the first chunk.
    """
    found = []
    for extra in ([], ["--seeds", str(seeds)]):
        out = ROOT / f"runs/bench-{os.getpid()}-{len(extra)}"
        command = [
            sys.executable,
            "-m",
            "flowrl",
            "run",
            "ppo",
            "--env",
            "gymnax:CartPole-v1",
            "--runtime",
            "xla",
            "--steps",
            str(steps),
            "--out",
            str(out),
        ]
        start = time.perf_counter()
        subprocess.run([*command, *extra], cwd=ROOT, check=True, capture_output=True)
        whole = time.perf_counter() - start
        profile, _ = from_text((out / "profile.json").read_text())
        found += [whole, by_kind(profile.processes["this process"])["update"]]
    return found[0], found[1], found[2], found[3]


def chunking(envs: int, rows: int) -> float:
    """What chunks of the chosen size cost beside one of the whole run.

    The median of the pairs' ratios, less one.
    """
    plan, ratios = graph(envs).compile(), []
    sessions = [fl.run(plan, runtime=fl.XlaRuntime(chunk=chunk)) for chunk in (rows, None)]
    for run in sessions:
        next(run)
        while run._session.pending_rows or run.rows[-1]["row"] < rows:
            next(run)
    for _ in range(PAIRS):
        times = []
        for run in sessions:
            start, before = time.perf_counter(), len(run.rows)
            while len(run.rows) - before < rows or run._session.pending_rows:
                next(run)
            times.append((time.perf_counter() - start) / (len(run.rows) - before))
        ratios.append(times[1] / times[0])
    for run in sessions:
        run.close()
    return statistics.median(ratios) - 1


def main() -> None:
    device = jax.devices()[0].device_kind
    print(f"PPO on gymnax CartPole-v1 as one program, on {device}")
    found = [side_by_side(envs, updates) for envs, updates in SIZES.items()]
    chunks = chunking(min(SIZES), CHUNKED)
    print(f"  chunks cost {chunks:+.1%}", flush=True)
    one, one_update, many, many_update = many_seeds()
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax "
        f"{jax.__version__} on {device}"
    )
    # With a GPU there is no choice of threads.
    by_threads = len(THREADS) > 1
    threads = [f"{f['threads']} | " if by_threads else "" for f in found]
    lines = [
        f"| {f['envs']:,} | {f['ours']:,.0f} | {f['hand']:,.0f} | {number}"
        f"**{statistics.median(f['ratios']):.3f}** ({min(f['ratios']):.3f} to "
        f"{max(f['ratios']):.3f}) "
        f"| {f['ready']:.1f} | {f['hand_ready']:.1f} | {f['ready'] / f['hand_ready']:.2f} |"
        for f, number in zip(found, threads, strict=True)
    ]
    column, choice = "", ""
    if by_threads:
        column = "its threads | "
        choice = (
            "\nThe scan runs with one thread of XLA and with one a core, and the faster counts."
        )
    text = f"""# The XLA runtime beside one `lax.scan` written by hand

Written by `make bench`: {machine}.

PPO on gymnax CartPole-v1, 64-64 networks, {scan.STEPS} steps an environment and update,
{scan.EPOCHS} epochs of {scan.MINIBATCHES} minibatches. By hand:
[bench/handwritten_scan.py](../../bench/handwritten_scan.py), the same maths in one scan over all
updates, which reports the loss and the mean return of each; it shuffles by `jax.random.permutation`
and resets every environment in every step. flowrl gives its Rows, in chunks of as many updates as
one measurement has.{choice}
{PAIRS} pairs in turn; the ratio is the pairs' median, lowest and highest. "Ready": the seconds from
`fl.run(plan)` to the first chunk, and those in which `jax.jit` traces and compiles the scan.
Nothing here comes from JAX's cache on disk.

| environments | flowrl, steps/s | by hand, steps/s | {column}ratio \
| flowrl ready, s | by hand ready, s | ratio |
|---:|---:|---:|---:|---:|---:|---:|{column and "---:|"}
{chr(10).join(lines)}

Chunks of the size that flowrl chooses cost {chunks:+.1%} beside chunks of {CHUNKED} rows
({min(SIZES)} environments; median of {PAIRS} pairs).

32 seeds of `flowrl run ppo --env gymnax:CartPole-v1 --runtime xla --steps 500_000` at once
(`--seeds 32`): {many:.1f} s as a command, of which {many_update:.1f} s without starting and
compiling. One seed: {one:.1f} s and {one_update:.1f} s, so 32 commands one after another take
{32 * one / many:.1f} times as long, and {32 * one_update / many_update:.2f} times as long without
starting and compiling.
{TRIED if CPU else ""}"""
    name = "xla" if CPU else f"xla-{re.sub(r'[^a-z0-9]+', '-', device.lower())}"
    target = ROOT / f"docs/benchmarks/{name}.md"
    target.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
