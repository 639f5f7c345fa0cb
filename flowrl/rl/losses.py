"""Losses of policies: each is a function ``(policy, params, batch) -> (loss, metrics)``.

The losses here are such functions with settings. ``policy(params, obs)`` returns the distribution
over actions and the value. `batch` maps field names to arrays ``[N, ...]``; for a loss of whole
sequences, and for recurrent policies, to arrays ``[T, B, ...]``. Every mean weighs rows by
``valid``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.core.trees import with_last
from flowrl.graph.settings import Settings, check_above_0, check_not_negative, check_shares
from flowrl.rl.distributions import Distribution
from flowrl.rl.masked import mean, standardized
from flowrl.rl.own_values import without_own_value
from flowrl.rl.returns import vtrace

if TYPE_CHECKING:
    from flowrl.rl.policies import Network

Array = Any
Bound = Callable[..., Any]
"""A policy as a loss calls it.

``policy(params, obs)`` returns the distribution and the value; ``policy(params, *args,
method="critic")`` returns what that method of the module returns. Of whole columns,
``policy(params, obs, burn_in=n)`` returns those after the first n rows, which only make the carry
of a recurrent policy, without a gradient.
"""
Metrics = dict[str, Array]


def without_masked_nans(rows: Mapping[str, Array]) -> dict[str, Array]:
    """Return rows ``[N, ...]`` or ``[T, B, ...]`` with 0 for every NaN or infinity at masked rows.

    Losses weigh rows by ``valid``, but a NaN times 0 is still NaN. All finite numbers stay as they
    are: a masked row holds the final observation of an episode, from which the row before it is
    bootstrapped where the episode was truncated.
    """
    valid = rows["valid"]

    def clean(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # The mask covers all axes that a field has beyond those of rows.
        mask = valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim))
        return jnp.where(mask | jnp.isfinite(x), x, 0)

    return {name: clean(x) for name, x in rows.items()}


class Loss(Settings, ABC):
    """Base class of losses: frozen settings, and the requirements by which graphs are checked."""

    needs: ClassVar[tuple[str, ...]]
    """The fields that a batch must have."""
    on_policy: ClassVar[bool]
    """Whether the loss is right only on data of the newest weights."""
    sequences: ClassVar[bool] = False
    """Whether the loss takes whole columns ``[T, B, ...]`` in place of single steps.

    The batch then holds the column fields too, ``bootstrap_obs`` among them.
    """
    target_network: ClassVar[bool] = False
    """Whether the loss takes ``target_params``.

    It is a copy of the parameters that `UpdateTarget` renews.
    """
    priorities: ClassVar[bool] = False
    """Whether the loss reports the size of each row's error as the metric ``priority [N]``.

    A prioritised replay samples by it.
    """
    sampled: ClassVar[bool] = False
    """Whether the loss learns only from actions sampled from the policy's own distribution.

    `Explore.samples` says which explorations sample so. The loss takes ``logp``, or the policy's
    own probabilities, for those of the behaviour policy.
    """
    values: ClassVar[bool] = False
    """Whether the policy's action outputs are action values, from which no actions are sampled."""
    deterministic: ClassVar[bool] = False
    """Whether the policy's action outputs are one action, from which no other is sampled."""
    random: ClassVar[bool] = False
    """Whether the loss takes the field ``seed``, random ``uint32[N, 2]``, new with every update.

    `jax.random.wrap_key_data` makes a key of each row.
    """

    @property
    def stops_early(self) -> bool:
        """Whether the loss may end an update before its last gradient step."""
        return False

    def stop(self, metrics: Mapping[str, Array]) -> Array:
        """Return whether a minibatch's metrics call for an end of the update.

        The update then ends before that minibatch's gradient step is taken. It is asked only where
        the loss `stops_early`.
        """
        return jnp.bool_(False)

    def check(self, net: Network) -> str:
        """Return what is wrong with training this network by the loss; empty if nothing is."""
        return ""

    def init(self) -> dict[str, Array]:
        """Return the numbers that adapt from update to update; `batch` holds them by name."""
        return {}

    def adapt(self, state: dict[str, Array], metrics: Mapping[str, Array]) -> dict[str, Array]:
        """Return those numbers after an update with these mean metrics."""
        return state

    def averaged(self, valid: Array) -> Array:
        """Return those of the field ``valid`` whose rows the means of the loss are over."""
        return valid

    @abstractmethod
    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array | Mapping[str, Array], Metrics]:
        """Return the scalar to minimise and the scalars to report.

        All are means over the valid rows: devices that share a minibatch average theirs.

        In place of one scalar it may return one for each group of parameters, by its name. Their
        sum is the loss, they are reported as ``loss/`` and the name, and what belongs to a group
        that rests (see `Optimizers`) is not computed. Each should train its own group alone, by
        `jax.lax.stop_gradient` of the others; layers that several groups use learn from all.
        """


def _clipped_surrogate(ratio: Array, advantage: Array, clip_ratio: float) -> Array:
    """Return the pessimistic surrogate objective of each row (Schulman et al. 2017, equation 7)."""
    unclipped = ratio * advantage
    return jnp.minimum(unclipped, jnp.clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * advantage)


