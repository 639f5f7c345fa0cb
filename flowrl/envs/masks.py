"""Masks of actions that environments give in their `info`, as a part of their observations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from flowrl.errors import EnvError
from flowrl.rl.spaces import ACTION_MASK, OBSERVATION, Spaces

Array = np.ndarray[Any, Any]
KEY = OBSERVATION[0]


def with_mask_of_info(spaces: Spaces, env: Any) -> Spaces:
    """Return the spaces with a mask of actions, if an environment gives one in its `info`.

    It is reset for it, unless its observations hold a mask or its actions have no choices.

    Args:
        spaces: of the environment.
        env: the environment, or a vector of them.
    """
    if holds_mask(spaces.obs):
        return spaces
    info: Any = None
    # Whoever runs the environment reports what is wrong with it, and where.
    with suppress(Exception):
        if spaces.head.choices:
            _, info = env.reset(seed=0)
    if not (isinstance(info, dict) and ACTION_MASK in info):
        return spaces
    mask = gym.spaces.MultiBinary(spaces.head.choices)
    return Spaces(gym.spaces.Dict({KEY: spaces.obs, ACTION_MASK: mask}), spaces.action)


def holds_mask(space: gym.Space[Any]) -> bool:
    """Return whether observations hold a mask of actions."""
    return isinstance(space, gym.spaces.Dict) and ACTION_MASK in space.spaces


def as_declared(env: Any, spaces: Spaces | None, label: str) -> Any:
    """Return an environment, or a vector, with its mask among its observations if `spaces` has it.

    Args:
        env: as it was made.
        spaces: what `with_mask_of_info` found; None to leave it as it is.
        label: what errors call it.
    """
    if spaces is None or not holds_mask(spaces.obs):
        return env
    if isinstance(env, VectorEnv):
        own = holds_mask(env.single_observation_space)
        return env if own else _MaskedVector(env, spaces, label)
    return env if holds_mask(env.observation_space) else _Masked(env, spaces, label)


def _arrays(mask: Any, space: gym.Space[Any]) -> Iterator[Any]:
    """Yield the arrays of a mask, in the order of the action space."""
    if isinstance(mask, dict):
        for key, part in cast("gym.spaces.Dict", space).spaces.items():
            yield from _arrays(mask[key], part)
    elif isinstance(mask, tuple | list) and isinstance(space, gym.spaces.Tuple):
        for one, part in zip(mask, space.spaces, strict=True):
            yield from _arrays(one, part)
    elif isinstance(mask, tuple | list):
        yield from mask
    else:
        yield mask


def _mask(info: Any, shape: tuple[int, ...], space: gym.Space[Any], label: str, verb: str) -> Array:
    """Return the mask in the `info` that an environment gave.

    Raises:
        EnvError: there is none, or it has another size than there are choices.
    """
    if ACTION_MASK not in info:
        raise EnvError(
            f"{label} gave no info['{ACTION_MASK}'] with {verb}, as it did when its spaces were "
            "read; let every reset and step give it"
        )
    *leading, _ = shape
    # All in one array, or one for each number or part of the action, in the order of its space.
    arrays = [np.reshape(x, (*leading, -1)) for x in _arrays(info[ACTION_MASK], space)]
    flat = np.concatenate(arrays, axis=-1)
    if flat.size != np.prod(shape):
        raise EnvError(
            f"{label} gave an info['{ACTION_MASK}'] of {flat.size} numbers with {verb}, but its "
            f"actions have {int(np.prod(shape))} choices; a mask has a number for each"
        )
    return (flat > 0).reshape(shape).astype(np.int8)


class _Masked(gym.Wrapper[Any, Any, Any, Any]):
    """Puts the mask in the `info` of one environment among its observations."""

    def __init__(self, env: gym.Env[Any, Any], spaces: Spaces, label: str) -> None:
        super().__init__(env)
        self.label, self.actions = label, spaces.action
        self.observation_space = spaces.obs
        self.shape = (spaces.head.choices,)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**how)
        return {
            KEY: obs,
            ACTION_MASK: _mask(info, self.shape, self.actions, self.label, "reset"),
        }, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        seen = {KEY: obs, ACTION_MASK: _mask(info, self.shape, self.actions, self.label, "step")}
        return seen, reward, terminated, truncated, info


class _MaskedVector(gym.vector.VectorWrapper):
    """Puts the masks in the `info` of a vector of environments among their observations."""

    def __init__(self, env: VectorEnv[Any, Any, Any], spaces: Spaces, label: str) -> None:
        super().__init__(env)
        self.label, self.actions = label, spaces.action
        self.masks = np.ones((env.num_envs, spaces.head.choices), np.int8)
        self.single_observation_space = spaces.obs
        self.observation_space = gym.vector.utils.batch_space(spaces.obs, env.num_envs)
        self.shape = (env.num_envs, spaces.head.choices)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**how)
        masks = _mask(info, self.shape, self.actions, self.label, "reset")
        # A vector that is reset in part gives the masks of that part.
        part = (how.get("options") or {}).get("reset_mask")
        self.masks = masks if part is None else np.where(part[:, None], masks, self.masks)
        return {KEY: obs, ACTION_MASK: self.masks}, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        self.masks = _mask(info, self.shape, self.actions, self.label, "step")
        seen = {KEY: obs, ACTION_MASK: self.masks}
        if "final_obs" in info:
            info = {**info, "final_obs": self._final(info)}
        return seen, reward, terminated, truncated, info

    def _final(self, info: dict[str, Any]) -> Array:
        """Return the final observations of the episodes that ended, each with its mask."""
        final = np.full(self.num_envs, None, object)
        masks = info.get("final_info", {}).get(ACTION_MASK)
        for i in np.flatnonzero(info["_final_obs"]):
            # No action is taken there: without a mask all of them are allowed.
            mask = np.ones(self.shape[1], np.int8) if masks is None else np.ravel(masks[i])
            final[i] = {KEY: info["final_obs"][i], ACTION_MASK: mask}
        return final
