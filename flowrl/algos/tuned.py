"""Tuned settings by (graph, environment). The command line uses them by default and says so in a run's first line.

`docs/learning.md` shows what they reach, over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TUNED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("ppo", "CartPole-v1"): {"envs": 8, "fragment": 128, "batch": 1024, "minibatch": 64, "lr": 1e-3, "gamma": 0.98, "lam": 0.8},
    ("ppo", "Pendulum-v1"): {"envs": 4, "fragment": 1024, "batch": 4096, "minibatch": 64, "lr": 1e-3, "gamma": 0.9, "lam": 0.95},
    ("ppo", "Acrobot-v1"): {"envs": 16, "fragment": 256, "batch": 4096, "minibatch": 64, "epochs": 4, "lam": 0.94, "normalize": True},
}


def tuned(graph: str, env: str) -> dict[str, Any]:
    """The tuned settings of a stock graph for an environment; empty where there are none."""
    return dict(TUNED.get((graph, env), {}))
