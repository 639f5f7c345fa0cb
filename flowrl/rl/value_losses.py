"""Losses of action values, on transitions ``[N, ...]`` drawn from a replay: ``obs action reward next_obs discount``, and ``weight`` if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.errors import SettingError
from flowrl.rl.losses import Bound, Loss, Metrics, mean

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any
TRANSITION = ("obs", "action", "reward", "next_obs", "discount")


def huber(x: Array, delta: float) -> Array:
    """``x^2 / 2`` up to `delta` from 0, and straight lines beyond (Huber 1964)."""
    most = jnp.minimum(jnp.abs(x), delta)
    return most * (jnp.abs(x) - most / 2)


def weights_of(batch: Mapping[str, Array]) -> Array:
    """How much each row counts: its importance weight if it has one, 0 where it is not valid."""
    valid: Array = batch["valid"]
    return (
        jnp.where(valid, batch["weight"], 0.0) if "weight" in batch else valid.astype(jnp.float32)
    )


def _without_memory(loss: Loss, net: Network, other: str) -> str:
    what = f"{type(loss).__name__} trains on single steps drawn from a replay, which a recurrent policy such as {net.name} can't"
    return f"{what}; take fl.{other}" if net.recurrent else ""


@dataclass(frozen=True)
class DQNLoss(Loss):
    """Q-learning towards a target network (Mnih et al. 2015), of a policy whose action outputs are action values.

    Args:
        double: the action that follows is chosen by the newest parameters and judged by the target's (van Hasselt et al. 2016, equation 4).
        huber: the error from which on the loss is linear; None for squares throughout.
    """

    double: bool = True
    huber: float | None = 1.0

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    values: ClassVar[bool] = True

    def check(self, net: Network) -> str:
        """Only for a policy without memory, and one of n actions."""
        if net.head.kind != "categorical":
            return f"DQNLoss needs a policy whose outputs are action values (fl.QNetwork), not {net.name}; SACLoss is for fl.SACNetwork"
        return _without_memory(self, net, "QNetwork")

    def __post_init__(self) -> None:
        if self.huber is not None and self.huber <= 0:
            raise SettingError(f"huber must be above 0 or None, got {self.huber}")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The loss and its metrics."""
        behind = policy(batch["target_params"], batch["next_obs"])[0].logits
        chooser = (
            policy(jax.lax.stop_gradient(params), batch["next_obs"])[0].logits
            if self.double
            else behind
        )
        following = jnp.take_along_axis(behind, jnp.argmax(chooser, -1)[:, None], -1)[:, 0]
        target = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * following)
        values = policy(params, batch["obs"])[0].logits
        value = jnp.take_along_axis(values, batch["action"][:, None].astype(jnp.int32), -1)[:, 0]
        error, valid = target - value, batch["valid"]
        each = error**2 / 2 if self.huber is None else huber(error, self.huber)
        loss = jnp.sum(weights_of(batch) * jnp.where(valid, each, 0.0)) / jnp.maximum(
            jnp.sum(valid), 1
        )
        return loss, {
            "q_mean": mean(value, valid),
            "td_error": mean(jnp.abs(error), valid),
            "priority": jnp.abs(error),
        }


@dataclass(frozen=True)
class SACLoss(Loss):
    """Soft actor-critic (Haarnoja et al. 2018b): two critics, a policy rewarded for its entropy, and the price of that (section 5, equation 18).

    The module is `fl.SACNetwork` or one like it: called it gives the squashed Gaussian, ``critic(obs, action)`` gives ``[2, N]`` values of actions
    in [-1, 1], and ``log_alpha()`` the logarithm of the price.

    Args:
        target_entropy: in nats, what the price steers to; None for minus the number of the action's parts (table 1).
    """

    target_entropy: float | None = None

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def check(self, net: Network) -> str:
        """Only for a policy without memory, and with critics."""
        if net.head.kind != "tanh_gaussian":
            return f"SACLoss needs a policy with critics (fl.SACNetwork), not {net.name}; DQNLoss is for fl.QNetwork"
        return _without_memory(self, net, "SACNetwork")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The loss and its metrics."""
        valid, fixed = batch["valid"], jax.lax.stop_gradient(params)
        shape = batch["action"].shape
        keys = jax.random.wrap_key_data(batch["seed"])
        now, then = jnp.moveaxis(
            jax.vmap(lambda key: jax.random.normal(key, (2, *shape[1:])))(keys), 1, 0
        )
        log_alpha = policy(params, method="log_alpha")
        alpha = jnp.exp(jax.lax.stop_gradient(log_alpha))

        following = policy(fixed, batch["next_obs"])[0]
        action, logp = following.draw(then)
        behind = (
            policy(batch["target_params"], batch["next_obs"], action, method="critic").min(0)
            - alpha * logp
        )
        target = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * behind)
        error = policy(params, batch["obs"], batch["action"], method="critic") - target
        critic = jnp.sum(
            weights_of(batch) * jnp.where(valid, (error**2).sum(0) / 2, 0.0)
        ) / jnp.maximum(jnp.sum(valid), 1)

        action, logp = policy(params, batch["obs"])[0].draw(now)
        actor = mean(
            alpha * logp - policy(fixed, batch["obs"], action, method="critic").min(0), valid
        )

        wanted = -float(shape[-1]) if self.target_entropy is None else self.target_entropy
        entropy = -mean(logp, valid)
        price = log_alpha * jax.lax.stop_gradient(entropy - wanted)
        return critic + actor + price, {
            "loss/critic": critic,
            "loss/actor": actor,
            "entropy": entropy,
            "alpha": alpha,
            "q_mean": mean(target, valid),
            "td_error": mean(jnp.abs(error).mean(0), valid),
            "priority": jnp.abs(error).mean(0),
        }
