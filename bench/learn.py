"""`make learn`: train the stock graphs to their gates, over seeds. Writes docs/learning.md. Exit status 1 if a gate was missed.

Names of graphs as arguments (`make learn GRAPHS='dqn sac'`) train those only; the lines of the others stay as they are.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import flowrl as fl
from flowrl.graphs import build, find

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import recurrent_policy  # noqa: E402 - an example is no package


@dataclass(frozen=True)
class Gate:
    """A return that a graph must reach: as the mean of the last 100 episodes within a number of environment steps; or `greedy`, after all of them."""

    graph: str
    env: str
    goal: float
    steps: int
    seeds: int
    runtime: str = "local"
    greedy: bool = False

    def __str__(self) -> str:
        how = f"greedy {self.goal:g} at" if self.greedy else f"{self.goal:g} within"
        return f"| {self.graph} | {self.env} | {self.runtime} | {how} {self.steps:,} |"


GATES = (
    Gate("ppo", "CartPole-v1", 475, 150_000, 5),
    Gate("ppo", "Pendulum-v1", -250, 300_000, 3),
    Gate("ppo", "Acrobot-v1", -100, 500_000, 3),
    Gate("a2c", "CartPole-v1", 450, 500_000, 3),
    Gate("pg", "CartPole-v1", 450, 500_000, 3),
    Gate("impala", "CartPole-v1", 450, 1_000_000, 3),
    Gate("impala", "CartPole-v1", 450, 1_000_000, 3, "ray"),
    Gate("appo", "CartPole-v1", 450, 1_000_000, 3),
    Gate("appo", "CartPole-v1", 450, 1_000_000, 3, "ray"),
    Gate("impala", "CartPole-v1", 450, 1_000_000, 3, "ray, a runner killed every 5 s"),
    Gate("ppo", "gymnax:CartPole-v1", 475, 500_000, 3, "xla"),
    Gate("ppo", "gymnax:Acrobot-v1", -100, 500_000, 3, "xla"),
    Gate("ppo", "gymnax:Pendulum-v1", -200, 1_000_000, 3, "xla"),
    Gate("ppo", "gymnax:Breakout-MinAtar", 28, 10_000_000, 3, "xla"),
    Gate("dqn", "CartPole-v1", 450, 100_000, 3, greedy=True),
    Gate("dqn", "Acrobot-v1", -100, 150_000, 3, greedy=True),
    Gate("dqn", "gymnax:CartPole-v1", 450, 100_000, 3, "xla", greedy=True),
    Gate("apex", "CartPole-v1", 450, 200_000, 3, "ray", greedy=True),
    Gate("sac", "Pendulum-v1", -200, 20_000, 3, greedy=True),
    Gate("impala, LSTM", "CartPole-v1, no velocities", 350, 1_000_000, 3),
)


@contextmanager
def killing(every: float | None) -> Iterator[None]:
    """Kill the process of one runner after the other, the longest-lived first, each so many seconds."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(every):
            with suppress(psutil.Error, ValueError):
                mine = [p for p in psutil.Process().children(recursive=True) if "ray::Host" in " ".join(p.cmdline())]
                min(mine, key=lambda p: p.create_time()).kill()

    thread = threading.Thread(target=kill, daemon=True)
    if every is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()


def reach(gate: Gate, seed: int) -> tuple[bool, str]:
    """Train until the gate is reached or the steps are used up: whether it was, and a line of the table."""
    start = time.perf_counter()
    own = recurrent_policy.graph() if "LSTM" in gate.graph else None
    graph = own or build(find(gate.graph), gate.env, fl.tuned(gate.graph, gate.env), [])
    name = f"{gate.graph} {gate.env} {gate.runtime} seed {seed}"

    def reached(row: fl.Row) -> bool:
        return not gate.greedy and row["episodes"] >= 100 and row["return_mean"] >= gate.goal

    runtime, _, faults = gate.runtime.partition(", ")
    with fl.run(graph, runtime=runtime, seed=seed, steps=gate.steps, until=reached) as run, killing(5.0 if faults else None):
        for row in run:
            print(f"\r  {name}: {row['env_steps']:>9,} steps, return {row['return_mean']:8.1f}", end="", flush=True)
    seconds, greedy = time.perf_counter() - start, run.policy.evaluate(20, seed=10_000)
    good = greedy.mean() >= gate.goal if gate.greedy else run.reason == "until"
    row = next(filter(reached, run.rows), run.rows[-1])  # a program goes on to the end of its chunk
    verdict = f"{row['env_steps']:,}" if good else f"**not reached** ({row['return_mean']:.1f})"
    lost = f", {row['restarts']:.0f} restarts, {row['lost_steps']:,.0f} steps lost" if "restarts" in row else ""
    print(f", {'reached' if good else 'MISSED'} in {seconds:.0f} s{lost}", flush=True)
    return good, f"{gate} {seed} | {verdict}{lost} | {greedy.mean():.1f} +- {greedy.std():.1f} | {seconds:.0f} |"


def main(graphs: list[str]) -> int:
    target = ROOT / "docs/learning.md"
    before = target.read_text(encoding="utf-8").splitlines() if graphs else []
    results = []
    for gate in GATES:
        for seed in range(gate.seeds):
            if graphs and gate.graph not in graphs:
                results += [("not reached" not in line, line) for line in before if line.startswith(f"{gate} {seed} |")]
            else:
                results.append(reach(gate, seed))
    head = """# Learning

Written by `make learn`: every stock graph with its tuned settings ([algos/tuned.py](../flowrl/algos/tuned.py)), trained until the mean
return of the last 100 training episodes (at least 100 of them) reaches the gate; or where the gate is greedy, for all of its steps. "Greedy" is
the mean and deviation of 20 episodes played with the likeliest actions right afterwards.
The recurrent one is [examples/recurrent_policy.py](../examples/recurrent_policy.py).

| graph | environment | runtime | gate | seed | reached after steps | greedy | seconds |
|---|---|---|---|---:|---:|---:|---:|
"""
    target.write_text(head + "\n".join(line for _, line in results) + "\n", encoding="utf-8")
    return 0 if all(good for good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
