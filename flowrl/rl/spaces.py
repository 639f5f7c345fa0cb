"""`Spaces`: the spaces of an environment as JSON, as arrays by name, and as modules see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.remote import is_array
from flowrl.core.trees import field_name, tree_of
from flowrl.errors import ContractError, PolicyError, a
from flowrl.rl.actions import Head, Path, head, leaves
from flowrl.rl.spaces_json import from_json, to_json

Array = Any
ACTION_MASK = "action_mask"
"""The key of a mask in observations that are a Dict, and in the `info` of environments."""
CONVERTIBLE = {(kind, kind) for kind in "fbui"} | {("i", "u"), ("u", "i")}
"""The kinds of NumPy types that an observation may have and its space may declare."""
OBSERVATION = ("observation", "observations", "obs")
"""The keys under which observations stand beside a mask."""


@dataclass(frozen=True)
class ObsPart:
    """One array of an environment's observations."""

    name: str
    """The name of its field in a batch: ``obs``, or one such as ``obs['camera']``."""
    path: Path
    """Its place in the observation: keys of Dicts and numbers of Tuples; empty for a whole one."""
    shape: tuple[int, ...]
    """The shape of one observation."""
    dtype: np.dtype[Any]
    """The type in batches: floats as float32, integers of 4 bytes at most."""
    declared: np.dtype[Any]
    """The type that the space declares."""
    bounds: tuple[Array, Array] | None = field(default=None, compare=False)
    """The least and the greatest choices, where they are choices; None of numbers in a Box."""

    @property
    def label(self) -> str:
        """What texts add to name the part, such as `` ['camera']``; empty if there is no other."""
        return f" {self.name.removeprefix('obs')}" if self.path else ""

    def of(self, obs: Any) -> Any:
        """Return this array of an observation as the environment returns it.

        Raises:
            KeyError, IndexError, TypeError: it is not there.
        """
        for step in self.path:
            obs = obs[step]
        return obs

    def mismatch(
        self,
        obs: Any,
        verb: str,
        *,
        batched: bool = False,
        converts: Callable[[Any, Any], bool] | None = None,
    ) -> str:
        """Return how an observation breaks what the space declares of this part; empty if not.

        Args:
            obs: as the environment returns it.
            verb: ``reset`` or ``step``, which returned it.
            batched: whether it is several observations ``[n, ...]`` (default False).
            converts: says whether numbers of one type may become another's; None for types of one
                kind, and integers with a sign and without (default None).
        """
        found, fits = None, converts or same_kind
        with suppress(KeyError, IndexError, TypeError):
            found = self.of(obs)
            found = found if is_array(found) else np.asarray(found)
            shape = tuple(found.shape[1:] if batched else found.shape)
            # This is called with every step of every environment: texts are made only below.
            if shape == self.shape and fits(np.dtype(found.dtype), self.declared):
                # What is traced has no numbers yet.
                return "" if self.bounds is None or batched else self.no_choice(found, verb)
        declared = f"but its observation_space declares {self.declared}{list(self.shape)}"
        way = "fix the environment or its space"
        if found is None:
            return f"an observation from {verb} that has no{self.label}, {declared} for it; {way}"
        got = f"{found.dtype}{list(shape)}"
        return f"an observation{self.label} {got} from {verb}, {declared}; {way}"

    def no_choice(self, found: Array, verb: str) -> str:
        """Return how observations ``[..., *shape]`` break the choices that there are; empty if not.

        Args:
            found: this part of them.
            verb: ``reset`` or ``step``, which returned them.
        """
        if self.bounds is None or not (wrong := self.outside(found)).any():
            return ""
        least, most = self.bounds
        return (
            f"an observation{self.label} from {verb} that holds {found[wrong].flat[0]}, but its "
            f"observation_space has choices from {least.tolist()} to {most.tolist()}; fix the "
            "environment or its space"
        )

    def outside(self, found: Array) -> Array:
        """Return which numbers of this part ``[..., *shape]`` are none of the choices."""
        least, most = self.bounds or (-np.inf, np.inf)
        return (found < least) | (found > most)

    @property
    def one(self) -> Array:
        """What stands for an observation where there is none: ones, or the choice nearest to 1."""
        return np.ones(()) if self.bounds is None else np.clip(1, *self.bounds)

    def not_taken(self, found: Array) -> str:
        """Return what a policy can't act on of this part ``[..., *shape]``; empty if nothing."""
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            return f"a number{self.label} that is not finite: {found[~np.isfinite(found)].flat[0]}"
        if self.bounds is not None and (wrong := self.outside(found)).any():
            return f"a choice{self.label} that it does not have: {found[wrong].flat[0]}"
        return ""

    def not_whole(self, found: Array) -> str:
        """Return which float can't become an integer of this part's type; empty if all can."""
        if found.dtype.kind in "biu" or self.dtype.kind == "f":
            return ""
        x = _in_float(found)
        with np.errstate(invalid="ignore"):
            changed = x.astype(self.dtype) != x
        if not changed.any():
            return ""
        return (
            f"a number{self.label} that is no whole one, or that {self.dtype} can't hold: "
            f"{x[changed].flat[0]}"
        )


