"""An update in two halves, the gradients of a batch and a step by them, as pure functions.

Together they are `Core.update` of one epoch and one minibatch, to the bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.items import Batch, Gradients, Metrics, check_columns
from flowrl.graph.protocols import Site
from flowrl.learner.core import Core, State
from flowrl.learner.minibatches import Minibatches, Rows
from flowrl.rl.normalizing import RunningNorm, joined_moments
from flowrl.rl.policies import Network, Weights
from flowrl.rollout.local_chain import sequence_columns

Array = Any
Found = dict[str, Any]
"""What one batch gives: the fields ``params metrics valid rest`` of `Gradients`, and ``priority``
of each row, which is None unless the loss reports it."""
FED_BACK = ("producer", "slot", "stamp", "shard")
"""The columns of a batch that an update hands on in its feedback."""
NO_ROWS = 1e-12
"""The count of a running norm that has seen nothing; with 0 it would divide by 0."""


def gradients_of(
    state: State, data: Rows, columns: Rows, *, core: Core, shards: int = 1
) -> tuple[Array, Found]:
    """Return the next random key, and the gradients of a batch.

    Args:
        state: of a learner; without a target network unless the loss needs it.
        data: fields ``[T, B, ...]``.
        columns: column fields ``[B, ...]`` of a loss that takes whole columns.
        core: the learner's functions.
        shards: devices that share the batch; they average by their numbers of valid rows.
    """
    steps, width = data["valid"].shape
    minibatches = Minibatches(steps, width, steps * width, core.sequences, False, shards)
    next_key, key = jax.random.split(state["key"])
    fields, column_fields = core.laid_out(minibatches, data, columns, key)
    # The names are known once the function is traced.
    names: list[str] = []

    def compute(
        weights: Weights, opt: Any, inputs: Rows, key: Array, fields: Rows, columns: Rows
    ) -> Any:
        rows = {name: minibatches.on_this_device(x) for name, x in fields.items()}

        def step(carry: None, batch: Rows) -> Any:
            loss, metrics, grads, rest, priority = core.found(weights, opt, batch, inputs)
            report = {"loss": loss, **metrics}
            names[:] = report
            return carry, ((grads, rest, list(report.values())), priority)

        _, (found, priority), order = minibatches.epoch(step, None, rows, columns, key)
        if priority is not None:
            priority = minibatches.as_laid_out(priority, order)
        grads, rest, numbers = jax.tree.map(lambda x: x[0], found)
        return grads, _changes(core, weights, rest, rows), jnp.stack(numbers), priority

    if shards > 1:
        compute = core.on_devices(compute, minibatches, fields, column_fields)
    grads, rest, numbers, priority = compute(
        state["weights"], state["opt"], core.loss_inputs(state), key, fields, column_fields
    )
    return next_key, {
        "params": grads,
        "metrics": Metrics(tuple(names), numbers),
        "valid": jnp.sum(core.loss.averaged(data["valid"]), dtype=jnp.float32),
        "rest": rest,
        "priority": None if priority is None else priority.reshape(-1),
    }


def gradients_of_rollout(
    weights: Weights, key: Array | None, first: Array, data: Rows, columns: Rows, *, core: Core
) -> Found:
    """Return the gradients of a rollout where it was sampled.

    Args:
        weights: those that it was sampled with.
        key: a random key of the runner, where the loss takes random numbers.
        first: the steps that each of its environments had taken before the rollout ``[B]``, which
            make the random numbers those of this rollout.
        data: as `gradients_of` takes them.
        columns: the same.
        core: the learner's functions.
    """
    own = jax.random.key(0) if key is None else jax.random.fold_in(key, first[0])
    state = {"weights": weights, "opt": (), "loss": {}, "key": own}
    _, found = gradients_of(state, data, columns, core=core)
    # Random keys stay where they are: they can't be sent as plain arrays.
    rest = {when: _without_keys(arrays) for when, arrays in found["rest"].items()}
    return {**found, "rest": rest}


def _without_keys(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return arrays by name, or the moments of norms by path, without random keys."""

    def is_key(x: Any) -> bool:
        return not isinstance(x, tuple) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    return {name: x for name, x in arrays.items() if not is_key(x)}


