"""Spaces as JSON, and the outputs that a policy must have for an action space."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium as gym
import jax
import numpy as np

from flowrl.errors import PolicyError
from flowrl.rl.distributions import (
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    TanhGaussian,
)


class Spaces:
    """The observation and action space of one environment, compared and hashed by value.

    Args:
        obs: the observation space.
        action: the action space.
    """

    def __init__(self, obs: gym.Space[Any], action: gym.Space[Any]) -> None:
        self.obs = obs
        self.action = action

    @cached_property
    def json(self) -> str:
        """Both spaces as JSON; `Spaces.from_json` reads it back."""
        return json.dumps({"obs": _to_json(self.obs), "action": _to_json(self.action)})

    @staticmethod
    def from_json(text: str) -> Spaces:
        """Return the spaces that `json` wrote.

        Raises:
            PolicyError: a space is of a kind that no policy fits.
        """
        both = json.loads(text)
        return Spaces(_from_json(both["obs"]), _from_json(both["action"]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spaces) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    def __repr__(self) -> str:
        return f"Spaces(obs={self.obs}, action={self.action})"

    @cached_property
    def obs_dtype(self) -> np.dtype[Any]:
        """The type of observations in batches: floats as float32, integers of 4 bytes at most.

        Raises:
            PolicyError: observations are not one array.
        """
        one_array = (
            gym.spaces.Box,
            gym.spaces.Discrete,
            gym.spaces.MultiDiscrete,
            gym.spaces.MultiBinary,
        )
        if not isinstance(self.obs, one_array):
            raise PolicyError(
                f"observations of {self.obs} are not one array; wrap the environment with "
                "gymnasium.wrappers.FlattenObservation: "
                "Runners(..., wrappers=(FlattenObservation,))"
            )
        dtype = np.dtype(self.obs.dtype)
        if dtype.kind == "f":
            return np.dtype(np.float32)
        # JAX has no integers of 8 bytes unless it is switched to them.
        return np.dtype(np.int32) if dtype.itemsize > 4 else dtype

    @cached_property
    def head(self) -> Head:
        """The outputs that a policy must have for the action space."""
        return head(self.action)


def _to_json(space: gym.Space[Any]) -> dict[str, Any]:
    match space:
        case gym.spaces.Box():
            return _box_to_json(space)
        case gym.spaces.Discrete():
            return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
        case gym.spaces.MultiDiscrete():
            return {
                "kind": "MultiDiscrete",
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
                "dtype": str(space.dtype),
            }
        case gym.spaces.MultiBinary():
            return {
                "kind": "MultiBinary",
                "n": space.n if isinstance(space.n, int) else list(space.n),
            }
    # Other spaces are written as text, for the message of who reads them.
    return {"kind": type(space).__name__, "text": str(space)}


def _box_to_json(space: gym.spaces.Box) -> dict[str, Any]:
    low, high = _finite_or_none(space.low), _finite_or_none(space.high)
    # Bounds that are alike for all numbers are written once: those of an image are many.
    if len(set(low)) == len(set(high)) == 1:
        low, high = low[:1], high[:1]
    return {
        "kind": "Box",
        "low": low,
        "high": high,
        "shape": space.shape,
        "dtype": str(space.dtype),
    }


def _finite_or_none(bounds: np.ndarray[Any, Any]) -> list[float | None]:
    """Return bounds as a list with None for infinity, of which JSON has none."""
    return [x if np.isfinite(x) else None for x in bounds.ravel().tolist()]


def _from_json(data: dict[str, Any]) -> gym.Space[Any]:
    match data["kind"]:
        case "Box":
            shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
            low = _bound(data["low"], -np.inf, shape, dtype)
            high = _bound(data["high"], np.inf, shape, dtype)
            box: gym.Space[Any] = gym.spaces.Box(low, high, dtype=dtype.type)
            return box
        case "Discrete":
            return gym.spaces.Discrete(data["n"], start=data["start"])
        case "MultiDiscrete":
            return gym.spaces.MultiDiscrete(
                data["nvec"], start=data["start"], dtype=np.dtype(data["dtype"]).type
            )
        case "MultiBinary":
            return gym.spaces.MultiBinary(data["n"])
    raise PolicyError(f"no policy fits a space of kind {data['kind']}: {data.get('text', '')}")


def _bound(
    numbers: list[float | None], infinite: float, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Any:
    """Return the bounds of a Box from those in JSON, with `infinite` for None."""
    bound = np.array([infinite if x is None else x for x in numbers], dtype)
    return np.full(shape, bound[0]) if bound.size == 1 else bound.reshape(shape)


@dataclass(frozen=True)
class Head:
    """The outputs of a policy for an action space.

    It knows how many numbers they are, which distribution they make, and how actions of that
    distribution become those of the environment.
    """

    outputs: int
    """The numbers that a module must return per observation."""
    width: int
    """The numbers of one action; 0 for a scalar action."""
    dtype: str
    """The type of the environment's actions."""
    kind: str
    """The distribution: ``categorical``, ``multi_categorical``, ``gaussian``, ``tanh_gaussian``."""
    sizes: tuple[int, ...] = ()
    """The number of choices of each part of a ``multi_categorical`` action."""
    start: tuple[int, ...] = ()
    """The environment's number of the first choice, for each part of a discrete action."""
    low: tuple[float, ...] = ()
    """The lower bound of each number of a continuous action."""
    high: tuple[float, ...] = ()
    """The upper bound of each number of a continuous action."""
    shape: tuple[int, ...] = ()
    """The shape of one action of the environment."""

    @cached_property
    def _bounds(self) -> tuple[Any, ...]:
        """The bounds of a continuous action as `to_env` needs them, ``[width]`` each.

        They are low, high, whether both are finite, low and high again with -1 and 1 where not both
        are finite, and the shift of the numbers with one finite bound.
        """
        low, high = np.asarray(self.low, self.dtype), np.asarray(self.high, self.dtype)
        has_low, has_high = np.isfinite(low), np.isfinite(high)
        finite = has_low & has_high
        shift = np.where(has_low, low + 1, np.where(has_high, high - 1, 0)).astype(self.dtype)
        return low, high, finite, np.where(finite, low, -1), np.where(finite, high, 1), shift

    @property
    def bounded(self) -> bool:
        """Whether all bounds of actions are finite."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def distribution(self, outputs: Any) -> Distribution:
        """Return the distribution over actions that the numbers ``[..., outputs]`` make."""
        if self.kind == "categorical":
            return Categorical(outputs)
        if self.kind == "multi_categorical":
            return MultiCategorical(outputs, self.sizes)
        mean, log_std = outputs[..., : self.width], outputs[..., self.width :]
        if self.kind == "tanh_gaussian":
            return TanhGaussian(mean, log_std)
        return Gaussian(mean, log_std)

    @property
    def continuous(self) -> bool:
        """Whether actions are real numbers, and not choices."""
        return self.kind in ("gaussian", "tanh_gaussian")

    def noise(self, key: Any, n: int) -> Any:
        """Return the noise from which `Distribution.sample` makes n actions.

        These are standard normals ``[n, width]`` for continuous actions, else standard Gumbels
        ``[n, outputs]``.
        """
        if self.continuous:
            return jax.random.normal(key, (n, self.width))
        return jax.random.gumbel(key, (n, self.outputs))

    def to_env(self, action: Any) -> Any:
        """Return actions ``[B]`` or ``[B, width]`` as the environment takes them.

        Gaussian actions stand for [-1, 1] between finite bounds: they are clipped to it and
        stretched over the bounds. Where only one bound is finite, -1 or 1 stands for it, too, and
        nothing is stretched: a policy that begins around 0 then begins near the bound, even if that
        is far from 0.
        """
        if self.continuous:
            action = self._to_bounds(action)
        elif any(self.start):
            action = action + np.asarray(self.start if self.width else self.start[0], self.dtype)
        # Without 64-bit numbers JAX would warn at each cast to a type that it does not have.
        if isinstance(action, np.ndarray):
            dtype = np.dtype(self.dtype)
        else:
            dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return action.reshape((*action.shape[:1], *self.shape)).astype(dtype)

    def _to_bounds(self, action: Any) -> Any:
        """Return continuous actions ``[B, width]`` between the bounds of the action space."""
        xp = action.__array_namespace__()
        low, high, finite, stretched_low, stretched_high, shift = self._bounds
        share = (xp.clip(action, -1, 1) + 1) / 2
        stretched = (1 - share) * stretched_low + share * stretched_high
        return xp.clip(xp.where(finite, stretched, action + shift), low, high)


def head(space: gym.Space[Any]) -> Head:
    """Return the head for an action space: Discrete, MultiDiscrete, MultiBinary, or Box.

    Raises:
        PolicyError: the space is any other.
    """
    match space:
        case gym.spaces.Discrete():
            return Head(int(space.n), 0, str(space.dtype), "categorical", start=(int(space.start),))
        case gym.spaces.MultiDiscrete() if space.nvec.ndim == 1:
            sizes = tuple(int(n) for n in space.nvec)
            return _multi_categorical(space, sizes, tuple(int(start) for start in space.start))
        case gym.spaces.MultiBinary():
            # Each bit is a choice of two.
            width = int(np.prod(space.shape))
            return _multi_categorical(space, (2,) * width, (0,) * width)
        case gym.spaces.Box() if np.dtype(space.dtype).kind == "f":
            width = int(np.prod(space.shape))
            low = tuple(float(x) for x in space.low.ravel())
            high = tuple(float(x) for x in space.high.ravel())
            return Head(
                2 * width,
                width,
                str(space.dtype),
                "gaussian",
                low=low,
                high=high,
                shape=space.shape,
            )
    raise PolicyError(
        f"there is no policy for actions in {space}; "
        "it can be Discrete, MultiDiscrete (one axis), MultiBinary, or Box of floats"
    )


def _multi_categorical(
    space: gym.spaces.MultiDiscrete | gym.spaces.MultiBinary,
    sizes: tuple[int, ...],
    start: tuple[int, ...],
) -> Head:
    return Head(
        sum(sizes),
        len(sizes),
        str(space.dtype),
        "multi_categorical",
        sizes,
        start,
        shape=space.shape,
    )
