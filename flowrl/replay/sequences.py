"""Sequences of rows as they are read from a `Ring`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.core.items import Batch
from flowrl.core.trees import names_of

if TYPE_CHECKING:
    from flowrl.replay.ring import Ring

Array = Any


def carries_of(batch: Batch) -> tuple[str, ...]:
    """Return the names of the columns that hold the carry before the first row."""
    return names_of("carry", batch.columns)


def sequences_of(
    ring: Ring, slots: Array, data: dict[str, Array], columns: dict[str, Array]
) -> Batch:
    """Return the sequences ``[sequence_length, n]`` that begin at slots ``[n]``.

    They have the layout of rollouts. Where rollouts are missing, what follows is masked: the last
    step before that counts as truncated, and the row after it holds the observation it led to.

    Args:
        ring: the ring that holds them.
        slots: of their first rows, where rollouts begin.
        data: more fields ``[1, n]``, which are those of all rows.
        columns: more columns ``[n]``.
    """
    flat, envs, length = ring.flat, ring.envs, ring.reach
    slots_of_rows = slots + envs * np.arange(length)[:, None]

    def taken(x: Array) -> Array:
        return x.take(slots_of_rows, axis=0, mode="wrap")

    # Only the observation after a rollout that no other one follows is no row of a rollout.
    following = np.logical_and.accumulate(taken(ring.real.reshape(-1)))
    valid = taken(ring.valid.reshape(-1)) & following
    terminated = taken(flat["terminated"]) & valid
    reward = taken(flat["reward"]) * valid
    rows = {
        **{name: taken(flat[name]) for name in (*ring.seen, "action")},
        # Rewards are stored as they came, so that all of a batch are scaled alike.
        "reward": reward if ring.scale is None else ring.scale(reward),
        "terminated": terminated,
        "truncated": taken(ring.over.reshape(-1)) & valid & ~terminated,
        "valid": valid,
        **{name: taken(flat[name]) for name in ring.extra},
        **{name: np.repeat(x, length, axis=0) for name, x in data.items()},
    }
    after = slots + envs * length
    # There is one carry for each rollout, in the order of their rows.
    carried = slots // envs // ring.rollout_length * envs + slots % envs
    return Batch(
        rows,
        {
            **{f"bootstrap_{k}": flat[k].take(after, axis=0, mode="wrap") for k in ring.seen},
            **{k: x.take(carried, axis=0) for k, x in flat.items() if k.startswith("carry")},
            "version": flat["version"].take(slots),
            **columns,
        },
    )
