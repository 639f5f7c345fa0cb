"""Train Rainbow and DQN on gymnax's Breakout, seed by seed. Writes docs/learning_rainbow.md.

The exit status is 1 if Rainbow was not shown to be better. Names of graphs or environments as
arguments train only if these are among them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

import flowrl as fl
from flowrl.algos.named import build, find

TARGET = Path(__file__).parents[1] / "docs/learning_rainbow.md"
ENV, STEPS, SEEDS, EPISODES = "gymnax:Breakout-MinAtar", 300_000, 16, 50
GRAPHS = ("dqn", "rainbow")
WAYS = ("greedy", "sampled")

PAGE = f"""# Rainbow beside DQN

Written by `make learn` ([learn_rainbow.py](../bench/learn_rainbow.py)): what policies play that
`dqn` and `rainbow` saved after {STEPS:,} steps of {ENV} in the xla runtime, both with their
tuned settings ([algos/tuned.py](../flowrl/algos/tuned.py)). They differ in what Rainbow adds:
distributions of returns (C51), a dueling network and priorities, with a beta that stays at 0.4.
Noisy layers and returns of several steps learned more slowly here, and are switched off.

Means of {EPISODES} episodes, greedily and with sampled actions (epsilon-greedily, with 0.05);
Breakout starts in two ways only, so the greedy episodes are two.

| seed | dqn, greedy | rainbow, greedy | dqn, sampled | rainbow, sampled |
|---:|---:|---:|---:|---:|
{{lines}}
| mean | {{means}} |

Rainbow's mean less DQN's, and its interval of 95 % (bootstrap, BCa): {{text}}.
"""


def played(graph: str, seed: int) -> list[float]:
    """Train and save a policy, and return what it plays greedily and with sampled actions."""
    start = time.perf_counter()
    made = build(find(graph), ENV, fl.tuned(graph, ENV), [])
    with tempfile.TemporaryDirectory() as folder:
        with fl.run(made, runtime="xla", seed=seed, steps=STEPS, out=f"{folder}/run") as run:
            for row in run:
                print(f"\r  {graph} seed {seed}: {row['env_steps']:>9,} steps", end="", flush=True)
        policy = fl.load(f"{folder}/run")
    seconds = time.perf_counter() - start
    means = [
        float(policy.evaluate(EPISODES, seed=10_000, greedy=way == "greedy").mean()) for way in WAYS
    ]
    print(f", {seconds:.0f} s, {', '.join(f'{x:.1f}' for x in means)}", flush=True)
    return means


def interval(better: Any, other: Any) -> tuple[float, float, float]:
    """Return the difference of two means, and the ends of its interval of 95 %."""

    def difference(a: Any, b: Any, axis: int = -1) -> Any:
        return np.mean(a, axis=axis) - np.mean(b, axis=axis)

    found = bootstrap((better, other), difference, n_resamples=9_999, rng=0).confidence_interval
    return float(difference(better, other)), float(found.low), float(found.high)


def page(found: Any) -> tuple[str, float]:
    """Return the page for what was played, ``[seeds, graphs, ways]``.

    With it comes the lower end of the interval of the greedy difference.
    """
    lines = [
        f"| {seed} | {dqn[0]:.1f} | {rainbow[0]:.1f} | {dqn[1]:.1f} | {rainbow[1]:.1f} |"
        for seed, (dqn, rainbow) in enumerate(found)
    ]
    means = " | ".join(f"{found[:, graph, way].mean():.1f}" for way in (0, 1) for graph in (0, 1))
    ends = [interval(found[:, 1, way], found[:, 0, way]) for way in (0, 1)]
    text = "; ".join(
        f"{way} **{mean:.1f}** ({low:.1f} to {high:.1f})"
        for way, (mean, low, high) in zip(WAYS, ends, strict=True)
    )
    return PAGE.format(lines="\n".join(lines), means=means, text=text), ends[0][1]


def main(names: list[str]) -> int:
    """Train all seeds if nothing else is asked for, and write the page after each from the third.

    So one that is cut off loses one seed, and has compared equally many of both graphs.
    """
    if names and not {*names} & {*GRAPHS, ENV, ENV.removeprefix("gymnax:")}:
        return 0
    found: list[list[list[float]]] = []
    low = 0.0
    for seed in range(SEEDS):
        found.append([played(graph, seed) for graph in GRAPHS])
        if len(found) >= 3:
            text, low = page(np.array(found))
            TARGET.write_text(text, encoding="utf-8")
    return int(low <= 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
