"""How a recurrent policy is applied to the rows of sequences, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Array = Any


def scan_after_burn_in(
    step: Callable[[Any, Any], tuple[Any, Any]], before: Any, rows: Any, burn_in: int
) -> tuple[Any, Any]:
    """Scan rows, of which the first ones only bring what is carried to where it should be.

    A carry that was stored with old weights is made fresh so (Kapturowski et al. 2019, section 3).

    Args:
        step: from what is carried and a row to what is carried next and an output.
        before: what is carried before the first row.
        rows: a tree of arrays ``[T, ...]``.
        burn_in: the number of first rows; no gradient flows back into them.

    Returns:
        What is carried after the last row, and the outputs ``[T - burn_in, ...]``.
    """
    if burn_in:
        first_rows = jax.tree.map(lambda x: x[:burn_in], rows)
        before = jax.lax.stop_gradient(jax.lax.scan(step, before, first_rows)[0])
        rows = jax.tree.map(lambda x: x[burn_in:], rows)
    return jax.lax.scan(step, before, rows)
