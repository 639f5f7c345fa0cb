"""A user's own function as a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
        result = self.fn(policy, params, _Fields(batch))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            name = getattr(self.fn, "__name__", "it")
            raise ContractError(
                "a loss returns (scalar, dict of scalars), "
                f"but {name} returned {_description(result)}"
            )
        return result


class _Fields(dict[str, Array]):
    """A batch of which a missing field is an error that says so."""

    def __missing__(self, name: str) -> Array:
        ways = {"advantage": "put Advantages(...) before TrainOneStep"}
        ways["target"] = ways["advantage"]
        ways |= dict.fromkeys(("next_obs", "discount"), "it comes from ReplaySample")
        ways |= {"target_params": "write a class on fl.losses.Loss with target_network = True"}
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
        SettingError: the value is neither.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise SettingError(
            "loss must be one such as fl.losses.PPOLoss() or a function "
            f"(policy, params, batch) -> (loss, metrics), got {loss!r}"
        )
    return FunctionLoss(loss)
