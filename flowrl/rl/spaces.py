"""Spaces as JSON, and what a policy must put out for an action space."""

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
    """The observation and action space of one environment. Compares and hashes by value."""

    def __init__(self, obs: gym.Space[Any], action: gym.Space[Any]) -> None:
        self.obs = obs
        self.action = action

    @cached_property
    def json(self) -> str:
        """Both spaces as JSON; `Spaces.from_json` reads it back."""
        return json.dumps({"obs": _to_json(self.obs), "action": _to_json(self.action)})

    @staticmethod
    def from_json(text: str) -> Spaces:
        """The spaces that `json` wrote."""
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
        """The type in which observations are kept: floats as float32, integers as they are."""
        if not isinstance(
            self.obs,
            gym.spaces.Box
            | gym.spaces.Discrete
            | gym.spaces.MultiDiscrete
            | gym.spaces.MultiBinary,
        ):
            raise PolicyError(
                f"observations of {self.obs} are not one array; wrap the environment with gymnasium.wrappers.FlattenObservation: "
                "Runners(..., wrappers=(FlattenObservation,))"
            )
        kind = np.dtype(self.obs.dtype)
        return (
            np.dtype(np.float32)
            if kind.kind == "f"
            else np.dtype(np.int32)
            if kind.itemsize > 4
            else kind
        )

    @cached_property
    def head(self) -> Head:
        """What a policy puts out for the action space."""
        return head(self.action)


def _to_json(space: gym.Space[Any]) -> dict[str, Any]:
    match space:
        case gym.spaces.Box():
            low, high = (
                [x if np.isfinite(x) else None for x in b.ravel().tolist()]
                for b in (space.low, space.high)
            )
            if len(set(low)) == len(set(high)) == 1:
                low, high = low[:1], high[:1]
            return {
                "kind": "Box",
                "low": low,
                "high": high,
                "shape": space.shape,
                "dtype": str(space.dtype),
            }
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
    return {"kind": type(space).__name__, "text": str(space)}


def _from_json(data: dict[str, Any]) -> gym.Space[Any]:
    match data["kind"]:
        case "Box":
            shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
            low, high = (
                _bound(data[k], infinite, shape, dtype)
                for k, infinite in (("low", -np.inf), ("high", np.inf))
            )
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
    bound = np.array([infinite if x is None else x for x in numbers], dtype)
    return np.full(shape, bound[0]) if bound.size == 1 else bound.reshape(shape)


@dataclass(frozen=True)
class Head:
    """What a policy puts out for an action space: how many numbers, the distribution they make, the way to the environment."""

    outputs: int
    """The numbers a module must give per observation."""
    width: int
    """The numbers of one action; 0 for a scalar one."""
    dtype: str
    kind: str
    sizes: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()

    @cached_property
    def _bounds(self) -> tuple[Any, ...]:
        """Low, high, whether both are finite, both again with -1 and 1 where they are not, and the shift of the others; ``[width]`` each."""
        low, high = np.asarray(self.low, self.dtype), np.asarray(self.high, self.dtype)
        above, below = np.isfinite(low), np.isfinite(high)
        finite = above & below
        shift = np.where(above, low + 1, np.where(below, high - 1, 0)).astype(self.dtype)
        return low, high, finite, np.where(finite, low, -1), np.where(finite, high, 1), shift

    @property
    def bounded(self) -> bool:
        """Whether actions lie between finite bounds."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def distribution(self, outputs: Any) -> Distribution:
        """The distribution over actions that the numbers ``[..., outputs]`` make."""
        if self.kind == "categorical":
            return Categorical(outputs)
        if self.kind == "multi_categorical":
            return MultiCategorical(outputs, self.sizes)
        mean, log_std = outputs[..., : self.width], outputs[..., self.width :]
        return (
            TanhGaussian(mean, log_std) if self.kind == "tanh_gaussian" else Gaussian(mean, log_std)
        )

    @property
    def continuous(self) -> bool:
        """Whether actions are numbers on a scale."""
        return self.kind in ("gaussian", "tanh_gaussian")

    def noise(self, key: Any, n: int) -> Any:
        """What `Distribution.sample` takes to draw n actions: standard normals ``[n, width]``, or standard Gumbels ``[n, outputs]``."""
        return (
            jax.random.normal(key, (n, self.width))
            if self.continuous
            else jax.random.gumbel(key, (n, self.outputs))
        )

    def to_env(self, action: Any) -> Any:
        """Actions ``[B]`` or ``[B, width]`` of the distribution as the environment takes them.

        Gaussian actions stand for [-1, 1] between finite bounds: they are clipped to it and stretched over the bounds. Where one bound is
        finite, it is met by -1 or 1, too, and a unit is a unit: a policy that begins around 0 then begins beside the bound, be it far from 0.
        """
        if self.continuous:
            xp = action.__array_namespace__()
            low, high, finite, floor, roof, shift = self._bounds
            share = (xp.clip(action, -1, 1) + 1) / 2
            action = xp.where(finite, (1 - share) * floor + share * roof, action + shift)
            action = xp.clip(action, low, high)
        elif any(self.start):
            action = action + np.asarray(self.start if self.width else self.start[0], self.dtype)
        dtype = (
            np.dtype(self.dtype)
            if isinstance(action, np.ndarray)
            else jax.dtypes.canonicalize_dtype(self.dtype)
        )
        return action.reshape((*action.shape[:1], *self.shape)).astype(dtype)


def head(space: gym.Space[Any]) -> Head:
    """The head for an action space: Discrete, MultiDiscrete, MultiBinary, or Box.

    Raises:
        PolicyError: any other space.
    """
    match space:
        case gym.spaces.Discrete():
            return Head(int(space.n), 0, str(space.dtype), "categorical", start=(int(space.start),))
        case gym.spaces.MultiDiscrete() if space.nvec.ndim == 1:
            sizes = tuple(int(n) for n in space.nvec)
            return Head(
                sum(sizes),
                len(sizes),
                str(space.dtype),
                "multi_categorical",
                sizes,
                tuple(int(s) for s in space.start),
                shape=space.shape,
            )
        case gym.spaces.MultiBinary():
            width = int(np.prod(space.shape))
            return Head(
                2 * width,
                width,
                str(space.dtype),
                "multi_categorical",
                (2,) * width,
                (0,) * width,
                shape=space.shape,
            )
        case gym.spaces.Box() if np.dtype(space.dtype).kind == "f":
            width = int(np.prod(space.shape))
            low, high = (tuple(float(x) for x in b.ravel()) for b in (space.low, space.high))
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
        f"there is no policy for actions in {space}; it can be Discrete, MultiDiscrete (one axis), MultiBinary, or Box of floats"
    )
