"""The parts of a replay: what goes into one, and its stub in the abstract trace."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from flowrl.core.items import Batch, check_columns, nbytes, only
from flowrl.core.texts import plural
from flowrl.core.trees import names_of
from flowrl.errors import ContractError, GraphError, SettingError
from flowrl.replay.ring import Ring
from flowrl.replay.sequences import carries_of

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = Any
NEEDED = ("obs", "action", "reward", "terminated", "truncated", "valid")
"""The fields that every replay stores or reads."""
KINDS = {"reward": "fV", "terminated": "b", "truncated": "b", "valid": "b"}
"""The kinds of numbers of the fields that returns are computed from: V is that of bfloat16."""
COLUMNS = ("bootstrap_obs", "version", "env", "first")
"""The columns that every replay stores or reads."""


def _check_turns(spec: Replay, rollout_length: int) -> None:
    """Refuse what needs rollouts that follow on: agents that take turns leave gaps between them.

    Raises:
        ContractError: with the setting, and what to take instead.
    """
    if spec.sequence_length is not None and spec.sequence_length > rollout_length:
        raise ContractError(
            f"sequences of {spec.sequence_length} rows go over several rollouts of "
            f"{rollout_length}, between which agents that take turns have gaps; of several agents "
            "a sequence, with its burn-in, is at most as long as a rollout: set rollout_length to "
            f"{spec.sequence_length}"
        )
    if spec.normalize_rewards:
        raise ContractError(
            "normalize_rewards: of several agents a replay does not know where episodes go on; set "
            "normalize_rewards of the runners (a discount factor) in place of the replay's"
        )


def needed(spec: Replay, batch: Batch) -> Batch:
    """Return the fields and columns of a batch that a replay stores or reads.

    Raises:
        ContractError: a field or column is missing, a field holds another kind of numbers, or the
            batch is of several agents and the replay has settings that gaps in their rollouts would
            spoil.
    """
    fields = (*NEEDED, *spec.extra)
    if missing := [name for name in fields if not batch.has(name)]:
        raise ContractError(
            f"needs the {plural(len(missing), 'field')} {', '.join(missing)}, "
            f"but the batch has {', '.join(batch.data)}"
        )
    for name, kinds in KINDS.items():
        if (dtype := batch.data[name].dtype).kind not in kinds:
            wanted, way = ("True or False", "bool") if kinds == "b" else ("fractions", "np.float32")
            raise ContractError(
                f"{name} is {dtype}, but a replay takes {wanted}: let the operator before it make "
                f"it {name}.astype({way})"
            )
    check_columns(batch, *COLUMNS)
    if "cut" in batch.columns:
        _check_turns(spec, batch.shape[0])
    columns = COLUMNS if spec.sequence_length is None else (*COLUMNS, "carry")
    if spec.sequence_length is None and names_of("carry", batch.columns):
        raise ContractError(
            "the replay gives single transitions, from which a recurrent policy can't be trained; "
            "take Replay(..., sequence_length=...) with R2D2Loss, or a policy that is not recurrent"
        )
    more = ("priority",) if spec.prioritized and "priority" in batch.data else ()
    return only(batch, (*fields, *more), columns)


def too_small(spec: Replay, name: str, rows: int, steps: int, envs: int) -> None:
    """Raise an error if a replay is too small for its rollouts.

    Args:
        spec: the settings of the replay.
        name: its name.
        rows: steps of each environment that it holds.
        steps: steps of a rollout.
        envs: environments.

    Raises:
        GraphError: with the least `buffer_size`.
    """
    if steps + spec.reach <= rows:
        return
    returns = f" and n_step={spec.n_step}" if spec.n_step > 1 else ""
    if spec.sequence_length is not None:
        returns = f" and sequences of {spec.sequence_length}"
    raise GraphError(
        f"{name} holds {rows:,} steps of each environment, too few for rollouts of {steps}{returns}"
        f"; raise buffer_size to {(steps + spec.reach) * envs:,} or more"
    )


def too_large(spec: Replay, name: str, takes: str, where: str = "") -> SettingError:
    """Return the error of a replay that memory can't hold.

    Args:
        spec: the settings of the replay.
        name: its name.
        takes: how much memory it takes, with a unit.
        where: where there is less, such as `` on the device``.
    """
    return SettingError(
        f"buffer_size={spec.buffer_size:,} takes {takes}, more than there is memory{where}; "
        f"lower {name}.buffer_size"
    )


def reached(spec: Replay, added: int, steps: int, envs: int) -> bool:
    """Return whether enough steps were added for an n-step return, or a sequence.

    Args:
        spec: the settings of the replay.
        added: steps that were added; none of them is taken to end an episode.
        steps: steps of a rollout.
        envs: environments.
    """
    # However the rollouts are spread, the environment with the most of them has at least their mean
    # number, rounded up.
    return math.ceil(added / (envs * steps)) * steps >= spec.reach


def columns_between(batch: Batch, low: int, high: int) -> Batch:
    """Return the columns of environments whose numbers are from `low` to below `high`."""
    at = np.flatnonzero((batch.columns["env"] >= low) & (batch.columns["env"] < high))
    if len(at) == batch.shape[1]:
        return batch
    return Batch(
        {k: v[:, at] for k, v in batch.data.items()}, {k: v[at] for k, v in batch.columns.items()}
    )


def shape_of(dtype: Any, *shape: int) -> Any:
    """Return a type and a shape as those of an array in the trace."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


