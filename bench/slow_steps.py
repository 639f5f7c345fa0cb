"""`make bench`: 24 runners over an environment that sleeps: what waiting for the slowest costs.

A step takes 3 ms, and one in 50 takes 100 ms, so that 24 environments that are always busy do 24 /
4.94 ms = 4,858 steps a second. Where all wait for all after every 50 steps, the slowest of 24 sets
the pace. Writes docs/benchmarks/slow_steps.md.
"""

from __future__ import annotations

import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import numpy as np
import ray

import flowrl as fl
from flowrl.rollout.runner import Runner
from flowrl.runtime.ray import RayWorkers

ROOT = Path(__file__).parents[1]
RUNNERS, ROLLOUT, SECONDS, TIMES = 24, 50, 20.0, 3
SHORT, LONG, EVERY = 0.003, 0.1, 50


class SlowSteps(gym.Env[Any, int]):
    """Sleeps in every step."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(LONG if self.np_random.random() < 1 / EVERY else SHORT)
        return self._obs(), 1.0, False, bool(self.np_random.random() < 0.01), {}

    def _obs(self) -> Any:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


def limits() -> tuple[float, float]:
    """Steps per second with all environments always busy, and with a barrier after each rollout."""
    rng = np.random.default_rng(0)
    rounds = SHORT * ROLLOUT + (LONG - SHORT) * rng.binomial(
        ROLLOUT, 1 / EVERY, (20_000, RUNNERS)
    ).max(axis=1)
    return RUNNERS / (SHORT + (LONG - SHORT) / EVERY), RUNNERS * ROLLOUT / float(rounds.mean())


def graphs() -> dict[str, fl.Graph]:
    policy = fl.Policy(fl.networks.MLP, hidden=(64, 64))
    settings = fl.IMPALASettings(
        num_runners=RUNNERS,
        envs_per_runner=1,
        rollout_length=ROLLOUT,
        batch_size=RUNNERS * ROLLOUT // 4,
        report_every=1,
        policy=policy,
    )
    free = fl.impala(SlowSteps, settings)
    return {
        "every one as it comes": free,
        f"a barrier every {ROLLOUT} steps": free.remove("queue").replace(
            sample=fl.ParallelSample()
        ),
    }


def speed(graph: fl.Graph) -> tuple[float, float, str]:
    """Steps per second once all are up; `time.time` at the first Row; and the explanation."""
    with fl.run(graph, runtime="ray") as run:
        next(run)
        first = time.time()
        while run.counts()["requests"] < 10 * RUNNERS:  # all of them are up
            next(run)
        start, steps = time.perf_counter(), run.counts()["sampled_steps"]
        while time.perf_counter() - start < SECONDS:
            next(run)
        rate = (run.counts()["sampled_steps"] - steps) / (time.perf_counter() - start)
    return rate, first, str(run.explain())


class ByHand:
    """An actor as one would write it, with the imports that a runner has."""

    def __init__(self) -> None:
        import flowrl.rollout.runner  # noqa: F401

    def up(self) -> bool:
        return True


def starting() -> tuple[float, float]:
    """Seconds until 24 runners answer, and until 24 actors written by hand do."""
    seconds = []
    for hand in (False, True):
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        spec: Any = graphs()["every one as it comes"].resources["runners"]
        began = time.perf_counter()
        if hand:
            kind: Any = ray.remote(ByHand).options(
                num_cpus=0, runtime_env={"env_vars": {"NPROC": "1", "JAX_PLATFORMS": "cpu"}}
            )
            actors = [kind.remote() for _ in range(RUNNERS)]
            ray.get([actor.up.remote() for actor in actors])
        else:
            pool = RayWorkers(
                "runners", RUNNERS, partial(Runner, spec, "runners", 0), None, False, (), print
            )
            for future in [pool.submit(i, "keep") for i in range(RUNNERS)]:
                future.result()
        seconds.append(time.perf_counter() - began)
        ray.shutdown()
    return seconds[0], seconds[1]


def measured(name: str) -> tuple[float, float, str]:
    """Steps per second, seconds to the first Row, and the explanation, of a process of its own."""
    began = time.time()
    out = subprocess.run(
        [sys.executable, __file__, name], capture_output=True, text=True, check=True
    ).stdout
    numbers, explanation = out.split("\n", 1)
    rate, first = map(float, numbers.split())
    return rate, first - began, explanation


def main() -> None:
    if len(sys.argv) > 1:
        rate, first, explanation = speed(graphs()[sys.argv[1]])
        print(f"{rate} {first}\n{explanation}")
        return
    lines, tables = [], []
    for name, limit in zip(graphs(), limits(), strict=True):
        runs = []
        for number in range(1, TIMES + 1):
            runs.append(measured(name))
            print(
                f"  {name}, {number} of {TIMES}: {runs[-1][0]:,.0f} steps/s of {limit:,.0f}; "
                f"first row after {runs[-1][1]:.1f} s",
                flush=True,
            )
        rates, firsts = [rate for rate, _, _ in runs], [first for _, first, _ in runs]
        rate, first, least = statistics.median(rates), statistics.median(firsts), min(rates) / limit
        lines.append(
            f"| {name} | {limit:,.0f} | {rate:,.0f} | **{rate / limit:.3f}** | {least:.3f} | "
            f"{first:.1f} |"
        )
        tables.append(f"{name[0].upper()}{name[1:]}:\n\n```text\n{runs[-1][2].strip()}\n```\n")
    up = [starting() for _ in range(TIMES)]
    ours, hand = (statistics.median(x) for x in zip(*up, strict=True))
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax "
        f"{jax.__version__}, ray {ray.__version__}"
    )
    text = f"""# Waiting for the slowest

Written by `make bench` ([bench/slow_steps.py](../../bench/slow_steps.py)): {machine}.

{RUNNERS} runners of one environment each, whose steps sleep {SHORT * 1000:.0f} ms, and one in
{EVERY} of them {LONG * 1000:.0f} ms; IMPALA, and the same graph without its queue, so that all wait
for all after every {ROLLOUT} steps. The limits are those of the sleeping alone. {TIMES} runs of
{SECONDS:.0f} s each once all runners are up, the median and the lowest; "first row" is from the
command to the first trained batch.

| sampling | limit, steps/s | flowrl, steps/s | of the limit | lowest | first row, s |
|---|---:|---:|---:|---:|---:|
{chr(10).join(lines)}

Besides its steps a request costs about 6 ms of the cores, its share of the updates included; Ray
needs 3 ms of them for an empty call that carries these weights. Weights of up to 64 kB go with the
call itself, because to look them up in the object store takes 1 ms more.

Runners that share a process act each by itself. A trial in which a runner took along all that
waited while another one acted found nobody waiting in 93 of 100 calls here (3,390 steps/s, without
it 3,550), and in 86 of 100 where steps take no time (CartPole: 5,600 to 6,300 steps/s, without it
5,400 to 6,000), because one thread of a process runs Python code at a time. To wait for others
takes longer than the 25 microseconds of a call.

Until all {RUNNERS} runners answer: {ours:.1f} s; until {RUNNERS} actors written by hand with the
same imports do: {hand:.1f} s (Ray's own start in neither).

What the last run of each reported:

{chr(10).join(tables)}"""
    (ROOT / "docs/benchmarks/slow_steps.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
