"""Optimisers and schedules as settings that print, compare and are written to files.

Optax computes what they describe.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from flowrl.errors import SettingError
from flowrl.graph.settings import Settings, check_not_negative, check_shares
from flowrl.graph.values import Spec


class Schedule(Settings, ABC):
    """A number that changes with the number of gradient steps."""

    @abstractmethod
    def build(self) -> optax.Schedule:
        """Return the optax schedule."""


@dataclass(frozen=True)
class Linear(Schedule):
    """Schedule from `start` to `end` in a straight line over `steps` gradient steps, then `end`.

    Args:
        start: the number at first, finite and not negative.
        end: the number at last, finite and not negative.
        steps: gradient steps from the one to the other, at least 1.

    Raises:
        SettingError: one of these is out of its range.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_ends(self)

    def build(self) -> optax.Schedule:
        """Return the `optax.linear_schedule`."""
        return optax.linear_schedule(self.start, self.end, self.steps)


@dataclass(frozen=True)
class Cosine(Schedule):
    """Schedule from `start` to `end` along half a cosine (Loshchilov and Hutter 2017).

    It takes `steps` gradient steps; the number is `end` after them.

    Args:
        start: the number at first, finite and not negative.
        end: the number at last, finite and not negative.
        steps: gradient steps from the one to the other, at least 1.

    Raises:
        SettingError: one of these is out of its range.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_ends(self)

    def build(self) -> optax.Schedule:
        """Return `optax.cosine_decay_schedule` from 1 to 0, stretched over start and end."""
        # Optax takes the end as a fraction of the start, which fails for a start of 0.
        decay = optax.cosine_decay_schedule(1.0, self.steps)
        return lambda count: self.end + (self.start - self.end) * decay(count)


def _check_ends(schedule: Linear | Cosine) -> None:
    """Refuse settings that optax would take for a constant without a warning.

    Others it would fail at in the middle of a compiled update.
    """
    numbers = (schedule.start, schedule.end, schedule.steps)
    if not all(isinstance(x, Real) and not isinstance(x, bool) for x in numbers):
        raise SettingError(
            f"{type(schedule).__name__} takes the numbers start, end and steps, got {numbers}"
        )
    if not (0 <= schedule.start < math.inf and 0 <= schedule.end < math.inf):
        raise SettingError(
            "start and end of a schedule must be finite and not negative, "
            f"got start={schedule.start}, end={schedule.end}"
        )
    if not schedule.steps >= 1:
        raise SettingError(f"steps of a schedule must be at least 1, got {schedule.steps}")


Rate = float | Schedule
"""A learning rate: a number, or a schedule of it."""

LARGEST_RATE = 1e30
"""With a larger one, a step of finite gradients could reach numbers beyond the range of floats."""

SMALLEST_EPS, LARGEST_DECAY = 1e-30, 0.999999
"""Far below the one a number is 0, and above the other it soon is 1, in arithmetic of 32 bits."""


def _rate(lr: Rate) -> Any:
    return lr.build() if isinstance(lr, Schedule) else lr


def _check(lr: Rate, max_grad_norm: float | None) -> None:
    rates = (lr.start, lr.end) if isinstance(lr, Linear | Cosine) else (lr,)
    for rate in rates:
        if not isinstance(rate, Schedule) and not 0 <= rate <= LARGEST_RATE:
            raise SettingError(f"lr must be from 0 to {LARGEST_RATE:g}, got {rate}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise SettingError(f"max_grad_norm must be above 0 or None, got {max_grad_norm}")


def _check_average(eps: float, **decays: float) -> None:
    """Refuse settings of moving averages by which a parameter would become NaN or infinite."""
    if not SMALLEST_EPS <= eps < math.inf:
        raise SettingError(
            f"eps must be at least {SMALLEST_EPS:g}, got {eps}: "
            "a parameter without a gradient would become NaN"
        )
    for name, decay in decays.items():
        if not 0 <= decay <= LARGEST_DECAY:
            raise SettingError(f"{name} must be from 0 to {LARGEST_DECAY}, got {decay}")


def _is_known(lr: Rate) -> bool:
    """Return whether a learning rate is in the range that `_check` demands, at every step."""
    return not isinstance(lr, Schedule) or isinstance(lr, Linear | Cosine)


def _is_zero(number: float) -> bool:
    """Return whether a number is 0; one that is an argument of what is compiled is not."""
    return isinstance(number, int | float) and number == 0


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """Return the clipping of `optax.clip_by_global_norm`, by one factor for all gradients.

    Optax's own divides each gradient and selects, which takes an eighth of a small network's
    update.

    Args:
        most: the largest global norm of the gradients.
    """

    def scaled(gradients: Any, _: Any) -> Any:
        norm = optax.tree.norm(gradients)
        factor = jnp.where(norm < most, 1.0, most / norm)
        # Gradients keep their own types.
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients)

    return optax.stateless(scaled)


def _clipped(
    max_grad_norm: float | None, rule: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return an update rule after the clipping of the gradients' norm, if there is any."""
    if max_grad_norm is None:
        return rule
    return optax.chain(clip_by_global_norm(max_grad_norm), rule)


