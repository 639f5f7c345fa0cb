"""`Head`: the outputs that a policy has for an action space, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.trees import field_name, tree_of
from flowrl.errors import PolicyError
from flowrl.rl.distributions import (
    Categorical,
    Distribution,
    Gaussian,
    Mixed,
    MultiCategorical,
    TanhGaussian,
)

Array = Any
Path = tuple[str | int, ...]
RULED_OUT = -1e9
"""The logit, or action value, of a choice that the environment's mask rules out.

It is finite, for 0 times infinity is NaN, and no output of a policy comes near it.
"""
MOST_CHOICES = 4096
"""The most choices of one number: a policy has an output for each of them."""


@dataclass(frozen=True)
class ActionPart:
    """One array of the environment's actions."""

    path: Path
    """Its place in the action space: keys of Dicts and numbers of Tuples; empty for a whole one."""
    discrete: bool
    """Whether its numbers are choices, and not real numbers."""
    first: int
    """The place of its first number among all choices, or among all real numbers."""
    shape: tuple[int, ...]
    """The shape of one action."""
    dtype: str
    """The type that the environment takes."""


@dataclass(frozen=True)
class Head:
    """The outputs of a policy for an action space.

    It knows how many numbers they are, which distribution they make, and how actions of that
    distribution become those of the environment. Outputs are the logits of all choices, then the
    means and then the log-deviations of all real numbers; an action holds the choices first, too.
    """

    kind: str
    """The distribution: ``categorical`` (one of n), ``multi_categorical``, ``gaussian``,
    ``tanh_gaussian``, or ``mixed`` of the second and third."""
    sizes: tuple[int, ...]
    """How many choices there are for each discrete number."""
    start: tuple[int, ...]
    """The environment's number of the first choice, for each discrete number."""
    low: tuple[float, ...]
    """The lower bound of each real number."""
    high: tuple[float, ...]
    """The upper bound of each real number."""
    parts: tuple[ActionPart, ...]
    """The arrays of the environment's actions."""

    @property
    def choices(self) -> int:
        """The number of choices of all discrete numbers together, which is the size of a mask."""
        return sum(self.sizes)

    @property
    def reals(self) -> int:
        """The number of real numbers of an action."""
        return len(self.low)

    @property
    def outputs(self) -> int:
        """The numbers that a module must return per observation."""
        return self.choices + 2 * self.reals

    @property
    def width(self) -> int:
        """The numbers of one action; 0 for a scalar action."""
        return 0 if self.kind == "categorical" else len(self.sizes) + self.reals

    @property
    def continuous(self) -> bool:
        """Whether all numbers of actions are real ones, and none is a choice."""
        return not self.sizes

    @property
    def bounded(self) -> bool:
        """Whether all bounds of real numbers are finite."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def distribution(self, outputs: Array) -> Distribution:
        """Return the distribution over actions that the numbers ``[..., outputs]`` make."""
        if self.kind == "categorical":
            return Categorical(outputs)
        if self.kind == "multi_categorical":
            return MultiCategorical(outputs, self.sizes)
        means = outputs[..., self.choices : self.choices + self.reals]
        log_stds = outputs[..., self.choices + self.reals :]
        if self.kind == "tanh_gaussian":
            return TanhGaussian(means, log_stds)
        if self.kind == "gaussian":
            return Gaussian(means, log_stds)
        choices = MultiCategorical(outputs[..., : self.choices], self.sizes)
        return Mixed(choices, Gaussian(means, log_stds))

    def masked(self, outputs: Array, mask: Array) -> Array:
        """Return outputs ``[N, outputs]`` with the choices ruled out where ``mask [N, choices]``.

        A mask is true for what is allowed. Where nothing is allowed of a number, as in the last
        observation of an episode, everything is: nobody acts on it, and its value must be finite.
        """
        begins = np.cumsum((0, *self.sizes))
        allowed = []
        for begin, end in pairwise(begins):
            of_number = mask[:, begin:end]
            allowed.append(of_number | ~of_number.any(-1, keepdims=True))
        # Gradients of what is ruled out are 0.
        logits = jnp.where(
            jnp.concatenate(allowed, -1), outputs[:, : self.choices], jnp.float32(RULED_OUT)
        )
        return jnp.concatenate([logits, outputs[:, self.choices :]], -1) if self.reals else logits

    def noise(self, key: Array, n: int) -> Array:
        """Return the noise from which `Distribution.sample` makes n actions.

        These are standard Gumbels ``[n, choices]``, standard normals ``[n, reals]``, or both side
        by side.
        """
        if not self.sizes:
            return jax.random.normal(key, (n, self.reals))
        if not self.reals:
            return jax.random.gumbel(key, (n, self.choices))
        of_choices, of_reals = jax.random.split(key)
        gumbels = jax.random.gumbel(of_choices, (n, self.choices))
        return jnp.concatenate([gumbels, jax.random.normal(of_reals, (n, self.reals))], axis=1)

    def to_env(self, action: Array) -> Any:
        """Return actions ``[B]`` or ``[B, width]`` as the environment takes them.

        Gaussian actions stand for [-1, 1] between finite bounds: they are clipped to it and
        stretched over the bounds. Where only one bound is finite, -1 or 1 stands for it, too, and
        nothing is stretched: a policy that begins around 0 then begins near the bound, even if that
        is far from 0.
        """
        if self._whole is not None:
            numbers = self._to_bounds(action) if self.reals else self._from_start(action)
            return _cast(numbers.reshape((numbers.shape[0], *self._whole.shape)), self._whole.dtype)
        choices, reals = action[:, : len(self.sizes)], action[:, len(self.sizes) :]
        choices = self._from_start(choices.astype(np.int32))
        reals = self._to_bounds(reals) if self.reals else reals
        arrays = {}
        for part in self.parts:
            all_numbers = choices if part.discrete else reals
            own = all_numbers[:, part.first : part.first + math.prod(part.shape)]
            arrays[field_name("action", part.path)] = _cast(
                own.reshape((own.shape[0], *part.shape)), part.dtype
            )
        return tree_of("action", arrays)

    def from_env(self, parts: Mapping[Path, Any]) -> Any:
        """Return actions ``[B]`` or ``[B, width]`` as a policy makes them: the inverse of `to_env`.

        Real numbers beyond finite bounds become -1 or 1, for no action stands for them.

        Args:
            parts: the arrays ``[B, *shape]`` of actions as an environment takes them, by path.
        """
        choices: list[Any] = []
        reals: list[Any] = []
        for part in self.parts:
            x = np.asarray(parts[part.path])
            flat = x.reshape(x.shape[0], math.prod(part.shape))
            (choices if part.discrete else reals).append(flat)
        found = []
        if choices:
            found.append(np.concatenate(choices, 1).astype(np.int64) - np.asarray(self.start))
        if reals:
            found.append(self._from_bounds(np.concatenate(reals, 1).astype(np.float64)))
        # Within these bounds float32 holds every choice.
        action = np.concatenate(found, 1).astype(np.float32 if reals else np.int32)
        return action if self.width else action[:, 0]

    def _from_bounds(self, reals: Any) -> Any:
        """Return real numbers ``[B, reals]`` of the environment as those that stand for them."""
        low, high, finite, _, _, shift = self._bounds
        # Numbers with no finite bound, or with one, are not divided by a range.
        span = np.where(finite & (high > low), high - low, 1.0)
        stretched = 2 * (reals - np.where(finite, low, 0.0)) / span - 1
        return np.where(finite, np.clip(stretched, -1, 1), reals - shift)

    @cached_property
    def _whole(self) -> ActionPart | None:
        """The only part, if actions are one array."""
        return self.parts[0] if self.parts[0].path == () else None

    def _from_start(self, choices: Array) -> Array:
        """Return choices ``[B]`` or ``[B, n]``, counted from 0, as the environment's numbers."""
        if not self._starts:
            return choices
        return choices + np.asarray(self.start if self.width else self.start[0], np.int32)

    @cached_property
    def _starts(self) -> bool:
        """Whether some first choice is not 0."""
        return any(self.start)

    @cached_property
    def _bounds(self) -> tuple[Any, ...]:
        """The bounds of real numbers as `to_env` needs them, ``[reals]`` each.

        They are low, high, whether both are finite, low and high again with -1 and 1 where not both
        are finite, and the shift of the numbers with one finite bound.
        """
        dtype = np.result_type(*(part.dtype for part in self.parts if not part.discrete))
        low, high = np.asarray(self.low, dtype), np.asarray(self.high, dtype)
        # A range that the type can't hold, such as that of all float32, is none.
        with np.errstate(over="ignore"):
            held = np.isfinite(high - low) | np.isinf(low) | np.isinf(high)
        low, high = np.where(held, low, -np.inf), np.where(held, high, np.inf)
        has_low, has_high = np.isfinite(low), np.isfinite(high)
        finite = has_low & has_high
        shift = np.where(has_low, low + 1, np.where(has_high, high - 1, 0)).astype(dtype)
        return low, high, finite, np.where(finite, low, -1), np.where(finite, high, 1), shift

    def _to_bounds(self, reals: Array) -> Array:
        """Return real numbers ``[B, reals]`` between the bounds of the action space."""
        xp = reals.__array_namespace__()
        low, high, finite, stretched_low, stretched_high, shift = self._bounds
        share = (xp.clip(reals, -1, 1) + 1) / 2
        stretched = (1 - share) * stretched_low + share * stretched_high
        return xp.clip(xp.where(finite, stretched, reals + shift), low, high)


