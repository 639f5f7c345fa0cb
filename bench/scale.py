"""`make bench`: what `flowrl scale` predicts of four graphs on 1, 2 and 4 nodes, and what they do.

Writes docs/benchmarks/scale.md. The environments sleep, so that the cores of this machine, on which
all nodes are simulated by Ray, are not what limits them. Each graph is measured once, with 2 runners
on one node; all predictions are written down before any of them is measured.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import gymnasium as gym  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402

import flowrl as fl  # noqa: E402
from flowrl.observe.scale import Prediction, scale  # noqa: E402
from planted import POLICY, Lingers  # noqa: E402

SECONDS, SKIPPED = 20.0, 6.0
"""How long a run is measured, after the seconds that are skipped once it gave its first row."""
RUNNERS = 2
"""The runners of the measured run, on one node."""
CLUSTERS = {1: 4, 2: 8, 4: 16}
"""By number of nodes: the runners there."""
CORES = 1
"""The cores of a node, as Ray is told."""
WITHIN = 0.15
"""The largest share by which a prediction may be off."""


class Sleeps(gym.Env[Any, int]):
    """Sleeps in every step; an episode has 100 of them.

    Args:
        seconds: how long it sleeps.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        time.sleep(self.seconds)
        return self._obs(), float(action), False, self.time == 100, {}

    def _obs(self) -> Any:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


def _sleeping(graph: fl.Graph, seconds: float) -> fl.Graph:
    return graph.set("runners.env_settings", {"seconds": seconds})


def ppo() -> fl.Graph:
    """Rounds of all runners, each followed by an update; 0.32 s a rollout."""
    graph = fl.ppo(
        Sleeps,
        num_runners=RUNNERS,
        envs_per_runner=2,
        rollout_length=16,
        batch_size=64,
        minibatch_size=32,
        epochs=2,
        policy=POLICY,
    )
    return _sleeping(graph, 0.01)


def a2c() -> fl.Graph:
    """The same with short rollouts and one gradient step; 0.2 s a rollout."""
    graph = fl.a2c(
        Sleeps,
        num_runners=RUNNERS,
        envs_per_runner=2,
        rollout_length=5,
        batch_size=20,
        report_every=1,
        policy=POLICY,
    )
    return _sleeping(graph, 0.02)


def impala() -> fl.Graph:
    """Rollouts as they come, and a learner that lingers for 50 ms: on 4 nodes it is full."""
    graph = fl.impala(
        Sleeps,
        num_runners=RUNNERS,
        envs_per_runner=2,
        rollout_length=16,
        batch_size=64,
        report_every=1,
        policy=POLICY,
    )
    lingers = Lingers(fl.losses.VTraceLoss(), 0.05)
    return _sleeping(graph.set("learner.loss", lingers), 0.01)


def apex() -> fl.Graph:
    """Three stages around a replay of two shards, an update for each rollout of 0.64 s."""
    graph = fl.apex(
        Sleeps,
        num_runners=RUNNERS,
        envs_per_runner=2,
        rollout_length=16,
        batch_size=32,
        learning_starts=100,
        buffer_size=10_000,
        updates_per_step=1 / 32,
        report_every=2,
        hidden=(8,),
    )
    return _sleeping(graph, 0.02)


GRAPHS: dict[str, Callable[[], fl.Graph]] = {"ppo": ppo, "a2c": a2c, "impala": impala, "apex": apex}


@contextmanager
def cluster_of(nodes: int) -> Iterator[str]:
    """Start a Ray cluster of so many nodes on this machine, and yield its address."""
    warnings.simplefilter("ignore")  # of Ray's own test cluster
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CORES})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=CORES)
        yield cluster.address
    finally:
        cluster.shutdown()


def measured(graph: fl.Graph, address: str, out: Path) -> tuple[float, float]:
    """Run a graph; return its environment steps per second and its mean policy lag."""
    rows = []
    how: dict[str, Any] = {"runtime": fl.RayRuntime(address=address), "snapshots": False}
    with fl.run(graph, out=out, **how) as run:
        next(run)
        began = time.perf_counter()
        for row in run:
            if time.perf_counter() - began >= SKIPPED:
                rows.append(row)
            if time.perf_counter() - began >= SKIPPED + SECONDS:
                break
    seconds = rows[-1]["seconds"] - rows[0]["seconds"]
    steps = rows[-1]["env_steps"] - rows[0]["env_steps"]
    return steps / seconds, fmean(row["lag_mean"] for row in rows)


def predictions(folder: Path) -> dict[tuple[str, int], Prediction]:
    """Measure each graph once, and return what is predicted by graph and number of nodes."""
    found = {}
    with cluster_of(1) as address:
        for name, build in GRAPHS.items():
            measured(build(), address, folder / name)
    for name, build in GRAPHS.items():
        for nodes, runners in CLUSTERS.items():
            made = scale(build(), folder / name, [runners], [nodes], cores=CORES)
            found[name, nodes] = made.predictions[0]
        print(made, flush=True)
    return found


def validated(folder: Path) -> list[dict[str, Any]]:
    """Predict, then measure; return a row for each graph and cluster."""
    predicted = predictions(folder)
    plain = {f"{name}, {nodes}": vars(p) for (name, nodes), p in predicted.items()}
    (folder / "predictions.json").write_text(json.dumps(plain, indent=1))
    rows = []
    for nodes, runners in CLUSTERS.items():
        with cluster_of(nodes) as address:
            for name, build in GRAPHS.items():
                graph = build().set("runners.num_runners", runners)
                speed, lag = measured(graph, address, folder / f"{name}-{nodes}")
                p = predicted[name, nodes]
                rows.append({"name": name, "speed": speed, "lag": lag, "predicted": p})
                off = p.steps_per_second / speed - 1
                print(name, nodes, f"{p.steps_per_second:.1f} {speed:.1f} {off:+.1%}", flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return the line of a table for a graph on a cluster."""
    p = row["predicted"]
    off = p.steps_per_second / row["speed"] - 1
    lags = "any | any" if np.isnan(p.lag_mean) else f"{p.lag_mean:.1f} | {row['lag']:.1f}"
    return (
        f"| {row['name']} | {p.nodes} | {p.runners} | {p.steps_per_second:,.1f} | "
        f"{row['speed']:,.1f} | {off:+.1%} | {lags} | {p.bound} |"
    )


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    print(folder)
    rows = validated(folder)
    print("\n".join(map(line, rows)))
