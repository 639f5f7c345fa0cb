"""Masks of actions that environments give in their `info`, as a part of their observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from flowrl.errors import EnvError, a
from flowrl.rl.actions import head
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


def as_declared(
    env: Any,
    spaces: Spaces | None,
    label: str,
    failed: Callable[[str], EnvError] = EnvError,
) -> Any:
    """Return an environment, or a vector, with its mask among its observations if `spaces` has it.

    Args:
        env: as it was made.
        spaces: what `with_mask_of_info` found; None to leave it as it is.
        label: what errors call it.
        failed: makes an error of a text, which then names the step, too (default: it does not).
    """
    if spaces is None or not holds_mask(spaces.obs):
        return env
    if isinstance(env, VectorEnv):
        own = holds_mask(env.single_observation_space)
        return env if own else _MaskedVector(env, spaces, label)
    return env if holds_mask(env.observation_space) else _Masked(env, spaces, label, failed)


@dataclass(frozen=True)
class _Choices:
    """The choices of an action, by which its masks are read."""

    sizes: tuple[int, ...]
    """How many choices each of its discrete numbers has."""
    parts: Mapping[str | int, _Choices]
    """Those of the parts of a Dict or Tuple; empty for any other action."""


def _choices(space: gym.Space[Any]) -> _Choices:
    """Return the choices of actions in a space."""
    match space:
        case gym.spaces.Dict():
            parts: dict[str | int, _Choices] = {
                key: _choices(one) for key, one in space.spaces.items()
            }
        case gym.spaces.Tuple():
            parts = {i: _choices(one) for i, one in enumerate(space.spaces)}
        case _:
            return _Choices(head(space).sizes, {})
    return _Choices(sum((part.sizes for part in parts.values()), ()), parts)


def _mask(info: Any, rows: Array | None, of: _Choices, label: str, verb: str) -> Array:
    """Return the mask in the `info` that an environment, or a vector of them, gave.

    Args:
        info: what was returned.
        rows: of a vector ``bool[N]``, whose masks are wanted; None for a single environment.
        of: the choices of its actions.
        label: what errors call it.
        verb: ``reset`` or ``step``.

    Returns:
        ``int8[choices]``, of a vector ``int8[N, choices]``.

    Raises:
        EnvError: there is none, or it does not fit the choices.
    """
    if ACTION_MASK not in info:
        raise EnvError(f"{label} {_NO_MASK.format(verb)}")
    # Gymnasium's vectors say under ``_key`` which environments gave the key.
    given = info.get(f"_{ACTION_MASK}") if rows is not None else None
    if given is not None and (without := np.flatnonzero(rows & ~np.asarray(given, bool))).size:
        within = int(without[0])
        raise EnvError(
            f"environment {within} of {label} {_NO_MASK.format(verb)}", what=label, within=within
        )
    try:
        flat = _flat(info[ACTION_MASK], of, rows)
    except (TypeError, ValueError) as error:
        vector = "" if rows is None else f", with its {len(rows)} environments as the first axis"
        raise EnvError(
            f"{label} gave an info['{ACTION_MASK}'] with {verb} that does not fit its actions, "
            f"which have {sum(of.sizes)} choices: {error}; a mask is one array with a number for "
            f"each choice{vector}, or such an array for each number or part of the action"
        ) from error
    return (flat > 0).astype(np.int8)


_NO_MASK = (
    f"gave no info['{ACTION_MASK}'] with {{}}, as it did when its spaces were read; let every "
    "reset and step give it"
)
"""What is wrong where there is no mask; it takes the verb."""


def _flat(mask: Any, of: _Choices, rows: Array | None) -> Array:
    """Return a mask as ``[choices]``, or as ``[N, choices]`` for N `rows`.

    Lists and tuples are taken apart by the parts or numbers of the action and never by
    environments, for their lengths may be equal. What has several environments has them as the
    first axis of each array; an array of objects is what Gymnasium makes of those that are none.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    if isinstance(mask, np.ndarray) and mask.dtype == object:
        return _of_objects(mask, of, rows)
    if isinstance(mask, dict):
        return _by_part(mask, of, rows)
    if not isinstance(mask, tuple | list):
        return _array(mask, sum(of.sizes), rows)
    if 0 in of.parts and not _is_flat(mask):
        if len(mask) != len(of.parts):
            raise ValueError(f"it has {len(mask)} parts, and actions have {len(of.parts)}")
        return _by_part(dict(enumerate(mask)), of, rows)
    return _by_number(mask, of, rows)


def _of_objects(masks: Array, of: _Choices, rows: Array | None) -> Array:
    """Return `_flat` of an array of objects: one for each environment, or of a single one."""
    if rows is None:
        return _flat(masks.tolist(), of, None)
    if len(masks) != len(rows):
        raise ValueError(f"it has {len(masks)} masks")
    # An environment whose mask is not wanted, as it was not reset, has something else there.
    found = np.zeros((len(rows), sum(of.sizes)))
    for i in np.flatnonzero(rows):
        found[i] = _flat(masks[i], of, None)
    return found