def _clip_fraction(ratio: Array, clip_ratio: float, valid: Array) -> Array:
    """Return the share of valid rows whose probability ratio is outside the clipping range."""
    return mean((jnp.abs(ratio - 1) > clip_ratio).astype(jnp.float32), valid)


class ActorCriticLoss(Loss):
    """Base class of losses that learn a policy and, beside it, the value of observations."""

    def check(self, net: Network) -> str:
        """Return what is wrong unless the policy has an entropy and a value apart from it."""
        return without_own_value(type(self).__name__, net)


@dataclass(frozen=True)
class PPOLoss(ActorCriticLoss):
    """Proximal policy optimisation (Schulman et al. 2017, equation 9).

    Equation 8 is added where `kl_penalty_target` is set.

    Args:
        clip_ratio: how far the probability ratio may move from 1 (default 0.2).
        vf_coef: coefficient of the value loss (default 0.5).
        value_clip: how far a value may move from the old value; None: any distance (Engstrom et al.
            2020 found no need of it; default None).
        ent_coef: coefficient of the entropy bonus (default 0.0).
        kl_penalty_target: KL divergence in nats that an adaptive penalty steers to; None: no
            penalty (default None).
        target_kl: KL divergence in nats; 1.5 times it ends an update; None: never (default None).

    Raises:
        SettingError: `vf_coef` is negative, or one of the others but `ent_coef` not above 0.
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
        check_above_0(self, "clip_ratio", "value_clip", "kl_penalty_target", "target_kl")
        check_not_negative(self, "vf_coef")

    @property
    def stops_early(self) -> bool:
        """Whether `target_kl` is set."""
        return self.target_kl is not None

    def stop(self, metrics: Mapping[str, Array]) -> Array:
        """Return whether the KL divergence is above 1.5 times `target_kl`."""
        return metrics["kl"] > (jnp.inf if self.target_kl is None else 1.5 * self.target_kl)

    def init(self) -> dict[str, Array]:
        """Return the coefficient of the KL penalty, if there is one."""
        return {} if self.kl_penalty_target is None else {"kl_weight": jnp.float32(0.2)}

    def adapt(self, state: dict[str, Array], metrics: Mapping[str, Array]) -> dict[str, Array]:
        """Return the penalty's coefficient after an update.

        It is doubled where the KL divergence is above 1.5 times its target, and halved where it is
        below the target divided by 1.5 (section 4).
        """
        if self.kl_penalty_target is None:
            return state
        kl, weight = metrics["kl"], state["kl_weight"]
        adapted = jnp.where(
            kl > 1.5 * self.kl_penalty_target,
            weight * 2,
            jnp.where(kl < self.kl_penalty_target / 1.5, weight / 2, weight),
        )
        return {"kl_weight": jnp.clip(adapted, 1e-6, 1e6)}

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        dist, value = policy(params, batch["obs"])
        valid, advantage = batch["valid"], batch["advantage"]
        log_ratio = dist.log_prob(batch["action"]) - batch["logp"]
        # At a masked row the ratio may overflow, and so would its gradient: it is 1 there.
        ratio = jnp.exp(jnp.where(valid, log_ratio, 0.0))
        policy_loss = -mean(_clipped_surrogate(ratio, advantage, self.clip_ratio), valid)
        value_loss = 0.5 * mean(self._value_error(value, batch), valid)
        entropy = mean(dist.entropy(), valid)
        # This estimator of KL(old || new) is unbiased, and no row of it is negative.
        kl = mean(ratio - 1 - log_ratio, valid)
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": _clip_fraction(ratio, self.clip_ratio, valid),
        }
        if self.kl_penalty_target is not None:
            loss = loss + batch["kl_weight"] * kl
            metrics["kl_weight"] = batch["kl_weight"]
        return loss, metrics

    def _value_error(self, value: Array, batch: Mapping[str, Array]) -> Array:
        """Return the squared error of each row's value; the larger of both where it is clipped."""
        error = (value - batch["target"]) ** 2
        if self.value_clip is None:
            return error
        move = jnp.clip(value - batch["value"], -self.value_clip, self.value_clip)
        clipped = batch["value"] + move
        return jnp.maximum(error, (clipped - batch["target"]) ** 2)


@dataclass(frozen=True)
class PGLoss(ActorCriticLoss):
    """Policy gradient with a learned baseline (Sutton et al. 2000; A2C: Mnih et al. 2016).

    Args:
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.0).

    Raises:
        SettingError: `vf_coef` is negative.
    """

    vf_coef: float = 0.5
    ent_coef: float = 0.0

    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "advantage", "target")
    on_policy: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_not_negative(self, "vf_coef")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        dist, value = policy(params, batch["obs"])
        valid = batch["valid"]
        policy_loss = -mean(dist.log_prob(batch["action"]) * batch["advantage"], valid)
        value_loss = 0.5 * mean((value - batch["target"]) ** 2, valid)
        entropy = mean(dist.entropy(), valid)
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        return loss, {"loss/policy": policy_loss, "loss/value": value_loss, "entropy": entropy}


