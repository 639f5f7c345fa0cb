"""Losses that learn from a dataset alone: behaviour cloning, and what improves on it.

They are functions as those of `losses` are. ``batch`` holds transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.core.mesh import mean_of_devices
from flowrl.errors import SettingError
from flowrl.graph.settings import check_above_0, check_not_negative
from flowrl.rl.actor_critics import ActorCritics
from flowrl.rl.deterministic_losses import Criticised
from flowrl.rl.images import Images
from flowrl.rl.losses import Bound, Loss, Metrics
from flowrl.rl.masked import mean
from flowrl.rl.value_losses import TRANSITION, SACLoss, no_recurrence

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any


@dataclass(frozen=True)
class BCLoss(Loss):
    """Behaviour cloning: the negative log-likelihood of the dataset's actions (Pomerleau 1989).

    Returns play no part in it, so the policy becomes as good as the data's mean, or as the one
    policy that they are from.
    """

    needs: ClassVar[tuple[str, ...]] = ("obs", "action")
    on_policy: ClassVar[bool] = False

    def check(self, net: Network) -> str:
        """Return what is wrong unless it trains the whole policy, which must not be recurrent."""
        if net.layers(ActorCritics) and net.layers(Images):
            return (
                f"the convolutions of {net.name} learn from its critics' loss, and BCLoss trains "
                "no critics; take fl.networks.MLP"
            )
        return no_recurrence(self, net, "take fl.networks.MLP")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        dist, _ = policy(params, batch["obs"])
        loss = -mean(dist.log_prob(batch["action"]), batch["valid"])
        return loss, {"loss/policy": loss}


def _no_value(loss: Loss, net: Network, way: str) -> str:
    """Return why the loss can't train a policy whose value is 0; empty if it is not always so."""
    if not net.layers(ActorCritics):
        return ""
    return (
        f"{type(loss).__name__} learns the value of observations, of which {net.name} has none "
        f"beside its critics; {way}"
    )


@dataclass(frozen=True)
class MARWILLoss(Loss):
    """Monotonic advantage re-weighted imitation learning (Wang et al. 2018, algorithm 1).

    Behaviour cloning in which each action counts by the exponential of its advantage: what did
    better than the value says is imitated more. The advantage is that of the return to go, which a
    `Dataset` with ``n_step=None`` gives; it is divided by a running root mean square, so that
    `beta` has no unit.

    Args:
        beta: how much the advantage counts; 0 is behaviour cloning (default 1.0).
        vf_coef: coefficient of the value loss (default 1.0).
        max_weight: the largest weight of an action (default 20.0).
        rate: share of each update in the running mean square of advantages (default 0.01).

    Raises:
        SettingError: a number is out of its range.
    """

    beta: float = 1.0
    vf_coef: float = 1.0
    max_weight: float = 20.0
    rate: float = 0.01

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_not_negative(self, "beta", "vf_coef")
        check_above_0(self, "max_weight")
        if not 0 < self.rate <= 1:
            raise SettingError(f"rate must be above 0 and at most 1, got {self.rate}")

    def check(self, net: Network) -> str:
        """Return what is wrong unless the policy decides by single observations."""
        way = "take fl.networks.MLP"
        return _no_value(self, net, way) or no_recurrence(self, net, way)

    def init(self) -> dict[str, Array]:
        """Return the running mean square of advantages, and the weight of what it is a mean of."""
        return {"square": jnp.float32(0), "seen": jnp.float32(0)}

    def adapt(self, state: dict[str, Array], metrics: Mapping[str, Array]) -> dict[str, Array]:
        """Return both after an update.

        Dividing the one by the other corrects for the start at 0 (Kingma and Ba 2015, section 3).
        """
        keep = 1 - self.rate
        square = keep * state["square"] + self.rate * metrics["advantage_square"]
        return {"square": square, "seen": keep * state["seen"] + self.rate}

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        valid = batch["valid"]
        dist, value = policy(params, batch["obs"])
        next_value = policy(jax.lax.stop_gradient(params), batch["next_obs"])[1]
        # Where an episode was cut short, the value stands for what would have come.
        target = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * next_value)
        advantage = target - jax.lax.stop_gradient(value)
        # Devices that share the rows divide by the same number, that of all of them.
        now = mean_of_devices(mean(advantage**2, valid), jnp.sum(valid))
        seen = batch["seen"]
        square = jnp.where(seen > 0, batch["square"] / jnp.maximum(seen, 1e-8), now)
        scaled = self.beta * advantage / jnp.sqrt(square + 1e-8)
        weight = jnp.minimum(jnp.exp(jnp.minimum(scaled, 50.0)), self.max_weight)
        policy_loss = -mean(weight * dist.log_prob(batch["action"]), valid)
        value_loss = 0.5 * mean((value - target) ** 2, valid)
        return policy_loss + self.vf_coef * value_loss, {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "advantage_square": now,
            "weight_mean": mean(weight, valid),
        }


