"""Losses of action values on sequences ``[T, B, ...]`` that are sampled from a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.core.trees import with_last
from flowrl.errors import ContractError, SettingError
from flowrl.graph.settings import check_above_0, check_shares
from flowrl.rl.losses import Bound, Loss, Metrics
from flowrl.rl.masked import mean
from flowrl.rl.returns import n_step_returns
from flowrl.rl.value_losses import huber, weighted_mean

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any
SLOPE = 1e-3
"""The least slope of `rescaled`, by which it has an inverse."""


def rescaled(x: Array) -> Array:
    """Return ``sign(x) (sqrt(|x| + 1) - 1) + SLOPE x`` (Pohlen et al. 2018, proposition A.2).

    So returns of any size are learned alike, without clipping rewards.
    """
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + SLOPE * x


def unscaled(x: Array) -> Array:
    """Return the inverse of `rescaled` (Pohlen et al. 2018, proposition A.2)."""
    root = jnp.sqrt(1.0 + 4.0 * SLOPE * (jnp.abs(x) + 1.0 + SLOPE))
    # This is (root - 1) / (2 SLOPE), written so that no digits cancel each other.
    return jnp.sign(x) * ((2.0 * (jnp.abs(x) + 1.0 + SLOPE) / (root + 1.0)) ** 2 - 1.0)


@dataclass(frozen=True)
class R2D2Loss(Loss):
    """Q-learning over sequences, for recurrent policies (R2D2, Kapturowski et al. 2019).

    The action outputs of the policy are action values. They and those of the target network are
    computed over whole sequences, each from the carry that was stored before the first row. The
    n-step returns end with their episode and with the sequence.

    The priority of a sequence is ``eta x max + (1 - eta) x mean`` of its rows' absolute errors.

    Args:
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        n_step: environment steps of a return (default 5).
        burn_in: first rows of each sequence that only bring the stored carry up to date with the
            weights, and are not trained on (default 0).
        double: the newest parameters choose the next action and the target network evaluates it
            (van Hasselt et al. 2016, equation 4) (default True).
        rescale: learn values on a scale that grows with their square root, ``sign(x)
            (sqrt(|x| + 1) - 1) + 0.001 x`` (Pohlen et al. 2018) (default True).
        huber: absolute error from which on the loss is linear; None: squares throughout (default
            None).
        eta: share of the largest error in a sequence's priority, from 0 to 1 (default 0.9).

    Raises:
        SettingError: a number is out of its range.
    """

    gamma: float = 0.99
    n_step: int = 5
    burn_in: int = 0
    double: bool = True
    rescale: bool = True
    huber: float | None = None
    eta: float = 0.9

    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "reward", "terminated", "truncated")
    on_policy: ClassVar[bool] = False
    sequences: ClassVar[bool] = True
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_shares(self, "gamma", "eta")
        if self.n_step < 1 or self.burn_in < 0:
            raise SettingError(
                "n_step must be at least 1 and burn_in not negative, "
                f"got n_step={self.n_step}, burn_in={self.burn_in}"
            )
        check_above_0(self, "huber")

    def check(self, net: Network) -> str:
        """Return what is wrong unless actions are one of n, whose values are the outputs."""
        if net.head.kind == "categorical":
            return ""
        return (
            "R2D2Loss needs a policy whose outputs are the values of n actions "
            f"(fl.networks.RecurrentQNetwork), not {net.name}"
        )

    def averaged(self, valid: Array) -> Array:
        """Return the rows after the burn-in."""
        return valid[self.burn_in :]

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        self._check_length(batch["valid"].shape[0])
        obs = with_last(batch["obs"], batch["bootstrap_obs"])
        values = policy(params, obs, burn_in=self.burn_in)[0]
        rows = {
            name: batch[name][self.burn_in :]
            for name in ("action", "reward", "terminated", "truncated", "valid", "weight")
            if name in batch
        }
        target = jax.lax.stop_gradient(self._targets(policy, values, obs, rows, batch))
        value, valid = _first(values).logit(rows["action"]), rows["valid"]
        # The target of a masked row means nothing, and might not even be finite.
        error = jnp.where(valid, target - value, 0.0)
        row_losses = error**2 / 2 if self.huber is None else huber(error, self.huber)
        return weighted_mean(row_losses, rows), {
            "q_mean": mean(value, valid),
            "td_error": mean(jnp.abs(error), valid),
            "priority": self._priority(jnp.abs(error), valid),
        }

    def _check_length(self, length: int) -> None:
        """Raise an error if burn-in leaves nothing of the sequences.

        Raises:
            ContractError: with the ways out.
        """
        if self.burn_in >= length:
            raise ContractError(
                f"burn_in={self.burn_in} leaves no row of sequences of {length} to train on; "
                "lower burn_in, or raise sequence_length of the replay"
            )

    def _targets(
        self,
        policy: Bound,
        values: Any,
        obs: Any,
        rows: Mapping[str, Array],
        batch: Mapping[str, Array],
    ) -> Array:
        """Return the targets ``[T, B]`` of the values of the actions that were taken.

        Args:
            policy: the policy.
            values: the newest action values, of all rows and the observation after the last.
            obs: the observations, with those of the burn-in and the one after the last row.
            rows: the fields of the rows to train on, ``[T, B]``.
            batch: what the loss was given.
        """
        target_values = policy(batch["target_params"], obs, burn_in=self.burn_in)[0]
        # Choosing and evaluating by one network overestimates: its errors are chosen, too.
        choosing = values if self.double else target_values
        value_tp1 = target_values.logit(choosing.mode())[1:]
        if self.rescale:
            value_tp1 = unscaled(value_tp1)
        returns = jax.vmap(
            partial(n_step_returns, gamma=self.gamma, n_step=self.n_step), in_axes=1, out_axes=1
        )(rows["reward"], value_tp1, rows["terminated"], rows["truncated"])
        return rescaled(returns) if self.rescale else returns

    def _priority(self, error: Array, valid: Array) -> Array:
        """Return the priority ``[B]`` of sequences by their rows' absolute errors ``[T, B]``."""
        means = jnp.sum(error, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1)
        return self.eta * jnp.max(error, axis=0) + (1 - self.eta) * means


def _first(values: Any) -> Any:
    """Return the action values of all rows but the last."""
    return jax.tree.map(lambda x: x[:-1], values)
