"""PPO on CartPole-v1 written by hand in JAX: what the local runtime is measured against.

The same maths as `fl.ppo` with value clipping: rows after an episode's end are invalid, truncated
episodes bootstrap from their final observation, advantages are standardised over the batch, Adam
after a clipped gradient norm.
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

ENVS, STEPS, EPOCHS, MINIBATCH = 32, 128, 10, 128
LR, GAMMA, LAM, CLIP, VALUE_CLIP, VALUE, ENTROPY = 3e-4, 0.99, 0.95, 0.2, 0.2, 0.5, 0.01
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LR, eps=1e-5))
Params = dict[str, Any]


def init(key: Any) -> Params:
    params = {}
    for name, sizes, gains in (
        ("actor", (4, 64, 64, 2), (2**0.5, 2**0.5, 0.01)),
        ("critic", (4, 64, 64, 1), (2**0.5, 2**0.5, 1.0)),
    ):
        for i, (a, b, gain) in enumerate(zip(sizes[:-1], sizes[1:], gains, strict=True)):
            key, sub = jax.random.split(key)
            params[f"{name}{i}"] = {
                "w": jax.nn.initializers.orthogonal(gain)(sub, (a, b)),
                "b": jnp.zeros(b),
            }
    return params


def net(params: Params, obs: Any) -> tuple[Any, Any]:
    def mlp(name: str) -> Any:
        x = obs
        for i in range(2):
            x = jnp.tanh(x @ params[f"{name}{i}"]["w"] + params[f"{name}{i}"]["b"])
        return x @ params[f"{name}2"]["w"] + params[f"{name}2"]["b"]

    return mlp("actor"), mlp("critic")[:, 0]


@jax.jit
def act(params: Params, obs: Any, key: Any, turn: Any) -> Any:
    logits, value = net(params, obs)
    action = jax.random.categorical(jax.random.fold_in(key, turn), logits)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
    return jnp.stack([action.astype(jnp.float32), logp, value])


def gae(params: Params, b: dict[str, Any], last_obs: Any) -> dict[str, Any]:
    values = jnp.concatenate([b["value"], net(params, last_obs)[1][None]])
    done = b["terminated"] | b["truncated"]

    def back(adv: Any, row: Any) -> Any:
        reward, value, after, terminated, over = row
        delta = reward + GAMMA * after * (1.0 - terminated) - value
        adv = delta + GAMMA * LAM * (1.0 - over) * adv
        return adv, adv

    _, adv = jax.lax.scan(
        back,
        jnp.zeros(values.shape[1]),
        (b["reward"], values[:-1], values[1:], b["terminated"], done),
        reverse=True,
    )
    adv = jnp.where(b["valid"], adv, 0.0)
    target = adv + b["value"]
    w = b["valid"].astype(jnp.float32)
    centred = adv - jnp.sum(adv * w) / jnp.sum(w)
    adv = jnp.where(
        b["valid"], centred / jnp.sqrt(jnp.sum(centred**2 * w) / jnp.sum(w) + 1e-8), 0.0
    )
    return {**b, "advantage": adv, "target": target}


def loss_of(params: Params, b: dict[str, Any]) -> Any:
    logits, value = net(params, b["obs"])
    logps = jax.nn.log_softmax(logits)
    w = b["valid"].astype(jnp.float32)

    def mean(x: Any) -> Any:
        return jnp.sum(jnp.where(w > 0, x, 0.0) * w) / jnp.maximum(jnp.sum(w), 1.0)

    log_ratio = jnp.take_along_axis(logps, b["action"][:, None], 1)[:, 0] - b["logp"]
    ratio = jnp.exp(jnp.where(b["valid"], log_ratio, 0.0))
    policy = -mean(
        jnp.minimum(ratio * b["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * b["advantage"])
    )
    clipped = b["value"] + jnp.clip(value - b["value"], -VALUE_CLIP, VALUE_CLIP)
    critic = 0.5 * mean(jnp.maximum((value - b["target"]) ** 2, (clipped - b["target"]) ** 2))
    entropy = mean(-jnp.sum(jnp.exp(logps) * logps, axis=-1))
    return policy + VALUE * critic - ENTROPY * entropy


def epochs(params: Params, opt: Any, rows: dict[str, Any], keys: Any, minibatch_size: int) -> Any:
    """An epoch of minibatches for each key."""
    n = rows["reward"].shape[0]

    def step(carry: Any, index: Any) -> Any:
        params, opt = carry
        loss, grads = jax.value_and_grad(loss_of)(params, jax.tree.map(lambda x: x[index], rows))
        updates, opt = TX.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    def epoch(carry: Any, key: Any) -> Any:
        return jax.lax.scan(step, carry, jax.random.permutation(key, n).reshape(-1, minibatch_size))

    (params, opt), losses = jax.lax.scan(epoch, (params, opt), keys)
    return params, opt, losses.mean()


@partial(jax.jit, donate_argnums=(0, 1))
def update(params: Params, opt: Any, key: Any, b: dict[str, Any], last_obs: Any) -> Any:
    n = ENVS * STEPS
    rows = jax.tree.map(lambda x: x.reshape(n, *x.shape[2:]), gae(params, b, last_obs))

    return epochs(params, opt, rows, jax.random.split(key, EPOCHS), MINIBATCH)


def train(seed: int, updates: int) -> list[float]:
    """Train, and return the seconds that each update took, sampling included."""
    env = gym.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="vector_entry_point")
    key = jax.random.key(seed)
    params = init(key)
    opt = TX.init(params)
    obs, _ = env.reset(seed=seed)
    done = np.zeros(ENVS, bool)
    recent: deque[float] = deque(maxlen=100)
    sums, turn, seconds = np.zeros(ENVS), 0, []
    for number in range(updates):
        start = time.perf_counter()
        b = {
            "obs": np.empty((STEPS, ENVS, 4), np.float32),
            "reward": np.empty((STEPS, ENVS), np.float32),
            **{k: np.empty((STEPS, ENVS), bool) for k in ("terminated", "truncated", "valid")},
        }
        packed = np.empty((STEPS, 3, ENVS), np.float32)
        for t in range(STEPS):
            b["obs"][t], b["valid"][t] = obs, ~done
            packed[t] = act(params, obs, key, np.uint32(turn))
            obs, b["reward"][t], b["terminated"][t], b["truncated"][t], _ = env.step(
                packed[t, 0].astype(np.int64)
            )
            done = b["terminated"][t] | b["truncated"][t]
            turn += 1
            sums += b["reward"][t]
            if done.any():
                recent.extend(sums[done])
                sums[done] = 0
        b["action"], b["logp"], b["value"] = (
            packed[:, 0].astype(np.int32),
            packed[:, 1],
            packed[:, 2],
        )
        params, opt, loss = update(params, opt, jax.random.fold_in(key, number), b, obs)
        float(loss)
        seconds.append(time.perf_counter() - start)
    env.close()
    return seconds