@dataclass(frozen=True)
class IQLLoss(Loss):
    """Implicit Q-learning (Kostrikov et al. 2022): no action is judged that the data do not have.

    The value is an upper expectile of the critics' values of the dataset's actions (equation 5),
    the critics learn from it (equation 6), and the policy imitates actions by the exponential of
    their advantage (equation 7).

    The module is `fl.networks.IQLNetwork` or one like it: a call returns the distribution and the
    value, and ``critic(obs, action)`` the values ``[2, N]`` of actions.

    Args:
        expectile: which expectile the value is, from 0 to 1; 0.5 is the mean (default 0.7).
        beta: how much the advantage counts, the inverse temperature (default 3.0).
        max_weight: the largest weight of an action (default 100.0).

    Raises:
        SettingError: a number is out of its range.
    """

    expectile: float = 0.7
    beta: float = 3.0
    max_weight: float = 100.0

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.expectile < 1:
            raise SettingError(f"expectile must be between 0 and 1, got {self.expectile}")
        check_not_negative(self, "beta")
        check_above_0(self, "max_weight")

    def check(self, net: Network) -> str:
        """Return what is wrong unless actions are in a Box and the policy is not recurrent."""
        if not (net.head.continuous and net.layers(Criticised)):
            return (
                "IQLLoss needs a policy with a value and critics of actions in a Box "
                f"(fl.networks.IQLNetwork), not {net.name}; MARWILLoss is for one of n actions"
            )
        way = "take fl.networks.IQLNetwork"
        return _no_value(self, net, way) or no_recurrence(self, net, way)

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        valid, obs, action = batch["valid"], batch["obs"], batch["action"]
        dist, value = policy(params, obs)
        # The smaller of both critics is less of an overestimate.
        judged = policy(batch["target_params"], obs, action, method="critic").min(0)
        advantage = jax.lax.stop_gradient(judged) - value
        value_loss = mean(expectile_loss(advantage, self.expectile), valid)

        next_value = policy(jax.lax.stop_gradient(params), batch["next_obs"])[1]
        target = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * next_value)
        error = policy(params, obs, action, method="critic") - target
        critic_loss = mean((error**2).sum(0) / 2, valid)

        # No gradient of the policy's loss flows into the value.
        fixed = self.beta * jax.lax.stop_gradient(advantage)
        weight = jnp.minimum(jnp.exp(jnp.minimum(fixed, 50.0)), self.max_weight)
        policy_loss = -mean(weight * dist.log_prob(action), valid)
        return policy_loss + value_loss + critic_loss, {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/critic": critic_loss,
            "q_mean": mean(judged, valid),
            "weight_mean": mean(weight, valid),
        }


def expectile_loss(x: Array, expectile: float) -> Array:
    """Return squares of `x`, weighed by `expectile` above 0 and by the rest to 1 below.

    Its least mean is at the expectile of what `x` is the distance of (Kostrikov et al. 2022,
    equation 3).
    """
    return jnp.where(x > 0, expectile, 1 - expectile) * x**2


