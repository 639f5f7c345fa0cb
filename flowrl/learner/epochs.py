"""The epochs of an update: a loop over minibatches, or a single gradient step without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.core.clock import epoch_ended
from flowrl.core.mesh import number
from flowrl.learner.minibatches import Minibatches, Rows

Array = Any
Step = Callable[[Any, Rows], Any]


def runs_once(minibatches: Minibatches, epochs: int) -> bool:
    """Return whether an update is a single gradient step."""
    return minibatches.count == 1 and epochs == 1


def run_epochs(
    minibatches: Minibatches,
    step: Step,
    start: Any,
    rows: Rows,
    columns: Rows,
    key: Array,
    *,
    epochs: int,
    traced: bool,
) -> tuple[Any, Array, Array | None]:
    """Take all gradient steps of an update.

    Args:
        minibatches: how the batch is cut.
        step: from what is carried and a minibatch to what is carried next and (metrics,
            priorities of the rows or None).
        start: what is carried first.
        rows: the fields on this device, as `Minibatches.epoch` takes them.
        columns: the column fields, likewise.
        key: a random key, from which the rows are shuffled.
        epochs: how often each step is used.
        traced: whether every epoch reports when it ended.

    Returns:
        What is carried at last, the metrics of all gradient steps, and the priorities of the last
        epoch, laid out like the fields, or None.
    """

    def epoch(carry: Any, indexed_key: tuple[Array, Array]) -> Any:
        index, key = indexed_key
        carry, (metrics, priority), order = minibatches.epoch(step, carry, rows, columns, key)
        if traced:
            _report_epoch(index, jnp.max(metrics))
        if priority is not None:
            priority = minibatches.as_laid_out(priority, order)
        return carry, (metrics, priority)

    # A single step runs without a loop, within which XLA is many times slower at convolutions.
    if runs_once(minibatches, epochs):
        carry, (metrics, priority) = epoch(start, (jnp.int32(0), key))
        return carry, metrics, priority
    indexed_keys = (jnp.arange(epochs), jax.random.split(key, epochs))
    carry, (metrics, priority) = jax.lax.scan(epoch, start, indexed_keys)
    return carry, metrics, None if priority is None else priority[-1]


def _report_epoch(epoch: Array, done: Array) -> None:
    """Report from within an update that an epoch ended, once `done` is computed.

    Where several devices run the update, only the first of them reports.
    """
    jax.lax.cond(number() == 0, lambda: jax.debug.callback(epoch_ended, epoch, done), lambda: None)
