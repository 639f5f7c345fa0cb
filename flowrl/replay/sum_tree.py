"""`SumTree`: weights by slot, from which slots are sampled in proportion to their weights.

It is wide and shallow, so that NumPy does the work.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from flowrl.core.keeping import Keeping

Array = np.ndarray[Any, Any]
WIDE = 32
"""Slots to a block, and blocks to a block of blocks."""


@cache
def scattered(n: int) -> Array:
    """Return the numbers below n in a shuffled order, which is always the same.

    Strata are sampled in this order, so that a part of a sample (a minibatch, or the rows of one
    device) is spread over the whole range of them.
    """
    return np.random.default_rng(n).permutation(n)


class SumTree(Keeping):
    """Weights of `size` slots, all 0 at first.

    The sums over blocks of 32 and of 1,024 slots are kept. They never drift, for they are summed
    again from the weights. It does what the binary sum tree of Schaul et al. 2016 (appendix
    B.2.1) does, in three steps of many slots at once.

    Args:
        size: the number of slots.
    """

    lasting = ("leaves", "blocks", "tops")
    remade = ("_by_block", "_by_top")

    def __init__(self, size: int) -> None:
        tops = -(-size // WIDE**2)
        self.leaves = np.zeros(tops * WIDE**2)
        self.blocks = np.zeros(tops * WIDE)
        self.tops = np.zeros(tops)
        self._view()

    def _view(self) -> None:
        """Make the views through which sums are taken."""
        self._by_block = self.leaves.reshape(-1, WIDE)
        self._by_top = self.blocks.reshape(-1, WIDE)

    def take(self, state: Any) -> None:
        """Go on with the weights that were kept."""
        super().take(state)
        self._view()

    def __setitem__(self, slots: Array, weights: Any) -> None:
        """Set the weights of slots; of a slot that is named twice, the last one counts."""
        self.leaves[slots] = weights
        blocks = slots // WIDE
        self.blocks[blocks] = np.add.reduce(self._by_block.take(blocks, axis=0), 1)
        tops = blocks // WIDE
        self.tops[tops] = np.add.reduce(self._by_top.take(tops, axis=0), 1)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.tops.sum())

    def find(self, shares: Array) -> Array:
        """Return the slots at which the running sum of weights exceeds shares of the total.

        Args:
            shares: ``[n]``, each from 0 to below 1.

        Returns:
            Slots ``[n]``, none of which has weight 0.
        """
        sums = self.tops.cumsum()
        mass = shares * sums[-1]
        # Rounding may carry a mass up to the total, after which there is no slot.
        top = sums.searchsorted(np.minimum(mass, _below(sums[-1])), side="right")
        mass -= (sums - self.tops).take(top)
        block, before = _within(self._by_top, top, mass)
        return _within(self._by_block, block, mass - before)[0]


@cache
def _starts(n: int) -> Array:
    """Return where each of n rows begins among the numbers of all of them."""
    return np.arange(0, n * WIDE, WIDE)


def _within(rows: Array, row: Array, mass: Array) -> tuple[Array, Array]:
    """Return where the running sum within rows exceeds a mass.

    Args:
        rows: all rows, ``[rows, WIDE]``.
        row: the row in which each mass is looked for, ``[n]``.
        mass: ``[n]``.

    Returns:
        The indices of the numbers, counted over all rows ``[n]``, and the sums of their rows before
        them ``[n]``.
    """
    # Few numbers at a time: what counts is how often NumPy is called, and by which way.
    numbers = rows.take(row, axis=0)
    sums = numbers.cumsum(axis=1)
    mass = np.minimum(np.maximum(mass, 0.0), _below(sums[:, -1]))
    at = (sums > mass[:, None]).argmax(1)
    found = _starts(len(at)) + at
    return row * WIDE + at, sums.ravel().take(found) - numbers.ravel().take(found)


def _below(x: Any) -> Any:
    """Return the greatest number below x."""
    return np.nextafter(x, 0.0)
