"""Arrays that lie in other processes: known here by shape and type, and fetched where their values are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

Array = Any


class Source(Protocol):
    """What can give the values of arrays that lie elsewhere, called its leaves."""

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Bring one here."""

    def wait(self) -> None:
        """Until they are computed."""

    def done(self) -> bool:
        """Whether they are."""


class RemoteArray(np.lib.mixins.NDArrayOperatorsMixin):
    """One array elsewhere. Operators move it like any other; what does reach for its values brings them here."""

    __slots__ = ("_here", "dtype", "leaf", "shape", "source")

    def __init__(self, shape: tuple[int, ...], dtype: Any, source: Source, leaf: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.source = source
        self.leaf = leaf
        self._here: np.ndarray[Any, Any] | None = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self._here is None:
            self._here = self.source.array(self.leaf)
        return self._here if dtype in (None, self.dtype) else self._here.astype(dtype)

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

    def block_until_ready(self) -> RemoteArray:
        """Wait until it is computed, there."""
        self.source.wait()
        return self

    def is_ready(self) -> bool:
        """Whether it is computed."""
        return self.source.done()


class Joining:
    """Arrays that are to be joined where they are used."""

    def __init__(self, parts: Sequence[Any], axis: int) -> None:
        self.parts = parts
        self.axis = axis

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Bring all parts here and join them."""
        return np.concatenate([near(x) for x in self.parts], self.axis)

    def wait(self) -> None:
        """For all parts."""
        jax.block_until_ready(self.parts)

    def done(self) -> bool:
        """Whether all parts are computed."""
        return all(x.is_ready() for x in self.parts if isinstance(x, RemoteArray))


def join(xs: Sequence[Any], axis: int) -> RemoteArray:
    """Arrays side by side, some of which are far."""
    first = xs[0].shape
    return RemoteArray(
        (*first[:axis], sum(x.shape[axis] for x in xs), *first[axis + 1 :]),
        xs[0].dtype,
        Joining(xs, axis),
        0,
    )


def near(tree: Any) -> Any:
    """A tree whose far arrays were brought here."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, RemoteArray) else x, tree)
