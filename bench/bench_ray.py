"""The Ray runtime beside an asynchronous pipeline written by hand, in interleaved pairs.

Writes docs/benchmarks/asynchronous.md.
"""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
import warnings
from pathlib import Path

import jax
import ray

import flowrl as fl
import handwritten_impala as hand

ROOT = Path(__file__).parents[1]
PAIRS, RUNNERS, WARM_UP, SECONDS = 5, 2, 4.0, 5.0


def flowrl_speed(seed: int, envs: int) -> float:
    """Steps per second that are trained on, once warm. A Ray of its own, as `fl.run` starts it."""
    settings = fl.IMPALASettings(
        num_runners=RUNNERS, envs_per_runner=envs, rollout_length=hand.STEPS, batch_size=hand.BATCH
    )
    began, first = None, None
    with fl.run(fl.impala("CartPole-v1", settings), runtime="ray", seed=seed) as run:
        for row in run:
            now = time.perf_counter()
            began = began or now
            if first is None and now - began > WARM_UP:
                first, steps = now, row["trained_steps"]
            if first is not None and now - first > SECONDS:
                break
    return (row["trained_steps"] - steps) / (now - (first or now))


def hand_speed(seed: int, envs: int) -> float:
    """The same of the pipeline by hand, with Ray's own defaults."""
    ray.init(
        address="local", logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False
    )
    try:
        return hand.train(seed, RUNNERS, envs, SECONDS, WARM_UP)[0]
    finally:
        ray.shutdown()


def main() -> None:
    warnings.filterwarnings(
        "ignore", message=r"os\.fork\(\) was called"
    )  # jax warns of any fork; Ray's children call exec at once
    lines = []
    for envs in (8, 64):
        ours, theirs = [], []
        for pair in range(PAIRS):
            ours.append(flowrl_speed(pair, envs))
            theirs.append(hand_speed(pair, envs))
            print(
                f"  {RUNNERS} x {envs}, pair {pair + 1} of {PAIRS}: flowrl {ours[-1]:,.0f}, by "
                f"hand {theirs[-1]:,.0f}",
                flush=True,
            )
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        speeds = f"{statistics.median(ours):,.0f} | {statistics.median(theirs):,.0f}"
        lines.append(
            f"| {RUNNERS} x {envs} | {speeds} | **{median:.3f}** | {least:.3f} | {most:.3f} |"
        )
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax "
        f"{jax.__version__}, ray {ray.__version__}"
    )
    text = (
        f"""# The Ray runtime beside an asynchronous pipeline written by hand

Written by `make bench`: {machine}.

IMPALA on CartPole-v1, {RUNNERS} runners, 64-64 networks, rollouts of {hand.STEPS} steps, batches of
at least {hand.BATCH}; the pipeline by hand is
[bench/handwritten_impala.py](../../bench/handwritten_impala.py), with the same maths. {PAIRS}
interleaved pairs of {SECONDS:.0f} s, each {WARM_UP:.0f} s after its first row or rollout: medians
of the speeds, and of the pairs' ratios. flowrl
draws the noise for a rollout's actions in one call, and acts in the runner's own thread; the
pipeline by hand draws it at each step, as one would write it.

| runners x environments | flowrl, steps/s | by hand, steps/s | ratio | lowest | highest |
|---|---:|---:|---:|---:|---:|
"""
        + "\n".join(lines)
        + "\n"
    )
    (ROOT / "docs/benchmarks/asynchronous.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