class Optimizer(Settings, ABC):
    """Settings from which an optax transformation is built."""

    @abstractmethod
    def build(self) -> optax.GradientTransformation:
        """Return the optax transformation."""

    @property
    def keeps_finite(self) -> bool:
        """Whether steps by gradients whose squares have a finite sum leave all numbers finite.

        Then it is enough to check gradients, before parameters and averages are written.
        """
        return False


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) with `weight_decay`.

    Args:
        lr: learning rate, a number or a schedule such as `Linear` (default 3e-4).
        eps: number added to the root of the second moment, at least `SMALLEST_EPS`; 1e-5 is usual
            for on-policy methods (default 1e-5).
        max_grad_norm: largest global norm of the gradients, which are scaled down to it; None: any
            (default None).
        b1: decay of the moving average of gradients, from 0 to `LARGEST_DECAY` (default 0.9).
        b2: decay of the moving average of squared gradients, from 0 to `LARGEST_DECAY`
            (default 0.999).
        weight_decay: coefficient of the decay of weights; 0: none (default 0.0).

    Raises:
        SettingError: one of these is out of its range, or the learning rate is negative or
            above `LARGEST_RATE`.
    """

    lr: Rate = 3e-4
    eps: float = 1e-5
    max_grad_norm: float | None = None
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0

    # An argument has 7 digits, of which 1 - b2 would keep 4.
    constants: ClassVar[tuple[str, ...]] = ("b1", "b2")

    def __post_init__(self) -> None:
        _check(self.lr, self.max_grad_norm)
        _check_average(self.eps, b1=self.b1, b2=self.b2)
        check_not_negative(self, "weight_decay")

    @property
    def keeps_finite(self) -> bool:
        """Whether finite gradients leave all numbers finite; a decay of weights can overflow."""
        return _is_known(self.lr) and _is_zero(self.weight_decay)

    def build(self) -> optax.GradientTransformation:
        """Return `optax.adam` or `optax.adamw`, after the clipping of the norm."""
        settings = (_rate(self.lr), self.b1, self.b2, self.eps)
        # `optax.adamw` without decay would have a state of another tree structure.
        if _is_zero(self.weight_decay):
            rule = optax.adam(*settings)
        else:
            rule = optax.adamw(*settings, weight_decay=self.weight_decay)
        return _clipped(self.max_grad_norm, rule)


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """RMSProp (Tieleman and Hinton 2012), with TensorFlow's initial scale of 1.

    A2C and IMPALA used that scale.

    Args:
        lr: learning rate, a number or a schedule such as `Linear` (default 7e-4).
        decay: decay of the moving average of squared gradients, from 0 to `LARGEST_DECAY`
            (default 0.99).
        eps: number added under the root, at least `SMALLEST_EPS` (default 1e-5).
        max_grad_norm: largest global norm of the gradients, which are scaled down to it; None: any
            (default None).

    Raises:
        SettingError: one of these is out of its range, or the learning rate is negative or
            above `LARGEST_RATE`.
    """

    lr: Rate = 7e-4
    decay: float = 0.99
    eps: float = 1e-5
    max_grad_norm: float | None = None

    # An argument has 7 digits, of which 1 - decay would keep 4.
    constants: ClassVar[tuple[str, ...]] = ("decay",)

    def __post_init__(self) -> None:
        _check(self.lr, self.max_grad_norm)
        _check_average(self.eps, decay=self.decay)

    @property
    def keeps_finite(self) -> bool:
        """Whether finite gradients leave all numbers finite."""
        return _is_known(self.lr)

    def build(self) -> optax.GradientTransformation:
        """Return `optax.rmsprop`, after the clipping of the norm."""
        rule = optax.rmsprop(_rate(self.lr), self.decay, self.eps, initial_scale=1.0)
        return _clipped(self.max_grad_norm, rule)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum where it is above 0.

    Args:
        lr: learning rate, a number or a schedule such as `Linear` (default 0.01).
        momentum: decay of the moving sum of gradients, from 0 to 1; 0: no momentum (default 0.0).
        max_grad_norm: largest global norm of the gradients, which are scaled down to it; None: any
            (default None).

    Raises:
        SettingError: the learning rate is negative or above `LARGEST_RATE`, `momentum` is not
            from 0 to 1, or `max_grad_norm` is not above 0.
    """

    lr: Rate = 1e-2
    momentum: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self.lr, self.max_grad_norm)
        check_shares(self, "momentum")

    def build(self) -> optax.GradientTransformation:
        """Return `optax.sgd`, after the clipping of the norm."""
        # For a momentum of 0 optax would keep a state of the size of the weights.
        momentum = None if _is_zero(self.momentum) else self.momentum
        return _clipped(self.max_grad_norm, optax.sgd(_rate(self.lr), momentum))


class Optax(Spec):
    """Optax transformation as a value: the function that makes it, and its settings.

    ``Optax(optax.lion, learning_rate=1e-4)`` is one. Unlike the transformation itself it compares,
    prints, and can be saved with a run.

    Args:
        fn: the function that makes the transformation.
        **settings: its keyword arguments.

    Raises:
        SettingError: `fn` can't be called, or not with these arguments.
    """

    def build(self) -> optax.GradientTransformation:
        """Return what the function returns for the settings."""
        return self.fn(**self.settings)


def as_transformation(optimizer: Any) -> optax.GradientTransformation:
    """Return the transformation of an optimiser of flowrl, or an optax transformation as it is.

    Raises:
        SettingError: the value is neither.
    """
    if isinstance(optimizer, Optimizer | Optax):
        return optimizer.build()
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    raise SettingError(
        f"optimizer must be one such as fl.Adam(3e-4) or an optax transformation, got {optimizer!r}"
    )
