"""Transitions as they are read from a `Ring`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.core.items import Batch

if TYPE_CHECKING:
    from flowrl.replay.ring import Ring

Array = Any


def transitions_of(
    ring: Ring, slots: Array, data: dict[str, Array], columns: dict[str, Array]
) -> Batch:
    """Return the transitions ``[1, n]`` that begin at slots ``[n]``.

    Args:
        ring: the ring that holds them.
        slots: of their first steps.
        data: more fields ``[1, n]``.
        columns: more columns ``[n]``.
    """
    flat = ring.flat
    reward, discount, last = _returns(ring, slots)
    if ring.scale is not None:
        # Rewards are stored as they came, so that all of a batch are scaled alike.
        reward = ring.scale(reward)
    found = {
        **{name: flat[name].take(slots, axis=0) for name in ring.seen},
        "action": flat["action"].take(slots, axis=0),
        "reward": reward,
        "discount": discount,
        **{
            f"next_{name}": flat[name].take(last + ring.envs, axis=0, mode="wrap")
            for name in ring.seen
        },
        **{name: flat[name].take(slots, axis=0) for name in ring.extra},
    }
    return Batch(
        {name: x[None] for name, x in found.items()} | data,
        {"version": flat["version"].take(slots), **columns},
    )


def _returns(ring: Ring, slots: Array) -> tuple[Array, Array, Array]:
    """Return the n-step returns from slots on, the discounts after them, and the last slots."""
    flat, last = ring.flat, slots
    reward, discount = flat["reward"].take(slots), flat["discount"].take(slots)
    if ring.n_step == 1:
        return reward, discount, last
    over = ring.over.reshape(-1)
    going = ~over.take(slots)
    for _ in range(ring.n_step - 1):
        # Those whose episode is over stay where they are.
        last = last + ring.envs * going
        reward += np.where(going, discount * flat["reward"].take(last, mode="wrap"), 0)
        further = discount * flat["discount"].take(last, mode="wrap")
        discount = np.where(going, further, discount)
        going &= ~over.take(last, mode="wrap")
    return reward, discount, last
