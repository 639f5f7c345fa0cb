"""What an update reports, and whether it is finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flowrl.core.finite import finite_along
from flowrl.core.items import COLUMNS, LOSS_PART
from flowrl.errors import ContractError

Array = Any
RESERVED = {*COLUMNS, "bad"}
"""Names that the metrics of a loss may not have.

Every Row has columns of the first ones, and by ``bad`` an update reports that it is not finite.
"""

SMALL = 16_384
"""The numbers of an array up to which it is joined with others to be looked through."""


def means(metrics: Array, names: list[str]) -> tuple[dict[str, Array], Array]:
    """Return the mean of each metric over the gradient steps that were applied, and their number.

    If none was applied, the metrics are those of the first, for which the update stopped. A part of
    the loss is NaN in steps in which its group of parameters rested: they are left out.

    Args:
        metrics: of every gradient step, ``[gradient steps, len(names)]``.
        names: of the metrics; the last one is ``gradient_steps``, 1 where a step was applied.
    """
    applied = metrics[:, -1:]
    gradient_steps = jnp.sum(applied)
    counted = applied.at[0].set(jnp.where(gradient_steps > 0, applied[0], 1.0))
    parts = jnp.array([name.startswith(LOSS_PART) for name in names])
    counted = jnp.where(parts & jnp.isnan(metrics), 0.0, counted)
    number = jnp.sum(counted, axis=0)
    # A step that does not count may have metrics that are NaN, which a share of 0 would keep.
    share = counted / jnp.maximum(number, 1)
    means = jnp.sum(jnp.where(counted > 0, metrics, 0.0) * share, axis=0)
    means = jnp.where(number > 0, means, jnp.nan)
    return dict(zip(names[:-1], means, strict=False)), gradient_steps


def all_finite(tree: Any) -> Array:
    """Return whether all floating point numbers of a tree are finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    # To look through a small array takes as long as to start it, so all of them are joined first.
    small = [x.ravel() for x in floats if x.size <= SMALL]
    large = [x for x in floats if x.size > SMALL]
    joined = [jnp.concatenate(small), *large] if small else large
    return jnp.all(jnp.stack([finite_along(x) for x in joined]))


def finite_or_masked(priority: Array, valid: Array) -> Array:
    """Return whether all priorities of a minibatch are finite, but for those of masked rows.

    Args:
        priority: by row, ``[N]``.
        valid: by row whether it counts, ``[N]``, or ``[T, N]`` of whole columns, which all count.
    """
    finite = jnp.isfinite(priority)
    return jnp.all(finite | (valid == 0) if valid.shape == priority.shape else finite)


def refuse_reserved(metrics: dict[str, Array]) -> None:
    """Raise an error if a metric of the loss has one of the reserved names.

    Raises:
        ContractError: with another name for it.
    """
    if taken := sorted(RESERVED & set(metrics)):
        raise ContractError(
            f"the loss reports {', '.join(taken)}, which every Row or update has already; "
            f"give it another name, such as loss/{taken[0]}"
        )