def _cast(x: Array, dtype: str) -> Array:
    """Return an array in the type that an environment takes, or the nearest one that JAX has."""
    # Without 64-bit numbers JAX would warn at each cast to a type that it does not have.
    if isinstance(x, np.ndarray):
        return x.astype(dtype)
    return x.astype(jax.dtypes.canonicalize_dtype(dtype))


def head(space: gym.Space[Any]) -> Head:
    """Return the head for an action space.

    It is Discrete, MultiDiscrete, MultiBinary, a Box, or a Dict or Tuple of these. A Box of
    integers is a choice for each of its numbers.

    Raises:
        PolicyError: the space is any other.
    """
    sizes: list[int] = []
    start: list[int] = []
    low: list[float] = []
    high: list[float] = []
    parts = []
    for path, one in leaves(space):
        begins = _choices(one)
        shape, dtype = tuple(one.shape or ()), str(one.dtype)
        if begins is None:
            parts.append(ActionPart(path, False, len(low), shape, dtype))
            low += [float(x) for x in one.low.ravel()]
            high += [float(x) for x in one.high.ravel()]
        else:
            parts.append(ActionPart(path, True, len(sizes), shape, dtype))
            sizes += begins[0]
            start += begins[1]
    if not parts:
        raise PolicyError(f"there is no policy for actions in {space}, which is empty")
    if not sizes:
        kind = "gaussian"
    elif low:
        kind = "mixed"
    else:
        kind = "categorical" if isinstance(space, gym.spaces.Discrete) else "multi_categorical"
    return Head(kind, tuple(sizes), tuple(start), tuple(low), tuple(high), tuple(parts))