def _in_float(x: Array) -> Array:
    """Return floats in a type that NumPy knows."""
    return x.astype(np.float32) if x.dtype.kind == "V" else x


def same_kind(found: np.dtype[Any], declared: np.dtype[Any]) -> bool:
    """Return whether numbers of one type become another's without loss of their kind."""
    kinds = (found.kind, declared.kind)
    # Types of one kind are converted; so are integers with a sign and without.
    return found == declared or kinds in CONVERTIBLE


class Spaces:
    """The observation and action space of one environment, compared and hashed by value.

    An environment may rule out actions by a mask, which is part of its observations: a Dict with
    the key ``action_mask``. The mask has a number for each choice of an action, 0 for what is not
    allowed. It acts on the outputs of a policy; modules do not see it.

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
        return json.dumps({"obs": to_json(self.obs), "action": to_json(self.action)})

    @staticmethod
    def from_json(text: str) -> Spaces:
        """Return the spaces that `json` wrote.

        Raises:
            PolicyError: a space is of a kind that no policy fits.
        """
        both = json.loads(text)
        return Spaces(from_json(both["obs"]), from_json(both["action"]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spaces) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    def __repr__(self) -> str:
        return f"Spaces(obs={self.obs}, action={self.action})"

    @cached_property
    def head(self) -> Head:
        """The outputs that a policy must have for the action space."""
        return head(self.action)

    # -- observations as arrays

    @cached_property
    def parts(self) -> tuple[ObsPart, ...]:
        """The arrays of observations; one whose name is ``obs`` if they are not divided.

        Raises:
            PolicyError: a part of observations is no array of one shape, or they hold no number.
        """
        parts = tuple(_part(path, space) for path, space in leaves(self.obs))
        if all(0 in part.shape for part in parts):
            raise PolicyError(
                f"observations in {self.obs} hold no number; where there is nothing to observe, "
                "give them one that is always the same: Box(0, 1, (1,))"
            )
        return parts

    def arrays(self, obs: Any) -> dict[str, Array]:
        """Return observations as an environment returns them as arrays by the names of fields.

        Raises:
            ContractError: one holds an integer that the type of its field can't hold.
        """
        return {part.name: in_type(np.asarray(part.of(obs)), part.dtype) for part in self.parts}

    def batched(self, obs: Any) -> tuple[dict[str, Array], bool]:
        """Return observations ``[N, ...]`` by the names of fields, and whether it was a single one.

        Args:
            obs: one observation as the environment returns it, or several.

        Raises:
            ContractError: a part is missing, has another shape than the space, or holds what is no
                finite number or none of its choices.
        """
        try:
            found = {part.name: np.asarray(part.of(obs)) for part in self.parts}
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._not_taken(a(obs)) from None
        single = all(found[part.name].shape == part.shape for part in self.parts)
        for part in self.parts:
            x = found[part.name]
            # Floats that NumPy does not know, such as bfloat16, are of the kind V.
            if x.dtype.kind not in "biufV":
                raise self._not_taken(f"{a(obs)}, values{part.label} of type {x.dtype}")
            count = x.shape[:1] if not single else ()
            if x.shape != (*count, *part.shape) or count == (0,):
                raise ContractError(
                    f"act takes an observation of shape {list(part.shape)}, or several of them; "
                    f"got {list(x.shape)}{part.label}"
                )
            if wrong := part.not_taken(x) or part.not_whole(x):
                raise self._not_taken(wrong)
        given = self.arrays(obs)
        # One observation is a batch of one.
        return {name: x[None] if single else x for name, x in given.items()}, single

    def _not_taken(self, got: str) -> ContractError:
        return ContractError(
            f"act takes an observation of {self.obs}, or several of them; got {got}"
        )

    def cast(self, obs: Any) -> Any:
        """Return observations of an environment in JAX in the types that batches have."""
        return self.tree({part.name: part.of(obs).astype(part.dtype) for part in self.parts})

    def tree(self, arrays: Mapping[str, Array]) -> Any:
        """Return observations as a tree, from arrays by name."""
        return tree_of("obs", arrays)

    def shapes(self, *leading: int) -> dict[str, Any]:
        """Return the shapes of observations by name, each with these leading axes."""
        return {
            part.name: jax.ShapeDtypeStruct((*leading, *part.shape), part.dtype)
            for part in self.parts
        }

    @property
    def bytes_of_obs(self) -> int:
        """The bytes of one observation."""
        return sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in self.parts)

    # -- what modules see, and the mask

    @cached_property
    def _has_mask(self) -> bool:
        """Whether observations hold a mask of actions.

        Raises:
            PolicyError: the mask, or one of its parts, has another size than there are choices.
        """
        if not (isinstance(self.obs, gym.spaces.Dict) and ACTION_MASK in self.obs.spaces):
            return False
        size = sum(int(np.prod(part.shape)) for part in self._mask_parts)
        if size != self.head.choices:
            raise PolicyError(
                f"{ACTION_MASK} has {size} {'number' if size == 1 else 'numbers'}, but actions in "
                f"{self.action} have {self.head.choices} choices; a mask has a number for each"
            )
        sizes = [int(np.prod(part.shape)) for part in self._mask_parts]
        # The keys of a Dict are sorted, so its parts have no order of their own.
        in_order = all(isinstance(part.path[-1], int) for part in self._mask_parts)
        wanted = (self._by_path, list(self.head.sizes) if in_order else None)
        if len(sizes) > 1 and sizes not in wanted:
            raise PolicyError(
                f"{ACTION_MASK} has parts of {sizes} numbers, but actions in {self.action} have "
                f"{list(self.head.sizes)} choices; give it the parts of the action by their own "
                "keys, a Tuple of a part for each number, or let it be one array"
            )
        return True

    @property
    def _by_path(self) -> list[int] | None:
        """How many choices the parts of actions have, if the mask has the same parts."""
        found = {}
        for part in self.head.parts:
            if part.discrete:
                last = part.first + int(np.prod(part.shape))
                found[(ACTION_MASK, *part.path)] = sum(self.head.sizes[part.first : last])
        same = set(found) == {part.path for part in self._mask_parts}
        return list(found.values()) if same else None

    @cached_property
    def _mask_parts(self) -> list[ObsPart]:
        """The arrays of the mask, in the order of the choices that they are for."""
        parts = [part for part in self.parts if part.path[:1] == (ACTION_MASK,)]
        order = {(ACTION_MASK, *part.path): i for i, part in enumerate(self.head.parts)}
        # Where the mask is a tree, a part of it stands at the place of the action that it is for.
        return sorted(parts, key=lambda part: order.get(part.path, 0))

    @cached_property
    def seen(self) -> gym.Space[Any]:
        """The space of what modules see: observations without the mask."""
        if not self._has_mask:
            return self.obs
        obs = cast("gym.spaces.Dict", self.obs)
        rest = {key: space for key, space in obs.spaces.items() if key != ACTION_MASK}
        if not rest:
            raise PolicyError(
                f"observations in {self.obs} are a mask alone; give them a part that the policy "
                "decides by"
            )
        key = self._only_key
        return rest[key] if key is not None else gym.spaces.Dict(rest)

    @cached_property
    def _only_key(self) -> str | None:
        """The key of the observation proper, where nothing stands beside it but a mask."""
        obs = cast("gym.spaces.Dict", self.obs)
        others = [key for key in obs.spaces if key != ACTION_MASK]
        return others[0] if len(others) == 1 and others[0] in OBSERVATION else None

    def split(self, obs: Any) -> tuple[Any, Array | None]:
        """Return what modules see of observations ``[N, ...]``, and the mask ``bool[N, choices]``.

        The mask is None if there is none.
        """
        if not self._has_mask:
            return obs, None
        found = [part.of(obs) for part in self._mask_parts]
        flat = [x.reshape(x.shape[0], -1) for x in found]
        return self.without_mask(obs), jnp.concatenate(flat, -1) > 0

    def without_mask(self, obs: Any) -> Any:
        """Return what modules see of observations; what holds no mask is returned as it is."""
        if not (self._has_mask and isinstance(obs, dict) and ACTION_MASK in obs):
            return obs
        if self._only_key is not None:
            return obs[self._only_key]
        return {key: value for key, value in obs.items() if key != ACTION_MASK}

    def allowed(self, arrays: Mapping[str, Array], xp: Any = np) -> Array | None:
        """Return what the mask allows, ``bool[..., choices]``; None without one.

        Args:
            arrays: observations ``[..., *shape]`` by name.
            xp: the module that computes: NumPy, or `jax.numpy` for arrays of JAX.
        """
        if not self._has_mask:
            return None
        flat = []
        for part in self._mask_parts:
            x = arrays[part.name]
            flat.append(x.reshape(*x.shape[: x.ndim - len(part.shape)], -1) > 0)
        return xp.concatenate(flat, -1)

    def outside(self, arrays: Mapping[str, Array]) -> Array | None:
        """Return which observations are none of the space's choices; None where it has none.

        Args:
            arrays: observations ``[..., *shape]`` by name, of NumPy or JAX.

        Returns:
            ``bool[...]``.
        """
        found = None
        for part in self.parts:
            if part.bounds is not None:
                wrong = part.outside(arrays[part.name])
                wrong = wrong.any(tuple(range(wrong.ndim - len(part.shape), wrong.ndim)))
                found = wrong if found is None else found | wrong
        return found

    def nothing_allowed(self, arrays: Mapping[str, Array], xp: Any = np) -> Array | None:
        """Return where some number of an action has no choice, ``bool[...]``; None without a mask.

        Args:
            arrays: observations ``[..., *shape]`` by name.
            xp: as of `allowed`.
        """
        allowed = self.allowed(arrays, xp)
        if allowed is None:
            return None
        begins = np.cumsum((0, *self.head.sizes))
        of_numbers = [allowed[..., begin:end].any(-1) for begin, end in pairwise(begins)]
        return ~xp.stack(of_numbers, -1).all(-1)


def in_type(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in the type that batches have.

    Raises:
        ContractError: it holds an integer that the type can't hold.
    """
    if x.dtype != dtype and x.dtype.kind in "iu" and dtype.kind in "iu" and x.size:
        least, most, bounds = x.min(), x.max(), np.iinfo(dtype)
        if least < bounds.min or most > bounds.max:
            wrong = most if most > bounds.max else least
            raise ContractError(f"holds {wrong}, which {dtype} can't")
    return x.astype(dtype, copy=False)


