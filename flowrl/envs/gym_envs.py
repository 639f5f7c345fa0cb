"""Make Gymnasium environments, and name them in every error."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import NormalizeObservation
from gymnasium.wrappers.vector import NormalizeObservation as NormalizeVector

from flowrl.envs.agents import PETTINGZOO, Agents, Maker, agents_of, make_pettingzoo
from flowrl.envs.bringing_back import retraced
from flowrl.envs.guard import Guard
from flowrl.envs.jax_agents import HostAgents, JaxAgents
from flowrl.envs.jax_envs import JaxEnv, JaxVector
from flowrl.envs.masks import as_declared, with_mask_of_info
from flowrl.envs.mujoco_warnings import take_warnings
from flowrl.envs.prefixes import ADAPTERS
from flowrl.errors import EnvError, SettingError, a, install, raised, unknown
from flowrl.rl.spaces import Spaces

Make = str | Callable[..., Any]
"""A Gymnasium id, or a function that makes an environment or a vector of them from its settings."""


@dataclass(frozen=True)
class Family:
    """A family of environments, whose package is imported when one of them is first named."""

    package: str
    """The package that registers them."""
    extra: str
    """The extra to install: ``flowrl[extra]``."""
    vector: Mapping[str, Any]
    """The settings that their vectors are made with unless `env_settings` say otherwise."""


FAMILIES: Mapping[str, Family] = {
    # Scores stay what the game counts, and what is learned from is clipped afterwards
    # (`clip_rewards`). A process that is to compute in one thread, as NPROC says, steps in one,
    # too; else ale-py takes as many as there are cores.
    "ALE": Family(
        "ale_py",
        "atari",
        {"reward_clipping": False, "num_threads": int(os.environ.get("NPROC", "0"))},
    ),
}
"""The families by the namespace of their ids."""


EXTRAS = {"gymnasium.envs.mujoco": "mujoco", "gymnasium.envs.box2d": "box2d"}
"""The extras that Gymnasium's own environments need, by the package that holds them."""


def env_name(env: Make) -> str:
    """Return what an environment is called in texts."""
    if isinstance(env, partial):
        return env_name(env.func)
    if isinstance(env, Maker):
        return env.name()
    return env if isinstance(env, str) else getattr(env, "__qualname__", type(env).__name__)


def make_env(
    env: Make, count: int, wrappers: Sequence[Callable[[Any], Any]], settings: Mapping[str, Any]
) -> Any:
    """Make a vector of environments where they have a form of their own for it, else a single one.

    What runs, what spaces are read from and what is evaluated all come from here, for the two forms
    may differ: the vectors of Atari games show preprocessed frames, single games do not.

    Args:
        env: a Gymnasium id, an id with a prefix of `ADAPTERS`, or a function.
        count: the number of environments of a vector.
        wrappers: put around a single environment, the first one innermost; with any there is no
            vectorised form.
        settings: keyword arguments for making the environment.

    Raises:
        SettingError: the id is unknown, or its package is not installed.
        EnvError: making it failed.
    """
    if not isinstance(env, str):
        return _made(env, env, wrappers, settings, count)
    # For Gymnasium, what stands before a colon is a module to import; here it names an adapter.
    if ":" in env:
        module, _, name = env.partition(":")
        if module in ADAPTERS:
            return _made(env, partial(ADAPTERS[module], name), wrappers, settings, count)
        if module == PETTINGZOO:
            return _made(env, partial(make_pettingzoo, name), wrappers, settings)
        prefixes = ", ".join(f"{prefix}:" for prefix in ADAPTERS)
        raise SettingError(
            f"'{env}' would import {module}; import it yourself (--import {module}, or "
            f"`import {module}` in Python) and write '{name}'. "
            f"Environments written in JAX have the prefixes {prefixes}, those of several agents "
            f"{PETTINGZOO}:"
        )
    family = FAMILIES.get(env.partition("/")[0])
    if family is not None:
        _register(env, family)
    if _is_vectorised(env, count, wrappers):
        make_vec = partial(gym.make_vec, env, count, gym.VectorizeMode.VECTOR_ENTRY_POINT)
        defaults = family.vector if family else {}
        return _made(env, make_vec, (), {**defaults, **settings})
    return _made(env, partial(gym.make, env, disable_env_checker=True), wrappers, settings)


