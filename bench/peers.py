"""What others do, for `bench/replay.py`. Prints one line of JSON.

It is run by the Python of an environment that holds Stable-Baselines3 and cpprb.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ENVS = 8
FORMS: dict[str, tuple[tuple[int, ...], Any, int]] = {
    "floats": ((4,), np.float32, 1_000_000),
    "images": ((84, 84, 4), np.uint8, 100_000),
}
"""Observations: their shape and type, and how many transitions are held."""


def rate(work: Callable[[], Any], number: int, seconds: float = 0.5, runs: int = 3) -> float:
    """What `work`, which does so many at a time, does a second: the median of some runs."""
    work()
    found = []
    for _ in range(runs):
        calls, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            work()
            calls += 1
        found.append(number * calls / (now - start))
    return statistics.median(found)


def observations(form: str) -> Any:
    """For so many environments."""
    shape, dtype, _ = FORMS[form]
    return np.random.default_rng(0).integers(0, 256, (ENVS, *shape)).astype(dtype)


def stable_baselines(form: str) -> dict[str, float]:
    """Its replay buffer."""
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer

    shape, dtype, size = FORMS[form]
    obs = observations(form)
    space = gym.spaces.Box(0, 255, shape, dtype)
    buffer = ReplayBuffer(size, space, gym.spaces.Discrete(2), n_envs=ENVS, device="cpu")
    infos: list[dict[str, Any]] = [{}] * ENVS
    action, reward, done = np.zeros((ENVS, 1), int), np.ones(ENVS), np.zeros(ENVS, bool)

    def add() -> None:
        buffer.add(obs, obs, action, reward, done, infos)

    for _ in range(size // ENVS):
        add()
    found = {f"sample {n}": rate(lambda n=n: buffer.sample(n), n) for n in (32, 512)}  # type: ignore[misc]
    return {"add": rate(add, ENVS), **found}


def cpprb(form: str) -> dict[str, float]:
    """Its prioritized buffer: each draw with new priorities after it."""
    from cpprb import PrioritizedReplayBuffer

    shape, dtype, size = FORMS[form]
    obs = observations(form)
    forms = {
        "obs": {"shape": shape, "dtype": dtype},
        "act": {"dtype": np.int32},
        "rew": {},
        "next_obs": {"shape": shape, "dtype": dtype},
        "done": {},
    }
    buffer = PrioritizedReplayBuffer(size, forms)
    rest = {"act": np.zeros(ENVS, np.int32), "rew": np.ones(ENVS), "done": np.zeros(ENVS)}

    def add() -> None:
        buffer.add(obs=obs, next_obs=obs, **rest)

    def draw(n: int, priorities: Any) -> None:
        buffer.update_priorities(buffer.sample(n, beta=0.4)["indexes"], priorities)

    for _ in range(size // ENVS):
        add()
    found = {}
    for n in (32, 512):
        priorities = np.random.default_rng(0).random(n)
        found[f"sample {n}"] = rate(lambda n=n, p=priorities: draw(n, p), n)  # type: ignore[misc]
    return {"add": rate(add, ENVS), **found}


def dqn(hidden: str) -> dict[str, float]:
    """Steps a second of its DQN, by the settings of RL Baselines3 Zoo for CartPole-v1."""
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy", "CartPole-v1", learning_rate=2.3e-3, batch_size=64, buffer_size=100_000,
        learning_starts=1_000, gamma=0.99,
        target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [int(hidden)] * 2}, device="cpu", seed=0,
    )  # fmt: skip
    return {"steps": speed(model, 1_024, 6_144)}


def sac(hidden: str) -> dict[str, float]:
    """Steps a second of its SAC, an update a step."""
    from stable_baselines3 import SAC

    model = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=1e-3,
        policy_kwargs={"net_arch": [int(hidden)] * 2},
        device="cpu",
        seed=0,
    )
    return {"steps": speed(model, 200, 1_500)}


def speed(model: Any, before: int, steps: int) -> float:
    """Steps a second after the first ones."""
    model.learn(before, log_interval=10**9)
    start = time.perf_counter()
    model.learn(steps, log_interval=10**9, reset_num_timesteps=False)
    return steps / (time.perf_counter() - start)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
