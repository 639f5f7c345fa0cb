"""Whether gradients that four devices share, and the step by them, are a shared update; as JSON."""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "learner"))
import test_gradients as own


def difference(name):
    """The devices that share it, and the largest difference from what one update gives."""
    results = []
    for in_halves in (False, True):
        learner = own.fresh(*own.CASES[name])
        rows = own.batch(columns=4)
        trained = learner.apply(learner.gradients(rows)) if in_halves else learner.update(rows)
        results.append(jax.tree.leaves(own.plain((trained, learner.state))))
    apart = partial(np.subtract, dtype=np.float64)
    return learner.shards, max(
        float(np.abs(apart(a, b)).max()) for a, b in zip(*results, strict=True)
    )


if __name__ == "__main__":
    names = ("ppo, adaptive, normalised", "dqn")
    sys.stdout.write(json.dumps({name: difference(name) for name in names}) + "\n")
