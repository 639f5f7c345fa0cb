"""DQN on CartPole-v1 by hand in JAX: a loop over NumPy arrays, and one `lax.scan` over gymnax.

Both go by rounds: `ENVS` environments take `STEPS` steps each, then come `UPDATES` updates on
minibatches of `BATCH` transitions drawn at random, and the target network becomes the newest one.
The maths is that of `fl.dqn` with ``double=False``.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium as gym
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

ENVS, STEPS, UPDATES, BATCH = 8, 32, 128, 64
CAPACITY, START, LR, GAMMA, EPSILON = 100_000, 1_000, 5e-4, 0.99, 0.05
TX = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(LR, eps=1e-5))
Params = list[tuple[Any, Any]]


def init(key: Any, hidden: int) -> Params:
    params = []
    for a, b in ((4, hidden), (hidden, hidden), (hidden, 2)):
        key, k_w, k_b = jax.random.split(key, 3)
        params.append(
            (
                jax.random.uniform(k_w, (a, b), minval=-(a**-0.5), maxval=a**-0.5),
                jax.random.uniform(k_b, (b,), minval=-(a**-0.5), maxval=a**-0.5),
            )
        )
    return params


def net(params: Params, obs: Any) -> Any:
    for w, b in params[:-1]:
        obs = jax.nn.relu(obs @ w + b)
    return obs @ params[-1][0] + params[-1][1]


def explore(params: Params, obs: Any, key: Any) -> Any:
    k_any, k_whether = jax.random.split(key)
    any_ = jax.random.randint(k_any, (ENVS,), 0, 2)
    return jnp.where(
        jax.random.uniform(k_whether, (ENVS,)) < EPSILON, any_, jnp.argmax(net(params, obs), 1)
    )


@jax.jit
def act(params: Params, obs: Any, key: Any, turn: Any) -> Any:
    return explore(params, obs, jax.random.fold_in(key, turn))


def loss_of(params: Params, target: Params, b: dict[str, Any]) -> Any:
    target_value = b["reward"] + GAMMA * (1.0 - b["terminated"]) * net(target, b["next_obs"]).max(1)
    value = jnp.take_along_axis(net(params, b["obs"]), b["action"][:, None], 1)[:, 0]
    return optax.huber_loss(value, target_value).mean()


def updates(params: Params, opt: Any, rows: dict[str, Any]) -> Any:
    """An update on each minibatch; what comes before them is the target."""
    target = params

    def step(carry: Any, b: dict[str, Any]) -> Any:
        params, opt = carry
        loss, grads = jax.value_and_grad(loss_of)(params, target, b)
        change, opt = TX.update(grads, opt, params)
        return (optax.apply_updates(params, change), opt), loss

    minibatches = jax.tree.map(lambda x: x.reshape(UPDATES, BATCH, *x.shape[1:]), rows)
    (params, opt), losses = jax.lax.scan(step, (params, opt), minibatches)
    return params, opt, losses.mean()


learn = partial(jax.jit, donate_argnums=1)(updates)


def train(seed: int, rounds: int, hidden: int) -> list[float]:
    """Train, and return the seconds that each round took."""
    env = gym.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="vector_entry_point")
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    params = init(key, hidden)
    opt = TX.init(params)
    forms = {
        "obs": ((4,), np.float32),
        "next_obs": ((4,), np.float32),
        "action": ((), np.int32),
        "reward": ((), np.float32),
        "terminated": ((), bool),
    }
    held = {name: np.empty((CAPACITY, *shape), dtype) for name, (shape, dtype) in forms.items()}
    size = at = turn = 0
    obs, _ = env.reset(seed=seed)
    done, seconds = np.zeros(ENVS, bool), []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(STEPS):
            action = np.asarray(act(params, obs, key, np.uint32(turn)))
            new, reward, terminated, truncated, _ = env.step(action)
            fresh = ~done
            slots = (at + np.arange(fresh.sum())) % CAPACITY
            for name, x in (
                ("obs", obs),
                ("next_obs", new),
                ("action", action),
                ("reward", reward),
                ("terminated", terminated),
            ):
                held[name][slots] = x[fresh]
            at, size, turn = (
                (at + len(slots)) % CAPACITY,
                min(CAPACITY, size + len(slots)),
                turn + 1,
            )
            done = terminated | truncated
            obs = new.copy()
        if turn * ENVS >= START:
            slots = rng.integers(0, size, UPDATES * BATCH)
            params, opt, loss = learn(params, opt, {name: x[slots] for name, x in held.items()})
            float(loss)
        seconds.append(time.perf_counter() - start)
    env.close()
    return seconds


def make(rounds: int, hidden: int) -> Any:
    """A function of a seed that trains for so many rounds in one scan, to be compiled."""
    env, params_of_env = gymnax.make("CartPole-v1")
    rows = CAPACITY // (ENVS * STEPS) * STEPS

    def reset(keys: Any) -> Any:
        obs, state = jax.vmap(env.reset_env, (0, None))(keys, params_of_env)
        return obs, jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), state)

    def one_round(carry: Any, number: Any) -> Any:
        params, opt, held, state, obs, returns, key = carry
        key, k_steps, k_draw = jax.random.split(key, 3)

        def step(now: Any, key: Any) -> Any:
            state, obs, returns = now
            k_act, k_env, k_reset = jax.random.split(key, 3)
            action = explore(params, obs, k_act)
            new, after, reward, terminated, _ = jax.vmap(env.step_env, (0, 0, 0, None))(
                jax.random.split(k_env, ENVS), state, action, params_of_env
            )
            over = terminated | jax.vmap(env.is_truncated, (0, None))(after, params_of_env)
            total = returns + reward
            row = {
                "obs": obs,
                "next_obs": new,
                "action": action,
                "reward": reward,
                "terminated": terminated,
            }
            begun = reset(jax.random.split(k_reset, ENVS))

            def pick(a: Any, b: Any) -> Any:
                return jnp.where(over.reshape(-1, *(1,) * (jnp.ndim(b) - 1)), a, b).astype(
                    jnp.result_type(b)
                )

            obs, state = jax.tree.map(pick, begun, (new, after))
            return (state, obs, jnp.where(over, 0.0, total)), (row, (over, total))

        (state, obs, returns), (rollout, (over, totals)) = jax.lax.scan(
            step, (state, obs, returns), jax.random.split(k_steps, STEPS)
        )
        at = number * STEPS % rows
        held = jax.tree.map(
            lambda all_, new: jax.lax.dynamic_update_slice(all_, new, (at, *[0] * (all_.ndim - 1))),
            held,
            rollout,
        )
        slots = jax.random.randint(
            k_draw, (UPDATES * BATCH,), 0, jnp.minimum((number + 1) * STEPS, rows) * ENVS
        )
        drawn = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[slots], held)
        params, opt, loss = updates(params, opt, drawn)
        ended = jnp.sum(jnp.where(over, totals, 0.0)) / jnp.maximum(jnp.sum(over), 1)
        return (params, opt, held, state, obs, returns, key), (loss, ended)

    def train(seed: Any) -> Any:
        key, k_params, k_env = jax.random.split(jax.random.key(seed), 3)
        params = init(k_params, hidden)
        obs, state = reset(jax.random.split(k_env, ENVS))
        forms = {"obs": (4,), "next_obs": (4,), "action": (), "reward": (), "terminated": ()}
        types = {"action": jnp.int32, "terminated": bool}
        held = {
            name: jnp.zeros((rows, ENVS, *shape), types.get(name, jnp.float32))
            for name, shape in forms.items()
        }
        first = (params, TX.init(params), held, state, obs, jnp.zeros(ENVS), key)
        return jax.lax.scan(one_round, first, jnp.arange(rounds))[1]

    return train
