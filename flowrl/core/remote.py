"""Remote arrays: they are in other processes, and fetched where their values are used.

This process knows their shapes and types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

Array = Any


class Source(Protocol):
    """Source of the values of remote arrays, which are its leaves."""

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Fetch one array, given its index."""

    def wait(self) -> None:
        """Wait until the arrays are computed."""

    def done(self) -> bool:
        """Return whether the arrays are computed."""


class RemoteArray(np.lib.mixins.NDArrayOperatorsMixin):
    """One array in another process.

    Operators pass it on like any other array. Code that uses its values makes it fetch them, once.

    Args:
        shape: its shape.
        dtype: its type.
        source: fetches its values.
        leaf: its index in the source.
    """

    __slots__ = ("_fetched", "dtype", "leaf", "shape", "source")

    def __init__(self, shape: tuple[int, ...], dtype: Any, source: Source, leaf: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.source = source
        self.leaf = leaf
        self._fetched: np.ndarray[Any, Any] | None = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        # Fetched once: several operators may use the values.
        if self._fetched is None:
            self._fetched = self.source.array(self.leaf)
        if dtype in (None, self.dtype):
            return self._fetched
        return self._fetched.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        return getattr(ufunc, method)(*(near(x) for x in inputs), **settings)

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} in another process; numpy.asarray brings it here>"

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (near(self),)

    def __getitem__(self, index: Any) -> Any:
        return near(self)[index]

    def __len__(self) -> int:
        return self.shape[0]

    # Without these Python would take the length for the truth value, and refuse to convert.
    def __bool__(self) -> bool:
        return bool(near(self))

    def __int__(self) -> int:
        return int(near(self))

    def __float__(self) -> float:
        return float(near(self))

    def block_until_ready(self) -> RemoteArray:
        """Wait until the array is computed in its process, and return it without fetching it."""
        self.source.wait()
        return self

    def is_ready(self) -> bool:
        """Return whether the array is computed."""
        return self.source.done()


KINDS = (np.ndarray, jax.Array, np.generic, jax.ShapeDtypeStruct, RemoteArray)


def is_array(x: Any) -> bool:
    """Return whether a value is an array: here, in another process, or a shape alone.

    Other things have a type and a shape too, such as spaces and the classes of NumPy's numbers.
    """
    return isinstance(x, KINDS)


class Joining:
    """Source of one array that is joined from parts where its values are used.

    Args:
        parts: the arrays, some of them remote.
        axis: the axis along which they are joined.
    """

    def __init__(self, parts: Sequence[Any], axis: int) -> None:
        self.parts = parts
        self.axis = axis

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Fetch all parts and return them joined."""
        return np.concatenate([near(x) for x in self.parts], self.axis)

    def wait(self) -> None:
        """Wait until all parts are computed."""
        jax.block_until_ready(self.parts)

    def done(self) -> bool:
        """Return whether all parts are computed."""
        return all(x.is_ready() for x in self.parts if isinstance(x, RemoteArray))


def join(xs: Sequence[Any], axis: int) -> RemoteArray:
    """Return arrays joined along an axis as a remote array; some of them are remote."""
    first = xs[0].shape
    length = sum(x.shape[axis] for x in xs)
    shape = (*first[:axis], length, *first[axis + 1 :])
    return RemoteArray(shape, xs[0].dtype, Joining(xs, axis), 0)


def near(tree: Any) -> Any:
    """Return a tree with the values of its remote arrays, which are fetched."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, RemoteArray) else x, tree)
