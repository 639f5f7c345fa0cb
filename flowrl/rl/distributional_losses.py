"""Losses of distributions of returns, on transitions ``[N, ...]`` that are sampled from a replay.

Transitions have the fields of `value_losses`. The module describes the distribution of each
action's return by a layer of `return_distributions`, and its method ``returns(obs)`` returns the
numbers ``[N, n, atoms]`` that this layer reads; a call returns the means of these distributions as
action values, so that acting needs to know no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from flowrl.graph.settings import check_above_0
from flowrl.rl.losses import Bound, Loss, Metrics
from flowrl.rl.masked import mean
from flowrl.rl.return_distributions import CategoricalReturns, QuantileReturns, Returns
from flowrl.rl.value_losses import TRANSITION, huber, no_recurrence, weighted_mean

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any

WAY = "take fl.networks.QNetwork"
"""What to take in place of a recurrent policy."""


@dataclass(frozen=True)
class C51Loss(Loss):
    """Categorical Q-learning towards a target network (C51, Bellemare et al. 2017).

    The loss is the cross-entropy of the predicted distribution with that of the target, projected
    onto the same returns (algorithm 1). The next action is the one of the highest mean. The
    priority of a transition is the KL divergence, which is the cross-entropy without what no
    prediction can take away (Hessel et al. 2018, section 3).

    Args:
        double: the newest parameters choose the next action and the target network evaluates it
            (van Hasselt et al. 2016, equation 4) (default True).
    """

    double: bool = True

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    values: ClassVar[bool] = True

    def check(self, net: Network) -> str:
        """Return what is wrong unless the policy has categorical distributions of returns."""
        wanted = "fl.networks.QNetwork with atoms, v_min and v_max"
        return _unfit(self, net, CategoricalReturns, wanted) or no_recurrence(self, net, WAY)

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        support = policy(params, method="support")
        following = jax.nn.softmax(_next_returns(policy, params, batch, double=self.double))
        returns = batch["reward"][:, None] + batch["discount"][:, None] * support
        target = jax.lax.stop_gradient(projected(returns, following, support))

        logits = _of_actions(policy(params, batch["obs"], method="returns"), batch["action"])
        cross_entropy = -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)
        kl = cross_entropy + jnp.sum(xlogy(target, target), axis=-1)
        value, valid = jax.nn.softmax(logits) @ support, batch["valid"]
        return weighted_mean(cross_entropy, batch), {
            "q_mean": mean(value, valid),
            "td_error": mean(jnp.abs(target @ support - value), valid),
            # Rounding may leave a little less than 0, which is no probability of a sample.
            "priority": jnp.maximum(jax.lax.stop_gradient(kl), 0.0),
        }


@dataclass(frozen=True)
class QRLoss(Loss):
    """Quantile regression of returns towards a target network (QR-DQN, Dabney et al. 2018).

    Each predicted quantile meets every return of the target's distribution (equation 10 and
    algorithm 1). The next action is the one of the highest mean. The priority of a transition is
    the mean absolute TD error, over all pairs of a quantile and a return.

    Args:
        double: the newest parameters choose the next action and the target network evaluates it
            (van Hasselt et al. 2016, equation 4) (default True).
        huber: absolute error from which on the loss is linear; None: linear throughout (default
            1.0).

    Raises:
        SettingError: `huber` is not above 0.
    """

    double: bool = True
    huber: float | None = 1.0

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    values: ClassVar[bool] = True

    def check(self, net: Network) -> str:
        """Return what is wrong unless the policy has quantiles of returns."""
        wanted = "fl.networks.QNetwork with atoms, and without v_min and v_max"
        return _unfit(self, net, QuantileReturns, wanted) or no_recurrence(self, net, WAY)

    def __post_init__(self) -> None:
        check_above_0(self, "huber")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        following = _next_returns(policy, params, batch, double=self.double)
        returns = batch["reward"][:, None] + batch["discount"][:, None] * following
        target = jax.lax.stop_gradient(returns)

        quantiles = _of_actions(policy(params, batch["obs"], method="returns"), batch["action"])
        # [N, atoms, atoms]: each quantile in a line, with an error for every return of the target.
        errors = target[:, None, :] - quantiles[:, :, None]
        sizes = jnp.abs(errors) if self.huber is None else huber(errors, self.huber)
        atoms = quantiles.shape[-1]
        probabilities = (jnp.arange(atoms) + 0.5) / atoms
        # A quantile at 0.9 is nine times as wrong below a return as above it.
        shares = jnp.abs(probabilities[:, None] - (jax.lax.stop_gradient(errors) < 0))
        row_losses = (shares * sizes).mean(-1).sum(-1)
        value, valid = quantiles.mean(-1), batch["valid"]
        return weighted_mean(row_losses, batch), {
            "q_mean": mean(value, valid),
            "td_error": mean(jnp.abs(target.mean(-1) - value), valid),
            "priority": jnp.abs(jax.lax.stop_gradient(errors)).mean((-1, -2)),
        }


def projected(returns: Array, probabilities: Array, support: Array) -> Array:
    """Return distributions over other returns, projected onto those of the support.

    Each probability is shared by the two nearest returns of the support, by how near they are; what
    lies outside goes to the outermost (Bellemare et al. 2017, equation 7).

    Args:
        returns: ``[N, atoms]``.
        probabilities: of these returns, ``[N, atoms]``.
        support: returns at equal distances, ``[atoms]``.

    Returns:
        Probabilities of the returns of the support, ``[N, atoms]``.
    """
    inside = jnp.clip(returns, support[0], support[-1])
    apart = (support[-1] - support[0]) / (support.shape[0] - 1)
    distances = jnp.abs(inside[:, None, :] - support[:, None]) / apart
    return jnp.sum(jnp.clip(1 - distances, 0, 1) * probabilities[:, None, :], axis=-1)


def _unfit(loss: Loss, net: Network, kind: type[Returns], wanted: str) -> str:
    """Return why a loss can't train a network; empty if it has such distributions of returns."""
    if net.head.kind == "categorical" and net.layers(kind):
        return ""
    other = "DQNLoss is for action values alone"
    if net.layers(CategoricalReturns):
        other = "C51Loss is for categorical distributions"
    elif net.layers(QuantileReturns):
        other = "QRLoss is for quantiles"
    return (
        f"{type(loss).__name__} needs a policy with distributions of returns ({wanted}), and "
        f"{net.name} has others or none; {other}"
    )


def _next_returns(policy: Bound, params: Any, batch: Mapping[str, Array], *, double: bool) -> Array:
    """Return what the target network says of the next action's return, ``[N, atoms]``."""
    # Choosing and evaluating by one network overestimates: its errors are chosen, too.
    choosing = jax.lax.stop_gradient(params) if double else batch["target_params"]
    # A call of the policy knows what the mask of the observations rules out.
    best = policy(choosing, batch["next_obs"])[0].mode()
    return _of_actions(policy(batch["target_params"], batch["next_obs"], method="returns"), best)


def _of_actions(x: Array, action: Array) -> Array:
    """Return the numbers ``[N, atoms]`` of one action in each row, from ``x [N, n, atoms]``."""
    return jnp.take_along_axis(x, action[:, None, None], axis=1)[:, 0]
