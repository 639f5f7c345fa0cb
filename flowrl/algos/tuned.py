"""Tuned settings by graph and environment, which the command line uses by default.

The first line that a run prints names them. `docs/learning.md` shows the returns that they reach,
over several seeds, and `docs/learning_rainbow.md` those of DQN and Rainbow on Breakout. The
settings for Atari games, for Walker2d, and for SAC on Hopper and HalfCheetah are published ones and
are not measured there.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from gymnasium.envs.registration import find_highest_version, parse_env_id
from gymnasium.error import Error as GymError

from flowrl.algos import STOCK
from flowrl.errors import SettingError, unknown
from flowrl.rl.networks import MLP
from flowrl.rl.optimizers import Linear
from flowrl.rl.policies import Policy

DQN: Mapping[str, Any] = {
    "envs_per_runner": 8,
    "rollout_length": 32,
    "batch_size": 128 * 64,
    "minibatch_size": 64,
    "updates_per_step": 1 / 256,
    "target_update_every": 1,
    "epsilon": 0.04,
    "epsilon_steps": 8_000,
    "buffer_size": 100_000,
    "n_step": 3,
    "double": False,
    "report_every": 4,
}
BREAKOUT: Mapping[str, Any] = {
    "envs_per_runner": 16,
    "rollout_length": 8,
    "batch_size": 8 * 128,
    "minibatch_size": 128,
    "updates_per_step": 1 / 128,
    "target_update_every": 8,
    "epsilon": 0.02,
    "epsilon_steps": 20_000,
    "buffer_size": 100_000,
    "lr": 5e-4,
    "hidden": (128, 128),
}
"""The settings that the tuned graphs of DQN and Ape-X share.

They take 128 gradient steps every 256 environment steps, as in RL Baselines3 Zoo, and update the
target network in between. The learning rates fall to 0.
"""

MUJOCO: Mapping[str, Any] = {
    "envs_per_runner": 8,
    "rollout_length": 256,
    "batch_size": 2048,
    "minibatch_size": 64,
    "lr": Linear(3e-4, 0.0, 156_250),
    "normalize": True,
    "normalize_rewards": True,
}
"""The settings of PPO on MuJoCo: those of Huang et al. (2022), but in 8 environments.

