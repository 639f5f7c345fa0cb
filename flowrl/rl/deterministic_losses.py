"""Losses of deterministic policies, on transitions that are sampled from a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from flowrl.graph.settings import check_not_negative
from flowrl.rl.losses import Bound, Loss, Metrics
from flowrl.rl.masked import mean
from flowrl.rl.value_losses import TRANSITION, no_recurrence, weighted_mean

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any


@runtime_checkable
class Criticised(Protocol):
    """A module with critics of its actions."""

    def critic(self, obs: Any, action: Array) -> Array:
        """Return the values ``[critics, N]`` of actions ``[N, d]`` in [-1, 1]."""


@dataclass(frozen=True)
class TD3Loss(Loss):
    """Critics that learn from smoothed target actions, and an actor that follows their gradient.

    The loss of TD3 (Fujimoto et al. 2018, algorithm 1), without its delays, which are settings of
    `Optimizers` and of `UpdateTarget`. With one critic and no `target_noise` it is that of DDPG
    (Lillicrap et al. 2016, algorithm 1).

    The module is `fl.networks.TD3Network` or one like it: the mode of what a call returns is the
    action, ``critic(obs, action)`` returns the values ``[critics, N]`` of actions in [-1, 1], and
    ``critic(obs, action, 1)`` those ``[1, N]`` of the first critic, by which the actor learns.

    Args:
        target_noise: standard deviation of the noise on target actions, where 1 is half the range
            of an action; 0: none (default 0.2).
        target_noise_clip: largest size of this noise (default 0.5).

    Raises:
        SettingError: one of them is negative.
    """

    target_noise: float = 0.2
    target_noise_clip: float = 0.5

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    random: ClassVar[bool] = True
    deterministic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_not_negative(self, "target_noise", "target_noise_clip")

    def check(self, net: Network) -> str:
        """Return what is wrong unless the policy has critics and is not recurrent."""
        if net.head.kind != "tanh_gaussian" or not net.layers(Criticised):
            return (
                f"TD3Loss needs a policy with critics (fl.networks.TD3Network), not {net.name}; "
                "DQNLoss is for fl.networks.QNetwork"
            )
        return no_recurrence(self, net, "take fl.networks.TD3Network")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[dict[str, Array], Metrics]:
        """Return the losses of critics and actor, and the metrics."""
        valid = batch["valid"]
        target = self._target(policy, batch)
        error = policy(params, batch["obs"], batch["action"], method="critic") - target
        critic_loss = weighted_mean((error**2).sum(0), batch)

        # The actor must not train the critics: it follows their gradient by its actions alone.
        fixed = jax.lax.stop_gradient(params)
        action = policy(params, batch["obs"])[0].mode()
        # Not `[0]` of all of them: XLA would compute the others, and their gradients, for nothing.
        (value,) = policy(fixed, batch["obs"], action, 1, method="critic")
        actor_loss = -mean(value, valid)
        return {"critic": critic_loss, "actor": actor_loss}, {
            "q_mean": mean(target, valid),
            "td_error": mean(jnp.abs(error).mean(0), valid),
            "priority": jnp.abs(error).mean(0),
        }

    def _target(self, policy: Bound, batch: Mapping[str, Array]) -> Array:
        """Return the targets ``[N]``: the smallest value of the target critics at noisy actions."""
        params, next_obs = batch["target_params"], batch["next_obs"]
        keys = jax.random.wrap_key_data(batch["seed"])
        # Each row has its own key: what is drawn for it does not depend on how rows are split up.
        noise = jax.vmap(lambda key: jax.random.normal(key, batch["action"].shape[1:]))(keys)
        most = self.target_noise_clip
        noise = jnp.clip(self.target_noise * noise, -most, most)
        action = jnp.clip(policy(params, next_obs)[0].mode() + noise, -1, 1)
        value = policy(params, next_obs, action, method="critic").min(0)
        return jax.lax.stop_gradient(batch["reward"] + batch["discount"] * value)
