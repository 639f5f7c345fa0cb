"""Losses. One is a function ``(policy, params, batch) -> (loss, metrics)``; these are such functions with settings.

``policy(params, obs)`` gives the distribution over actions and the value; `batch` maps field names to arrays ``[N, ...]``, or for a
loss of whole sequences and for recurrent policies ``[T, B, ...]``. Every mean weighs rows by ``valid``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.core.mesh import mean_of_devices
from flowrl.errors import ContractError, SettingError
from flowrl.rl.distributions import Distribution
from flowrl.rl.returns import vtrace

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any
Bound = Callable[..., Any]
"""``policy(params, obs)`` gives the distribution and the value; ``policy(params, *args, method="critic")`` what that method of the module does."""
Metrics = dict[str, Array]


def mean(x: Array, weight: Array) -> Array:
    """The mean of `x` weighed by `weight`, of one shape; 0 where all weights are 0."""
    w = weight.astype(jnp.float32)
    total = jnp.sum(w)
    return jnp.sum(jnp.where(w > 0, x, 0.0) * w) / jnp.where(total > 0, total, 1.0)


def standardized(x: Array, valid: Array) -> Array:
    """`x` with mean 0 and variance 1 over the valid rows, of all devices that share them, and 0 at the others."""

    def over_all(x: Array) -> Array:
        return mean_of_devices(mean(x, valid), jnp.sum(valid))

    centred = x - over_all(x)
    return jnp.where(valid, centred / jnp.sqrt(over_all(centred**2) + 1e-8), 0.0)


def without_masked_nans(rows: Mapping[str, Array]) -> dict[str, Array]:
    """Rows ``[N, ...]`` or ``[T, B, ...]`` with 0 in place of every NaN or infinity at the masked ones.

    Losses weigh rows by ``valid``, but a NaN times 0 is still NaN. All finite numbers stay as they are: a masked row holds the final observation
    of an episode, from which the row before it is bootstrapped where the episode was truncated.
    """

    def clean(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        valid = rows["valid"]
        valid = valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim))
        return jnp.where(valid | jnp.isfinite(x), x, 0)

    return {k: clean(v) for k, v in rows.items()}


class Loss(ABC):
    """A loss with settings, and what it says of itself to the checks."""

    needs: ClassVar[tuple[str, ...]]
    """The fields that a batch must have."""
    on_policy: ClassVar[bool]
    """Right only on data of the newest weights."""
    sequences: ClassVar[bool] = False
    """Takes whole columns ``[T, B, ...]`` and the column fields, ``bootstrap_obs`` among them, in place of single steps."""
    target_network: ClassVar[bool] = False
    """Takes ``target_params``: a copy of the parameters that `UpdateTarget` renews."""
    priorities: ClassVar[bool] = False
    """Tells how far off each row was as the metric ``priority [N]``, for a replay to draw by."""
    sampled: ClassVar[bool] = False
    """Learns only from actions that were drawn from the policy's own distribution (`Explore.samples`): it takes ``logp``, or the
    policy's own probabilities, for those of the behaviour policy."""
    values: ClassVar[bool] = False
    """Takes the policy's action outputs for action values, from which no actions are drawn by chance."""
    random: ClassVar[bool] = False
    """Takes ``seed``: random ``uint32[N, 2]``, other ones for every update, of which `jax.random.wrap_key_data` makes a key of each row."""

    @property
    def stops_early(self) -> bool:
        """Whether it may end an update before its last gradient step."""
        return False

    def stop(self, metrics: Mapping[str, Array]) -> Array:
        """Whether the metrics of a minibatch call for an end of the update before the gradient step is taken, where it `stops_early`."""
        return jnp.bool_(False)

    def check(self, net: Network) -> str:
        """What is wrong with training this network by it; empty if nothing is."""
        return ""

    def init(self) -> dict[str, Array]:
        """Numbers that adapt from update to update; they stand in `batch` under their names."""
        return {}

    def adapt(self, state: dict[str, Array], metrics: Mapping[str, Array]) -> dict[str, Array]:
        """Those numbers after an update with these mean metrics."""
        return state

    @abstractmethod
    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The scalar to minimise, and scalars to report: means over the rows that are valid, for devices that share a minibatch average theirs."""


@dataclass(frozen=True)
class PPOLoss(Loss):
    """Proximal policy optimisation (Schulman et al. 2017, equation 9; with equation 8 where `kl_penalty_target` is set).

    Args:
        clip_ratio: how far the probability ratio may move from 1.
        vf_coef: weight of the value loss.
        value_clip: how far a value may move from the old one; None for any (Engstrom et al. 2020 found no need of it).
        ent_coef: weight of the entropy bonus.
        kl_penalty_target: the KL divergence that an adaptive penalty steers to; None for no penalty.
        target_kl: ends an update as soon as a minibatch's KL divergence exceeds 1.5 times this; None for never.
    """

    clip_ratio: float = 0.2
    vf_coef: float = 0.5
    value_clip: float | None = None
    ent_coef: float = 0.0
    kl_penalty_target: float | None = None
    target_kl: float | None = None

    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "logp", "value", "advantage", "target")
    on_policy: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clip_ratio <= 0:
            raise SettingError(f"clip_ratio must be above 0, got {self.clip_ratio}")

    @property
    def stops_early(self) -> bool:
        """Where `target_kl` is set."""
        return self.target_kl is not None

    def stop(self, metrics: Mapping[str, Array]) -> Array:
        """Whether the KL divergence is above 1.5 times `target_kl`."""
        return metrics["kl"] > (jnp.inf if self.target_kl is None else 1.5 * self.target_kl)

    def init(self) -> dict[str, Array]:
        """The weight of the KL penalty, if there is one."""
        return {} if self.kl_penalty_target is None else {"kl_weight": jnp.float32(0.2)}

    def adapt(self, state: dict[str, Array], metrics: Mapping[str, Array]) -> dict[str, Array]:
        """The penalty's weight, doubled or halved as the KL divergence leaves the target by half (section 4)."""
        if self.kl_penalty_target is None:
            return state
        kl, weight = metrics["kl"], state["kl_weight"]
        weight = jnp.where(
            kl > 1.5 * self.kl_penalty_target,
            weight * 2,
            jnp.where(kl < self.kl_penalty_target / 1.5, weight / 2, weight),
        )
        return {"kl_weight": jnp.clip(weight, 1e-6, 1e6)}

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The loss and its metrics."""
        dist, value = policy(params, batch["obs"])
        valid, advantage = batch["valid"], batch["advantage"]
        log_ratio = dist.log_prob(batch["action"]) - batch["logp"]
        ratio = jnp.exp(jnp.where(valid, log_ratio, 0.0))
        surrogate = jnp.minimum(
            ratio * advantage, jnp.clip(ratio, 1 - self.clip_ratio, 1 + self.clip_ratio) * advantage
        )
        policy_loss = -mean(surrogate, valid)
        error = (value - batch["target"]) ** 2
        if self.value_clip is not None:
            clipped = batch["value"] + jnp.clip(
                value - batch["value"], -self.value_clip, self.value_clip
            )
            error = jnp.maximum(error, (clipped - batch["target"]) ** 2)
        value_loss = 0.5 * mean(error, valid)
        entropy = mean(dist.entropy(), valid)
        kl = mean(ratio - 1 - log_ratio, valid)
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": mean(
                (jnp.abs(ratio - 1) > self.clip_ratio).astype(jnp.float32), valid
            ),
        }
        if self.kl_penalty_target is not None:
            loss = loss + batch["kl_weight"] * kl
            metrics["kl_weight"] = batch["kl_weight"]
        return loss, metrics


@dataclass(frozen=True)
class PGLoss(Loss):
    """The policy gradient with a learned baseline (Sutton et al. 2000; as in A2C, Mnih et al. 2016).

    Args:
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy bonus.
    """

    vf_coef: float = 0.5
    ent_coef: float = 0.0

    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "advantage", "target")
    on_policy: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The loss and its metrics."""
        dist, value = policy(params, batch["obs"])
        valid = batch["valid"]
        policy_loss = -mean(dist.log_prob(batch["action"]) * batch["advantage"], valid)
        value_loss = 0.5 * mean((value - batch["target"]) ** 2, valid)
        entropy = mean(dist.entropy(), valid)
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        return loss, {"loss/policy": policy_loss, "loss/value": value_loss, "entropy": entropy}


