"""The mean of several gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.core.items import Gradients, concatenate
from flowrl.errors import ContractError
from flowrl.rl.normalizing import joined_moments

Array = Any


def average(several: Sequence[Gradients], run: Callable[..., Any]) -> Gradients:
    """Return the mean of several gradients, each weighted by its number of valid rows.

    It is the gradient of one batch that holds the rows of all. The metrics are averaged likewise,
    and running norms get the moments of all observations.

    Args:
        several: the gradients, at least one.
        run: what runs pure functions, such as `Context.run`.

    Raises:
        ContractError: they are of several learners.
    """
    first = several[0]
    if len(several) == 1:
        return first
    if len(learners := dict.fromkeys(each.learner for each in several)) > 1:
        raise ContractError(
            f"can't average the gradients of {' and '.join(learners)}; average those of each "
            "learner by itself"
        )
    metrics, params, valid, rest = run(
        _mean, [(each.metrics, each.params, each.valid, each.rest) for each in several]
    )
    columns = dict(first.columns)
    for name in columns:
        columns[name] = concatenate([each.columns[name] for each in several], 0)
    return replace(
        first,
        steps=sum(each.steps for each in several),
        params=params,
        metrics=metrics,
        valid=valid,
        rest=rest,
        columns=columns,
        batches=sum(each.batches for each in several),
    )


def _mean(several: Sequence[tuple[Any, Any, Array, Any]]) -> tuple[Any, Any, Array, Any]:
    """Return the weighted mean of ``(metrics, params, valid, rest)`` of several gradients."""
    weights = jnp.stack([valid for _, _, valid, _ in several])
    valid = jnp.sum(weights)
    shares = weights / jnp.maximum(valid, 1)

    def mean(*xs: Array) -> Array:
        if not jnp.issubdtype(xs[0].dtype, jnp.floating):
            return xs[-1]
        # Where no row is valid there may be NaN, which a share of 0 would keep.
        parts = (jnp.where(share > 0, x * share, 0) for x, share in zip(xs, shares, strict=True))
        return sum(parts, jnp.zeros_like(xs[0]))

    metrics, params, rest = jax.tree.map(
        mean, *((metrics, params, rest) for metrics, params, _, rest in several)
    )
    moments = several[0][3]["moments"]
    for *_, other in several[1:]:
        more = other["moments"]
        moments = {path: joined_moments(moments[path], more[path]) for path in moments}
    return metrics, params, valid, {**rest, "moments": moments}