def leaves(space: gym.Space[Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the spaces within a space that are neither Dict nor Tuple, each with its path."""
    match space:
        case gym.spaces.Dict():
            for key, one in space.spaces.items():
                yield from leaves(one, (*path, key))
        case gym.spaces.Tuple():
            for i, one in enumerate(space.spaces):
                yield from leaves(one, (*path, i))
        case _:
            yield path, space


def _choices(space: Any) -> tuple[list[int], list[int]] | None:
    """Return for each number of an action how many choices it has, and the first of them.

    None of a Box of floats, whose numbers are real.

    Raises:
        PolicyError: the space is of another kind, or a Box of integers with too many choices.
    """
    match space:
        case gym.spaces.Discrete():
            return [int(space.n)], [int(space.start)]
        case gym.spaces.MultiDiscrete():
            return space.nvec.ravel().tolist(), space.start.ravel().tolist()
        case gym.spaces.MultiBinary():
            width = math.prod(space.shape)
            # Each bit is a choice of two.
            return [2] * width, [0] * width
        case gym.spaces.Box():
            return _choices_of_box(space)
    raise PolicyError(
        f"there is no policy for actions in {space}; it can be Discrete, MultiDiscrete, "
        "MultiBinary, a Box, or a Dict or Tuple of these"
    )


def _choices_of_box(space: gym.spaces.Box) -> tuple[list[int], list[int]] | None:
    """Return `_choices` of a Box."""
    if np.dtype(space.dtype).kind == "f":
        return None
    first = space.low.ravel().tolist()
    sizes = [
        last - start + 1 for start, last in zip(first, space.high.ravel().tolist(), strict=True)
    ]
    if max(sizes) > MOST_CHOICES:
        raise PolicyError(
            f"actions in {space} are integers with {max(sizes):,} choices for one number, and a "
            f"policy has an output for each of at most {MOST_CHOICES:,}; give the Box closer "
            "bounds, or floats that the environment rounds"
        )
    return sizes, first
