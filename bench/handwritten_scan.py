"""PPO on gymnax CartPole-v1 by hand as one `lax.scan`: what the XLA runtime is measured against.

The network, loss and advantages are those of `handwritten`; episodes end as there, too. Like flowrl
it draws all that a rollout needs at its start, gathers minibatches of single steps, and gives for
each update the loss and the mean return of the episodes that ended in it.
"""

from __future__ import annotations

import time
from typing import Any

import gymnax
import jax
import jax.numpy as jnp

from handwritten import TX, epochs, gae, init, net

STEPS, EPOCHS, MINIBATCHES = 128, 4, 4


def make(envs: int, updates: int) -> Any:
    """A function of a seed that trains for so many updates, to be compiled."""
    env, params_of_env = gymnax.make("CartPole-v1")
    n = envs * STEPS

    def reset(keys: Any) -> Any:
        obs, state = jax.vmap(env.reset_env, (0, None))(keys, params_of_env)
        return obs, jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), state)

    def pick(done: Any, a: Any, b: Any) -> Any:
        return jax.tree.map(
            lambda x, y: jnp.where(done.reshape(-1, *(1,) * (jnp.ndim(x) - 1)), x, y).astype(
                jnp.result_type(x)
            ),
            a,
            b,
        )

    def one_update(carry: Any, _: Any) -> Any:
        params, opt, state, obs, done, returns, key = carry
        key, k_act, k_env, k_update = jax.random.split(key, 4)
        gumbel = jax.random.gumbel(k_act, (STEPS, envs, 2))
        bits = jax.random.bits(k_env, (STEPS, envs, 2, 2))

        def step(now: Any, random: Any) -> Any:
            state, obs, done, returns = now
            logits, value = net(params, obs)
            action = jnp.argmax(logits + random[0], axis=1)
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            keys = jax.random.wrap_key_data(random[1])
            new_obs, new, reward, terminated, _ = jax.vmap(env.step_env, (0, 0, 0, None))(
                keys[:, 0], state, action, params_of_env
            )
            truncated = jax.vmap(env.is_truncated, (0, None))(new, params_of_env)
            new_obs, new = pick(done, reset(keys[:, 1]), (new_obs, new))
            reward, terminated, truncated = (
                jnp.where(done, 0.0, reward),
                terminated & ~done,
                truncated & ~done,
            )
            over, total = terminated | truncated, returns + reward
            row = {
                "obs": obs,
                "action": action,
                "logp": logp,
                "value": value,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
            }
            return (new, new_obs, over, jnp.where(over, 0.0, total)), {
                **row,
                "valid": ~done,
                "total": total,
            }

        (state, obs, done, returns), b = jax.lax.scan(
            step, (state, obs, done, returns), (gumbel, bits)
        )
        over, totals = b["terminated"] | b["truncated"], b.pop("total")
        ended = jnp.sum(jnp.where(over, totals, 0.0)) / jnp.maximum(jnp.sum(over), 1)
        rows = jax.tree.map(lambda x: x.reshape(n, *x.shape[2:]), gae(params, b, obs))

        params, opt, loss = epochs(
            params, opt, rows, jax.random.split(k_update, EPOCHS), n // MINIBATCHES
        )
        return (params, opt, state, obs, done, returns, key), (loss, ended)

    def train(seed: Any) -> Any:
        key, k_params, k_env = jax.random.split(jax.random.key(seed), 3)
        params = init(k_params)
        obs, state = reset(jax.random.split(k_env, envs))
        first = (params, TX.init(params), state, obs, jnp.zeros(envs, bool), jnp.zeros(envs), key)
        return jax.lax.scan(one_update, first, None, length=updates)

    return train


def measure(seed: int, envs: int, updates: int) -> tuple[float, float]:
    """Seconds to compile, and steps a second without."""
    start = time.perf_counter()
    program = jax.jit(make(envs, updates)).lower(0).compile()
    compiled = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(program(seed))
    return compiled, updates * envs * STEPS / (time.perf_counter() - start)
