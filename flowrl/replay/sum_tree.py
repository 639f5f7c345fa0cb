"""`SumTree`: weights by slot, found again in proportion to them. Wide and shallow, so that NumPy does the work."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
WIDE = 32
"""Slots to a block, and blocks to a block of blocks."""


@cache
def scattered(n: int) -> Array:
    """The numbers below n in an order without order, always the same: in it strata are drawn from, so that any part of a draw is one of all."""
    return np.random.default_rng(n).permutation(n)


class SumTree:
    """Weights of `size` slots; the sums over blocks of 32 and of 1,024 are kept, and never drift, for they are summed anew.

    It does what the binary sum tree of Schaul et al. 2016 (appendix B.2.1) does, in three steps of many slots at once.
    """

    def __init__(self, size: int) -> None:
        tops = -(-size // WIDE**2)
        self.leaves = np.zeros(tops * WIDE**2)
        self.blocks = np.zeros(tops * WIDE)
        self.tops = np.zeros(tops)
        self._by_block = self.leaves.reshape(-1, WIDE)
        self._by_top = self.blocks.reshape(-1, WIDE)

    def __setitem__(self, slots: Array, weights: Any) -> None:
        """Set weights, of a slot that is named twice the last one."""
        self.leaves[slots] = weights
        blocks = slots // WIDE
        self.blocks[blocks] = self._by_block[blocks].sum(1)
        tops = slots // WIDE**2
        self.tops[tops] = self._by_top[tops].sum(1)

    @property
    def total(self) -> float:
        """Of all weights."""
        return float(self.tops.sum())

    def find(self, shares: Array) -> Array:
        """The slots at which the running sum of weights goes past ``shares [n]`` of the total, each from 0 to below 1. None has weight 0."""
        tops = self.tops.cumsum()
        mass = shares * tops[-1]
        top = tops.searchsorted(np.minimum(mass, _below(tops[-1])), side="right")
        block, mass = _within(self._by_top, top, mass - (tops - self.tops)[top])
        slot, _ = _within(self._by_block, block, mass)
        return slot


def _within(rows: Array, row: Array, mass: Array) -> tuple[Array, Array]:
    """Where the running sum goes past `mass` in a row of each, counted over all rows; and the mass that is left there."""
    sums = rows[row].cumsum(axis=1)
    mass = np.minimum(
        np.maximum(mass, 0.0), _below(sums[:, -1])
    )  # `numpy.clip` takes several times as long for a few
    at = (sums <= mass[:, None]).sum(1)
    index = row * WIDE + at
    return index, mass - (sums[np.arange(len(at)), at] - rows.reshape(-1)[index])


def _below(x: Any) -> Any:
    return np.nextafter(x, 0.0)
