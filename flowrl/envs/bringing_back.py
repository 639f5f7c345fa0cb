"""Bring environments back to where they were when a run was kept.

A single environment is brought back by what it did: its generators and its plain attributes are set
to what they were before its last reset, and the actions since are taken again. A vector whose
attributes are all plain values is kept by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from flowrl.core.keeping import Keeping
from flowrl.envs.agents import Agents, Turn
from flowrl.envs.joint_env import JointEnv
from flowrl.envs.rewards import REWARDS, as_number

Array = np.ndarray[Any, Any]
MOST = 10_000
"""The most steps of an episode that are taken again; a longer one is given up."""
LARGEST = 65_536
"""Bytes of the largest array that is kept of an environment's attributes."""
PLAIN = (bool, int, float, str, bytes, np.ndarray, np.generic, np.random.Generator, jax.Array)
INERT = (gym.Space, EnvSpec, Enum, type)
"""What does not change while a vector is stepped."""
LEFT_OUT = ("env", "envs", "env_fns", "metadata")
"""Attributes of vectors that are kept in another way, or never change."""
SCALARS = frozenset((bool, int, float, str, bytes, type(None)))
OTHERWISE = (*INERT, gym.Env, Agents)
"""Objects that are kept in another way, or never change."""


class NOTHING:
    """Stands for an attribute of which nothing is kept."""


class Retraced(gym.Wrapper[Any, Any, Any, Any]):
    """Wraps one environment, and notes what brings it back to where it is."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.layers = tuple(_layers(env))
        self.begun: dict[str, Any] | None = None
        """How the episode began: what was held before the reset, and its arguments."""
        self.actions: list[Any] = []
        """The actions since; more than `MOST` are of no use."""
        self.seen: Any = None
        """The last observation."""
        self.rewards: list[Any] = []
        """The rewards since the reset."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and note what its generators were before."""
        self.begun = {"held": _held(self.layers), "seed": seed, "options": options}
        self.actions, self.rewards = [], []
        result = self.env.reset(seed=seed, options=options)
        self.seen = result[0] if isinstance(result, tuple) else None
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and note the action."""
        result = self.env.step(action)
        # What is no step at all raises an error in the vector, which says so better.
        if isinstance(result, tuple) and len(result) == 5 and len(self.actions) <= MOST:
            self.actions.append(action)
            self.rewards.append(result[1])
            self.seen = result[0]
        return result

    def keep(self) -> Any:
        """Return what brings it back; None where its episode is too long."""
        if self.begun is None or len(self.actions) > MOST:
            return None
        actions = jax.tree.map(lambda *x: np.stack(x), *self.actions) if self.actions else None
        begun = {**self.begun, "held": _lasting(self.begun["held"])}
        what = {"begun": begun, "count": len(self.actions), "actions": actions}
        if not all(map(_is_plain, jax.tree.leaves((what, self.seen)))):
            return None
        return {**what, "seen": self.seen, "rewards": _numbers(self.rewards)}

    def bring_back(self, kept: Any) -> bool:
        """Go through the episode again; return whether it came out as it was."""
        if kept is None:
            return False
        begun = kept["begun"]
        _hold(self.layers, begun["held"])
        Retraced.reset(self, seed=begun["seed"], options=begun["options"])
        for i in range(kept["count"]):
            Retraced.step(self, jax.tree.map(lambda x, i=i: x[i], kept["actions"]))
        self.begun = begun
        return _same(self.seen, kept["seen"]) and _same(_numbers(self.rewards), kept["rewards"])


def _numbers(rewards: Sequence[Any]) -> Array:
    """Return rewards as an array of numbers, of which each may be an array or a Decimal."""
    if REWARDS.issuperset(map(type, rewards)):
        return np.array(rewards)
    return np.array([as_number(reward) for reward in rewards])


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment's wrappers, the outermost first, and then itself."""
    while True:
        yield env
        # Environments of several agents, and their wrappers, have theirs under one of these names.
        names = ("env", "inner", "aec_env")
        inner = next((getattr(env, name) for name in names if getattr(env, name, None)), None)
        wraps = isinstance(env, gym.Wrapper | JointEnv) or not isinstance(env, gym.Env)
        if inner is None or not wraps:
            return
        env = inner