def _part(path: Path, space: gym.Space[Any]) -> ObsPart:
    """Return the part of observations at a path.

    Raises:
        PolicyError: it is no array of one shape.
    """
    arrays = (
        gym.spaces.Box,
        gym.spaces.Discrete,
        gym.spaces.MultiDiscrete,
        gym.spaces.MultiBinary,
    )
    if not isinstance(space, arrays):
        raise PolicyError(
            f"observations in {space} are no array of one shape; they can be Box, Discrete, "
            "MultiDiscrete, MultiBinary, and a Dict or Tuple of these: make them such by a wrapper "
            "(gymnasium.wrappers.TransformObservation)"
        )
    declared: np.dtype[Any] = np.dtype(space.dtype)
    dtype: np.dtype[Any]
    bounds = None
    if isinstance(space, gym.spaces.MultiBinary):
        bounds = np.asarray(0), np.asarray(1)
    elif isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        sizes = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
        least: Array = np.asarray(space.start)
        bounds = least, least + sizes - 1
    if declared.kind == "f":
        dtype = np.dtype(np.float32)
    else:
        # JAX has no integers of 8 bytes unless it is switched to them.
        dtype = np.dtype(np.int32) if declared.itemsize > 4 else declared
    shape = tuple(space.shape or ())
    return ObsPart(field_name("obs", path), path, shape, dtype, declared, bounds)