def _by_part(masks: Mapping[Any, Any], of: _Choices, rows: Array | None) -> Array:
    """Return `_flat` of the masks of all parts of an action."""
    found = []
    for key, part in of.parts.items():
        # Real numbers have no choices, whatever stands in the place of their mask.
        if not part.sizes:
            continue
        if key not in masks:
            raise ValueError(f"it has nothing for the part {key!r}")
        # In a tuple, a list for one number may be the masks of the parts of one environment.
        one = isinstance(key, int) and not part.parts and len(part.sizes) == 1
        if rows is not None and one and isinstance(masks[key], tuple | list):
            raise TypeError(f"its part {key} is {a(masks[key])}")
        found.append(_flat(masks[key], part, rows))
    if not found:
        raise ValueError("it is a dict, and actions are not")
    return np.concatenate(found, axis=-1)


def _by_number(mask: Any, of: _Choices, rows: Array | None) -> Array:
    """Return `_flat` of a list with a mask for each number of an action, or of one mask."""
    pieces = list(_pieces(mask))
    if len(of.sizes) == 1:
        # The mask of a single number may be a list itself.
        whole = len(pieces) == 1 and (rows is None or np.shape(pieces[0])[:1] == rows.shape)
        return _array(pieces[0] if whole else mask, of.sizes[0], rows)
    if len(pieces) == 1 and len(pieces[0]) == sum(of.sizes):
        return _array(mask, sum(of.sizes), rows)
    if len(pieces) != len(of.sizes):
        raise ValueError(f"it has {len(pieces)} arrays, and actions have {len(of.sizes)} numbers")
    arrays = [_array(x, size, rows) for x, size in zip(pieces, of.sizes, strict=True)]
    return np.concatenate(arrays, axis=-1)


def _is_flat(mask: Any) -> bool:
    """Return whether a list holds nothing but numbers."""
    return all(not isinstance(x, tuple | list | dict) and np.ndim(x) == 0 for x in mask)


def _pieces(mask: Any) -> Iterator[Any]:
    """Yield the arrays within nested lists; a list of numbers is one."""
    if not isinstance(mask, tuple | list) or _is_flat(mask):
        yield mask
        return
    for one in mask:
        yield from _pieces(one)


def _array(mask: Any, size: int, rows: Array | None) -> Array:
    """Return one array of a mask as ``[size]``, or as ``[N, size]`` for N `rows`.

    Raises:
        ValueError: it has another shape, or is not of numbers.
    """
    x, leading = np.asarray(mask), () if rows is None else rows.shape
    if x.dtype.kind not in "biuf":
        raise ValueError(f"it is {a(mask)}")
    if x.shape[: len(leading)] != leading or x.size != size * math.prod(leading):
        wanted = ", ".join(map(str, (*leading, size)))
        raise ValueError(f"an array {list(x.shape)} stands where [{wanted}] is wanted")
    return x.reshape(*leading, size)


class _Masked(gym.Wrapper[Any, Any, Any, Any]):
    """Puts the mask in the `info` of one environment among its observations."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        spaces: Spaces,
        label: str,
        failed: Callable[[str], EnvError],
    ) -> None:
        super().__init__(env)
        self.label, self.choices, self.failed = label, _choices(spaces.action), failed
        self.observation_space = spaces.obs

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**how)
        return self._seen(obs, info, "reset"), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._seen(obs, info, "step"), reward, terminated, truncated, info

    def _seen(self, obs: Any, info: Any, verb: str) -> dict[str, Any]:
        try:
            mask = _mask(info, None, self.choices, self.label, verb)
        except EnvError as error:
            raise self.failed(error.message) from error.__cause__
        return {KEY: obs, ACTION_MASK: mask}


class _MaskedVector(gym.vector.VectorWrapper):
    """Puts the masks in the `info` of a vector of environments among their observations."""

    def __init__(self, env: VectorEnv[Any, Any, Any], spaces: Spaces, label: str) -> None:
        super().__init__(env)
        self.label, self.choices = label, _choices(spaces.action)
        self.masks = np.ones((env.num_envs, sum(self.choices.sizes)), np.int8)
        self.all = np.ones(env.num_envs, bool)
        self.single_observation_space = spaces.obs
        self.observation_space = gym.vector.utils.batch_space(spaces.obs, env.num_envs)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        # Gymnasium's vectors take it out of the options that they are given.
        part = (how.get("options") or {}).get("reset_mask")
        obs, info = self.env.reset(**how)
        # A vector that is reset in part gives the masks of that part.
        rows = self.all if part is None else part
        self.masks = np.where(rows[:, None], self._of(info, rows, "reset"), self.masks)
        return {KEY: obs, ACTION_MASK: self.masks}, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        self.masks = self._of(info, self.all, "step")
        seen = {KEY: obs, ACTION_MASK: self.masks}
        if "final_obs" in info:
            info = {**info, "final_obs": self._final(info)}
        return seen, reward, terminated, truncated, info

    def _of(self, info: Any, rows: Array, verb: str) -> Array:
        return _mask(info, rows, self.choices, self.label, verb)

    def _final(self, info: dict[str, Any]) -> Array:
        """Return the final observations of the episodes that ended, each with its mask."""
        final = np.full(self.num_envs, None, object)
        last, ended = info.get("final_info", {}), np.asarray(info["_final_obs"], bool)
        # No action is taken there: without a mask all of them are allowed.
        masks = np.ones_like(self.masks)
        if ACTION_MASK in last:
            rows = ended & last.get(f"_{ACTION_MASK}", True)
            masks = np.where(rows[:, None], self._of(last, rows, "step"), masks)
        for i in np.flatnonzero(ended):
            final[i] = {KEY: info["final_obs"][i], ACTION_MASK: masks[i]}
        return final
