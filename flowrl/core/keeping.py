"""`Keeping`: objects that give what lasts of their state, and take it back in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from flowrl.core.declared import check_declared
from flowrl.core.remote import is_array
from flowrl.errors import SaveError


class Keeping:
    """An object whose state lasts longer than its process.

    Each attribute that a constructor sets is named in one of the two lists, which a test checks:
    so nothing is lost when a run is resumed.
    """

    lasting: ClassVar[tuple[str, ...]] = ()
    """The attributes that are kept."""
    remade: ClassVar[tuple[str, ...]] = ()
    """The attributes that a new object has by itself, or that `take` makes again."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check what the class declares."""
        super().__init_subclass__(**keywords)
        check_declared(cls)

    def keep(self) -> Any:
        """Return what lasts, as values that `flowrl.core.encoding.encoded` takes.

        Nothing is copied: what is returned is to be encoded before the run goes on.
        """
        return {name: kept(getattr(self, name)) for name in self.lasting}

    def lasting_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `take` takes of a state in which a subclass has kept more beside it.

        What another version of flowrl did not keep is missing, and `take` refuses the state.
        """
        return {name: state[name] for name in self.lasting if name in state}

    def take(self, state: Any) -> None:
        """Go on from what `keep` returned.

        Args:
            state: of an object with the same settings.

        Raises:
            SaveError: it is of another kind of object.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.lasting):
            raise SaveError(
                f"what was kept of {type(self).__name__} is not what it keeps now; resume it with "
                "the version of flowrl that wrote it"
            )
        for name in self.lasting:
            setattr(self, name, taken(getattr(self, name), state[name]))


def kept(value: Any) -> Any:
    """Return what lasts of a value, which may be one that keeps by itself."""
    return value.keep() if isinstance(value, Keeping) else value


def taken(now: Any, state: Any) -> Any:
    """Return a value for an attribute: the kept one, or the present object, which took it.

    Args:
        now: the attribute's value in the new object.
        state: what `kept` returned.
    """
    if isinstance(now, Keeping):
        now.take(state)
        return now
    return state


def writable(state: Any) -> Any:
    """Return a tree whose NumPy arrays can be written to, which those that Ray sent can't."""
    return jax.tree.map(
        lambda x: x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x, state
    )


@dataclass(frozen=True)
class Leaves:
    """The arrays of a tree by their paths, for trees of classes that nobody here knows.

    They are put into the tree that a new object makes, which has the same structure.
    """

    arrays: dict[str, Any]


def leaves(tree: Any) -> Leaves:
    """Return the arrays of a tree by their paths."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return Leaves({jax.tree_util.keystr(path): x for path, x in found})


def into(like: Any, state: Leaves, what: str) -> Any:
    """Return a tree with the arrays that were kept of one like it.

    Args:
        like: a tree of the same structure, whose arrays may be shapes alone.
        state: the arrays.
        what: what it is, for errors.

    Raises:
        SaveError: the structure, a shape or a type is another one.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(path) for path, _ in found]
    if names != list(state.arrays):
        differing = sorted({*names} ^ {*state.arrays}) or ["the order of its parts"]
        raise SaveError(f"what was kept of {what} has other parts: {', '.join(differing[:3])}")
    for name, (_, x) in zip(names, found, strict=True):
        was, now = (_kind(y) for y in (state.arrays[name], x))
        if was != now:
            raise SaveError(f"what was kept of {what} has {was} at {name}, and now it has {now}")
    return jax.tree.unflatten(structure, state.arrays.values())


def _kind(x: Any) -> str:
    """Return the type and the shape of an array, or the type of another value."""
    if is_array(x):
        return f"{x.dtype}{list(x.shape)}"
    return type(x).__name__


class Draws(Keeping):
    """A generator of random numbers that is called for one of so many.

    Args:
        seed: of the generator.
    """

    lasting = ("random",)

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, count: int) -> int:
        """Return a number from 0 to below `count`."""
        return int(self.random.integers(count))