def one_agent(env: Make, made: Any) -> Any:
    """Return an environment that was made, if it has but one agent.

    Raises:
        SettingError: it has several.
    """
    if isinstance(made, Agents):
        made.close()
        raise SettingError(
            f"{env_name(env)} has several agents, and this policy was trained for a single one"
        )
    return made


def steps_singly(env: Make, wrappers: Sequence[Callable[[Any], Any]]) -> bool:
    """Return whether several environments are stepped one after another.

    They are if they have no vectorised form of their own, as far as that is known without making
    one.
    """
    if not isinstance(env, str):
        return True
    return ":" not in env and not _is_vectorised(env, 2, wrappers)


def _is_vectorised(env: str, count: int, wrappers: Sequence[Callable[[Any], Any]]) -> bool:
    """Return whether so many environments of an id are made in their vectorised form."""
    # Wrappers are put around single environments, so with any there is no vector of its own.
    if wrappers or env not in gym.registry:
        return False
    entry = gym.spec(env).vector_entry_point
    # A single one of Gymnasium's own shows what a vector of one does, in a third of the time.
    single = count == 1 and str(entry).startswith("gymnasium.")
    return entry is not None and not single


def _register(env: str, family: Family) -> None:
    """Import the package that registers an environment."""
    try:
        importlib.import_module(family.package)
    except ImportError as error:
        raise SettingError(
            f"'{env}' needs the package {family.package} ({error}): {install(family.extra)}"
        ) from error


def _made(
    env: Make,
    make: Callable[..., Any],
    wrappers: Sequence[Callable[[Any], Any]],
    settings: Mapping[str, Any],
    count: int = 1,
) -> Any:
    """Make an environment by `make` and wrap it; one in JAX becomes a vector of `count`."""
    take_warnings(needed=_extra_of(env) == "mujoco")
    try:
        made = make(**settings)
        for wrapper in wrappers:
            made = wrapper(made)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        if (extra := _extra_of(env)) is None:
            raise EnvError(f"{env_name(env)} could not be made: {raised(error)}") from error
        raise SettingError(
            f"'{env_name(env)}' needs the extra {extra} ({error}): {install(extra)}"
        ) from error
    except gym.error.Error as error:
        if isinstance(env, str) and (unknown_id := _unknown_id(env, error)) is not None:
            raise unknown_id from None
        raise EnvError(f"{env_name(env)} could not be made: {error}") from error
    except (SettingError, EnvError) as error:
        raise error.at(env_name(env)) from None
    except Exception as error:
        how = _lacking(env, error)
        raise EnvError(f"{env_name(env)} could not be made: {raised(error)}{how}") from error
    if isinstance(made, JaxEnv):
        _spaces(env, *(getattr(made, f"{name}_space", None) for name in ("observation", "action")))
        return JaxVector(made, count)
    if isinstance(made, JaxAgents):
        return HostAgents(made)
    if (several := agents_of(made)) is not None:
        return several
    if not isinstance(made, gym.Env | VectorEnv):
        raise EnvError(
            f"{env_name(env)} made {a(made)}; it must be a gymnasium.Env, "
            "gymnasium.vector.VectorEnv, fl.envs.JaxEnv, fl.envs.JaxAgents, or one of PettingZoo's"
        )
    return made


def _extra_of(env: Make) -> str | None:
    """Return the extra that one of Gymnasium's own environments needs, None for others."""
    spec = gym.registry.get(env) if isinstance(env, str) else None
    where = spec.entry_point if spec is not None else None
    if not isinstance(where, str):
        return None
    return next((EXTRAS[package] for package in EXTRAS if where.startswith(package)), None)


def _unknown_id(env: str, error: gym.error.Error) -> SettingError | None:
    """Return the error for an id that Gymnasium does not know, None if it knows the id."""
    if isinstance(error, gym.error.NamespaceNotFound):
        remedy = FIRST.format(env.partition("/")[0])
        return SettingError(f"unknown environment '{env}': {remedy}")
    if isinstance(error, gym.error.NameNotFound | gym.error.VersionNotFound):
        remedy = FIRST.format("others")
        return SettingError(f"{unknown('environment', env, _similar(env))}, ...; {remedy}")
    return None


