"""`JaxPerturbed`: whole episodes with perturbed weights in environments written in JAX.

All perturbations play side by side, as pure functions of arrays; `perturbed.py` does the same in
Gymnasium environments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from flowrl.core.broken import NONE
from flowrl.core.finite import finite_along
from flowrl.core.trees import fields_of
from flowrl.envs.jax_envs import advance_each, begin
from flowrl.rl.evolution import noise
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.policies import Memory, Weights
from flowrl.rollout.jax_core import Core, core_of
from flowrl.rollout.perturbed import act_each, memory_of_each, two_points

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = Any
State = dict[str, Any]
EPISODES = 1
"""What is folded into a pair's key for its episodes; the key itself is that of its noise."""


@lru_cache(maxsize=64)
def perturbed_of(spec: Runners) -> JaxPerturbed:
    """Return the functions for these settings, the same ones for equal settings."""
    return JaxPerturbed(spec)


@dataclass(frozen=True)
class JaxPerturbed:
    """The pure functions by which runners over an environment in JAX play perturbed weights.

    A lane is an episode of a perturbation: ``[2, pairs, episodes]``, as one axis of lanes.

    Args:
        spec: the settings of the runners.
    """

    spec: Runners

    @property
    def core(self) -> Core:
        """The functions of the runners."""
        return core_of(self.spec)

    def play(
        self,
        weights: Weights,
        seeds: Array,
        *,
        sigma: float,
        episodes: int,
        max_steps: int,
        sampled: bool,
    ) -> tuple[dict[str, Array], State, Array]:
        """Play the episodes of all pairs at once, until the last one ends or is cut.

        Args:
            weights: those that are perturbed.
            seeds: of the pairs, ``uint32[pairs]``.
            sigma: standard deviation of the perturbations.
            episodes: of each perturbation.
            max_steps: after so many steps an episode is cut.
            sampled: whether actions are picked by the runners' exploration, not greedily.

        Returns:
            The data ``[2, pairs]`` of a batch; what ended, as `Core.roll` returns it; and the
            number of episodes that were cut.
        """
        shape = (2, seeds.shape[0], episodes)
        # Both of a pair have one noise, so it is made once.
        added = jax.vmap(noise, (0, None))(seeds, weights.params)
        params = {
            name: jnp.concatenate([x + sigma * added[name], x - sigma * added[name]])
            for name, x in weights.params.items()
        }
        keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), EPISODES))(seeds)
        first = self._first(params, weights.rest, keys, shape)
        last = jax.lax.while_loop(
            lambda now: ~jnp.all(now["over"]) & (now["step"] < max_steps),
            lambda now: self._step(params, weights.rest, keys, shape, sampled, now),
            first,
        )
        scales = jnp.array([[1.0], [-1.0]], jnp.float32) * sigma
        returns, lengths = last["return"].reshape(shape), last["length"].reshape(shape)
        data = {
            "noise_seed": jnp.broadcast_to(seeds, shape[:2]),
            "noise_scale": jnp.broadcast_to(scales, shape[:2]),
            "return": jnp.mean(returns, axis=2),
            "length": jnp.sum(lengths, axis=2),
        }
        if self._normalizes:
            mean, square = jax.tree.map(
                lambda x: x.reshape(*shape, *x.shape[1:]), (last["mean"], last["square"])
            )
            data |= two_points(lengths, mean, square, spaces=self.spec.spaces())
        ended = {
            "over": jnp.ones_like(last["over"])[None],
            "return": last["return"][None],
            "length": last["length"][None],
            "broken": _broken(last),
        }
        return data, ended, jnp.sum(~last["over"], dtype=jnp.int32)

    @property
    def _normalizes(self) -> bool:
        return bool(self.core.network.layers(RunningNorm))

    def _first(
        self, params: dict[str, Array], rest: dict[str, Array], keys: Array, shape: tuple[int, ...]
    ) -> State:
        """Return the state in which all lanes begin their episodes."""
        bits = _of_lanes(jax.vmap(lambda key: jax.random.bits(key, (shape[2], 2)))(keys))
        states, obs = begin(self.core.env, bits)
        zeros = jnp.zeros(bits.shape[0], jnp.float32)
        sums = {}
        if self._normalizes:
            fields = fields_of("obs", obs)
            nothing = {name: jnp.zeros(x.shape, jnp.float32) for name, x in fields.items()}
            sums = {"mean": nothing, "square": nothing}
        return {
            "state": states,
            "obs": obs,
            "memory": memory_of_each(params, rest, net=self.core.network, k=shape[2]),
            "return": zeros,
            "length": zeros.astype(jnp.int32),
            "over": zeros > 0,
            "broken": self._wrong(obs, zeros),
            "step": jnp.uint32(0),
            **sums,
        }

    def _step(
        self,
        params: dict[str, Array],
        rest: dict[str, Array],
        keys: Array,
        shape: tuple[int, ...],
        sampled: bool,
        now: State,
    ) -> State:
        """Step all lanes once; those whose episode is over stay as they are."""
        net, lanes = self.core.network, now["over"].shape[0]
        live = ~now["over"]
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, now["step"])
        bits = _of_lanes(jax.vmap(lambda key: jax.random.bits(key, (shape[2], 2)))(step_keys))
        action_noise = None
        explore = self.spec.explore_of("").last
        if sampled:
            # Both of a pair act by the same noise.
            key, half = jax.random.fold_in(step_keys[0], 1), lanes // 2
            env = jnp.zeros(half, jnp.int32)
            drawn = explore.noise(net.head, key, half, jnp.float32(0), env, half)
            action_noise = jnp.tile(drawn, (2, *(1,) * (drawn.ndim - 1)))
            action_noise = action_noise.reshape(-1, shape[2], *drawn.shape[1:])
        obs = jax.tree.map(lambda x: x.reshape(-1, shape[2], *x.shape[1:]), now["obs"])
        action, carry = act_each(
            params, rest, obs, action_noise, now["memory"], net=net, explore=explore
        )
        action = net.head.to_env(action.reshape(lanes, *action.shape[2:]))
        state, obs, reward, over = advance_each(
            self.core.env, now["state"], now["over"], action, bits
        )
        broken = self._wrong(obs, reward)
        # What an episode ends with may allow nothing, so it is asked of what was acted on.
        nothing = self.spec.spaces().nothing_allowed(fields_of("obs", now["obs"]), jnp)
        if nothing is not None:
            broken |= nothing
        memory = now["memory"]
        if net.recurrent:
            memory = Memory(carry, jnp.zeros_like(memory.reset))
        return {
            "state": state,
            "obs": obs,
            "memory": memory,
            "return": now["return"] + reward,
            "length": now["length"] + live,
            "over": now["over"] | over,
            "broken": now["broken"] | (live & broken),
            "step": now["step"] + 1,
            **self._sums(now, live),
        }

    def _wrong(self, obs: Any, reward: Array) -> Array:
        """Return whether a lane got what is not finite, or none of the space's choices."""
        wrong, outside = ~_finite(obs, reward), self.spec.spaces().outside(fields_of("obs", obs))
        return wrong if outside is None else wrong | outside

    def _sums(self, now: State, live: Array) -> State:
        """Return the moments of what the lanes saw, with the observations acted on now."""
        if not self._normalizes:
            return {}
        count = now["length"] + 1
        mean, square = {}, {}
        for name, x in fields_of("obs", now["obs"]).items():
            axes = (-1, *(1,) * (x.ndim - 1))
            counts, flags = count.reshape(axes), live.reshape(axes)
            before = now["mean"][name]
            apart = x.astype(jnp.float32) - before
            mean[name] = jnp.where(flags, before + apart / counts, before)
            added = apart * (x - mean[name])
            square[name] = now["square"][name] + jnp.where(flags, added, 0.0)
        return {"mean": mean, "square": square}


def _of_lanes(bits: Array) -> Array:
    """Return the bits ``[pairs, episodes, 2]`` of all lanes, the same for both of a pair."""
    flat = bits.reshape(-1, bits.shape[-1])
    return jnp.concatenate([flat, flat])


def _finite(obs: Any, reward: Array) -> Array:
    """Return whether all that a lane got is finite, ``bool[lanes]``."""
    finite = jnp.isfinite(reward)
    for x in jax.tree.leaves(obs):
        if jnp.issubdtype(x.dtype, jnp.floating):
            finite &= finite_along(x, tuple(range(1, x.ndim)))
    return finite


def _broken(last: State) -> Array:
    """Return ``int32[3]``: the first lane that went wrong (as in `Core.roll`), 0, its steps."""
    lane = jnp.argmax(last["broken"])
    found = jnp.stack([lane, jnp.zeros_like(lane), last["length"][lane]]).astype(jnp.int32)
    return jnp.where(jnp.any(last["broken"]), found, NONE).astype(jnp.int32)
