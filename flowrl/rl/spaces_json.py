"""Spaces as JSON, and back."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from flowrl.errors import PolicyError


def to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """Return a space as values that JSON has."""
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
        case gym.spaces.Dict():
            return {
                "kind": "Dict",
                "spaces": [[key, to_json(one)] for key, one in space.spaces.items()],
            }
        case gym.spaces.Tuple():
            return {"kind": "Tuple", "spaces": [to_json(one) for one in space.spaces]}
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


def from_json(data: dict[str, Any]) -> gym.Space[Any]:
    """Return the space that `to_json` wrote.

    Raises:
        PolicyError: it is of a kind that no policy fits.
    """
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
        case "Dict":
            return gym.spaces.Dict([(key, from_json(one)) for key, one in data["spaces"]])
        case "Tuple":
            return gym.spaces.Tuple([from_json(one) for one in data["spaces"]])
    raise PolicyError(f"no policy fits a space of kind {data['kind']}: {data.get('text', '')}")


def _bound(
    numbers: list[float | None], infinite: float, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Any:
    """Return the bounds of a Box from those in JSON, with `infinite` for None."""
    bound = np.array([infinite if x is None else x for x in numbers], dtype)
    return np.full(shape, bound[0]) if bound.size == 1 else bound.reshape(shape)
