"""Train graphs that learn from datasets to their gates. Writes docs/learning_offline.md.

The exit status is 1 if a gate was missed. Names of gates as arguments train those only; the lines
of the others stay as they are. Datasets are made once, in build/datasets.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import flowrl as fl
from flowrl.offline.files import Files

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs/learning_offline.md"
FOLDER = ROOT / "build/datasets"
sys.path.insert(0, str(ROOT / "examples"))
import offline_to_online  # noqa: E402 - an example is no package

SEEDS = 3
EPISODES = 50
"""How many episodes a policy plays greedily."""


def expert(seed: int) -> str:
    """Make 20,000 steps of CartPole by a policy of PPO that has learned, and save that policy."""
    path, teacher = FOLDER / f"expert-{seed}", FOLDER / f"teacher-{seed}"
    if not path.exists():
        graph = fl.ppo("CartPole-v1", **fl.tuned("ppo", "CartPole-v1"))
        with fl.run(graph, seed=seed, until=solved, out=teacher) as run:
            list(run)
        collect = fl.Graph(
            "collect",
            runners=fl.Runners("CartPole-v1", run.policy.policy),
            teacher=fl.Frozen(str(teacher)),
            writer=fl.DatasetWriter(str(path)),
        ).then(sample=fl.ParallelSample(), write=fl.WriteDataset(), report=fl.Report())
        with fl.run(collect, seed=seed, steps=20_000) as run:
            list(run)
    return str(path)


def solved(row: fl.Row) -> bool:
    return row["episodes"] >= 100 and row["return_mean"] >= 475


def half_trained(seed: int) -> str:
    """Make the first 4,000 steps of Pendulum that SAC takes, while it learns."""
    path = FOLDER / f"half-{seed}"
    if not path.exists():
        graph = fl.write_dataset(fl.sac("Pendulum-v1", lr=1e-3), str(path))
        with fl.run(graph, seed=seed, steps=4_000) as run:
            list(run)
    return str(path)


def mean_of(path: str) -> float:
    """Return the mean return of the episodes of a dataset."""
    files = Files(path)
    returns = [x["rewards"].sum() for x in files.minari.get_episodes(range(files.episodes))]
    return float(sum(returns) / len(returns))


@cache
def played(name: str, env: str, data: str, seed: int, updates: int) -> float:
    """Train a stock graph on a dataset, and return what its policy plays."""
    out = saved_run(name, env, seed, updates)
    if not out.exists():
        every = updates // 8
        graph = getattr(fl, name)(env, data=data, evaluate_every=every, **fl.tuned(name, env))
        graph = graph.set("report.every", every)
        with fl.run(graph, seed=seed, until=lambda row: row["updates"] >= updates, out=out) as run:
            list(run)
    return float(fl.load(out).evaluate(EPISODES, seed=10_000).mean())


def saved_run(name: str, env: str, seed: int, updates: int) -> Path:
    """Return where a run of a gate is saved, for pictures of it too."""
    return FOLDER / "runs" / f"{name}-{env}-{updates}-{seed}"


def online(data: str, seed: int) -> float:
    """Train offline for 2,000 updates, then online for as many steps, and return what it plays."""
    graph = offline_to_online.offline_to_online(data, 2_000)
    graph = graph.replace(learner=small_iql(data).resources["learner"])
    policy = graph.resources["learner"].policy
    with fl.run(graph.set("runners.policy", policy), seed=seed, steps=2_000) as run:
        list(run)
    return float(run.policy.evaluate(EPISODES, seed=10_000).mean())


def small_iql(data: str) -> fl.Graph:
    return fl.iql("Pendulum-v1", data=data, **fl.tuned("iql", "Pendulum-v1"))


@dataclass(frozen=True)
class Gate:
    """What a graph must play, of a seed: at least the largest of some returns."""

    name: str
    data: Callable[[int], str]
    wanted: str
    """What it is compared with, in words."""
    plays: Callable[[str, int], float]
    bounds: Callable[[str, int], tuple[float, ...]]


PENDULUM = "Pendulum-v1"


def on_pendulum(name: str, updates: int) -> Callable[[str, int], float]:
    return lambda data, seed: played(name, PENDULUM, data, seed, updates)


def cloned(data: str, seed: int) -> float:
    return played("bc", PENDULUM, data, seed, 3_000)


GATES = (
    Gate(
        "bc",
        expert,
        "0.9 of its teacher",
        lambda data, seed: played("bc", "CartPole-v1", data, seed, 1_000),
        lambda _, seed: (
            0.9 * fl.load(FOLDER / f"teacher-{seed}").evaluate(EPISODES, seed=10_000).mean(),
        ),
    ),
    Gate(
        "marwil",
        half_trained,
        "bc",
        lambda data, seed: played("marwil", PENDULUM, data, seed, 3_000),
        lambda data, seed: (cloned(data, seed),),
    ),
    *(
        Gate(
            name,
            half_trained,
            "the data's mean, bc",
            on_pendulum(name, 4_000),
            lambda data, seed: (mean_of(data), cloned(data, seed)),
        )
        for name in ("iql", "cql")
    ),
    Gate(
        "iql, then online",
        half_trained,
        "iql after 2,000 updates",
        online,
        lambda data, seed: (played("iql", PENDULUM, data, seed, 2_000),),
    ),
)


def reach(gate: Gate, seed: int) -> str:
    """Train, play and compare: a line of the table."""
    began, data = time.perf_counter(), gate.data(seed)
    bounds, plays = gate.bounds(data, seed), gate.plays(data, seed)
    verdict = "passed" if plays >= max(bounds) else "**missed**"
    beside = ", ".join(f"{bound:.1f}" for bound in bounds)
    seconds = time.perf_counter() - began
    what = f"{plays:.1f} | {gate.wanted}: {beside} | {verdict} | {seconds:.0f} |"
    line = f"| {gate.name} | {gate.data.__name__} | {seed} | {what}"
    print(line, flush=True)
    return line


HEAD = f"""# Learning from datasets

Written by `python bench/learn_offline.py`: what the policies of graphs that learn from datasets
play greedily, as means of {EPISODES} episodes, and what they must reach. `expert` is CartPole-v1,
20,000 steps by a policy of PPO whose training episodes reached 475; `half_trained` is Pendulum-v1,
the first 4,000 steps that SAC takes while it learns. Each seed has a dataset of its own. `bc` takes
1,000 updates on the first and 3,000 on the second, as `marwil` does; `iql` and `cql` take 4,000.
"iql, then online" takes 2,000 updates on the dataset and then 2,000 steps, with demonstrations
mixed in ([examples/offline_to_online.py](../examples/offline_to_online.py)).

| graph | dataset | seed | plays | beside | gate | seconds |
|---|---|---:|---:|---|---|---:|
"""


def main(names: list[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    old = TARGET.read_text(encoding="utf-8").splitlines() if TARGET.exists() else []
    keys = [(gate, seed) for gate in GATES for seed in range(SEEDS)]
    found = {}
    for gate, seed in keys:
        begin = f"| {gate.name} | {gate.data.__name__} | {seed} |"
        found[gate.name, seed] = next((line for line in old if line.startswith(begin)), "")
    for gate, seed in keys:
        if not names or gate.name in names:
            found[gate.name, seed] = reach(gate, seed)
            lines = [line for line in found.values() if line]
            TARGET.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return int(any("**missed**" in line for line in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