def _held(layers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what an environment and its wrappers hold now, by layer and attribute.

    That are plain values, such as the number of episodes that a curriculum goes by; the states of
    generators; and the attributes of objects of plain values, such as the running moments of
    `gymnasium.wrappers.NormalizeObservation`. A reset need not make them again.
    """
    return [_attributes_of(layer) for layer in layers]


def _attributes_of(layer: Any) -> dict[str, Any]:
    # This is called at each reset, and most attributes are numbers.
    return {
        name: value if type(value) in SCALARS else _copied(name, value)
        for name, value in vars(layer).items()
    }


def _copied(name: str, value: Any) -> Any:
    """Return what lasts of a value that is no scalar; `NOTHING` if that is nothing."""
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if (plain := _plain_copy(value)) is not NOTHING:
        return plain
    if name in LEFT_OUT or isinstance(value, OTHERWISE):
        return NOTHING
    inner = {key: _plain_copy(x) for key, x in getattr(value, "__dict__", {}).items()}
    return {"object": inner} if inner and all(x is not NOTHING for x in inner.values()) else NOTHING


def _plain_copy(value: Any) -> Any:
    """Return a plain value, which nobody else may write to; `NOTHING` if it is none, or large."""
    if isinstance(value, np.ndarray):
        fits = value.nbytes <= LARGEST and not value.dtype.hasobject
        return value.copy() if fits else NOTHING
    return value if type(value) in SCALARS or isinstance(value, np.generic) else NOTHING


def _lasting(held: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of what layers held what is kept."""
    return [dict(filter(lambda pair: pair[1] is not NOTHING, layer.items())) for layer in held]


def _hold(layers: Sequence[Any], held: Sequence[Mapping[str, Any]]) -> None:
    """Give layers what they held, whether they have it now or not; the rest stays as it is."""
    for layer, attributes in zip(layers, held, strict=True):
        for name, value in attributes.items():
            if not isinstance(value, Mapping):
                _set(layer, name, value)
            elif "generator" in value:
                made = getattr(np.random, value["generator"]["bit_generator"])()
                made.state = value["generator"]
                # Generators that a first reset makes are not there before it.
                setattr(layer, name, np.random.Generator(made))
            else:
                for key, x in value["object"].items():
                    _set(getattr(layer, name, None), key, x)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute if it is another one, in place if it is an array, which may have views."""
    now = getattr(owner, name, None)
    if isinstance(now, np.ndarray) and _alike(now, value):
        np.copyto(now, value)
    elif now is None or not _same(now, value):
        setattr(owner, name, value)


def _is_plain(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return not x.dtype.hasobject
    return x is None or isinstance(x, PLAIN)


def _same(one: Any, other: Any) -> bool:
    """Return whether two observations, or rewards, are equal bit for bit."""
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and set(one) == set(other)
            and all(_same(one[k], other[k]) for k in one)
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    a, b = np.asarray(one), np.asarray(other)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class RetracedAgents(Agents):
    """Wraps an environment of several agents, and notes what brings it back to where it is.

    Args:
        inner: the environment.
    """

    def __init__(self, inner: Agents) -> None:
        self.inner, self.names = inner, inner.names
        self.layers = tuple(_layers(inner))
        self.begun: dict[str, Any] | None = None
        """How the episode began: what was held before the reset, and its seed."""
        self.actions: list[Mapping[str, Any]] = []
        """The actions by agent since; more than `MOST` are of no use."""
        self.turn: Turn | None = None
        """The newest turn."""

    def spaces_of(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent's observations and actions."""
        return self.inner.spaces_of(agent)

    def close(self) -> None:
        """Close the environment."""
        self.inner.close()

    def reset(self, seed: int | None = None) -> Turn:
        """Begin an episode, and note what the generators were before."""
        self.begun = {"held": _held(self.layers), "seed": seed}
        self.actions = []
        self.turn = self.inner.reset(seed)
        return self.turn

    def step(self, actions: Mapping[str, Any]) -> Turn:
        """Take a step, and note the actions."""
        self.turn = self.inner.step(actions)
        if len(self.actions) <= MOST:
            self.actions.append(actions)
        return self.turn

    def keep(self) -> Any:
        """Return what brings it back; None where its episode is too long."""
        if self.begun is None or len(self.actions) > MOST:
            return None
        begun = {**self.begun, "held": _lasting(self.begun["held"])}
        what = {"begun": begun, "actions": self.actions, "turn": _plain_turn(self.turn)}
        return what if all(map(_is_plain, jax.tree.leaves(what))) else None

    def bring_back(self, kept: Any) -> bool:
        """Go through the episode again; return whether it came out as it was."""
        if kept is None:
            return False
        _hold(self.layers, kept["begun"]["held"])
        self.reset(kept["begun"]["seed"])
        for actions in kept["actions"]:
            # It came out otherwise where other agents act.
            if self.turn is None or set(self.turn.obs) != set(actions):
                return False
            self.step(actions)
        self.begun = kept["begun"]
        return _same(_plain_turn(self.turn), kept["turn"])


def _plain_turn(turn: Turn | None) -> Any:
    """Return what agents see and gained in a turn, as plain values."""
    return None if turn is None else {"obs": dict(turn.obs), "reward": dict(turn.reward)}


# -- vectors


def retraced(vector: VectorEnv[Any, Any, Any]) -> None:
    """Let each single environment of a vector note what brings it back, if none does so yet."""
    inner = list(_vectors(vector))[-1]
    if isinstance(inner, SyncVectorEnv):
        inner.envs = [env if _tracer(env) else Retraced(env) for env in inner.envs]


def _tracer(env: Any) -> Retraced | None:
    return next((layer for layer in _layers(env) if isinstance(layer, Retraced)), None)


def _vectors(vector: Any) -> Iterator[Any]:
    """Yield a vector's wrappers, the outermost first, and then itself."""
    while isinstance(vector, VectorWrapper):
        yield vector
        vector = vector.env
    yield vector


def kept_environments(vector: Any) -> Any:
    """Return what brings a vector back; None where it holds what can't be kept."""
    layers = []
    for layer in _vectors(vector):
        if isinstance(layer, Keeping):
            layers.append({"own": layer.keep()})
            continue
        attributes = _attributes(layer)
        if attributes is None:
            return None
        layers.append({"attributes": attributes})
        if isinstance(layer, SyncVectorEnv):
            tracers = [_tracer(env) for env in layer.envs]
            layers[-1]["envs"] = [tracer.keep() if tracer else None for tracer in tracers]
    return layers


def _attributes(layer: Any) -> dict[str, Any] | None:
    """Return the attributes of a vector that may change; None if one of them can't be kept."""
    found = {}
    for name, value in vars(layer).items():
        if name in LEFT_OUT or isinstance(value, INERT):
            continue
        if not all(map(_is_plain, jax.tree.leaves(value, is_leaf=lambda x: x is None))):
            return None
        found[name] = value
    return found


def bring_back(vector: Any, kept: Any, seed: int, put: Callable[[int | None, Any], None]) -> Array:
    """Bring the environments of a new vector back, and reset those that can't be.

    Args:
        vector: the new vector.
        kept: what `kept_environments` returned of one like it.
        seed: of the environments that are reset.
        put: takes an environment's number and its first observation; with None in place of the
            number, the observations of all.

    Returns:
        ``bool[B]``: which environments were reset.
    """
    layers = list(_vectors(vector))
    if kept is None or len(kept) != len(layers):
        put(None, vector.reset(seed=seed)[0])
        return np.ones(vector.num_envs, bool)
    # A first reset makes the arrays that are then filled in place: some may be views of others.
    vector.reset(seed=seed)
    for layer, state in zip(layers, kept, strict=True):
        if isinstance(layer, Keeping):
            layer.take(state["own"])
            continue
        for name, value in state["attributes"].items():
            now = getattr(layer, name, None)
            if isinstance(now, np.ndarray) and _alike(now, value):
                np.copyto(now, value)
            else:
                setattr(layer, name, value)
    if not isinstance(layers[-1], SyncVectorEnv):
        return np.zeros(vector.num_envs, bool)
    return _bring_back_each(layers[-1], kept[-1]["envs"], seed, put)


def _alike(one: Array, other: Any) -> bool:
    same = isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape
    return same and one.flags.writeable


def _bring_back_each(
    vector: Any, kept: list[Any], seed: int, put: Callable[[int | None, Any], None]
) -> Array:
    """Bring back the single environments of a vector; return which of them were reset."""
    lost = np.zeros(len(kept), bool)
    for i, (env, state) in enumerate(zip(vector.envs, kept, strict=True)):
        tracer = _tracer(env)
        try:
            lost[i] = tracer is None or not tracer.bring_back(state)
        except Exception:  # noqa: BLE001 - it raises where it did not before: it is another one
            lost[i] = True
        if lost[i]:
            obs = env.reset(seed=seed + i)[0]
            vector._env_obs[i], vector._autoreset_envs[i] = obs, False  # noqa: SLF001
            put(i, obs)
    return lost
