"""`make bench`: 24 runners over an environment that sleeps in its steps, now and then for long: what waiting for the slowest costs.

A step takes 3 ms, and one in 50 takes 100 ms, so that 24 environments that are always busy do 24 / 4.94 ms = 4,858 steps a second. Where all
wait for all after every 100 steps, the slowest of 24 sets the pace. Writes docs/benchmarks/slow_steps.md.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import ray

import flowrl as fl

ROOT = Path(__file__).parents[1]
RUNNERS, FRAGMENT, SECONDS = 24, 100, 20.0
SHORT, LONG, EVERY = 0.003, 0.1, 50
BEGAN = time.time()


class SlowSteps(gym.Env[np.ndarray, int]):
    """Sleeps in every step."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(LONG if self.np_random.random() < 1 / EVERY else SHORT)
        return self._obs(), 1.0, False, bool(self.np_random.random() < 0.01), {}

    def _obs(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


def limits() -> tuple[float, float]:
    """Steps per second with every environment always busy, and with a barrier every so many steps."""
    rng = np.random.default_rng(0)
    rounds = SHORT * FRAGMENT + (LONG - SHORT) * rng.binomial(FRAGMENT, 1 / EVERY, (20_000, RUNNERS)).max(axis=1)
    return RUNNERS / (SHORT + (LONG - SHORT) / EVERY), RUNNERS * FRAGMENT / float(rounds.mean())


def graphs() -> dict[str, fl.Graph]:
    policy = fl.Policy(fl.MLP, hidden=(64, 64))
    settings = fl.IMPALASettings(runners=RUNNERS, envs=1, fragment=FRAGMENT, batch=RUNNERS * FRAGMENT // 4, report_every=1, policy=policy)
    free = fl.impala(SlowSteps, settings)
    return {"every one as it comes": free, "a barrier every 100 steps": free.remove("queue").replace(sample=fl.ParallelSample())}


def speed(graph: fl.Graph) -> tuple[float, float, str]:
    """Steps per second once all are up; seconds to the first Row; and the diagnosis."""
    began = time.perf_counter()
    with fl.run(graph, runtime="ray") as run:
        next(run)
        first = time.perf_counter() - began
        while run.counts()["requests"] < 20 * RUNNERS:  # all of them are up
            next(run)
        start, steps = time.perf_counter(), run.counts()["sampled_steps"]
        while time.perf_counter() - start < SECONDS:
            next(run)
        rate = (run.counts()["sampled_steps"] - steps) / (time.perf_counter() - start)
    return rate, first, str(run.diagnosis())


class ByHand:
    """An actor as one would write it, with the imports that a runner has."""

    def __init__(self) -> None:
        import flowrl.resources.sampling  # noqa: F401

    def up(self) -> bool:
        return True


def starting() -> tuple[float, float]:
    """Seconds until 24 runners answer, and until 24 actors written by hand do."""
    seconds = []
    for hand in (False, True):
        ray.init(address="local", include_dashboard=False, logging_level="error", log_to_driver=False)
        spec = graphs()["every one as it comes"].resources["runners"]
        began = time.perf_counter()
        if hand:
            kind = ray.remote(ByHand).options(num_cpus=0, runtime_env={"env_vars": {"NPROC": "1", "JAX_PLATFORMS": "cpu"}})
            actors = [kind.remote() for _ in range(RUNNERS)]
            ray.get([actor.up.remote() for actor in actors])
        else:
            from functools import partial

            from flowrl.resources.sampling import Runner
            from flowrl.runtime.ray import RayWorkers

            pool = RayWorkers("runners", RUNNERS, partial(Runner, spec, "runners", 0))
            assert len(ray.get([actor.spent.remote() for actor in pool.actors])) == RUNNERS
        seconds.append(time.perf_counter() - began)
        ray.shutdown()
    return seconds[0], seconds[1]


def main() -> int:
    if len(sys.argv) > 1:
        rate, first, told = speed(graphs()[sys.argv[1]])
        print(f"{rate} {first} {time.time() - BEGAN}\n{told}")
        return 0
    ours, hand = zip(*(starting() for _ in range(3)), strict=True)
    lines = []
    good = True
    for (name, _), limit in zip(graphs().items(), limits(), strict=True):
        runs = []
        for _ in range(3):
            began = time.perf_counter()
            out = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True).stdout
            numbers, told = out.split("\n", 1)
            rate, first, inside = map(float, numbers.split())
            runs.append((rate, time.perf_counter() - began - inside + first, told))
            print(f"{name}: {rate:,.0f} steps/s, {rate / limit:.3f} of {limit:,.0f}; first row after {runs[-1][1]:.1f} s", flush=True)
        rate, first = (statistics.median(run[i] for run in runs) for i in (0, 1))
        good &= rate >= 0.85 * limit and first <= 30
        lines.append((name, limit, rate, first, runs[-1][2]))
    print(lines, ours, hand)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
