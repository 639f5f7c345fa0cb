"""What flows along the edges of a graph: `Batch`, `Trained`, and the `Row` that a run gives out; `Filling`, a count of what came."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.clock import CONCAT
from flowrl.core.remote import RemoteArray, join
from flowrl.errors import ContractError, unknown

Array = Any
"""A NumPy array, a JAX array, a tracer, or a `jax.ShapeDtypeStruct` in the abstract trace."""


class Filling(int):
    """A number in a state that only grows, and on which nothing depends until it reaches `mark`: the abstract trace skips what lies between."""

    mark: int

    def __new__(cls, number: int, mark: int) -> Self:
        """A number on its way to a mark."""
        self = super().__new__(cls, number)
        self.mark = mark
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Experience, time-major.

    `data` holds one array per field, ``[T, B, ...]``: ``obs action reward terminated truncated logp value valid``
    and what operators add. `columns` holds what there is once per column, ``[B, ...]``: ``bootstrap_obs`` (the
    observation after the last row), ``version`` (of the weights that acted), ``producer`` (the runner's index), ``env`` (the environment's number,
    counted over all runners) and ``first`` (the steps that it had gone before the first row: those of one fragment follow on from the last's if
    this is where that ended).

    The form is Gymnasium's NEXT_STEP: after a row with ``terminated`` or ``truncated`` comes one that holds the
    episode's final observation and has ``valid`` 0; the next episode starts behind it.
    """

    data: dict[str, Array]
    columns: dict[str, Array] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """``(T, B)``: steps in time, and columns."""
        rows, columns = next(iter(self.data.values())).shape[:2]
        return rows, columns

    @property
    def steps(self) -> int:
        """T x B, invalid rows included: a static number."""
        rows, columns = self.shape
        return int(rows * columns)

    def __getitem__(self, name: str) -> Array:
        if name not in self.data:
            raise ContractError(f"the batch has no field: {unknown('field', name, self.data)}")
        return self.data[name]

    def with_(self, **fields: Array) -> Batch:
        """A batch that has these data fields too."""
        return replace(self, data={**self.data, **fields})

    def __reduce__(self) -> tuple[Any, ...]:
        """NumPy arrays are pickled as one: each one alone would cost more to send than a small batch holds."""
        arrays = [*self.data.values(), *self.columns.values()]
        if not all(isinstance(x, np.ndarray) for x in arrays):
            return (Batch, (self.data, self.columns))
        return (_unpacked, (tuple(self.data), tuple(self.columns), Packed(arrays)))

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """Batches of the same length in time, side by side: ``[T, B1], [T, B2]`` become ``[T, B1 + B2]``."""
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        with CONCAT:
            return Batch(
                {k: concatenate([b.data[k] for b in batches], axis=1) for k in first.data},
                {k: concatenate([b.columns[k] for b in batches], axis=0) for k in first.columns},
            )


def _unpacked(data: Sequence[str], columns: Sequence[str], arrays: Packed) -> Batch:
    return Batch(
        dict(zip(data, arrays, strict=False)), dict(zip(columns, arrays[len(data) :], strict=True))
    )


ALIGNED = 64
"""Where arrays begin, in bytes: XLA reads those in place."""


