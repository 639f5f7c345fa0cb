"""Losses of action values, on transitions ``[N, ...]`` that are sampled from a replay.

Transitions have the fields ``obs action reward next_obs discount``, and ``weight`` where the replay
gives importance weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from flowrl.graph.settings import check_above_0
from flowrl.rl.losses import Bound, Loss, Metrics
from flowrl.rl.masked import mean
from flowrl.rl.return_distributions import Returns

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any
TRANSITION = ("obs", "action", "reward", "next_obs", "discount")
"""The fields of a transition."""


@runtime_checkable
class Mixing(Protocol):
    """A module whose actions have several parts, and which mixes the values of these."""

    def mix(self, obs: Any, values: Array) -> Array:
        """Return the values ``[N]`` of whole actions, from those ``[N, n]`` of their n parts."""


@runtime_checkable
class Tempered(Protocol):
    """A module with a temperature, which weighs the entropy of its policy."""

    def log_alpha(self) -> Array:
        """Return the logarithm of the temperature."""


def huber(x: Array, delta: float) -> Array:
    """Return ``x^2 / 2`` up to `delta` from 0, and straight lines beyond (Huber 1964)."""
    quadratic = jnp.minimum(jnp.abs(x), delta)
    return quadratic * (jnp.abs(x) - quadratic / 2)


def weights_of(batch: Mapping[str, Array]) -> Array:
    """Return the weight of each row: its importance weight if it has one, 0 where it is masked."""
    valid: Array = batch["valid"]
    if "weight" in batch:
        return jnp.where(valid, batch["weight"], 0.0)
    return valid.astype(jnp.float32)


def weighted_mean(x: Array, batch: Mapping[str, Array]) -> Array:
    """Return the sum of `x` times `weights_of` its rows, over the number of valid rows."""
    valid = batch["valid"]
    # The sum of the weights must not be divided by: it would undo the importance sampling.
    weighted = jnp.sum(weights_of(batch) * jnp.where(valid, x, 0.0))
    return weighted / jnp.maximum(jnp.sum(valid), 1)


def no_recurrence(loss: Loss, net: Network, way: str) -> str:
    """Return why the loss can't train a recurrent policy; empty if the policy is not recurrent.

    Args:
        loss: the loss.
        net: the policy.
        way: the way out.
    """
    if not net.recurrent:
        return ""
    return (
        f"{type(loss).__name__} trains on single transitions, "
        f"which a recurrent policy such as {net.name} can't; {way}"
    )


def _whole(policy: Bound, params: Any, obs: Any, values: Array) -> Array:
    """Return the values ``[N]`` of whole actions, from ``[N]``, or ``[N, n]`` of their n parts."""
    if values.ndim == 1:
        return values
    mixed: Array = policy(params, obs, values, method="mix")
    return mixed


@dataclass(frozen=True)
class DQNLoss(Loss):
    """Q-learning towards a target network (Mnih et al. 2015).

    The action outputs of the policy are action values. Where an action has several choices, such as
    those of a team's agents, each has values of its own, and the module's ``mix(obs, values)``
    makes of those that are taken the value of the whole: a sum (VDN, Sunehag et al. 2017) or a
    monotonic network (QMIX, Rashid et al. 2018, equation 5). The target is mixed by the target
    network, of each part's best choice.

    Args:
        double: the newest parameters choose the next action and the target network evaluates it
            (van Hasselt et al. 2016, equation 4) (default True).
        huber: absolute error from which on the loss is linear; None: squares throughout (default
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
        """Return what is wrong unless actions are choices whose values are known, or mixed."""
        mixed = net.head.kind == "multi_categorical" and bool(net.layers(Mixing))
        if net.head.kind != "categorical" and not mixed:
            return (
                "DQNLoss needs a policy whose outputs are action values (fl.networks.QNetwork, or "
                f"TeamQNetwork for actions of several choices), not {net.name}; SACLoss is for "
                "fl.networks.SACNetwork"
            )
        if net.layers(Returns):
            return (
                f"DQNLoss would train only the means of the distributions that {net.name} has; "
                "take C51Loss or QRLoss, or leave its atoms out"
            )
        return no_recurrence(
            self,
            net,
            "take fl.networks.QNetwork, or R2D2Loss and Replay(..., sequence_length=...) (fl.r2d2)",
        )

    def __post_init__(self) -> None:
        check_above_0(self, "huber")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        next_values = policy(batch["target_params"], batch["next_obs"])[0]
        # Choosing and evaluating by one network overestimates: its errors are chosen, too.
        choosing = next_values
        if self.double:
            choosing = policy(jax.lax.stop_gradient(params), batch["next_obs"])[0]
        best = next_values.logit(choosing.mode())
        next_value = _whole(policy, batch["target_params"], batch["next_obs"], best)
        target = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * next_value)

        taken = policy(params, batch["obs"])[0].logit(batch["action"])
        value = _whole(policy, params, batch["obs"], taken)
        error, valid = target - value, batch["valid"]
        row_losses = error**2 / 2 if self.huber is None else huber(error, self.huber)
        return weighted_mean(row_losses, batch), {
            "q_mean": mean(value, valid),
            "td_error": mean(jnp.abs(error), valid),
            "priority": jnp.abs(error),
        }