@dataclass(frozen=True)
class VTraceLoss(ActorCriticLoss):
    """Policy gradient corrected for off-policy data by V-trace (Espeholt et al. 2018, section 4).

    This is the loss of IMPALA.

    Args:
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        vtrace_lambda: the factor by which longer traces decay per step; 1 for no such decay
            (default 1.0).
        rho_clip: the largest importance ratio of a step's own error (default 1.0).
        c_clip: the largest importance ratio by which later errors are passed back through a step
            (default 1.0).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.0).

    Raises:
        SettingError: `gamma` or `vtrace_lambda` is not from 0 to 1, or one of the others but
            `ent_coef` is negative.
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

    def __post_init__(self) -> None:
        _check_vtrace(self)

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        valid = batch["valid"]
        dist, value, end = _with_end(policy, params, batch)
        log_ratio = jnp.where(valid, dist.log_prob(batch["action"]) - batch["logp"], 0.0)
        # Targets and advantages are constants of this loss: no gradient flows through the ratio.
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


def _check_vtrace(loss: VTraceLoss | APPOLoss) -> None:
    check_shares(loss, "gamma", "vtrace_lambda")
    check_not_negative(loss, "rho_clip", "c_clip", "vf_coef")


@dataclass(frozen=True)
class APPOLoss(ActorCriticLoss):
    """Asynchronous PPO: the clipped surrogate on V-trace advantages (IMPACT, Luo et al. 2020).

    It is equation 3 of the paper with its target network. The target network is the policy that
    probability ratios are clipped around and that V-trace evaluates. It does not change until
    `UpdateTarget` moves it, so many updates on data of any age stay near one policy.

    Args:
        clip_ratio: how far the probability ratio may move from 1 (default 0.2).
        standardize: shift and scale the advantages of a minibatch to mean 0 and variance 1 (default
            False). Near the optimum, where all advantages are small, this scales noise up to the
            size that the signal had before.
        target_values: take the values in V-trace from the target network, as IMPACT does, and not
            from the newest parameters, as RLlib does (default False).
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        vtrace_lambda: the factor by which longer traces decay per step; 1 for no such decay
            (default 1.0).
        rho_clip: the largest importance ratio of a step's own error (default 1.0).
        c_clip: the largest importance ratio by which later errors are passed back through a step
            (default 1.0).
        vf_coef: coefficient of the value loss (default 0.5).
        ent_coef: coefficient of the entropy bonus (default 0.0).
        kl_coef: coefficient of the KL divergence from the target network (default 0.0).

    Raises:
        SettingError: `clip_ratio` is not above 0, `gamma` or `vtrace_lambda` is not from 0 to 1, or
            one of the others but `ent_coef` is negative.
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
        _check_vtrace(self)
        check_above_0(self, "clip_ratio")
        check_not_negative(self, "kl_coef")

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        valid, action = batch["valid"], batch["action"]
        dist, value, end = _with_end(policy, params, batch)
        anchor, old_value, old_end = jax.lax.stop_gradient(
            _with_end(policy, batch["target_params"], batch)
        )
        # V-trace evaluates the target network, not the policy in training.
        old_logp = anchor.log_prob(action)
        values = (old_value, old_end) if self.target_values else (value, end)
        target, advantage = _vtrace(
            self, jnp.where(valid, old_logp - batch["logp"], 0.0), *values, batch
        )
        if self.standardize:
            advantage = standardized(advantage, valid)
        # The probability ratio is clipped around the target network, not the behaviour policy.
        log_ratio = jnp.where(valid, dist.log_prob(action) - old_logp, 0.0)
        ratio = jnp.exp(log_ratio)
        policy_loss = -mean(_clipped_surrogate(ratio, advantage, self.clip_ratio), valid)
        value_loss = 0.5 * mean((value - target) ** 2, valid)
        entropy, kl = mean(dist.entropy(), valid), mean(anchor.kl(dist), valid)
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy + self.kl_coef * kl
        return loss, {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": _clip_fraction(ratio, self.clip_ratio, valid),
        }


def _with_end(
    policy: Bound, params: Any, batch: Mapping[str, Array]
) -> tuple[Distribution, Array, Array]:
    """Return the distribution and value of each row ``[T, B]``, and the bootstrap value ``[B]``."""
    # One call over T + 1 rows: a recurrent policy must see the bootstrap observation last.
    dist, value = policy(params, with_last(batch["obs"], batch["bootstrap_obs"]))
    return jax.tree.map(lambda x: x[:-1], dist), value[:-1], value[-1]


def _vtrace(
    loss: VTraceLoss | APPOLoss,
    log_ratio: Array,
    value: Array,
    end: Array,
    batch: Mapping[str, Array],
) -> tuple[Array, Array]:
    """Return `vtrace` of every column ``[T, B]``; no gradient flows through it."""
    of_columns = jax.vmap(
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
    flags = (batch["terminated"], batch["truncated"], batch["valid"])
    targets_and_advantages: tuple[Array, Array] = jax.lax.stop_gradient(
        of_columns(log_ratio, batch["reward"], value, end, *flags)
    )
    return targets_and_advantages