@dataclass(frozen=True)
class VTraceLoss(Loss):
    """The policy gradient corrected for the age of its data by V-trace (IMPALA, Espeholt et al. 2018, section 4).

    Args:
        gamma: discount.
        vtrace_lambda: the weight of longer traces.
        rho_clip: the largest weight of a step's own error.
        c_clip: the largest weight of what comes behind a step.
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy bonus.
    """

    gamma: float = 0.99
    vtrace_lambda: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    vf_coef: float = 0.5
    ent_coef: float = 0.0

    needs: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "logp",
        "reward",
        "terminated",
        "truncated",
    )
    on_policy: ClassVar[bool] = False
    sequences: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The loss and its metrics."""
        valid = batch["valid"]
        dist, value, end = _with_end(policy, params, batch)
        log_ratio = jnp.where(valid, dist.log_prob(batch["action"]) - batch["logp"], 0.0)
        target, advantage = _vtrace(self, jax.lax.stop_gradient(log_ratio), value, end, batch)
        policy_loss = -mean(dist.log_prob(batch["action"]) * advantage, valid)
        value_loss = 0.5 * mean((value - target) ** 2, valid)
        entropy = mean(dist.entropy(), valid)
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        return loss, {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
            "rho_mean": mean(jnp.exp(log_ratio), valid),
        }


@dataclass(frozen=True)
class APPOLoss(Loss):
    """Asynchronous PPO: the clipped surrogate on V-trace advantages (IMPACT, Luo et al. 2020; equation 3 with its target network).

    The target network is the policy that probability ratios are clipped around and that V-trace evaluates. It stands still between
    two `UpdateTarget`s, so many updates on data of any age stay near one policy.

    Args:
        clip_ratio: how far the probability ratio may move from 1.
        standardize: shift and scale the advantages of a minibatch to mean 0 and variance 1. Near the optimum, where all advantages are small,
            this scales noise up to the size that the signal had before.
        target_values: take the values in V-trace from the target network, as IMPACT does, and not from the newest parameters, as RLlib does.
        gamma: discount.
        vtrace_lambda: the weight of longer traces.
        rho_clip: the largest weight of a step's own error.
        c_clip: the largest weight of what comes behind a step.
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy bonus.
        kl_coef: weight of the KL divergence from the target network.
    """

    clip_ratio: float = 0.2
    gamma: float = 0.99
    vtrace_lambda: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    vf_coef: float = 0.5
    ent_coef: float = 0.0
    kl_coef: float = 0.0
    standardize: bool = False
    target_values: bool = False

    needs: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "logp",
        "reward",
        "terminated",
        "truncated",
    )
    on_policy: ClassVar[bool] = False
    sequences: ClassVar[bool] = True
    sampled: ClassVar[bool] = True
    target_network: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clip_ratio <= 0:
            raise SettingError(f"clip_ratio must be above 0, got {self.clip_ratio}")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The loss and its metrics."""
        valid, action = batch["valid"], batch["action"]
        dist, value, end = _with_end(policy, params, batch)
        anchor, old_value, old_end = jax.lax.stop_gradient(
            _with_end(policy, batch["target_params"], batch)
        )
        old_logp = anchor.log_prob(action)
        values = (old_value, old_end) if self.target_values else (value, end)
        target, advantage = _vtrace(
            self, jnp.where(valid, old_logp - batch["logp"], 0.0), *values, batch
        )
        if self.standardize:
            advantage = standardized(advantage, valid)
        log_ratio = jnp.where(valid, dist.log_prob(action) - old_logp, 0.0)
        ratio = jnp.exp(log_ratio)
        surrogate = jnp.minimum(
            ratio * advantage, jnp.clip(ratio, 1 - self.clip_ratio, 1 + self.clip_ratio) * advantage
        )
        policy_loss = -mean(surrogate, valid)
        value_loss = 0.5 * mean((value - target) ** 2, valid)
        entropy, kl = mean(dist.entropy(), valid), mean(anchor.kl(dist), valid)
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy + self.kl_coef * kl
        return loss, {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": mean(
                (jnp.abs(ratio - 1) > self.clip_ratio).astype(jnp.float32), valid
            ),
        }


