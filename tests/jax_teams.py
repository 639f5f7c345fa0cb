"""Environments of several agents written in JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from gymnasium.spaces import Box, Discrete

import flowrl as fl
from environments import Corridor


class Chaos(fl.envs.JaxAgents):
    """Agents act, gain, die and come back as a number says into which all actions go.

    So it does the same wherever agents act alike, whatever its random keys are.
    """

    names = ("a", "b", "c")
    observation_spaces = dict.fromkeys(names, Box(0, 1e6, (1,)))
    action_spaces = dict.fromkeys(names, Discrete(3))

    def __init__(self, act=0.5, gain=0.5, end=0.1, come=0.5, seed=0):
        self.act, self.gain, self.end, self.come, self.seed = act, gain, end, come, seed

    def chances(self, mixed):
        key = jax.random.fold_in(jax.random.key(self.seed), mixed)
        return jax.random.uniform(key, (6, 3))

    def turn(self, mixed, live, over, acted):
        """Return the state and what agents see, with who acts next of those who live."""
        chance = self.chances(mixed)
        acts = live & (chance[0] < self.act)
        first_alive = live & (jnp.cumsum(live) == 1)
        acts = jnp.where(acts.any(), acts, first_alive)
        state = {"mixed": mixed, "live": live, "over": over & ~acts, "acts": acts}
        seen = (mixed % 997 + jnp.arange(3)).astype(jnp.float32)
        obs = {name: seen[i][None] for i, name in enumerate(self.names)}
        return state, obs, {name: acts[i] for i, name in enumerate(self.names)}

    def reset(self, key):
        mixed = jnp.uint32(1)
        live = (self.chances(mixed)[1] < 0.7) | (jnp.arange(3) == 0)
        return self.turn(mixed, live, jnp.zeros(3, bool), jnp.zeros(3, bool))

    def step(self, state, actions, key):
        taken = jnp.stack([actions[name] for name in self.names]).astype(jnp.uint32)
        mixed = state["mixed"]
        for i in range(3):
            mixed = mixed * jnp.uint32(31) + jnp.where(state["acts"][i], taken[i] + 1, 0)
        chance, live, over = self.chances(mixed), state["live"], state["over"]
        gains = live & ~over & (chance[2] < self.gain)
        reward = jnp.where(gains, jnp.floor(chance[3] * 8) + 1, 0.0)
        ends = live & (chance[4] < self.end)
        by_itself = chance[3] < 0.5
        comes = ~live & ~ends & (chance[5] < self.come)
        after, obs, acts = self.turn(mixed, (live & ~ends) | comes, over | ends, state["acts"])
        by_agent = [
            {name: x[i] for i, name in enumerate(self.names)}
            for x in (reward, ends & by_itself, ends & ~by_itself)
        ]
        return after, obs, *by_agent, acts


class Corridors(fl.envs.JaxAgents):
    """Two corridors, each begun again alone; an agent at its end comes back a step later."""

    names = ("red", "blue")
    observation_spaces = dict.fromkeys(names, Corridor.observation_space)
    action_spaces = dict.fromkeys(names, Corridor.action_space)

    def __init__(self, nan_at=None):
        self.alone = {"red": Corridor(), "blue": Corridor(nan_at)}

    def keys(self, key):
        return dict(zip(self.names, jax.random.split(key), strict=True))

    def reset(self, key):
        keys = self.keys(key)
        begun = {name: self.alone[name].reset(keys[name]) for name in self.names}
        state = {name: {"own": begun[name][0], "over": jnp.bool_(False)} for name in self.names}
        acts = dict.fromkeys(self.names, jnp.bool_(True))
        return state, {name: begun[name][1] for name in self.names}, acts

    def step(self, state, actions, key):
        found = [{} for _ in range(6)]
        for name, own in self.keys(key).items():
            now = state[name]
            after = self.alone[name].step(now["own"], actions[name], own)
            fresh = self.alone[name].reset(own)
            none = jnp.float32(0), jnp.bool_(False), jnp.bool_(False)
            again = (*fresh, *none)
            again_now = partial(jnp.where, now["over"])
            chosen = jax.tree.map(again_now, again, after)
            over = chosen[3] | chosen[4]
            parts = ({"own": chosen[0], "over": over}, *chosen[1:], ~over)
            for by_agent, value in zip(found, parts, strict=True):
                by_agent[name] = value
        return tuple(found)
