"""Environments of several agents written in JAX: their interface, and an adapter for JaxMARL.

`HostAgents` lets a runner step one turn by turn, where its functions are no part of a program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from flowrl.envs.agents import Agents, End, Turn
from flowrl.envs.jax_envs import (
    begun_where,
    check_number,
    check_same,
    class_name,
    fits,
    package,
    quiet,
    space_of,
    typed_as,
)
from flowrl.errors import EnvError, SettingError, a, unknown
from flowrl.rl.spaces import ACTION_MASK, Spaces

Array = Any
State = Any
ByAgent = Mapping[str, Any]
"""A value for each agent, by its name."""


class JaxAgents(ABC):
    """One environment of several agents as pure functions.

    Agents may act at once or in turn, die, come late and come back: with each step the environment
    says who acts next. Both functions are compiled and mapped over environments, so they compute
    with `jax.numpy` and change nothing. Every mapping that they return has an entry for each agent.

    - An agent acts next if its entry of `acts` is True. It sees its observation; those of others
      are not looked at.
    - An agent whose episode ends, by `terminated` or `truncated`, has its final observation, and
      does not act next, whatever `acts` says. It may act again a step later.
    - An agent that does not act may gain a reward: it belongs to its last action.
    - Where nobody acts next, the environment is reset in place of the next step.
    """

    observation_spaces: Mapping[str, gym.Space[Any]]
    """The space of each agent's observations. Its keys are the names of all agents that there can
    be, in their order."""
    action_spaces: Mapping[str, gym.Space[Any]]
    """The space of each agent's actions."""

    @abstractmethod
    def reset(self, key: Array) -> tuple[State, ByAgent, ByAgent]:
        """Begin an episode.

        Args:
            key: random key of the episode's beginning.

        Returns:
            The state, a tree of arrays; by agent, the first observations, and whether it acts
            first.
        """

    @abstractmethod
    def step(
        self, state: State, actions: ByAgent, key: Array
    ) -> tuple[State, ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Take one step.

        Args:
            state: that of `reset` or of the step before.
            actions: by agent: an action of its space, or zeros where it does not act.
            key: random key of the step.

        Returns:
            The state after the actions; by agent, the observation, the reward, whether its episode
            ended by itself (`terminated`), whether it was cut (`truncated`), and whether it acts
            next.
        """


def names_of_agents(env: JaxAgents) -> tuple[str, ...]:
    """Return the names of all agents of an environment, in their order.

    Raises:
        EnvError: it has no agents, or an agent has no action space.
    """
    names = tuple(env.observation_spaces)
    if not names:
        raise EnvError(f"{class_name(env)} has no agents; observation_spaces names them")
    _check_names(env, "action_spaces", env.action_spaces, names)
    return names


class Turns(NamedTuple):
    """What n environments return for their agents; arrays by agent, ``[n, ...]``."""

    state: State
    obs: dict[str, Any]
    reward: dict[str, Array]
    """``float32[n]``."""
    terminated: dict[str, Array]
    truncated: dict[str, Array]
    acts: dict[str, Array]
    """``bool[n]``: who acts next."""


def begin_agents(env: JaxAgents, bits: Array) -> Turns:
    """Return the first turns of n environments.

    Args:
        env: one of the environments.
        bits: random, ``uint32[n, 2]``.

    Raises:
        EnvError: the environment returned something else than `JaxAgents.reset` says.
    """
    begun = jax.vmap(env.reset)(jax.random.wrap_key_data(bits))
    if not isinstance(begun, tuple) or len(begun) != 3:
        raise EnvError(f"{class_name(env)}.reset must return (state, obs, acts)")
    names, (state, obs, acts) = names_of_agents(env), begun
    _check_obs(env, obs, "reset", names)
    _check_single(env, "reset", "acts", acts, names, len(bits))
    # This makes weakly typed numbers strongly typed.
    state = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), state)
    nothing = jnp.zeros(len(bits))
    return Turns(
        state,
        {name: _as_declared(env, name, obs[name]) for name in names},
        dict.fromkeys(names, nothing),
        dict.fromkeys(names, nothing > 0),
        dict.fromkeys(names, nothing > 0),
        {name: jnp.asarray(acts[name]).astype(bool) for name in names},
    )


def advance_agents(
    env: JaxAgents, states: State, resets: Array, actions: ByAgent, bits: Array
) -> Turns:
    """Step n environments, or reset those that are to begin an episode.

    Args:
        env: one of the environments.
        states: theirs, ``[n, ...]``.
        resets: ``bool[n]``, which begin an episode in place of a step.
        actions: by agent, as its space has them, ``[n, ...]``.
        bits: random, ``uint32[n, 2, 2]``.

    Raises:
        EnvError: the environment returned something else than `JaxAgents.step` says.
    """
    after = jax.vmap(env.step)(states, actions, jax.random.wrap_key_data(bits[:, 0]))
    parts = ("obs", "reward", "terminated", "truncated", "acts")
    if not isinstance(after, tuple) or len(after) != 1 + len(parts):
        raise EnvError(f"{class_name(env)}.step must return (state, {', '.join(parts)})")
    names = names_of_agents(env)
    _check_obs(env, after[1], "step", names)
    for part, value in zip(parts[1:], after[2:], strict=True):
        _check_single(env, "step", part, value, names, len(resets))
    check_same(env, states, after[0])
    by_part = dict(zip(parts, after[1:], strict=True))

    def of(part: str, dtype: Any) -> dict[str, Array]:
        return {name: jnp.asarray(by_part[part][name]).astype(dtype) for name in names}

    terminated, truncated, acts = (of(part, bool) for part in parts[2:])
    going_on = Turns(
        typed_as(states, after[0]),
        {name: _as_declared(env, name, by_part["obs"][name]) for name in names},
        of("reward", jnp.float32),
        terminated,
        truncated,
        {name: acts[name] & ~terminated[name] & ~truncated[name] for name in names},
    )
    chosen: Turns = begun_where(resets, lambda: begin_agents(env, bits[:, 1]), going_on)
    return chosen


def _as_declared(env: JaxAgents, agent: str, obs: Any) -> Any:
    """Return observations of an agent in the types that batches have."""
    return Spaces(env.observation_spaces[agent], env.action_spaces[agent]).cast(obs)


def _check_names(env: JaxAgents, what: str, value: Any, names: tuple[str, ...]) -> None:
    """Check that a mapping has an entry for each agent, and for no other.

    Raises:
        EnvError: with the agent that is missing, or unknown.
    """
    label, known = class_name(env), ", ".join(names)
    if not isinstance(value, Mapping):
        raise EnvError(f"{label}: {what} must be a dict by agent ({known}), got {a(value)}")
    for name in names:
        if name not in value:
            raise EnvError(
                f"{label}: {what} has no entry for agent {name}; give it one for each of {known}"
            )
    for name in value:
        if name not in names:
            raise EnvError(
                f"{label}: {what} has an entry for an {unknown('agent', str(name), names)}; name "
                "every agent that there can be in observation_spaces"
            )


def _check_obs(env: JaxAgents, obs: Any, verb: str, names: tuple[str, ...]) -> None:
    """Check the observations of all agents against their spaces."""
    _check_names(env, f"the obs of {verb}", obs, names)
    for name in names:
        for part in Spaces(env.observation_spaces[name], env.action_spaces[name]).parts:
            if wrong := part.mismatch(obs[name], verb, batched=True, converts=fits):
                raise EnvError(f"{class_name(env)} returned {wrong}, for agent {name}")


def _check_single(
    env: JaxAgents, verb: str, part: str, value: Any, names: tuple[str, ...], count: int
) -> None:
    """Check that each agent has a single number of its own, for each of `count` environments."""
    _check_names(env, f"the {part} of {verb}", value, names)
    for name in names:
        check_number(value[name], (count,), f"{class_name(env)}.{verb} returned", part, name)


@lru_cache(maxsize=16)
def _compiled(env: JaxAgents) -> tuple[Any, Any]:
    """Return the compiled functions that begin and step one environment."""

    def first(bits: Array) -> Turns:
        return _only(begin_agents(env, bits[None]))

    def after(state: State, actions: ByAgent, bits: Array) -> Turns:
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], (state, dict(actions), bits))
        return _only(advance_agents(env, one[0], jnp.zeros(1, bool), one[1], one[2]))

    return jax.jit(first), jax.jit(after)


def _only(turns: Turns) -> Turns:
    """Return the turn of the only environment."""
    only: Turns = jax.tree.map(lambda x: x[0], turns)
    return only


class HostAgents(Agents):
    """An environment of several agents in JAX, stepped by compiled calls of its own.

    Args:
        jax_agents: the environment. Several may share it, for it changes nothing.
    """

    def __init__(self, jax_agents: JaxAgents) -> None:
        self.jax_agents = jax_agents
        self.names = names_of_agents(jax_agents)
        # Held here: the cache forgets those of many environments.
        self.first, self.after = _compiled(jax_agents)
        self.rng = np.random.default_rng()
        self.state: State = None
        self.nothing = {}
        for name in self.names:
            space = jax_agents.action_spaces[name]
            sample = space.sample()
            self.nothing[name] = jax.tree.map(lambda x: np.zeros_like(np.asarray(x)), sample)

    def spaces_of(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent's observations and actions."""
        env = self.jax_agents
        return env.observation_spaces[agent], env.action_spaces[agent]

    def reset(self, seed: int | None = None) -> Turn:
        """Begin an episode; without a seed, go on with the random numbers."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return self._turn(self.first(self._bits(2)))

    def step(self, actions: ByAgent) -> Turn:
        """Take a step by the actions of the agents that act."""
        return self._turn(self.after(self.state, {**self.nothing, **actions}, self._bits(2, 2)))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _bits(self, *shape: int) -> Any:
        """Return random bits of this shape."""
        return self.rng.integers(2**32, size=shape, dtype=np.uint32)

    def _turn(self, turns: Turns) -> Turn:
        """Go on from a state, and return the turn that led to it."""
        self.state = turns.state
        found = jax.device_get(turns._replace(state=None))
        ended = {}
        for name in self.names:
            flags = bool(found.terminated[name]), bool(found.truncated[name])
            if any(flags):
                ended[name] = End(*flags, found.obs[name])
        seen = {name: found.obs[name] for name in self.names if found.acts[name]}
        return Turn(seen, {name: float(x) for name, x in found.reward.items()}, ended)


class JaxmarlEnv(JaxAgents):
    """An environment of JaxMARL (Rutherford et al. 2024).

    An agent that is done acts no more, and its episode ends with that of all: so what its team
    gains after its death belongs to its last action. For JaxMARL an episode that was
    cut has ended too; here all have ended by themselves. Where an environment says which actions
    are available, that is the mask of the agent's observations.

    Args:
        name: such as ``MPE_simple_spread_v3``.
        **settings: arguments of its class.

    Raises:
        SettingError: the name is unknown, or JaxMARL is not installed.
        EnvError: it has actions that are neither Box nor Discrete.
    """

    masks: Mapping[str, str] = {"hanabi": "get_legal_moves"}
    """The methods that return the available actions, where they have a name of their own."""

    def __init__(self, name: str, **settings: Any) -> None:
        jaxmarl = package("jaxmarl")
        if name not in jaxmarl.registered_envs:
            raise SettingError(unknown("jaxmarl environment", name, jaxmarl.registered_envs))
        with quiet():
            self.env = jaxmarl.make(name, **settings)
        obs, state = jax.eval_shape(self.env.reset, jax.random.key(0))
        self.available = getattr(self.env, self.masks.get(name, "get_avail_actions"))
        masks = self._masks_of(state)
        names = [str(agent) for agent in self.env.agents]
        self.action_spaces = {
            agent: space_of(self.env.action_space(agent), f"jaxmarl:{name}") for agent in names
        }
        self.observation_spaces = {}
        self.masked = set()
        for agent in names:
            # Some declare another shape than they return.
            seen = gym.spaces.Box(-np.inf, np.inf, obs[agent].shape, np.float32)
            action, mask = self.action_spaces[agent], masks.get(agent)
            if isinstance(action, gym.spaces.Discrete) and mask is not None:
                allowed = gym.spaces.Box(0, 1, (int(action.n),), np.int8)
                self.masked.add(agent)
                self.observation_spaces[agent] = gym.spaces.Dict(
                    {"observation": seen, ACTION_MASK: allowed}
                )
            else:
                self.observation_spaces[agent] = seen

    def _masks_of(self, state: State) -> Mapping[str, Any]:
        """Return the shapes of the masks of available actions; empty if there are none."""
        try:
            masks: Mapping[str, Any] = jax.eval_shape(self.available, state)
        except NotImplementedError:
            return {}
        return masks

    def reset(self, key: Array) -> tuple[State, ByAgent, ByAgent]:
        """Begin an episode, in which all agents act first."""
        with quiet():
            obs, state = self.env.reset(key)
        acts = dict.fromkeys(self.observation_spaces, jnp.bool_(True))
        return state, self._seen(obs, state), acts

    def step(
        self, state: State, actions: ByAgent, key: Array
    ) -> tuple[State, ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Take one step, without the reset that JaxMARL would do after the last of an episode."""
        with quiet():
            obs, state, reward, done, _ = self.env.step_env(key, state, dict(actions))
        names = tuple(self.observation_spaces)
        over = jnp.asarray(done["__all__"]).astype(bool)
        return (
            state,
            self._seen(obs, state),
            {name: reward[name] for name in names},
            dict.fromkeys(names, over),
            dict.fromkeys(names, jnp.bool_(False)),
            {name: ~jnp.asarray(done[name]).astype(bool) for name in names},
        )

    def _seen(self, obs: ByAgent, state: State) -> ByAgent:
        """Return what agents see, with the masks of their actions."""
        masks = self.available(state) if self.masked else {}
        seen: dict[str, Any] = {}
        for name in self.observation_spaces:
            seen[name] = obs[name].astype(jnp.float32)
            if name in self.masked:
                mask = jnp.asarray(masks[name]).astype(jnp.int8)
                seen[name] = {"observation": seen[name], ACTION_MASK: mask}
        return seen
