"""The parts of a replay: what goes into one, and its form in the abstract trace."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from flowrl.core.items import Batch, nbytes
from flowrl.errors import ContractError, GraphError, SettingError
from flowrl.replay.ring import Ring

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = Any
NEEDED = ("obs", "action", "reward", "terminated", "truncated", "valid")
COLUMNS = ("bootstrap_obs", "version", "env", "first")


def needed(spec: Replay, batch: Batch) -> Batch:
    """What is stored of a batch.

    Raises:
        ContractError: a field or column is missing.
    """
    fields = (*NEEDED, *spec.extra)
    if missing := [name for name in fields if name not in batch.data]:
        raise ContractError(
            f"needs the field{'s' * (len(missing) > 1)} {', '.join(missing)}, but the batch has {', '.join(batch.data)}"
        )
    if missing := [name for name in COLUMNS if name not in batch.columns]:
        raise ContractError(
            f"the batch has lost the column {missing[0]}; change batches by batch.with_(...), which keeps the columns"
        )
    more = ("priority",) if spec.prioritized and "priority" in batch.data else ()
    return Batch(
        {name: batch.data[name] for name in (*fields, *more)},
        {name: batch.columns[name] for name in COLUMNS},
    )


def too_small(spec: Replay, name: str, rows: int, steps: int, envs: int) -> None:
    """Refuse a replay that is too small for its fragments.

    Raises:
        GraphError: with the least capacity.
    """
    if steps + spec.n_step > rows:
        raise GraphError(
            f"{name} holds {rows:,} steps of each environment, too few for fragments of {steps}"
            f"{f' and n_step={spec.n_step}' * (spec.n_step > 1)}; raise buffer_size to {(steps + spec.n_step) * envs:,} or more"
        )


def too_large(spec: Replay, name: str, takes: str, where: str = "") -> SettingError:
    """The error of a replay that memory can't hold, which takes so much."""
    return SettingError(
        f"buffer_size={spec.buffer_size:,} takes {takes}, more than there is memory{where}; lower {name}.buffer_size"
    )


def reached(spec: Replay, came: int, steps: int, envs: int) -> bool:
    """Whether so many steps in fragments of `steps` are enough for the n-step return of some environment, if no episode ends."""
    return math.ceil(came / (envs * steps)) * steps >= spec.n_step


def columns_between(batch: Batch, low: int, high: int) -> Batch:
    """The columns of a batch whose environments have numbers from `low` to below `high`."""
    at = np.flatnonzero((batch.columns["env"] >= low) & (batch.columns["env"] < high))
    if len(at) == batch.shape[1]:
        return batch
    return Batch(
        {k: v[:, at] for k, v in batch.data.items()}, {k: v[at] for k, v in batch.columns.items()}
    )


class RingStub:
    """A ring in the abstract trace: the same methods, giving shapes."""

    def __init__(self, spec: Replay, envs: int) -> None:
        self.spec = spec
        self.envs = envs
        self.came = 0
        self.form: Batch | None = None

    def close(self) -> None:
        """Nothing to let go of."""

    def add(self, batch: Batch) -> dict[str, int]:
        """Note the form."""
        self.form = batch
        self.came += batch.steps
        return dict.fromkeys(("added", "evicted", "held"), 0) | {
            "usable": reached(self.spec, self.came, batch.shape[0], self.envs)
        }

    def sample(self, size: int, beta: float = 1.0) -> Batch:
        """Transitions of that form."""
        form, f = cast("Batch", self.form), np.dtype(np.float32)

        def of(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

        def like(name: str) -> Any:
            return of(form.data[name].dtype, 1, size, *form.data[name].shape[2:])

        names = {
            "obs": "obs",
            "action": "action",
            "reward": "reward",
            "discount": "",
            "next_obs": "obs",
            **{n: n for n in self.spec.extra},
        }
        data = {name: like(source) if source else of(f, 1, size) for name, source in names.items()}
        columns = {"version": of(np.int32, size)}
        if self.spec.prioritized:
            data["weight"] = of(f, 1, size)
            columns |= {
                "slot": of(np.int64, size),
                "stamp": of(np.int64, size),
                "shard": of(np.int32, size),
            }
        return Batch(data, columns)


def stub(spec: Replay, bounds: tuple[int, ...], index: int, *_: int) -> RingStub:
    """The twin of the shard of a number."""
    return RingStub(spec, bounds[index + 1] - bounds[index])


def ring(
    spec: Replay,
    rows: int,
    bounds: tuple[int, ...],
    name: str,
    seed: int,
    index: int,
    restart_count: int,
) -> Ring:
    """The shard of a number."""
    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode()), index, restart_count])
    return Ring(spec, rows, bounds[index + 1] - bounds[index], bounds[index], entropy)


def row_bytes(spec: Replay, batch: Batch) -> int:
    """What one row takes."""
    steps = batch.steps
    fields = sum(
        nbytes(batch.data[name]) // steps for name in ("obs", "action", "reward", *spec.extra)
    )
    return (
        fields
        + 4
        + 4
        + 4
        + (8 + 8 * 33 // 32 + 8 * ("priority" in batch.data) if spec.prioritized else 0)
    )
