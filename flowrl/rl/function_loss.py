"""How losses are called, and a user's own function as a loss."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import jax.numpy as jnp

from flowrl.core.items import LOSS_PART
from flowrl.errors import ContractError, SettingError
from flowrl.rl.losses import Array, Bound, Loss, Metrics


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A user's own function as a loss.

    Args:
        fn: the function ``(policy, params, batch) -> (loss, metrics)``.
    """

    fn: Callable[..., tuple[Array, Metrics]]

    needs: ClassVar[tuple[str, ...]] = ("obs",)
    on_policy: ClassVar[bool] = False

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        return self.fn(policy, params, batch)


def call_loss(
    loss: Loss,
    policy: Bound,
    params: Any,
    batch: Mapping[str, Array],
    resting: Collection[str] = (),
) -> tuple[Array, Metrics]:
    """Return what a loss returns of a batch, once it is known to have the right form.

    The parts of a loss that returns a mapping are added up and reported, such as ``loss/actor``.
    Those of groups of parameters that rest are left out, and reported as NaN.

    Raises:
        ContractError: the batch lacks a field that the loss reads, or the loss returned something
            else than a scalar and a dictionary of scalars; ``priority`` alone is ``[N]``.
    """
    result: Any = loss(policy, params, _Fields(batch))
    name = type(loss).__name__
    if isinstance(loss, FunctionLoss):
        name = getattr(loss.fn, "__name__", "it")
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise ContractError(
            f"a loss returns (scalar, dict of scalars), but {name} returned {_description(result)}"
        )
    value, metrics = result
    parts = value if isinstance(value, Mapping) else {"": value}
    for group, part in parts.items():
        if jnp.shape(part):
            of = f" for {group}" if group else ""
            raise ContractError(
                f"a loss is a scalar, but {name} returned shape {jnp.shape(part)}{of}; take the "
                "mean over the valid rows (fl.losses.masked_mean)"
            )
    if isinstance(value, Mapping):
        metrics = {
            LOSS_PART + g: jnp.nan if g in resting else x for g, x in value.items()
        } | metrics
        due = [x for group, x in value.items() if group not in resting]
        value = reduce(operator.add, due) if due else jnp.float32(0)
    for metric, x in metrics.items():
        if metric != "priority" and jnp.shape(x):
            raise ContractError(
                f"metrics are scalars, but '{metric}' of {name} has the shape {jnp.shape(x)}"
            )
    return value, metrics


class _Fields(dict[str, Array]):
    """A batch of which a missing field is an error that says so."""

    def __missing__(self, name: str) -> Array:
        ways = {"advantage": "put Advantages(...) before TrainOneStep"}
        ways["target"] = ways["advantage"]
        ways |= dict.fromkeys(("next_obs", "discount"), "it comes from ReplaySample")
        ways["target_params"] = "set target_network = True in the class of the loss"
        ways["seed"] = "set random = True in the class of the loss"
        way = ways.get(name, "add it before TrainOneStep by batch.with_(...)")
        raise ContractError(
            f"the loss needs the field '{name}', but the batch has {', '.join(self)}; {way}"
        )


def _description(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return f"one {type(result).__name__}"


def as_loss(loss: Any) -> Loss:
    """Return a loss as it is, or a function ``(policy, params, batch) -> (loss, metrics)`` as one.

    Raises:
        SettingError: the value is neither, or a class of a loss lacks `needs` or `on_policy`.
    """
    if isinstance(loss, Loss):
        for name, example in (("needs", '("obs", "action")'), ("on_policy", "False")):
            if getattr(loss, name, None) is None:
                kind = type(loss).__name__
                raise SettingError(f"{kind} lacks {name}; write {name} = {example} in its class")
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise SettingError(
            "loss must be one such as fl.losses.PPOLoss() or a function "
            f"(policy, params, batch) -> (loss, metrics), got {loss!r}"
        )
    return FunctionLoss(loss)
