"""Runs whose learner is a group of two processes, beside two devices of one, printed as JSON.

It is run in a process that has two devices, as two nodes of a cluster have one each.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np

import flowrl as fl

SMALL = {"num_runners": 2, "envs_per_runner": 4, "rollout_length": 16}
POLICY = fl.Policy(fl.networks.MLP, hidden=(8,), normalize=True)
GRAPHS = {
    "ppo": fl.ppo(
        "CartPole-v1", batch_size=256, epochs=2, minibatch_size=64, policy=POLICY, **SMALL
    ),
    "in order": fl.ppo("CartPole-v1", batch_size=128, minibatch_size=32, epochs=1, **SMALL).set(
        "train.shuffle", False
    ),
    "recurrent": fl.ppo(
        "CartPole-v1",
        batch_size=128,
        minibatch_size=64,
        epochs=2,
        policy=fl.Policy(fl.networks.RNN, hidden=(8,), size=8),
        **SMALL,
    ),
    "dqn": fl.dqn(
        "CartPole-v1",
        envs_per_runner=4,
        rollout_length=4,
        batch_size=64,
        minibatch_size=32,
        learning_starts=64,
        prioritized=True,
        report_every=3,
        hidden=(8,),
    ),
}
"""Advantages in shares of columns, minibatches in order, whole columns, and priorities."""
ONE_DEVICE = {"runtime_env": {"env_vars": {"XLA_FLAGS": ""}}}
GROUP = {"learner": fl.Actor(count=2, options=ONE_DEVICE)}


def found_of(graph, runtime, out=None):
    saving = {} if out is None else {"out": out, "snapshots": fl.Snapshots(every=0)}
    with fl.run(graph, runtime=runtime, seed=1, **saving) as run:
        rows = [next(run) for _ in range(3)]
        assert run.audit().closed
        devices = run.profile().facts["learner"]["devices"]
    return rows, run.policy.weights, devices


def furthest(one, other):
    """The largest difference of two trees of numbers."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in pairs)


def node_of(actor):
    import ray

    return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))


def nodes_of(run):
    """The nodes of the members of the group, and those of the runners in order."""
    place = run._session.place
    members = [member.actor for member in place.sites["learner"].homes[0].remote.members]
    workers = place.handles["runners"].pool
    return [node_of(actor) for actor in members], [node_of(actor) for actor, _ in workers.calls]


def main():
    from ray.cluster_utils import Cluster

    assert jax.device_count() == 2
    warnings.simplefilter("ignore")  # of Ray's own test cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        runtime = fl.RayRuntime(address=cluster.address, place=GROUP, processes=2)
        found = {}
        for name, graph in GRAPHS.items():
            rows, weights, devices = found_of(graph, "local")
            there, others, members = found_of(graph, runtime)
            found[name] = {
                "devices": [devices, members],
                "weights": furthest(weights, others),
                "loss": furthest(rows[-1]["loss"], there[-1]["loss"]),
            }
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            found_of(GRAPHS["ppo"], runtime, out)
            with fl.resume(out, runtime=runtime, until=lambda row: row["row"] >= 5) as run:
                nodes = nodes_of(run)
                list(run)
            resumed = run.policy.weights
        with fl.run(GRAPHS["ppo"], runtime=runtime, seed=1) as run:
            for _ in range(5):
                next(run)
        found["resumed"] = furthest(resumed, run.policy.weights)
        found["nodes"] = nodes
    finally:
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