def _with_end(
    policy: Bound, params: Any, batch: Mapping[str, Array]
) -> tuple[Distribution, Array, Array]:
    """The distribution and value of each row ``[T, B]``, and the value ``[B]`` of what comes behind the last."""
    dist, value = policy(params, jnp.concatenate([batch["obs"], batch["bootstrap_obs"][None]]))
    return jax.tree.map(lambda x: x[:-1], dist), value[:-1], value[-1]


def _vtrace(
    loss: VTraceLoss | APPOLoss,
    log_ratio: Array,
    value: Array,
    end: Array,
    batch: Mapping[str, Array],
) -> tuple[Array, Array]:
    """`vtrace` of every column ``[T, B]``; no gradient flows through it."""
    one = jax.vmap(
        partial(
            vtrace,
            gamma=loss.gamma,
            vtrace_lambda=loss.vtrace_lambda,
            rho_clip=loss.rho_clip,
            c_clip=loss.c_clip,
        ),
        in_axes=(1, 1, 1, 0, 1, 1, 1),
        out_axes=1,
    )
    rows = (
        log_ratio,
        batch["reward"],
        value,
        end,
        batch["terminated"],
        batch["truncated"],
        batch["valid"],
    )
    found: tuple[Array, Array] = jax.lax.stop_gradient(one(*rows))
    return found


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A user's own function as a loss."""

    fn: Callable[..., tuple[Array, Metrics]]

    needs: ClassVar[tuple[str, ...]] = ("obs",)
    on_policy: ClassVar[bool] = False

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """The loss and its metrics."""
        result = self.fn(policy, params, batch)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise ContractError(
                f"a loss returns (scalar, dict of scalars), but {getattr(self.fn, '__name__', 'it')} returned {_form(result)}"
            )
        return result


def _form(result: Any) -> str:
    return (
        f"a tuple of {len(result)}" if isinstance(result, tuple) else f"one {type(result).__name__}"
    )


def as_loss(loss: Any) -> Loss:
    """A loss from one of ours or from a function ``(policy, params, batch) -> (loss, metrics)``.

    Raises:
        SettingError: it is neither.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise SettingError(
            f"loss must be one such as fl.PPOLoss() or a function (policy, params, batch) -> (loss, metrics), got {loss!r}"
        )
    return FunctionLoss(loss)
