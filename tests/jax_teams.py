"""Environments of several agents written in JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from gymnasium.spaces import Box, Discrete

import flowrl as fl
from environments import Corridor

TINY = fl.Policy(fl.networks.MLP, hidden=(4,))


def by_agent(x, names):
    """An array ``[agents, ...]`` as a dict."""
    return {name: x[i] for i, name in enumerate(names)}


RATES = {
    "act": (0.5, 0.1, 0.9, 1.0),
    "gain": (0.5, 0.9, 0.1, 0.5),
    "end": (0.1, 0.02, 0.4, 0.0),
    "come": (0.5, 0.1, 0.9, 0.5),
}
"""How likely what is in `Chaos`, in each of its four moods."""


class Chaos(fl.envs.JaxAgents):
    """Agents act, gain, die and come back as a number says into which all actions go.

    So it does the same wherever agents act alike, whatever its random keys are.
    """

    names = ("a", "b", "c")
    observation_spaces = dict.fromkeys(names, Box(0, 1e6, (1,)))
    action_spaces = dict.fromkeys(names, Discrete(3))

    def chances(self, mixed):
        key = jax.random.fold_in(jax.random.key(7), mixed)
        return jax.random.uniform(key, (7, 3))

    def turn(self, mixed, mood, live, over):
        """The state, what agents see, and who acts next of those who live."""
        rate = {name: jnp.array(rates)[mood] for name, rates in RATES.items()}
        acts = live & (self.chances(mixed)[0] < rate["act"])
        # Someone acts, or the episode is over for all.
        acts = jnp.where(acts.any(), acts, live & (jnp.cumsum(live) == 1))
        state = {"mixed": mixed, "mood": mood, "live": live, "over": over & ~acts, "acts": acts}
        seen = (mixed % 997 + jnp.arange(3)).astype(jnp.float32)
        return state, by_agent(seen[:, None], self.names), by_agent(acts, self.names)

    def reset(self, key):
        mixed, mood = jnp.uint32(1), jnp.int32(0)
        live = (self.chances(mixed)[1] < 0.7) | (jnp.arange(3) == 0)
        return self.turn(mixed, mood, live, jnp.zeros(3, bool))

    def step(self, state, actions, key):
        taken = jnp.stack([actions[name] for name in self.names]).astype(jnp.uint32)
        mixed, mood = state["mixed"], state["mood"]
        for i in range(3):
            mixed = mixed * jnp.uint32(31) + jnp.where(state["acts"][i], taken[i] + 1, 0)
        chance, live, over = self.chances(mixed), state["live"], state["over"]
        rate = {name: jnp.array(rates)[mood] for name, rates in RATES.items()}
        gains = live & ~over & (chance[2] < rate["gain"])
        reward = jnp.where(gains, jnp.floor(chance[3] * 8) + 1, 0.0)
        ends, by_itself = live & (chance[4] < rate["end"]), chance[3] < 0.5
        comes = ~live & ~ends & (chance[5] < rate["come"])
        mood = jnp.where(chance[6, 0] < 0.1, (chance[6, 1] * 4).astype(jnp.int32), mood)
        after, obs, acts = self.turn(mixed, mood, (live & ~ends) | comes, over | ends)
        rest = (by_agent(x, self.names) for x in (reward, ends & by_itself, ends & ~by_itself))
        return after, obs, *rest, acts


class Fixed(Corridor):
    """A corridor whose episodes all begin at the same place."""

    def reset(self, key):
        return {"place": jnp.int32(3), "age": jnp.int32(0)}, self.observe(jnp.int32(3))


class Corridors(fl.envs.JaxAgents):
    """Two corridors, each begun again alone; an agent at its end comes back a step later."""

    names = ("red", "blue")
    observation_spaces = dict.fromkeys(names, Corridor.observation_space)
    action_spaces = dict.fromkeys(names, Corridor.action_space)

    def __init__(self, nan_at=None, kind=Corridor):
        self.alone = {"red": kind(), "blue": kind(nan_at)}

    def keys(self, key):
        return {"red": key, "blue": jax.random.wrap_key_data(jax.random.key_data(key) * 3)}

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


def fixed():
    """Two corridors in which nothing is random but the actions."""
    return Corridors(kind=Fixed)


def two_rates(env=Corridors, of=None, ratio=4, **runners):
    """Two learners on one stream, the second of which updates once where the first does `ratio`."""
    team = fl.Team(red=TINY, blue=TINY, of=of)
    runners = {"envs_per_runner": 2, "rollout_length": 4, **runners}
    graph = fl.Graph(
        "rates",
        runners=fl.Runners(env, team, **runners),
        red=fl.Learner(TINY, fl.losses.VTraceLoss(), fl.Adam(1e-3), runners="runners.red"),
        blue=fl.Learner(TINY, fl.losses.VTraceLoss(), fl.Adam(1e-3), runners="runners.blue"),
    ).then(sample=fl.ParallelSample(), select_red=fl.Select("red"))
    graph = graph.then(
        train_red=fl.TrainOneStep(learner="red"),
        sync_red=fl.SyncWeights(learner="red", runners="runners.red"),
    )
    columns = graph.resources["runners"].by_policy["blue"].envs_per_runner
    columns *= runners.get("num_runners", 1)
    graph = graph.then(
        after="sample",
        select_blue=fl.Select("blue"),
        batch_blue=fl.Concat(ratio * 4 * columns),
        train_blue=fl.TrainOneStep(learner="blue"),
        sync_blue=fl.SyncWeights(learner="blue", runners="runners.blue"),
    )
    report = fl.Report(every=ratio + 1)
    return graph.then(after=("sync_red", "sync_blue"), both=fl.Merge(), report=report)