@dataclass(frozen=True)
class CQLLoss(Loss):
    """Conservative Q-learning (Kumar et al. 2020, equation 4), on soft actor-critic.

    To the loss of `SACLoss` it adds what keeps the critics low where there are no data: by how much
    the log-sum-exp of the values of all actions is above the value of the dataset's action. The
    sum is estimated from actions of the policy at both observations and from uniform ones, each
    weighed by the inverse of its density (appendix F).

    The module is `fl.networks.SACNetwork` or one like it.

    Args:
        cql_coef: coefficient of what is added (default 1.0).
        actions: actions of each of the three kinds for an observation (default 10).
        target_entropy: entropy in nats that the temperature steers to; None: minus the number of
            the action's dimensions (default None).

    Raises:
        SettingError: a number is out of its range.
    """

    cql_coef: float = 1.0
    actions: int = 10
    target_entropy: float | None = None

    needs: ClassVar[tuple[str, ...]] = TRANSITION
    on_policy: ClassVar[bool] = False
    target_network: ClassVar[bool] = True
    priorities: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.cql_coef < 0 or self.actions < 1:
            raise SettingError(
                "cql_coef must not be negative and actions be at least 1, "
                f"got cql_coef={self.cql_coef}, actions={self.actions}"
            )

    @property
    def sac(self) -> SACLoss:
        """The loss to which this one adds."""
        return SACLoss(self.target_entropy)

    def check(self, net: Network) -> str:
        """Return what is wrong unless the policy has critics and is not recurrent."""
        return self.sac.check(net).replace("SACLoss", "CQLLoss")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        loss, metrics = self.sac(policy, params, batch)
        gap = self._gap(policy, params, batch)
        return loss + self.cql_coef * gap, {**metrics, "loss/conservative": gap}

    def _gap(self, policy: Bound, params: Any, batch: Mapping[str, Array]) -> Array:
        """Return by how much unseen actions are above those of the dataset, for both critics."""
        fixed = jax.lax.stop_gradient(params)
        width = batch["action"].shape[-1]
        uniform, here, after = _noise(batch, self.actions)
        actions, densities = [uniform], [jnp.full(uniform.shape[:-1], -width * jnp.log(2.0))]
        for obs, noise in ((batch["obs"], here), (batch["next_obs"], after)):
            dist = policy(fixed, obs)[0]
            # The distribution of each row serves all of its actions, which are the first axis.
            sampled, density = jax.vmap(dist.sample_and_log_prob)(noise)
            actions.append(sampled)
            densities.append(density)
        every = jnp.concatenate(actions)
        flat = every.reshape(-1, width)
        # Row i of the batch stands at i, i + N, i + 2 N and so on.
        repeated = jax.tree.map(
            lambda x: jnp.tile(x, (len(every), *(1,) * (x.ndim - 1))), batch["obs"]
        )
        values = policy(params, repeated, flat, method="critic")
        values = values.reshape(2, len(every), -1) - jnp.concatenate(densities)
        seen = policy(params, batch["obs"], batch["action"], method="critic")
        largest = jax.nn.logsumexp(values, axis=1) - jnp.log(float(len(every)))
        return mean((largest - seen).sum(0), batch["valid"])


def _noise(batch: Mapping[str, Array], count: int) -> tuple[Array, Array, Array]:
    """Return uniform actions and two times standard normals, ``[count, N, d]`` each.

    They are made from the random keys of rows: what a row gets does not depend on how rows are
    split up.
    """
    shape = (count, batch["action"].shape[-1])

    def of_row(data: Array) -> tuple[Array, Array, Array]:
        # The loss of SAC uses the key itself.
        keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(data), 1), 3)
        uniform = jax.random.uniform(keys[0], shape, minval=-1.0, maxval=1.0)
        return uniform, jax.random.normal(keys[1], shape), jax.random.normal(keys[2], shape)

    uniform, here, after = jax.vmap(of_row, out_axes=1)(batch["seed"])
    return uniform, here, after