The learning rate falls to 0 over 1,000,000 environment steps.
"""

TUNED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        "envs_per_runner": 8,
        "rollout_length": 128,
        "batch_size": 1024,
        "minibatch_size": 64,
        "lr": 1e-3,
        "gamma": 0.98,
        "gae_lambda": 0.8,
    },
    ("ppo", "Pendulum-v1"): {
        "envs_per_runner": 4,
        "rollout_length": 1024,
        "batch_size": 4096,
        "minibatch_size": 64,
        "lr": Linear(1e-3, 0.0, 47_000),
        "gamma": 0.9,
    },
    ("ppo", "Acrobot-v1"): {
        "envs_per_runner": 16,
        "rollout_length": 256,
        "batch_size": 4096,
        "minibatch_size": 64,
        "epochs": 4,
        "gae_lambda": 0.94,
        "normalize": True,
    },
    ("ppo", "Taxi-v4"): {
        "envs_per_runner": 16,
        "rollout_length": 128,
        "batch_size": 2048,
        "minibatch_size": 128,
        # While the rate stays as high as at first, greedy actions may go round in circles.
        "lr": Linear(1e-3, 0.0, 39_060),
        "gamma": 0.98,
        "ent_coef": 0.01,
    },
    # These are the settings of RL Baselines3 Zoo, but with batches of a quarter: with those of
    # 16,384 steps one of three seeds played 213.
    ("ppo", "LunarLander-v3"): {
        "envs_per_runner": 16,
        "rollout_length": 256,
        "batch_size": 4096,
        "minibatch_size": 64,
        "epochs": 4,
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "ent_coef": 0.01,
    },
    ("ppo", "InvertedPendulum-v5"): {
        **MUJOCO,
        "envs_per_runner": 4,
        "rollout_length": 512,
        "lr": Linear(3e-4, 0.0, 31_250),
    },
    ("ppo", "Hopper-v5"): MUJOCO,
    # These are the settings of RL Baselines3 Zoo, but in 8 environments: with those of Hopper it
    # plays 1,900 in place of 6,000; one seed in three stays near 2,000.
    ("ppo", "HalfCheetah-v5"): {
        "envs_per_runner": 8,
        "rollout_length": 64,
        "batch_size": 512,
        "minibatch_size": 64,
        "epochs": 20,
        "lr": 2.0633e-5,
        "gamma": 0.98,
        "gae_lambda": 0.92,
        "clip_ratio": 0.1,
        "vf_coef": 0.58,
        "ent_coef": 0.0004,
        "max_grad_norm": 0.8,
        "normalize_rewards": True,
        "policy": Policy(MLP, hidden=(256, 256), activation="relu", log_std=-2.0, normalize=True),
    },
    ("ppo", "Walker2d-v5"): MUJOCO,
    # These are from Schulman et al. 2017, table 5, but with the 4 epochs of OpenAI Baselines and
    # a constant learning rate.
    ("ppo", "ALE/*"): {
        "envs_per_runner": 8,
        "rollout_length": 128,
        "batch_size": 1024,
        "epochs": 4,
        "minibatch_size": 256,
        "lr": 2.5e-4,
        "clip_ratio": 0.1,
        "ent_coef": 0.01,
        "clip_rewards": 1.0,
    },
    # With tanh in place of relu most runs stay at returns of 7 to 24.
    ("ppo", "Breakout-MinAtar"): {
        "envs_per_runner": 64,
        "rollout_length": 128,
        "batch_size": 8192,
        "epochs": 4,
        "minibatch_size": 1024,
        "lr": Linear(5e-3, 0.0, 39_060),
        "ent_coef": 0.01,
        "policy": Policy(MLP, activation="relu"),
    },
    # These are the settings of OpenAI Baselines.
    ("a2c", "ALE/*"): {
        "envs_per_runner": 16,
        "batch_size": 80,
        "ent_coef": 0.01,
        "clip_rewards": 1.0,
    },
    # Rewards are clipped as in Mnih et al. 2015.
    ("a3c", "ALE/*"): {"clip_rewards": 1.0},
    ("pg", "ALE/*"): {"clip_rewards": 1.0},
    # Rewards are clipped as in Espeholt et al. 2018.
    ("impala", "ALE/*"): {"clip_rewards": 1.0},
    ("impala", "CartPole-v1"): {"lr": 1e-3, "gamma": 0.98},
    ("appo", "ALE/*"): {"clip_rewards": 1.0},
    # Several epochs and a small clip range keep the critic fitted and the policy from collapsing.
    ("appo", "CartPole-v1"): {
        "batch_size": 1600,
        "epochs": 4,
        "minibatch_size": 200,
        "lr": 5e-4,
        "gamma": 0.98,
        "clip_ratio": 0.05,
    },
    ("dqn", "CartPole-v1"): {
        **DQN,
        "prioritized": True,
        "beta_steps": 100_000,
        "lr": Linear(1e-3, 0.0, 65_000),
        "hidden": (128, 128),
    },
    ("dqn", "Taxi-v4"): {
        "lr": Linear(1e-3, 0.0, 25_000),
        "gamma": 0.98,
        "epsilon_steps": 20_000,
        "hidden": (128,),
    },
    # After 300,000 steps three seeds played 228, 134 and 97, for which there is no gate.
    ("dqn", "LunarLander-v3"): {
        **DQN,
        "lr": Linear(6.3e-4, 0.0, 150_000),
        "epsilon": 0.05,
        "epsilon_steps": 36_000,
        "buffer_size": 300_000,
        "hidden": (256, 256),
    },
    ("dqn", "Acrobot-v1"): {**DQN, "lr": Linear(1e-3, 0.0, 75_000)},
    # As many gradient steps as those of DQN; no return is above 1 / (1 - gamma) = 100.
    ("rainbow", "CartPole-v1"): {
        "rollout_length": 32,
        "batch_size": 128 * 64,
        "minibatch_size": 64,
        "updates_per_step": 1 / 256,
        "target_update_every": 1,
        "v_min": 0.0,
        "v_max": 100.0,
        "hidden": (128, 128),
        "beta_steps": 50_000,
        "lr": Linear(2e-3, 0.0, 25_000),
        "report_every": 4,
    },
    ("dqn", "Breakout-MinAtar"): BREAKOUT,
    # Noisy layers, returns of three steps, and a beta that rises to 1 all learned more slowly.
    ("rainbow", "Breakout-MinAtar"): {
        **BREAKOUT,
        "n_step": 1,
        "noisy": False,
        "beta_steps": 0,
        "v_min": 0.0,
        "v_max": 15.0,
    },
    ("apex", "CartPole-v1"): {
        **DQN,
        "rollout_length": 16,
        "epsilon": 0.4,
        "lr": Linear(1e-3, 0.0, 100_000),
    },
    # The replay holds all of 480,000 steps: without the first ones the policy forgets them. With
    # gamma 0.99 one policy in ten on the way, and the last one of one seed, play below 400.
    ("r2d2", "CartPole-v1"): {
        "buffer_size": 500_000,
        "gamma": 0.997,
        "lr": Linear(1e-3, 0.0, 6_000),
        "target_update_every": 200,
    },
    ("sac", "Pendulum-v1"): {"lr": 1e-3},
    ("iql", "Pendulum-v1"): {"lr": 1e-3, "hidden": (64, 64)},
    ("cql", "Pendulum-v1"): {
        "lr": 1e-3,
        "actions": 4,
        "hidden": (64, 64),
    },
    ("multi_ppo", "pettingzoo:mpe2.simple_spread_v3"): {
        "central_critic": True,
        "envs_per_runner": 16,
        "rollout_length": 25,
        "batch_size": 1200,
        "minibatch_size": 300,
        "lr": 7e-4,
        "ent_coef": 0.01,
        # Episodes are cut after 25 steps: with 0.99, and rewards as they are, some runs get worse.
        "gamma": 0.95,
        "normalize": True,
        "normalize_rewards": True,
    },
    # The first steps are by a policy that has not learned, as in Haarnoja et al. 2018b.
    ("sac", "Hopper-v5"): {"learning_starts": 10_000},
    ("sac", "HalfCheetah-v5"): {"learning_starts": 10_000},
    ("sac", "Walker2d-v5"): {"learning_starts": 10_000},
}


def tuned(graph: str, env: str) -> dict[str, Any]:
    """Return the tuned settings of a stock graph for an environment, empty where there are none.

    An environment of gymnax has the same settings as Gymnasium's environment of that name. An id
    without a version stands for the newest one, as in `gymnasium.make`.

    Args:
        graph: the name of the stock graph, such as ``ppo``. What is no single name, such as
            ``mine.py:graph``, is a graph of one's own, for which there are none.
        env: the id of the environment.

    Raises:
        SettingError: no stock graph has this name.

    >>> tuned("impala", "ALE/Pong-v5")
    {'clip_rewards': 1.0}
    """
    if graph.isidentifier() and graph not in STOCK:
        raise SettingError(unknown("graph", graph, STOCK))
    id_ = _with_version(env.removeprefix("gymnax:"))
    for (name, pattern), settings in TUNED.items():
        if name == graph and fnmatchcase(id_, pattern):
            return dict(settings)
    return {}


def _with_version(env: str) -> str:
    """Return the id that `gymnasium.make` takes for one without a version."""
    try:
        namespace, name, version = parse_env_id(env)
    except GymError:
        # It is an id of another kind, such as one of PettingZoo.
        return env
    newest = find_highest_version(namespace, name) if version is None else None
    return env if newest is None else f"{env}-v{newest}"