@dataclass(frozen=True)
class SACLoss(Loss):
    """Soft actor-critic (Haarnoja et al. 2018b).

    It trains two critics, a policy that is rewarded for its entropy, and the temperature alpha, by
    which that entropy is weighed (section 5, equation 18).

    The module is `fl.networks.SACNetwork` or one like it: a call returns the squashed Gaussian,
    ``critic(obs, action)`` returns the values ``[2, N]`` of actions in [-1, 1], and ``log_alpha()``
    the logarithm of the temperature.

    Args:
        target_entropy: entropy in nats that the temperature steers to; None: minus the number of
            the action's dimensions (table 1) (default None).
    """

    target_entropy: float | None = None

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def check(self, net: Network) -> str:
        """Return what is wrong unless the policy has critics and is not recurrent."""
        if net.head.kind != "tanh_gaussian":
            return (
                f"SACLoss needs a policy with critics (fl.networks.SACNetwork), not {net.name}; "
                "DQNLoss is for fl.networks.QNetwork"
            )
        if not net.layers(Tempered):
            return (
                "SACLoss needs a policy with a temperature (fl.networks.SACNetwork), and "
                f"{net.name} has no method log_alpha; TD3Loss needs none"
            )
        return no_recurrence(self, net, "take fl.networks.SACNetwork")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        valid = batch["valid"]
        # No loss but the critics' may train the critics, and the target may train nothing.
        fixed = jax.lax.stop_gradient(params)
        noise, next_noise = _noise_of_rows(batch)
        log_alpha = policy(params, method="log_alpha")
        alpha = jnp.exp(jax.lax.stop_gradient(log_alpha))

        target = _soft_target(policy, fixed, alpha, next_noise, batch)
        error = policy(params, batch["obs"], batch["action"], method="critic") - target
        critic_loss = weighted_mean((error**2).sum(0) / 2, batch)

        action, logp = policy(params, batch["obs"])[0].sample_and_log_prob(noise)
        value = policy(fixed, batch["obs"], action, method="critic").min(0)
        actor_loss = mean(alpha * logp - value, valid)

        target_entropy = self.target_entropy
        if target_entropy is None:
            target_entropy = -float(batch["action"].shape[-1])
        entropy = -mean(logp, valid)
        alpha_loss = log_alpha * jax.lax.stop_gradient(entropy - target_entropy)
        return critic_loss + actor_loss + alpha_loss, {
            "loss/critic": critic_loss,
            "loss/actor": actor_loss,
            "entropy": entropy,
            "alpha": alpha,
            "q_mean": mean(target, valid),
            "td_error": mean(jnp.abs(error).mean(0), valid),
            "priority": jnp.abs(error).mean(0),
        }


def _noise_of_rows(batch: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return two standard normals per action part, ``[N, d]`` each, by the random keys of rows."""
    shape = batch["action"].shape
    keys = jax.random.wrap_key_data(batch["seed"])
    # Each row has its own key: what is drawn for it does not depend on how rows are split up.
    both = jax.vmap(lambda key: jax.random.normal(key, (2, *shape[1:])))(keys)
    noise, next_noise = jnp.moveaxis(both, 1, 0)
    return noise, next_noise


def _soft_target(
    policy: Bound, params: Any, alpha: Array, noise: Array, batch: Mapping[str, Array]
) -> Array:
    """Return the targets ``[N]`` of both critics: the smaller of the target critics' values.

    The next action is sampled from the policy, and its log-density times alpha is subtracted.
    """
    action, logp = policy(params, batch["next_obs"])[0].sample_and_log_prob(noise)
    values = policy(batch["target_params"], batch["next_obs"], action, method="critic")
    next_value = values.min(0) - alpha * logp
    return jax.lax.stop_gradient(batch["reward"] + batch["discount"] * next_value)
