"""Items that flow along the edges of a graph, such as `Batch`, and the `Row` of a run.

`Filling` is a count in the state of an operator that collects items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.clock import CONCAT
from flowrl.core.remote import RemoteArray, is_array, join
from flowrl.core.trees import fields_of, names_of, tree_of
from flowrl.errors import ContractError, unknown

Array = Any
"""A NumPy array, a JAX array, a tracer, or a `jax.ShapeDtypeStruct` in the abstract trace."""


class Filling(int):
    """A number in a state that only grows, and on which nothing depends until it reaches `mark`.

    The abstract trace skips the numbers in between, and a program of the xla runtime has one loop
    for them. An operator that does something with every n-th item holds ``Filling(0, n)``, takes
    ``Filling.after(count, n)`` with each, and does it where that is 0.

    Args:
        number: the number.
        mark: the number from which on something depends on it.
        turns: how often it reached its mark and began again at 0 (default 0).
    """

    mark: int
    turns: int

    def __new__(cls, number: int, mark: int, turns: int = 0) -> Self:
        """Return a number that grows to a mark."""
        self = super().__new__(cls, number)
        self.mark = mark
        self.turns = turns
        return self

    @classmethod
    def after(cls, number: int, mark: int) -> Self:
        """Return one more than a number, which is 0 again where that reaches the mark."""
        turns = number.turns if isinstance(number, Filling) else 0
        return cls(number + 1, mark, turns) if number + 1 < mark else cls(0, mark, turns + 1)

    def __getnewargs__(self) -> Any:
        return int(self), self.mark, self.turns


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Batch:
    """Experience of T steps in B columns, time-major.

    The layout is that of Gymnasium's NEXT_STEP mode: the row after one with ``terminated`` or
    ``truncated`` is masked. It holds the episode's final observation, kept for bootstrapping, and
    has ``valid`` 0; the next episode starts after it.

    Args:
        data: one array per field, ``[T, B, ...]``: ``obs action reward terminated truncated logp
            value valid`` and the fields that operators add. Observations that are a Dict or a Tuple
            have a field for each part, such as ``obs['camera']``.
        columns: one array per column field, ``[B, ...]``: ``bootstrap_obs`` (the observation after
            the last row), ``version`` (the policy version of the behaviour policy), ``producer``
            (the runner's index), ``env`` (the environment's number, counted over all runners) and
            ``first`` (the steps that the environment had taken before the first row: a rollout
            continues the one before if its ``first`` is where that one ended). Of several agents
            also ``last_version`` (the policy version of all rows but a first one that was open
            before, whose version is ``version``) and ``cut`` (whether the last row's ``truncated``
            marks the end of the rollout, and not of the episode)
            Runners over several agents in JAX give all rows one ``version``, and add ``older``: by
            how many policy versions the first row is older, if it was open before (default none).
    """

    data: dict[str, Array]
    columns: dict[str, Array] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """The pair (T, B) of the steps in time and the number of columns."""
        rows, columns = next(iter(self.data.values())).shape[:2]
        return rows, columns

    @property
    def steps(self) -> int:
        """The number of steps, T x B, masked rows included; it is a static number."""
        rows, columns = self.shape
        return int(rows * columns)

    def __repr__(self) -> str:
        fields = [
            f"{name} {_type_and_shape(x)}"
            for name, x in [*self.data.items(), *self.columns.items()]
        ]
        return f"Batch({', '.join(fields)})"

    def __getitem__(self, name: str) -> Any:
        """Return a field, or the tree of arrays that the fields of that name make up."""
        if not self.has(name):
            raise ContractError(f"the batch has no field: {unknown('field', name, self.data)}")
        return tree_of(name, self.data)

    def has(self, name: str) -> bool:
        """Return whether there is a field of this name, or a tree of fields."""
        return bool(names_of(name, self.data))

    def with_(self, **fields: Any) -> Batch:
        """Return a batch that has these data fields ``[T, B, ...]``, or trees of fields, too."""
        data = dict(self.data)
        for name, tree in fields.items():
            if name in data and not isinstance(tree, dict | tuple):
                data[name] = tree  # it keeps its place among the fields
                continue
            # What was there goes as a whole, for a tree may have other parts.
            for replaced in names_of(name, data):
                del data[replaced]
            data |= fields_of(name, tree)
        return replace(self, data=data)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle NumPy arrays as one.

        Each of them alone would cost more to send than a small batch holds.
        """
        arrays = [*self.data.values(), *self.columns.values()]
        # JAX arrays and shapes have a way of their own to be pickled.
        if not all(isinstance(x, np.ndarray) for x in arrays):
            return (Batch, (self.data, self.columns))
        return (_unpacked, (tuple(self.data), tuple(self.columns), Packed(arrays)))

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """Return batches of the same length in time side by side.

        ``[T, B1]`` and ``[T, B2]`` become ``[T, B1 + B2]``.
        """
        if len(batches) == 1:
            return batches[0]
        with CONCAT:
            data = _joined([batch.data for batch in batches], axis=1)
            return Batch(data, _joined([batch.columns for batch in batches], axis=0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiBatch:
    """Experience of several policies that act in the same environments.

    Args:
        batches: by policy: the batch whose columns are its agents.
    """

    batches: dict[str, Batch]

    @property
    def steps(self) -> int:
        """The number of agent steps of all policies, masked rows included."""
        return sum(batch.steps for batch in self.batches.values())

    def __getitem__(self, policy: str) -> Batch:
        """Return the batch of one policy.

        Raises:
            ContractError: there is no such policy.
        """
        if policy not in self.batches:
            raise ContractError(unknown("policy", policy, self.batches))
        return self.batches[policy]


def _type_and_shape(x: Array) -> str:
    """Return the type and shape of an array as text."""
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]" if is_array(x) else repr(x)


def _joined(parts: Sequence[dict[str, Array]], axis: int) -> dict[str, Array]:
    """Return each field's arrays, joined along an axis."""
    joined = {}
    for name in parts[0]:
        joined[name] = concatenate([part[name] for part in parts], axis)
    return joined


def _unpacked(data: Sequence[str], columns: Sequence[str], arrays: Packed) -> Batch:
    """Return the batch of which `Packed` holds the arrays, those of `data` first."""
    fields = dict(zip(data, arrays, strict=False))
    return Batch(fields, dict(zip(columns, arrays[len(data) :], strict=True)))


def _gradients(numbered: tuple[Any, ...], arrays: Packed) -> Gradients:
    """Return the gradients whose arrays `Packed` holds, of which `numbered` has the numbers."""
    found: Gradients = jax.tree.map(arrays.__getitem__, Gradients(*numbered))
    return found


ALIGNED = 64
"""Arrays begin at multiples of this many bytes: XLA reads such arrays in place."""


class Packed(list[Any]):
    """A list of NumPy arrays that are pickled as one buffer."""

    def __reduce__(self) -> tuple[Any, ...]:
        starts = np.cumsum([0, *(_aligned(x.nbytes) for x in self)]).tolist()
        buffer = np.empty(starts[-1], np.uint8)
        # The last start is the size of the buffer, at which no array begins.
        for start, x in zip(starts, self, strict=False):
            buffer[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        layout = tuple((x.dtype.str, x.shape) for x in self)
        return (_unpack, (layout, buffer))


def _aligned(size: int) -> int:
    """Return a number of bytes, rounded up to a multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def _unpack(layout: Sequence[tuple[str, tuple[int, ...]]], buffer: np.ndarray[Any, Any]) -> Packed:
    """Return the arrays in a buffer, as views of it, from the type and shape of each."""
    arrays, start = Packed(), 0
    for dtype, shape in layout:
        x = np.frombuffer(buffer, dtype, math.prod(shape), start).reshape(shape)
        arrays.append(read_only(x))
        start += _aligned(x.nbytes)
    return arrays


def nbytes(x: Array) -> int:
    """Return the bytes of an array of any kind, abstract ones too."""
    return int(math.prod(x.shape) * x.dtype.itemsize)


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array itself, after it was made read-only.

    An item that a node yields may go to several others, and arrays from Ray are read-only, too.
    """
    x.flags.writeable = False
    return x


def concatenate(xs: Sequence[Array], axis: int) -> Array:
    """Return arrays joined along an axis; they may be NumPy, JAX, remote or abstract ones."""
    if all(isinstance(x, np.ndarray) for x in xs):
        return read_only(np.concatenate(xs, axis))
    if any(isinstance(x, RemoteArray) for x in xs):
        return join(xs, axis)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in xs):
        return _abstract_concatenate(xs, axis)
    return jnp.concatenate(xs, axis)


def _abstract_concatenate(xs: Sequence[Array], axis: int) -> Array:
    """Return the shape and type of arrays joined along an axis."""
    other_axes = {(*x.shape[:axis], *x.shape[axis + 1 :], str(x.dtype)) for x in xs}
    # JAX raises an error that says what does not fit, or finds the common type.
    if len(other_axes) > 1:
        return jax.eval_shape(lambda *ys: jnp.concatenate(ys, axis), *xs)
    shape = xs[0].shape
    length = sum(x.shape[axis] for x in xs)
    return jax.ShapeDtypeStruct((*shape[:axis], length, *shape[axis + 1 :]), xs[0].dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Named numbers, packed into one array.

    Args:
        names: the names of the numbers.
        values: ``float32[len(names)]``, which may stay on the device.
    """

    names: tuple[str, ...] = field(metadata={"static": True})
    values: Array

    @staticmethod
    def pack(named: Mapping[str, Array]) -> Metrics:
        """Return scalars packed under their names."""
        # One array in place of many: each would be fetched from the device on its own.
        values = [jnp.asarray(v, jnp.float32) for v in named.values()]
        return Metrics(tuple(named), jnp.stack(values))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """Gradients of a learner's loss, of one batch or the mean of several.

    `ComputeGradients` yields them and `ApplyGradients` takes them.
    """

    steps: int = field(metadata={"static": True})
    """The steps of the batches, masked rows included."""
    params: dict[str, Array]
    """By parameter: its gradient."""
    metrics: Metrics
    """The loss, and its metrics."""
    valid: Array
    """The number of valid rows, by which a mean of several is weighted."""
    rest: dict[str, dict[str, Any]]
    """What the network keeps beside its parameters, and how the batch changed it.

    Under ``before`` and ``after`` are the arrays before and after, and under ``moments`` the mean,
    variance and count that each running norm would have of the batch alone, by its path.
    """
    columns: dict[str, Array]
    """Arrays ``[B]``, one number per column of the batches.

    They are ``version`` (the policy version of the weights that the gradients are of), ``lag`` (by
    how many updates the data was older than those), and what an update feeds back to the producers
    of the batches: see `Trained.feedback`.
    """
    batches: int = field(default=1, metadata={"static": True})
    """The number of batches."""
    learner: str = field(default="learner", metadata={"static": True})
    """The name of the learner whose loss it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle NumPy arrays as one, as a `Batch` does."""
        arrays, structure = jax.tree.flatten(self)
        if not all(isinstance(x, np.ndarray) for x in arrays):
            return (Gradients, tuple(vars(self).values()))
        # The same with the number of each array in its place.
        numbered = jax.tree.unflatten(structure, range(len(arrays)))
        return (_gradients, (tuple(vars(numbered).values()), Packed(arrays)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trained:
    """Result of one update of a learner, by `TrainOneStep` or `ApplyGradients`."""

    steps: int = field(metadata={"static": True})
    """The steps of the batch."""
    metrics: Metrics
    """The metrics of the update."""
    lag: tuple[Array, Array]
    """Mean and maximum of the policy lag, in updates.

    It is the policy version before the update less that of the data.
    """
    feedback: dict[str, Array] = field(default_factory=dict)
    """Arrays ``[B]``, one number per column, for the producers of the batch.

    They are ``producer``, and for a batch sampled from a replay ``slot``, ``stamp``, ``shard`` and,
    if the loss reports it, ``priority``.
    """
    learner: str = field(default="learner", metadata={"static": True})
    """The name of the learner that was updated."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """Everything that was gathered since the last Row, from which the next one is made."""

    updates: tuple[Trained, ...]
    """The results of the updates since the last Row."""
    episodes: dict[str, Array]
    """Scalars that runners report of their episodes.

    They are ``env_steps`` (the steps that were taken, also those that are in no rollout, but no
    resets) and ``episodes`` since the last Row, ``return_mean`` and ``length_mean``. Under
    ``since_last`` are others that a Row counts from the beginning of the run, by name.
    """
    metrics: dict[str, Any] = field(default_factory=dict)
    """The metrics of operators and environments since the last Row, by name; the loop adds them."""


COLUMNS = (
    "row", "env_steps", "trained_steps", "updates", "gradient_steps", "episodes", "return_mean",
    "length_mean", "seconds", "steps_per_second", "lag_mean", "lag_max", "loss",
)  # fmt: skip
"""The keys that every Row has, in every runtime."""
LOSS_PART = "loss/"
"""What the names of a loss's parts begin with."""


class Row(Mapping[str, float]):
    """One row of results: a read-only mapping from names to numbers, NaN where there is none yet.

    Args:
        values: the numbers by column.

    >>> Row({"row": 1, "loss": 0.5})["loss"]
    0.5
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> float:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(unknown("column", name, self._values)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Return the number of a column, or the default where the row has no such column."""
        return self._values.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{k}={v:,.6g}' for k, v in self._values.items())})"


def samples_nothing(row: Mapping[str, float]) -> bool:
    """Return whether a run has learned without a step of an environment, as from a dataset."""
    return row["env_steps"] == 0 and row["updates"] > 0


def reached(row: Mapping[str, float]) -> tuple[int, str]:
    """Return how far a run has come at a row: a number, and what it counts.

    These are environment steps, or updates where nothing is sampled.

    >>> reached({"env_steps": 640, "updates": 5}), reached({"env_steps": 0, "updates": 5})
    ((640, 'steps'), (5, 'updates'))
    """
    if samples_nothing(row):
        return round(row["updates"]), "updates"
    return round(row["env_steps"]), "steps"


def check_columns(batch: Batch, *names: str) -> None:
    """Make sure that a batch has these columns, or trees of columns.

    Raises:
        ContractError: it has lost one.
    """
    for name in names:
        if not names_of(name, batch.columns):
            raise ContractError(
                f"needs the column {name}, but the batch has lost it; change batches by "
                "batch.with_(...), which keeps the columns"
            )


def only(batch: Batch, fields: Sequence[str], columns: Sequence[str]) -> Batch:
    """Return a batch of nothing but these fields and columns, or trees of them, if it has them."""
    data = [x for name in fields for x in names_of(name, batch.data)]
    kept = [x for name in columns for x in names_of(name, batch.columns)]
    return Batch({x: batch.data[x] for x in data}, {x: batch.columns[x] for x in kept})


def bytes_of(item: Any) -> int:
    """Return the bytes of an item's arrays; 0 where it has none."""
    if isinstance(item, Batch):
        return sum(map(nbytes, item.data.values())) + sum(map(nbytes, item.columns.values()))
    return sum(nbytes(x) for x in jax.tree.leaves(item) if is_array(x))


def steps_of(item: Any) -> int:
    """Return the steps in an item; 0 where it has none."""
    return item.steps if isinstance(item, Batch | MultiBatch | Gradients | Trained) else 0


def lag_of(version: Array, versions: Array, older: Array = 0) -> tuple[Array, Array]:
    """Return the mean and maximum policy lag of a batch, in updates.

    Args:
        version: the policy version of the learner.
        versions: ``[B]``, the policy versions of the batch's columns.
        older: ``[B]``, how much older their first rows are (default 0).
    """
    lag = version - versions + older
    return lag.mean(), lag.max()


def plain_copy(tree: Any) -> Any:
    """Return a copy of a tree of arrays, with random keys as plain numbers.

    A function that computes with the tree's own arrays may then reuse their buffers.
    """

    def copy(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(x)
        return jnp.copy(x)

    return jax.tree.map(copy, tree)
