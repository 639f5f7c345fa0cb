"""Environments written in JAX: their interface, adapters for gymnax and Brax, and `JaxVector`."""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from flowrl.core.keeping import Keeping, into, leaves
from flowrl.envs.flags import WANTED
from flowrl.errors import EnvError, SettingError, install, raised, unknown
from flowrl.rl.spaces import Spaces

Array = Any
State = Any


class JaxEnv(ABC):
    """One environment as pure functions, so that thousands of them become one program.

    Whoever steps it resets it too: a step after the end of an episode is never asked for. Both
    functions are compiled and mapped over environments, so they compute with `jax.numpy` and change
    nothing.
    """

    observation_space: gym.Space[Any]
    """The space of one environment's observations."""
    action_space: gym.Space[Any]
    """The space of one environment's actions."""

    @abstractmethod
    def reset(self, key: Array) -> tuple[State, Array]:
        """Begin an episode.

        Args:
            key: random key of the episode's beginning.

        Returns:
            The state, a tree of arrays, and the first observation.
        """

    @abstractmethod
    def step(
        self, state: State, action: Array, key: Array
    ) -> tuple[State, Array, Array, Array, Array]:
        """Take one step.

        Args:
            state: that of `reset` or of the step before.
            action: one of the action space.
            key: random key of the step.

        Returns:
            The state after the action, the observation, the reward, whether the episode ended by
            itself (`terminated`), and whether it was cut (`truncated`).
        """