FIRST = (
    "the package that registers {} must be imported first (--import PACKAGE, or `import PACKAGE` "
    "in Python)"
)
"""The way out of naming an environment that Gymnasium does not know."""


def _similar(env: str) -> list[str]:
    """Return the ids most similar to an unknown one, or two well-known ones."""
    import difflib

    # Whoever leaves the namespace out has not had its package imported either.
    for family in FAMILIES.values():
        with suppress(ImportError):
            importlib.import_module(family.package)
    near = difflib.get_close_matches(env, list(gym.registry), n=5, cutoff=0.3)
    same = [name for name in gym.registry if name.endswith(f"/{env}")]
    return list(dict.fromkeys([*same, *near])) or ["CartPole-v1", "Pendulum-v1"]


def guarded(
    env: Make, made: Sequence[gym.Env[Any, Any]], spaces: Spaces | None = None
) -> SyncVectorEnv:
    """Return a vector of environments that are stepped one after another, each within a `Guard`.

    Args:
        env: what they were made of, which errors name.
        made: the environments.
        spaces: theirs, as `probe` found them; None for those that they declare (default None).
    """

    def one(index: int) -> gym.Env[Any, Any]:
        guard = Guard(made[index], index, env_name(env))
        found: gym.Env[Any, Any] = as_declared(guard, spaces, guard.label, guard.failed)
        return found

    return SyncVectorEnv([partial(one, index) for index in range(len(made))], copy=False)


def make_vector(
    env: Make,
    count: int,
    wrappers: tuple[Callable[[Any], Any], ...],
    settings: Mapping[str, Any],
    spaces: Spaces | None = None,
) -> VectorEnv[Any, Any, Any]:
    """Make environments as one vector, which steps one after another if it has no form of its own.

    Args:
        env: a Gymnasium id, or a function that makes an environment or a vector of them.
        count: the number of environments.
        wrappers: put around each environment, the first one innermost.
        settings: keyword arguments for making an environment.
        spaces: theirs, as `probe` found them; None for those that they declare (default None).

    Raises:
        SettingError: the id is unknown, its package is not installed, or a vector of the user's own
            has another size.
        EnvError: making it failed, its way of resetting is unknown, or an environment has other
            spaces than the others.
    """
    with ExitStack() as on_error:
        vector = make_env(env, count, wrappers, settings)
        # What was made is closed if anything after it fails.
        on_error.callback(vector.close)
        if not isinstance(vector, VectorEnv):
            made = [vector]
            for _ in range(count - 1):
                made.append(make_env(env, 1, wrappers, settings))
                on_error.callback(made[-1].close)
            _check_alike(env, made, spaces)
            vector = guarded(env, made, spaces)
        else:
            retraced(vector)
            vector = as_declared(vector, spaces, env_name(env))
        if getattr(vector, "num_envs", None) is None:
            raise EnvError(
                f"{env_name(env)} made a vector that does not say of how many environments; let it "
                "set num_envs"
            )
        if vector.num_envs != count:
            raise SettingError(
                f"{env_name(env)} made a vector of {vector.num_envs} environments, but "
                f"envs_per_runner={count}; make them equal"
            )
        autoreset_mode(vector, env)
        on_error.pop_all()
    found: VectorEnv[Any, Any, Any] = vector
    return found


def _check_alike(env: Make, made: Sequence[gym.Env[Any, Any]], spaces: Spaces | None) -> None:
    """Check that environments have the spaces of another one, of which the policy was made.

    What they show is checked with every reset and step, in shape and type; an environment may take
    a wrong action without a word.

    Args:
        env: what they were made of, which errors name.
        made: the environments.
        spaces: what the policy was made for; None if that is not known.

    Raises:
        EnvError: one of them has another space of actions, or others of observations than the
            first one.
    """
    known = made[0].action_space if spaces is None else spaces.action
    for i, one in enumerate(made):
        pairs = {
            "action space": (one.action_space, known),
            "observation space": (one.observation_space, made[0].observation_space),
        }
        for name, (found, wanted) in pairs.items():
            if found != wanted:
                raise EnvError(
                    f"environment {i} of {env_name(env)} has the {name} {found}, but one that was "
                    f"made before had {wanted}; let all that are made have the same"
                )


