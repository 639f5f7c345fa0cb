"""Implicit Q-learning on a dataset, then in the environment, with demonstrations mixed in.

The same learner gets its batches from the dataset at first; then three of four come from a replay
of what it samples itself.
"""

from __future__ import annotations

import tempfile

import flowrl as fl


def offline_to_online(data: str, updates: int, hidden: tuple[int, ...] = (256, 256)) -> fl.Graph:
    """Return a graph that learns from a dataset for so many updates, and then online, too."""
    offline = fl.iql("Pendulum-v1", data=data, envs_per_runner=1, hidden=hidden)
    offline = offline.set("runners.rollout_length", 1)
    nodes = {node.name: node.op for node in offline.nodes}
    return (
        fl.Graph("offline_to_online", replay=fl.Replay(100_000), **offline.resources)
        .then(sample=fl.ParallelSample(), add=fl.ReplayAdd())
        .then(online=fl.ReplaySample(256, learning_starts=1_000, updates_per_step=0.75))
        .then(after=(), demo=fl.ReadDataset(256))
        .then(after=("online", "demo"), mix=fl.Merge({"online": 3, "demo": 1}))
        .then(after=(), read=fl.ReadDataset(256))
        .then(after=("read", "mix"), phase=fl.Switch({"read": updates, "mix": None}))
        .then(train=nodes["train"], target=nodes["target"], sync=fl.SyncWeights())
        .then(evaluate=fl.Evaluate(every=1_000), report=fl.Report(every=500))
    )


def main(steps: int = 6_000, hidden: tuple[int, ...] = (256, 256)) -> list[fl.Run]:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/half_trained"
        writing = fl.write_dataset(fl.sac("Pendulum-v1", lr=1e-3, hidden=hidden), data)
        for graph in (writing, offline_to_online(data, steps // 2, hidden)):
            with fl.run(graph, steps=steps) as run:
                for row in run:
                    print(f"{row['updates']:,} updates, {row['env_steps']:,} steps:", end=" ")
                    print(f"return {row.get('eval/return_mean', row['return_mean']):.1f}")
            runs.append(run)
    return runs


if __name__ == "__main__":
    main()
