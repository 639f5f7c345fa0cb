"""Checks of the settings of `Runners`, which name the setting, its value and the way out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING

import gymnasium as gym
from gymnasium.vector import VectorEnv

from flowrl.core.declared import hidden
from flowrl.core.metrics import misnamed
from flowrl.envs.jax_agents import JaxAgents
from flowrl.envs.jax_envs import JaxEnv
from flowrl.errors import GraphError, SettingError, unknown
from flowrl.graph.settings import check_above_0, check_at_least_1, check_not_negative
from flowrl.rl.explore import Explore
from flowrl.rl.policies import Policy
from flowrl.rl.team import Team

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


def check_settings(spec: Runners) -> None:
    """Check the settings of runners, each by itself.

    Raises:
        SettingError: a setting has a value that it can't have.
    """
    _check_numbers(spec)
    if spec.on_error not in ("stop", "restart"):
        raise SettingError(f"on_error must be stop or restart, got {spec.on_error!r}")
    is_made = isinstance(spec.env, gym.Env | VectorEnv | JaxEnv | JaxAgents)
    if is_made or not (isinstance(spec.env, str) or callable(spec.env)):
        made = "one that is made already: " if is_made else ""
        raise SettingError(
            "env must be an id, a class or a function that makes an environment, got "
            f"{made}{spec.env}"
        )
    _check_explore(spec)
    wrong_names = (misnamed(key, "env/") for key in spec.metrics)
    if wrong := next(filter(None, wrong_names), ""):
        raise SettingError(f"metrics: {wrong}")
    if not isinstance(spec.policy, Policy | Team):
        raise SettingError(
            f"policy must be fl.Policy(ModuleClass, **settings), got {spec.policy!r}"
        )


def _check_numbers(spec: Runners) -> None:
    check_at_least_1(spec, "num_runners", "envs_per_runner", "rollout_length")
    check_not_negative(spec, "restarts")
    check_above_0(spec, "timeout", "evaluation_timeout", "clip_rewards")
    for name in ("timeout", "evaluation_timeout"):
        if getattr(spec, name) == math.inf:
            raise SettingError(f"{name} must be finite, or None for no bound, got inf")
    gamma = spec.normalize_rewards
    # True would count as a discount factor of 1.
    is_number = isinstance(gamma, Real) and not isinstance(gamma, bool)
    if gamma is not None and not (is_number and 0 <= gamma <= 1):
        raise SettingError(
            "normalize_rewards must be a discount factor from 0 to 1, such as 0.99, or None for "
            f"no scaling, got {gamma!r}"
        )


def _check_explore(spec: Runners) -> None:
    ways = {"": spec.explore}
    if isinstance(spec.explore, Mapping):
        known = spec.part_names()
        if others := [name for name in spec.explore if name not in known]:
            raise SettingError(f"explore: {unknown('policy', others[0], known)}")
        ways = dict(spec.explore)
    for name, explore in ways.items():
        where = f"explore[{name!r}]" if name else "explore"
        if not isinstance(explore, Explore):
            raise SettingError(f"{where} must be one such as fl.EpsilonGreedy(), got {explore!r}")
        if wrong := hidden(explore, Explore):
            raise SettingError(f"{where}: {wrong}")


def check_perturbed(spec: Runners) -> None:
    """Refuse settings that episodes with perturbed weights do not follow.

    Args:
        spec: the settings of the runners that play them.

    Raises:
        GraphError: with the setting.
    """
    if spec.metrics:
        raise GraphError(
            "metrics: infos are not gathered in episodes with perturbed weights; leave it out"
        )
    for name in ("clip_rewards", "normalize_rewards"):
        if getattr(spec, name) is not None:
            raise GraphError(
                f"{name}: episodes with perturbed weights count by the environment's own rewards; "
                "leave it out, or wrap the environment (gymnasium.wrappers.TransformReward)"
            )