def autoreset_mode(vector: VectorEnv[Any, Any, Any], env: Make) -> AutoresetMode:
    """Return how a vector begins the next episode of a column.

    Raises:
        EnvError: it does not say so.
    """
    mode = vector.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise EnvError(
            f"{env_name(env)} does not say how it resets: metadata['autoreset_mode'] is {mode!r}; "
            "set it to a gymnasium.vector.AutoresetMode"
        )
    return mode


class Probed(NamedTuple):
    """What is known of an environment once one was made."""

    spaces: Spaces | None
    """Its spaces; None where there are several agents."""
    jax_env: JaxEnv | JaxAgents | None = None
    """Itself, if it is one written in JAX."""
    agents: Mapping[str, Spaces] | None = None
    """The spaces of its agents by name; None where there is but one."""
    skips: bool = False
    """Whether it is a vector of which some columns' steps are skipped where episodes end."""
    own_moments: bool = False
    """Whether it normalises observations by moments of its own."""

    @property
    def first(self) -> Spaces:
        """Its spaces, or those of its first agent."""
        return self.spaces or next(iter((self.agents or {}).values()))


def _spaces(env: Make, observation: Any, action: Any) -> Spaces:
    """Return the spaces of an environment.

    Raises:
        EnvError: one of them is no space.
    """
    for name, space in (("observation_space", observation), ("action_space", action)):
        if not isinstance(space, gym.Space):
            raise EnvError(
                f"{env_name(env)}: its {name} is {space!r}, and no space of Gymnasium; set "
                f"self.{name} in __init__, such as to gymnasium.spaces.Discrete(2)"
            )
    return Spaces(observation, action)


def _lacking(env: Make, error: Exception) -> str:
    """Return where to give the arguments that a function lacked to make one; empty if none."""
    found = re.findall(r"'(\w+)'", str(error).partition("required")[2])
    if not isinstance(error, TypeError) or isinstance(env, str) or not found:
        return ""
    try:
        known = inspect.signature(env).parameters
    except (TypeError, ValueError):
        return ""
    # What failed within it may be the call of another function.
    if any(name not in known or known[name].default is not known[name].empty for name in found):
        return ""
    settings = ", ".join(f"'{name}': ..." for name in found)
    return f"; set env_settings={{{settings}}} of its runners"


def _has_moments(env: Any) -> bool:
    """Return whether one of the wrappers of an environment normalises observations."""
    while not isinstance(env, NormalizeObservation | NormalizeVector):
        if isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
            env = env.env
        elif isinstance(env, gym.vector.SyncVectorEnv):
            # Within a vector there are several, which are alike.
            env = env.envs[0]
        else:
            return False
    return True


def probe(
    env: Make, wrappers: tuple[Callable[[Any], Any], ...], settings: Mapping[str, Any]
) -> Probed:
    """Return what is known of an environment: its spaces, its agents, and whether it is in JAX.

    The spaces are found by making one; a mask of actions in its `info`, by a reset.

    Raises:
        EnvError: it can't be made, or does not set its spaces.
    """
    made = make_env(env, 1, wrappers, settings)
    try:
        if isinstance(made, Agents):
            spaces_of = {name: Spaces(*made.spaces_of(name)) for name in made.names}
            jax_agents = made.jax_agents if isinstance(made, HostAgents) else None
            return Probed(None, jax_agents, spaces_of)
        if isinstance(made, VectorEnv):
            spaces = _spaces(env, made.single_observation_space, made.single_action_space)
            jax_env = getattr(made, "jax_env", None)
            if jax_env is not None:
                return Probed(spaces, jax_env)
            skips = made.metadata.get("autoreset_mode") is not AutoresetMode.NEXT_STEP
            seen = with_mask_of_info(spaces, made)
            return Probed(seen, skips=skips, own_moments=_has_moments(made))
        spaces = _spaces(env, made.observation_space, made.action_space)
        return Probed(with_mask_of_info(spaces, made), own_moments=_has_moments(made))
    except AttributeError as error:
        raise EnvError(
            f"{env_name(env)}: {error}; an environment sets self.observation_space and "
            "self.action_space in __init__"
        ) from None
    finally:
        made.close()
