"""Whole episodes of environments of several agents in JAX, as pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.envs.jax_agents import JaxAgents, advance_agents, begin_agents, names_of_agents
from flowrl.envs.jax_envs import where_rows
from flowrl.rl.policies import Weights
from flowrl.rollout.handle import EVALUATED
from flowrl.rollout.jax_part import JaxPart

Array = Any
State = dict[str, Any]


def evaluated(
    env: JaxAgents,
    parts: Mapping[str, JaxPart],
    weights: Mapping[str, Weights],
    key: Array,
    episodes: int,
    max_steps: int,
) -> dict[str, Array]:
    """Play whole episodes with the greedy actions, all at once.

    What counts is what `play_agents` counts: an agent's episode is over at its first end, and the
    return of several agents is the mean of theirs.

    Args:
        env: one environment.
        parts: the policies by name.
        weights: by policy.
        key: random key of the environments.
        episodes: how many.
        max_steps: after so many steps of an environment its episode is cut.

    Returns:
        Numbers of all agents by the names in `EVALUATED`, and those of each policy of several, with
        its name at the end.
    """
    turns, names = begin_agents(env, jax.random.bits(key, (episodes, 2))), names_of_agents(env)
    everyone = jnp.ones(episodes, bool)
    first = {
        "states": turns.state,
        "parts": {name: part.start(turns) for name, part in parts.items()},
        "live": dict.fromkeys(names, everyone),
        "return": dict.fromkeys(names, jnp.zeros(episodes)),
        "running": everyone,
        "step": jnp.uint32(0),
    }
    last = jax.lax.while_loop(
        lambda now: jnp.any(_going_on(parts, now)) & (now["step"] < max_steps),
        lambda now: _step(env, parts, weights, key, now),
        first,
    )
    # Who is left where an environment goes on was cut.
    running = last["running"]
    cut = {name: last["live"][name] & running for name in names}
    found = _numbers(last["return"], cut, names)
    for name, part in parts.items():
        if name:
            of_one = _numbers(last["return"], cut, part.agents)
            found |= {f"{column}/{name}": x for column, x in of_one.items()}
    return found


def _going_on(parts: Mapping[str, JaxPart], now: State) -> Array:
    """Return the environments ``bool[E]`` where somebody acts, and some episode is not over."""
    acting = [part.of_env(now["parts"][name]["acting"]) for name, part in parts.items()]
    live = jnp.stack(list(now["live"].values())).any(axis=0)
    going: Array = now["running"] & jnp.concatenate(acting, axis=1).any(axis=1) & live
    return going


def _step(
    env: JaxAgents,
    parts: Mapping[str, JaxPart],
    weights: Mapping[str, Weights],
    key: Array,
    now: State,
) -> State:
    """Step the environments of an evaluation once."""
    running, actions, carries = _going_on(parts, now), {}, {}
    acts = {}
    for name, part in parts.items():
        before = now["parts"][name]
        acts[name] = before["acting"] & part.by_column(running)
        _, carries[name], by_agent = part.act(before, acts[name], None, weights[name])
        actions.update(by_agent)
    bits = jax.random.bits(jax.random.fold_in(key, now["step"]), (len(running), 2, 2))
    turns = advance_agents(env, now["states"], jnp.zeros_like(running), actions, bits)
    after = {}
    for name, part in parts.items():
        before, goes_on = now["parts"][name], part.by_column(running)
        over = part.joined(turns.terminated) | part.joined(turns.truncated)
        acting = part.joined(turns.acts)
        after[name] = {
            **before,
            "obs": part.seen(turns, goes_on & acting, before["obs"]),
            "acting": jnp.where(goes_on, acting, before["acting"]),
            "memory": part.remembered(before, acts[name], carries[name], goes_on & over),
        }
    live, returns = dict(now["live"]), dict(now["return"])
    for name, alive in now["live"].items():
        counts = alive & running
        returns[name] = returns[name] + jnp.where(counts, turns.reward[name], 0.0)
        over = turns.terminated[name] | turns.truncated[name]
        live[name] = alive & ~(running & over)
    states = jax.tree.map(
        lambda new, old: where_rows(running, new, old), turns.state, now["states"]
    )
    return {
        "states": states,
        "parts": after,
        "live": live,
        "return": returns,
        "running": running,
        "step": now["step"] + 1,
    }


def _numbers(
    returns: Mapping[str, Array], cut: Mapping[str, Array], agents: Iterable[str]
) -> dict[str, Array]:
    """Return the numbers of an evaluation of some agents together."""
    names = list(agents)
    mean = jnp.stack([returns[name] for name in names]).mean(axis=0)
    found = [getattr(jnp, name)(mean) for name in ("mean", "std", "min", "max")]
    any_cut = jnp.stack([cut[name] for name in names]).any(axis=0)
    return dict(zip(EVALUATED, [*found, jnp.sum(any_cut)], strict=True))