class RingStub:
    """A shape-only stub of a ring in the abstract trace: its methods return shapes.

    Args:
        spec: the settings of the replay.
        envs: environments.
    """

    def __init__(self, spec: Replay, envs: int) -> None:
        self.spec = spec
        self.envs = envs
        self.added = 0
        self.newest: Batch | None = None
        """The shapes of the newest batch that was added."""

    def close(self) -> None:
        """Do nothing: a stub holds only shapes."""

    def add(self, batch: Batch) -> dict[str, int]:
        """Keep the shapes of a batch; report only whether a ring could be sampled by then."""
        self.newest = batch
        self.added += batch.steps
        usable = reached(self.spec, self.added, batch.shape[0], self.envs)
        return {"added": 0, "evicted": 0, "held": 0, "usable": usable}

    def sample(self, size: int, beta: float = 1.0) -> Batch:
        """Return the shapes of a batch of transitions ``[1, size]``, or of sequences."""
        newest, rows = cast("Batch", self.newest), self.spec.sequence_length or 1

        def like(name: str) -> Any:
            field = newest.data[name]
            return shape_of(field.dtype, rows, size, *field.shape[2:])

        number = shape_of(np.float32, rows, size)
        seen = names_of("obs", newest.data)
        data = {name: like(name) for name in (*seen, "action", "reward", *self.spec.extra)}
        columns = {"version": shape_of(np.int32, size)}
        if self.spec.sequence_length is None:
            data |= {"discount": number, **{f"next_{name}": like(name) for name in seen}}
        else:
            data |= {name: like(name) for name in ("terminated", "truncated", "valid")}
            for name in (*names_of("bootstrap_obs", newest.columns), *carries_of(newest)):
                column = newest.columns[name]
                columns[name] = shape_of(column.dtype, size, *column.shape[1:])
        if self.spec.prioritized:
            data["weight"] = number
            columns |= {
                "slot": shape_of(np.int64, size),
                "stamp": shape_of(np.int64, size),
                "shard": shape_of(np.int32, size),
            }
        return Batch(data, columns)


def stub(spec: Replay, bounds: tuple[int, ...], index: int, *_: int) -> RingStub:
    """Return the shape-only stub of the shard of an index."""
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
    """Return the shard of an index.

    Args:
        spec: the settings of the replay.
        rows: rows of each environment.
        bounds: the first environment of each shard, and the number of environments.
        name: of the replay.
        seed: of the run.
        index: of the shard.
        restart_count: how often it was restarted, so that it samples by other random numbers.
    """
    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode()), index, restart_count])
    return Ring(spec, rows, bounds[index + 1] - bounds[index], bounds[index], entropy)


def row_bytes(spec: Replay, batch: Batch) -> int:
    """Return the bytes that one row takes, with its share of the sum tree."""
    stored = (*names_of("obs", batch.data), "action", "reward", *spec.extra)
    fields = sum(nbytes(batch.data[name]) // batch.steps for name in stored)
    # Discount and version of 4 bytes each, and the four flags of 1 byte.
    row = fields + 4 + 4 + 4
    # A carry is stored once for each rollout.
    row += sum(nbytes(batch.columns[name]) for name in carries_of(batch)) // batch.steps
    if not spec.prioritized:
        return row
    # The sums of blocks add a quarter of a byte, which is left out.
    stamp, weight = 8, 8
    brought = 8 if "priority" in batch.data else 0
    return row + stamp + weight + brought
