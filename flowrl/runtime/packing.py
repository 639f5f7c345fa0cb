"""Arrays that a scan stacked, and trees whose leaves are elements of them.

A row may report a thousand updates. A program would be slow to compile if it took each of their
numbers out of what a scan stacked, only to return them one by one: they stay stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Index = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Element:
    """An element of an array, as a leaf of a tree in the array's place.

    Args:
        array: the array.
        index: where the element is, in the array's first axes.
    """

    array: Array
    index: Index

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the element."""
        return tuple(self.array.shape[len(self.index) :])


def taken_out(tree: Any) -> Any:
    """Return a tree with arrays in place of elements."""
    return jax.tree.map(lambda x: x.array[x.index] if isinstance(x, Element) else x, tree)


def whole(x: Array | Element) -> Array:
    """Return the array that an element is of; an array itself."""
    return x.array if isinstance(x, Element) else x


@dataclass(frozen=True)
class Packing:
    """Where the leaves of a tree are among arrays.

    Args:
        structure: the structure of the tree.
        leaves: by leaf, the index of an array and where the leaf is in it.
    """

    structure: Any
    leaves: tuple[tuple[int, Index], ...]

    def unpacked(self, leaf: Callable[[int, Index], Any]) -> Any:
        """Return the tree.

        Args:
            leaf: returns a leaf, given the index of an array and where the leaf is in it.
        """
        return jax.tree.unflatten(self.structure, [leaf(*at) for at in self.leaves])

    def turns(self, arrays: Sequence[Array], times: int) -> list[Any]:
        """Return the trees of all turns of a scan, of elements of what it stacked."""

        def turn(i: int) -> Any:
            return self.unpacked(lambda number, index: Element(arrays[number], (i, *index)))

        return list(map(turn, range(times)))


def packed(tree: Any) -> tuple[list[Array], Packing]:
    """Return the arrays of a tree, each once, and where its leaves are in them."""
    arrays: dict[int, Array] = {}
    numbers: dict[int, int] = {}
    leaves: list[tuple[int, Index]] = []
    found, structure = jax.tree.flatten(tree)
    for x in found:
        array, index = (x.array, x.index) if isinstance(x, Element) else (x, ())
        number = numbers.setdefault(id(array), len(numbers))
        arrays[number] = array
        leaves.append((number, index))
    return list(map(jnp.asarray, arrays.values())), Packing(structure, tuple(leaves))
