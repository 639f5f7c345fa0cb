"""Tuned settings by (graph, environment). The command line uses them by default and says so in a run's first line.

`docs/learning.md` shows what they reach, over seeds; those for Atari games are published ones, not measured there.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from flowrl.rl.networks import MLP
from flowrl.rl.optimizers import Linear
from flowrl.rl.policies import Policy

DQN = {
    "envs": 8, "fragment": 32, "batch": 128 * 64, "minibatch": 64, "updates_per_step": 1 / 256, "target_every": 1, "epsilon": 0.04,
    "epsilon_steps": 8_000, "capacity": 100_000, "n_step": 3, "double": False, "report_every": 4,
}  # fmt: skip
"""128 updates every 256 steps, as in RL Baselines3 Zoo, a target that moves between them, and rates that fall."""

TUNED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("ppo", "CartPole-v1"): {"envs": 8, "fragment": 128, "batch": 1024, "minibatch": 64, "lr": 1e-3, "gamma": 0.98, "lam": 0.8},
    ("ppo", "Pendulum-v1"): {"envs": 4, "fragment": 1024, "batch": 4096, "minibatch": 64, "lr": Linear(1e-3, 0.0, 47_000), "gamma": 0.9},
    ("ppo", "Acrobot-v1"): {"envs": 16, "fragment": 256, "batch": 4096, "minibatch": 64, "epochs": 4, "lam": 0.94, "normalize": True},
    ("ppo", "ALE/*"): {  # Schulman et al. 2017, table 5, with the 4 epochs of OpenAI Baselines, no rate annealed
        "envs": 8, "fragment": 128, "batch": 1024, "epochs": 4, "minibatch": 256, "lr": 2.5e-4, "clip": 0.1, "entropy": 0.01, "clip_rewards": 1.0,
    },
    ("ppo", "Breakout-MinAtar"): {  # with tanh most runs stay at returns of 7 to 24
        "envs": 64, "fragment": 128, "batch": 8192, "epochs": 4, "minibatch": 1024, "lr": Linear(5e-3, 0.0, 39_060), "entropy": 0.01,
        "policy": Policy(MLP, activation="relu"),
    },
    ("impala", "CartPole-v1"): {"lr": 1e-3, "gamma": 0.98},
    ("appo", "CartPole-v1"): {"batch": 1600, "epochs": 4, "minibatch": 200, "lr": 5e-4, "gamma": 0.98, "clip": 0.05},
    ("dqn", "CartPole-v1"): {**DQN, "prioritized": True, "beta_steps": 100_000, "lr": Linear(1e-3, 0.0, 65_000), "hidden": (128, 128)},
    ("dqn", "Acrobot-v1"): {**DQN, "lr": Linear(1e-3, 0.0, 75_000)},
    ("apex", "CartPole-v1"): {**DQN, "fragment": 16, "epsilon": 0.4, "lr": Linear(1e-3, 0.0, 100_000)},
    ("sac", "Pendulum-v1"): {"lr": 1e-3},
    ("a2c", "ALE/*"): {"envs": 16, "batch": 80, "entropy": 0.01, "clip_rewards": 1.0},  # OpenAI Baselines
    **{(graph, "ALE/*"): {"clip_rewards": 1.0} for graph in ("pg", "impala", "appo")},  # Mnih et al. 2015; Espeholt et al. 2018
}  # fmt: skip


def tuned(graph: str, env: str) -> dict[str, Any]:
    """The tuned settings of a stock graph for an environment; empty where there are none. gymnax's environments have those of Gymnasium's.

    >>> tuned("impala", "ALE/Pong-v5")
    {'clip_rewards': 1.0}
    """
    id_ = env.removeprefix("gymnax:")
    return dict(
        next(
            (
                settings
                for (name, pattern), settings in TUNED.items()
                if name == graph and fnmatchcase(id_, pattern)
            ),
            {},
        )
    )