class Packed(list[Any]):
    """NumPy arrays that are pickled as one."""

    def __reduce__(self) -> tuple[Any, ...]:
        starts = np.cumsum([0, *(-(-x.nbytes // ALIGNED) * ALIGNED for x in self)]).tolist()
        buffer = np.empty(starts[-1], np.uint8)
        for start, x in zip(starts, self, strict=False):
            buffer[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        return (_unpack, (tuple((x.dtype.str, x.shape) for x in self), buffer))


def _unpack(layout: Sequence[tuple[str, tuple[int, ...]]], buffer: np.ndarray[Any, Any]) -> Packed:
    arrays, start = Packed(), 0
    for dtype, shape in layout:
        x = np.frombuffer(buffer, dtype, math.prod(shape), start).reshape(shape)
        arrays.append(read_only(x))
        start += -(-x.nbytes // ALIGNED) * ALIGNED
    return arrays


def nbytes(x: Array) -> int:
    """The bytes of an array of any kind, abstract ones too."""
    return int(math.prod(x.shape) * x.dtype.itemsize)


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, which nobody may write to any more: what a node yields may go to several others, and comes so from Ray."""
    x.flags.writeable = False
    return x


def concatenate(xs: Sequence[Array], axis: int) -> Array:
    """`numpy.concatenate` for arrays of any one kind: NumPy, JAX, or abstract."""
    if all(isinstance(x, np.ndarray) for x in xs):
        return read_only(np.concatenate(xs, axis))
    if any(isinstance(x, RemoteArray) for x in xs):
        return join(xs, axis)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in xs):
        rests = {(*x.shape[:axis], *x.shape[axis + 1 :], str(x.dtype)) for x in xs}
        if len(rests) > 1:  # jax tells what does not fit
            return jax.eval_shape(lambda *ys: jnp.concatenate(ys, axis), *xs)
        shape = xs[0].shape
        return jax.ShapeDtypeStruct(
            (*shape[:axis], sum(x.shape[axis] for x in xs), *shape[axis + 1 :]), xs[0].dtype
        )
    return jnp.concatenate(xs, axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Named numbers, packed: `values` is one ``float32[len(names)]`` that may stay on the device."""

    names: tuple[str, ...] = field(metadata={"static": True})
    values: Array

    @staticmethod
    def pack(named: Mapping[str, Array]) -> Metrics:
        """Pack scalars under their names."""
        values = [jnp.asarray(v, jnp.float32) for v in named.values()]
        return Metrics(tuple(named), jnp.stack(values))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trained:
    """What one `learner.update` did: the steps that it was handed, its metrics and its lag."""

    steps: int = field(metadata={"static": True})
    metrics: Metrics
    lag: tuple[Array, Array]
    """Mean and maximum of (version before the update - version of the data)."""
    feedback: dict[str, Array] = field(default_factory=dict)
    """By column ``[B]``, what those may want to know who gave it: ``producer``; of what was drawn from a replay ``slot``, ``stamp``, ``shard`` and,
    if the loss tells it, ``priority``."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """What gathered since the last Row: the updates, and what the runners tell of their episodes."""

    updates: tuple[Trained, ...]
    episodes: dict[str, Array]
    """Scalars: ``env_steps`` (valid ones) and ``episodes`` since the last Row; ``return_mean`` and ``length_mean``."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What operators and environments measured since then, by name; the loop puts it in."""


COLUMNS = (
    "row", "env_steps", "trained_steps", "updates", "gradient_steps", "episodes", "return_mean", "length_mean",
    "seconds", "steps_per_second", "lag_mean", "lag_max", "loss",
)  # fmt: skip
"""The keys that every Row has, in every runtime."""


class Row(Mapping[str, float]):
    """One row of results. A read-only mapping from names to numbers; NaN where there is none yet.

    >>> Row({"row": 1, "loss": 0.5})["loss"]
    0.5
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{k}={v:,.6g}' for k, v in self._values.items())})"


def bytes_of(item: Any) -> int:
    """The bytes of an item's arrays; 0 where it has none."""
    if isinstance(item, Batch):
        return sum(map(nbytes, item.data.values())) + sum(map(nbytes, item.columns.values()))
    return sum(nbytes(x) for x in jax.tree.leaves(item) if hasattr(x, "dtype"))


def steps_of(item: Any) -> int:
    """The steps in an item; 0 where it has none."""
    return item.steps if isinstance(item, Batch | Trained) else 0


def lag_of(version: Array, versions: Array) -> tuple[Array, Array]:
    """Mean and maximum of how many updates old the columns ``[B]`` of a batch are."""
    lag = version - versions
    return lag.mean(), lag.max()


def plain_copy(tree: Any) -> Any:
    """A copy of a tree of arrays, with random keys as plain numbers: what computes with the tree's own may reuse their buffers."""
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.copy(x)
        ),
        tree,
    )
