"""A `SumTree` on the device: pure functions of its arrays.

They are ``leaves``, the weights of all slots, and the sums over ``blocks`` and ``tops``, which are
blocks of blocks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from flowrl.replay.sum_tree import WIDE

Array = Any
Tree = dict[str, Any]


def empty_tree(slots: int) -> Tree:
    """Return a tree of weights of 0, with leaves for so many slots or a few more."""
    size = -(-slots // WIDE**2) * WIDE**2
    return {
        "leaves": jnp.zeros(size),
        "blocks": jnp.zeros(size // WIDE),
        "tops": jnp.zeros(size // WIDE**2),
    }


def set_weights(tree: Tree, slots: Array, weights: Array) -> Tree:
    """Return a sum tree with the weights of slots set, and the sums above them."""
    slots, weights = slots.reshape(-1), weights.reshape(-1)
    leaves = tree["leaves"].at[slots].set(weights)
    blocks = tree["blocks"].at[slots // WIDE].set(leaves.reshape(-1, WIDE)[slots // WIDE].sum(1))
    tops = tree["tops"].at[slots // WIDE**2].set(blocks.reshape(-1, WIDE)[slots // WIDE**2].sum(1))
    return {"leaves": leaves, "blocks": blocks, "tops": tops}


def find(tree: Tree, shares: Array) -> Array:
    """Return the slots that `SumTree.find` would return."""
    sums = jnp.cumsum(tree["tops"])
    mass = jnp.minimum(shares * sums[-1], jnp.nextafter(sums[-1], 0.0))
    row = jnp.searchsorted(sums, mass, side="right")
    mass = mass - (sums - tree["tops"])[row]
    for level in ("blocks", "leaves"):
        part = tree[level].reshape(-1, WIDE)[row]
        sums = jnp.cumsum(part, axis=1)
        mass = jnp.clip(mass, 0.0, jnp.nextafter(sums[:, -1], 0.0))
        at = jnp.sum(sums <= mass[:, None], axis=1)
        mass = mass - jnp.take_along_axis(sums - part, at[:, None], 1)[:, 0]
        row = row * WIDE + at
    return row