def _changes(
    core: Core, weights: Weights, rest: dict[str, Array], rows: Rows
) -> dict[str, dict[str, Any]]:
    """Return how a batch changes what the network keeps beside its parameters.

    Args:
        core: the learner's functions.
        weights: those that the gradients are of.
        rest: what the network keeps, after the loss's calls.
        rows: the rows of this device.
    """
    moments: dict[str, Any] = {}
    after = Weights(weights.params, rest)
    if core.normalizes:
        norms = _norms(core.network)
        blank = {count: jnp.float32(NO_ROWS) for _, _, count in norms.values()}
        seen = core.observed(Weights(weights.params, {**rest, **blank}), rows).rest
        for path, names in norms.items():
            moments[path] = tuple(seen[name] for name in names)
        after = core.observed(after, rows)
    return {
        # Copies, for what is returned as it came shares its buffer with the learner's state.
        "before": {name: jnp.copy(x) for name, x in weights.rest.items()},
        "after": after.rest,
        "moments": moments,
    }


def _norms(net: Network) -> dict[str, tuple[str, str, str]]:
    """Return the names of mean, variance and count of each running norm, by its path."""
    paths = {path: f"{path}/".lstrip("/") for path in net.layers(RunningNorm)}
    return {path: (f"{x}mean", f"{x}var", f"{x}count") for path, x in paths.items()}


def applied(
    weights: Weights, others: State, found: Found, *, core: Core, newest: bool
) -> tuple[State, Metrics, Array | None]:
    """Return the state after a step by some gradients, its metrics and priorities.

    If the result or a priority is not finite, then weights, optimiser state and the numbers of the
    loss stay as they were, and the metric ``bad`` is set.

    Args:
        weights: of the learner.
        others: the rest of its state, as `Core.update` takes it.
        found: the gradients.
        core: the learner's functions.
        newest: whether they are of one batch and of these weights.
    """
    metrics = dict(zip(found["metrics"].names, found["metrics"].values, strict=True))
    state, rest = {**others, "weights": weights}, found["rest"]
    after = rest["after"] if newest else _merged(core.network, weights.rest, rest)
    kept = {**weights.rest, **after}
    carry = (weights, state["opt"], jnp.bool_(False))
    (new, opt, _), report = core.stepped(
        carry, metrics.pop("loss"), metrics, found["params"], kept, alone=True
    )
    # Running norms take observations in even where the step is not taken.
    of_norms = {name: kept[name] for names in _norms(core.network).values() for name in names}
    new = Weights(new.params, {**new.rest, **of_norms})
    numbers = jnp.stack([jnp.asarray(x, jnp.float32) for x in report.values()])[None]
    return core.settled(state, new, opt, (numbers, list(report)), found["priority"], alone=True)


def _merged(
    net: Network, now: dict[str, Array], rest: dict[str, dict[str, Any]]
) -> dict[str, Array]:
    """Return what the network keeps beside its parameters, with the changes of some batches.

    Args:
        net: the network.
        now: what it keeps; other batches may have changed it since.
        rest: how these batches changed what it kept.
    """
    merged = {}
    for name, after in rest["after"].items():
        # What is an average or a count moves as far as it did; a random key is as good as another.
        is_number = jnp.issubdtype(after.dtype, jnp.number)
        merged[name] = now[name] + (after - rest["before"][name]) if is_number else after
    for path, names in _norms(net).items():
        ours = tuple(now[name] for name in names)
        merged.update(zip(names, joined_moments(ours, rest["moments"][path]), strict=True))
    return merged


def arrays_of(core: Core, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and the column fields of a batch that a learner's functions take."""
    if "valid" not in batch.data:
        batch = batch.with_(valid=np.ones(batch.shape, bool))
    return batch.data, sequence_columns(batch) if core.sequences else {}


def versions_of(batch: Batch) -> tuple[Array, ...]:
    """Return the policy versions of a batch's columns, and how much older their first rows are.

    Raises:
        ContractError: the batch has lost the column `version`.
    """
    check_columns(batch, "version")
    return tuple(batch.columns[name] for name in ("version", "older") if name in batch.columns)


def as_item(site: Site, learner: str, found: Found, batch: Batch, version: Array) -> Gradients:
    """Return the gradients of a batch as an item.

    Args:
        site: where they were computed.
        learner: the learner's name.
        found: what the batch gave.
        batch: the batch.
        version: the policy version of the weights that they are of.
    """
    columns = {name: batch.columns[name] for name in FED_BACK if name in batch.columns}
    columns["version"] = np.full(batch.shape[1], version, np.int32)
    columns["lag"] = site.call(_lags, version, *versions_of(batch))
    if found["priority"] is not None:
        columns["priority"] = found["priority"]
    return Gradients(
        batch.steps,
        found["params"],
        found["metrics"],
        found["valid"],
        found["rest"],
        columns,
        learner=learner,
    )


def _lags(version: Array, versions: Array, older: Array = 0) -> Array:
    """Return the policy lag of each column ``[B]``, as `lag_of` has their mean and maximum."""
    return version - versions + older