class GymnaxEnv(JaxEnv):
    """An environment of gymnax (Lange 2022).

    Args:
        name: such as ``CartPole-v1``.
        **settings: fields of its parameters or arguments of its class.

    Raises:
        SettingError: the name is unknown, or gymnax is not installed.
        EnvError: it has a space that is neither Box nor Discrete.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        gymnax = package("gymnax")
        known = [str(x) for x in gymnax.registered_envs]
        if name not in known:
            raise SettingError(unknown("gymnax environment", name, known))
        _, default_params = gymnax.make(name)
        param_names = {f.name for f in fields(default_params)}
        # gymnax takes settings in two places: those of its parameters, and all others.
        of_class = {k: v for k, v in settings.items() if k not in param_names}
        of_params = {k: v for k, v in settings.items() if k in param_names}
        self.env, params = gymnax.make(name, **of_class)
        self.params = params.replace(**of_params)
        label = f"gymnax:{name}"
        self.observation_space = space_of(self.env.observation_space(self.params), label)
        self.action_space = space_of(self.env.action_space(self.params), label)

    def reset(self, key: Array) -> tuple[State, Array]:
        """Begin an episode: return its state and its first observation."""
        obs, state = self.env.reset_env(key, self.params)
        return state, obs

    def step(
        self, state: State, action: Array, key: Array
    ) -> tuple[State, Array, Array, Array, Array]:
        """Take one step, without the reset that gymnax would do after the last of an episode."""
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        return state, obs, reward, terminated, self.env.is_truncated(state, self.params)


class BraxEnv(JaxEnv):
    """An environment of Brax (Freeman et al. 2021).

    Args:
        name: such as ``ant``.
        episode_length: steps after which an episode is cut.
        **settings: arguments of its class, such as ``backend="mjx"``.

    Raises:
        SettingError: the name is unknown, or Brax is not installed.
    """

    def __init__(self, name: str, episode_length: int = 1000, **settings: Any) -> None:
        envs = package("brax.envs")
        known = list(envs._envs)  # noqa: SLF001 - Brax has no other list
        if name not in known:
            raise SettingError(unknown("brax environment", name, known))
        with quiet():
            self.env = envs.get_environment(name, **settings)
            sizes = self.env.observation_size, self.env.action_size
        self.episode_length = episode_length
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, sizes[:1], np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, sizes[1:], np.float32)

    def reset(self, key: Array) -> tuple[State, Array]:
        """Begin an episode: return its state and its first observation."""
        with quiet():
            state = self.env.reset(key)
        # The age of the episode is kept beside the state, for `step` to cut it.
        return {"brax": state, "age": jnp.int32(0)}, state.obs

    def step(
        self, state: State, action: Array, key: Array
    ) -> tuple[State, Array, Array, Array, Array]:
        """Return what follows on an action, as `JaxEnv.step` says."""
        with quiet():
            after, age = self.env.step(state["brax"], action), state["age"] + 1
        return (
            {"brax": after, "age": age},
            after.obs,
            after.reward,
            after.done > 0,
            age >= self.episode_length,
        )


def package(name: str) -> Any:
    """Import an optional package.

    Raises:
        SettingError: it is not installed.
    """
    try:
        with quiet():
            return importlib.import_module(name)
    except ImportError as error:
        raise SettingError(
            f"needs the package {name.partition('.')[0]} ({error}): {install('jax-envs')}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings: Brax warns of its own age and of that of what it uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def space_of(space: Any, label: str) -> gym.Space[Any]:
    """Return a space of gymnax, or one like it, as one of Gymnasium.

    Args:
        space: the space.
        label: what the environment is called.

    Raises:
        EnvError: it is neither Box nor Discrete.
    """
    match type(space).__name__:
        case "Discrete":
            return gym.spaces.Discrete(int(space.n))
        case "Box":
            dtype = np.dtype(space.dtype)
            low, high = (
                np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high)
            )
            box: gym.Space[Any] = gym.spaces.Box(low, high, dtype=dtype.type)
            return box
    raise EnvError(f"{label} has a space {type(space).__name__}; it must be Box or Discrete")


def advance(
    env: JaxEnv, states: State, done: Array, action: Array, bits: Array
) -> tuple[State, Array, Array, Array, Array]:
    """Step n environments in Gymnasium's autoreset mode NEXT_STEP.

    One that is `done` begins its next episode, with reward 0.

    Args:
        env: one of the environments.
        states: theirs, ``[n, ...]``.
        done: ``bool[n]``, whose episode ended with the step before.
        action: as the environment takes them, ``[n, ...]``.
        bits: random, ``uint32[n, 2, 2]``.

    Returns:
        States, observations, rewards ``float32[n]``, and the flags ``bool[n]`` of terminated and of
        truncated episodes.

    Raises:
        EnvError: the environment returned values of a wrong number, shape or type.
    """
    after = _stepped(env, states, action, bits[:, 0])
    going_on = typed_as(states, after[0]), _as_declared(env, after[1], "step")
    state, obs = begun_where(done, lambda: begin(env, bits[:, 1]), going_on)
    reward, terminated, truncated = after[2:]
    return (
        state,
        obs,
        jnp.where(done, 0.0, reward).astype(jnp.float32),
        terminated.astype(bool) & ~done,
        truncated.astype(bool) & ~done,
    )


def begun_where(flags: Array, begin: Callable[[], Any], others: Any) -> Any:
    """Return what `begin` gives where a flag is set, and `others` where none is.

    Args:
        flags: ``bool[n]``.
        begin: begins episodes in all n environments.
        others: what the environments that go on gave, a tree of arrays ``[n, ...]`` like that of
            `begin`.
    """

    def some() -> Any:
        return jax.tree.map(lambda new, old: where_rows(flags, new, old), begin(), others)

    # Of few environments mostly none begins. On a GPU a branch was not measured.
    if jax.default_backend() == "cpu":
        return jax.lax.cond(jnp.any(flags), some, lambda: others)
    return some()


def advance_each(
    env: JaxEnv, states: State, over: Array, action: Array, bits: Array
) -> tuple[State, Array, Array, Array]:
    """Step n environments, each for one episode: one that is over stays as it is.

    Args:
        env: one of the environments.
        states: theirs, ``[n, ...]``.
        over: ``bool[n]``, whose episode has ended.
        action: as the environment takes them, ``[n, ...]``.
        bits: random, ``uint32[n, 2]``.

    Returns:
        States, observations, rewards ``float32[n]``, which are 0 where the episode was over, and
        the flags ``bool[n]`` of episodes that ended with the step.

    Raises:
        EnvError: the environment returned values of a wrong number, shape or type.
    """
    after, obs, reward, terminated, truncated = _stepped(env, states, action, bits)
    state = jax.tree.map(lambda old, new: where_rows(over, old, new), states, after)
    return (
        state,
        _as_declared(env, obs, "step"),
        jnp.where(over, 0.0, reward).astype(jnp.float32),
        (terminated.astype(bool) | truncated.astype(bool)) & ~over,
    )


def _stepped(env: JaxEnv, states: State, action: Array, bits: Array) -> tuple[Any, ...]:
    """Step n environments, and check what they return but for the observations.

    Args:
        env: one of the environments.
        states: theirs, ``[n, ...]``.
        action: as the environment takes them, ``[n, ...]``.
        bits: random, ``uint32[n, 2]``.
    """
    after = jax.vmap(env.step)(states, action, jax.random.wrap_key_data(bits))
    if not isinstance(after, tuple) or len(after) != 5:
        raise EnvError(
            f"{class_name(env)}.step must return (state, obs, reward, terminated, truncated)"
        )
    check_same(env, states, after[0])
    for what, value in zip(("reward", "terminated", "truncated"), after[2:], strict=True):
        check_number(value, bits.shape[:1], f"{class_name(env)}.step returned", what)
    return after


def check_number(
    value: Any, shape: tuple[int, ...], label: str, what: str, agent: str = ""
) -> None:
    """Check that there is a number for each environment, or a flag.

    Args:
        value: as the environment returned it.
        shape: of the number of environments.
        label: how errors begin.
        what: ``reward``, or the name of a flag.
        agent: whose it is (default nobody's).

    Raises:
        EnvError: it is of another kind or shape.
    """
    whose = agent and f" for agent {agent}"
    if value is None:
        raise EnvError(f"{label} None as {what}{whose}; it must be a single number")
    if jnp.shape(value) != shape:
        found = f"{what} of shape {list(jnp.shape(value)[1:])}"
        raise EnvError(f"{label} {found}{whose}; it must be a single number")
    dtype = jnp.result_type(value)
    # Within a compiled function no value can be seen, and NaN would count as True.
    if what != "reward" and dtype.kind not in "biu":
        raise EnvError(f"{label} {what} of the type {dtype}{whose}; {WANTED}, such as by `x > 0`")


def typed_as(like: Any, found: Any) -> Any:
    """Return a tree of arrays in the types of another one."""
    return jax.tree.map(lambda x, y: jnp.asarray(y).astype(x.dtype), like, found)


def where_rows(flags: Array, a: Array, b: Array) -> Array:
    """Return the rows of `a` where a flag is set, else those of `b`, in the type of `a`."""
    a = jnp.asarray(a)
    return jnp.where(flags.reshape(-1, *(1,) * (a.ndim - 1)), a, b).astype(a.dtype)


def begin(env: JaxEnv, bits: Array) -> tuple[State, Array]:
    """Return the first states and observations of n environments.

    Args:
        env: one of the environments.
        bits: random, ``uint32[n, 2]``.

    Raises:
        EnvError: `reset` failed, or returned an observation that breaks its space.
    """
    try:
        begun = jax.vmap(env.reset)(jax.random.wrap_key_data(bits))
    except (EnvError, BdbQuit):
        raise
    except Exception as error:
        raise EnvError(f"{class_name(env)} raised in reset: {raised(error)}") from error
    if not isinstance(begun, tuple) or len(begun) != 2:
        raise EnvError(f"{class_name(env)}.reset must return (state, obs)")
    # This makes weakly typed numbers strongly typed.
    states = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), begun[0])
    return states, _as_declared(env, begun[1], "reset")


def _as_declared(env: JaxEnv, obs: Any, verb: str) -> Any:
    """Return observations from `reset` or `step` in the types that batches have.

    Raises:
        EnvError: they break the space.
    """
    spaces = Spaces(env.observation_space, env.action_space)
    for part in spaces.parts:
        if wrong := part.mismatch(obs, verb, batched=True, converts=fits):
            raise EnvError(f"{class_name(env)} returned {wrong}")
    return spaces.cast(obs)


def check_same(env: Any, before: Any, after: Any) -> None:
    """Check that `step` returned a state of the same tree structure, shapes and types as `reset`.

    A loop carries what they return, so it must.
    """
    structure: Any = jax.tree.structure(before)
    if structure != (other := jax.tree.structure(after)):
        raise EnvError(
            f"{class_name(env)}.step returned a state that is another tree than reset's: {other}, "
            f"not {structure}"
        )
    leaves_before = jax.tree_util.tree_leaves_with_path(before)
    for (path, a), b in zip(leaves_before, jax.tree.leaves(after), strict=True):
        if jnp.shape(a) != jnp.shape(b) or not fits(jnp.result_type(b), jnp.result_type(a)):
            was, now = (f"{jnp.result_type(x)}{list(jnp.shape(x)[1:])}" for x in (a, b))
            raise EnvError(
                f"{class_name(env)}.step returned a state{jax.tree_util.keystr(path)} {now}, but "
                f"reset's is {was}; make them equal"
            )


def fits(found: Any, wanted: Any) -> bool:
    """Return whether numbers of one type become another's without loss of their kind."""
    return (
        found == wanted
        or np.can_cast(np.dtype(found), np.dtype(wanted), "same_kind")
        or {np.dtype(x).kind for x in (found, wanted)} == {"i", "u"}
    )


def class_name(env: Any) -> str:
    """Return what an environment is called in errors: the name of its class."""
    return type(env).__qualname__


class JaxVector(Keeping, VectorEnv[Any, Any, Any]):
    """Gymnasium vector of environments written in JAX, stepped by one compiled call.

    Args:
        jax_env: one of them.
        num_envs: how many.
    """

    lasting = ("rng", "states", "done")
    remade = (
        "jax_env", "num_envs", "metadata", "single_observation_space", "single_action_space",
        "observation_space", "action_space", "_begin", "_advance",
    )  # fmt: skip

    def __init__(self, jax_env: JaxEnv, num_envs: int) -> None:
        self.jax_env = jax_env
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = jax_env.observation_space
        self.single_action_space = jax_env.action_space
        self.observation_space = batch_space(jax_env.observation_space, num_envs)
        self.action_space = batch_space(jax_env.action_space, num_envs)
        self._begin = jax.jit(lambda bits: begin(jax_env, bits))
        self._advance = jax.jit(lambda *args: advance(jax_env, *args))
        self.rng = np.random.default_rng()

    def keep(self) -> Any:
        """Return the states of the environments, by leaves, and of the generator."""
        return {"rng": self.rng, "states": leaves(self.states), "done": self.done}

    def take(self, state: Any) -> None:
        """Go on from the states that were kept."""
        like = jax.eval_shape(self._begin, np.zeros((self.num_envs, 2), np.uint32))[0]
        self.states = into(like, state["states"], class_name(self.jax_env))
        self.rng, self.done = state["rng"], state["done"]

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every environment; without a seed, go on with the random numbers."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.states, obs = self._begin(self._bits(2))
        self.done = np.zeros(self.num_envs, bool)
        return jax.tree.map(np.asarray, obs), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every environment; one whose episode ended begins its next."""
        self.states, *results = self._advance(self.states, self.done, actions, self._bits(2, 2))
        obs, reward, terminated, truncated = jax.tree.map(np.asarray, results)
        self.done = terminated | truncated
        return obs, reward, terminated, truncated, {}

    def _bits(self, *shape: int) -> Any:
        """Return random bits of this shape for every environment."""
        return self.rng.integers(2**32, size=(self.num_envs, *shape), dtype=np.uint32)
