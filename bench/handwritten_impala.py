"""IMPALA on CartPole-v1 by hand with Ray and JAX: what the Ray runtime is measured against.

The same maths as `fl.impala`: V-trace over rollouts in NEXT_STEP form, Adam after a clipped
gradient norm, weights to the runners with every update, two requests in flight to each runner,
batches of at least `BATCH` steps.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

from handwritten import Params, act, init, net

STEPS, BATCH = 50, 500
LR, GAMMA, VALUE, ENTROPY = 5e-4, 0.99, 0.5, 0.01
TX = optax.chain(optax.clip_by_global_norm(40.0), optax.adam(LR, eps=1e-5))


class Runner:
    def __init__(self, index: int, envs: int) -> None:
        self.env = gym.make_vec(
            "CartPole-v1", num_envs=envs, vectorization_mode="vector_entry_point"
        )
        self.key = jax.random.fold_in(jax.random.key(1), index)
        self.envs, self.turn, self.params = envs, 0, None
        self.obs, _ = self.env.reset(seed=index)
        self.done, self.sums = np.zeros(envs, bool), np.zeros(envs)

    def sample(self, weights: Any) -> Any:
        if weights is not None:
            self.params, self.version = jax.tree.map(jnp.asarray, weights[0]), weights[1]
        envs = self.envs
        ended: list[float] = []
        b = {
            "obs": np.empty((STEPS, envs, 4), np.float32),
            "reward": np.empty((STEPS, envs), np.float32),
            **{k: np.empty((STEPS, envs), bool) for k in ("terminated", "truncated", "valid")},
        }
        packed = np.empty((STEPS, 3, envs), np.float32)
        for t in range(STEPS):
            b["obs"][t], b["valid"][t] = self.obs, ~self.done
            packed[t] = act(self.params, self.obs, self.key, np.uint32(self.turn))
            self.obs, b["reward"][t], b["terminated"][t], b["truncated"][t], _ = self.env.step(
                packed[t, 0].astype(np.int64)
            )
            self.done = b["terminated"][t] | b["truncated"][t]
            self.turn += 1
            self.sums += b["reward"][t]
            if self.done.any():
                ended.extend(self.sums[self.done])
                self.sums[self.done] = 0
        b["action"], b["logp"] = packed[:, 0].astype(np.int32), packed[:, 1]
        return b, self.obs.copy(), self.version, ended


def vtrace(value: Any, end: Any, log_ratio: Any, b: dict[str, Any]) -> tuple[Any, Any]:
    rho = jnp.where(b["valid"], jnp.minimum(jnp.exp(log_ratio), 1.0), 0.0)
    after = jnp.concatenate([value[1:], end[None]])
    on = GAMMA * (1.0 - b["terminated"])
    delta = rho * (b["reward"] + on * after - value)
    keep = GAMMA * rho * (1.0 - (b["terminated"] | b["truncated"]))

    def back(error: Any, row: Any) -> Any:
        error = row[0] + row[1] * error
        return error, error

    _, error = jax.lax.scan(back, jnp.zeros_like(end), (delta, keep), reverse=True)
    target = value + error
    advantage = rho * (b["reward"] + on * jnp.concatenate([target[1:], end[None]]) - value)
    return target, advantage


def loss_of(params: Params, b: dict[str, Any], last_obs: Any) -> Any:
    rows, columns = b["reward"].shape
    logits, value = net(params, jnp.concatenate([b["obs"], last_obs[None]]).reshape(-1, 4))
    logits, value = logits.reshape(rows + 1, columns, -1)[:-1], value.reshape(rows + 1, columns)
    logps = jax.nn.log_softmax(logits)
    w = b["valid"].astype(jnp.float32)

    def mean(x: Any) -> Any:
        return jnp.sum(jnp.where(w > 0, x, 0.0) * w) / jnp.maximum(jnp.sum(w), 1.0)

    logp = jnp.take_along_axis(logps, b["action"][..., None], 2)[..., 0]
    log_ratio = jnp.where(b["valid"], logp - b["logp"], 0.0)
    target, advantage = jax.lax.stop_gradient(vtrace(value[:-1], value[-1], log_ratio, b))
    policy = -mean(logp * advantage)
    critic = 0.5 * mean((value[:-1] - target) ** 2)
    entropy = mean(-jnp.sum(jnp.exp(logps) * logps, axis=-1))
    return policy + VALUE * critic - ENTROPY * entropy


@partial(jax.jit, donate_argnums=(0, 1))
def update(params: Params, opt: Any, b: dict[str, Any], last_obs: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, b, last_obs)
    updates, opt = TX.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    return params, opt, loss, jax.tree.map(jnp.copy, params)


def train(
    seed: int, runners: int, envs: int, seconds: float, warm_up: float
) -> tuple[float, float]:
    """Train for so long, after a warm-up that begins with the first rollout.

    Gives the steps per second, and the mean return of the last 100 episodes.
    """
    kind: Any = ray.remote(Runner).options(
        num_cpus=0, runtime_env={"env_vars": {"NPROC": "1", "JAX_PLATFORMS": "cpu"}}
    )
    actors = [kind.remote(i, envs) for i in range(runners)]
    params = init(jax.random.key(seed))
    opt, version = TX.init(params), 0
    newest = ray.put((jax.device_get(params), version))
    has: list[Any] = [None] * runners
    going: dict[Any, int] = {}
    held: list[Any] = []
    recent: deque[float] = deque(maxlen=100)

    def ask(i: int) -> None:
        weights, has[i] = (None if has[i] is newest else newest), newest
        going[actors[i].sample.remote(weights)] = i

    for i in [*range(runners)] * 2:
        ask(i)
    steps, began, start = 0, None, None
    while True:
        (ref,), _ = ray.wait(list(going))
        now = time.perf_counter()
        began = began or now  # the first rollout is here
        if start is None and now - began > warm_up:
            start, steps = now, 0
        if start is not None and now - start > seconds:
            break
        i = going.pop(ref)
        b, last, _, ended = ray.get(ref)
        ask(i)
        recent.extend(ended)
        steps += STEPS * envs
        held.append((b, last))
        if len(held) * STEPS * envs >= BATCH:
            joined = {k: np.concatenate([h[0][k] for h in held], axis=1) for k in held[0][0]}
            lasts = np.concatenate([h[1] for h in held])
            held = []
            params, opt, _, copy = update(params, opt, joined, lasts)
            version += 1
            newest = ray.put((jax.device_get(copy), version))
    for actor in actors:
        ray.kill(actor)
    return steps / (now - start), float(np.mean(recent))
