"""Two rows of runs whose learner has four devices: losses and weights, printed as JSON.

It is run in a process that has four of them.
"""

import json
import sys

import jax
import numpy as np

import flowrl as fl
from environments import Corridor
from flowrl.runtime.ray import start

SETTINGS = fl.PPOSettings(
    envs_per_runner=8,
    rollout_length=8,
    batch_size=64,
    epochs=2,
    minibatch_size=32,
    policy=fl.Policy(fl.networks.MLP, hidden=(8,), normalize=True),
)
GYM = fl.ppo("CartPole-v1", SETTINGS).set("train.shuffle", False)
JAX = fl.ppo(Corridor, SETTINGS).set("train.shuffle", False)
QUICK = fl.IMPALASettings(
    envs_per_runner=4,
    rollout_length=4,
    batch_size=32,
    report_every=1,
    policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
)
ASYNC = fl.impala(Corridor, QUICK).insert(after="sync", play=fl.Evaluate(every=1, episodes=2))
"""It has a warm-up, and parts of its state come out of a program in another shape than they went
in, left to itself."""
EVOLUTION = fl.es(Corridor, pairs=4, max_steps=20, policy=fl.Policy(fl.networks.MLP, hidden=(8,)))
"""JAX's own Philox, by which one device makes its noise, does not compile for several."""
RUNS = {
    "local": (GYM, "local"),
    "xla": (JAX, fl.XlaRuntime(chunk=2)),
    "evolution": (EVOLUTION, fl.XlaRuntime(chunk=2)),
    "ray": (GYM, fl.RayRuntime(processes=1)),
    "placed": (GYM, fl.RayRuntime(place={"learner": fl.Actor()}, processes=1)),
    "uneven": (GYM.set("train.minibatch_size", 2), "local"),
    "seeds": (ASYNC, fl.XlaRuntime(chunk=1, seeds=4)),
}


def spread(run):
    """Whether arrays of an XLA program are split over all devices."""
    arrays = getattr(run._session.turns, "arrays", ())
    return any(
        len(x.sharding.device_set) == 4 and not x.sharding.is_fully_replicated for x in arrays
    )


def main():
    assert jax.local_device_count() == 4
    found, stop = {}, start(None, {"include_dashboard": False})
    for name, (graph, runtime) in RUNS.items():
        with fl.run(graph, runtime=runtime) as run:
            rows = [next(run) for _ in range(2 if name != "seeds" else 5)]
            weights, split = run.policy.weights, spread(run)
        found[name] = {
            "loss": rows[-1]["loss"],
            "weights": {key: np.asarray(x).tolist() for key, x in weights.params.items()},
            "split": split,
            "text": run.explain().short(),
            "devices": run.profile().facts["learner"]["devices"],
        }
    stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
