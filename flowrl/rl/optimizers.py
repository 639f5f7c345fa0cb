"""Optimisers and schedules as settings that print, compare and are written to files; optax does the work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flowrl.errors import SettingError
from flowrl.graph.values import Spec


class Schedule(ABC):
    """A number that changes with the count of gradient steps."""

    @abstractmethod
    def build(self) -> optax.Schedule:
        """The optax schedule."""


@dataclass(frozen=True)
class Linear(Schedule):
    """From `start` to `end` in a straight line over `steps` gradient steps, then `end`."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_ends(self)

    def build(self) -> optax.Schedule:
        """`optax.linear_schedule`."""
        return optax.linear_schedule(self.start, self.end, self.steps)


@dataclass(frozen=True)
class Cosine(Schedule):
    """From `start` to `end` along half a cosine over `steps` gradient steps (Loshchilov and Hutter 2017), then `end`."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_ends(self)

    def build(self) -> optax.Schedule:
        """`optax.cosine_decay_schedule` from 1 to 0, stretched over start and end."""
        decay = optax.cosine_decay_schedule(1.0, self.steps)
        return lambda count: self.end + (self.start - self.end) * decay(count)


def _check_ends(schedule: Linear | Cosine) -> None:
    """Refuse what optax takes for a constant, without a word, or fails at in the middle of a compiled update."""
    numbers = (schedule.start, schedule.end, schedule.steps)
    if not all(isinstance(x, Real) and not isinstance(x, bool) for x in numbers):
        raise SettingError(
            f"{type(schedule).__name__} takes the numbers start, end and steps, got {numbers}"
        )
    if not (0 <= schedule.start < math.inf and 0 <= schedule.end < math.inf):
        raise SettingError(
            f"start and end of a schedule must be finite and not negative, got start={schedule.start}, end={schedule.end}"
        )
    if not schedule.steps >= 1:
        raise SettingError(f"steps of a schedule must be at least 1, got {schedule.steps}")


Rate = float | Schedule


def _rate(lr: Rate) -> Any:
    return lr.build() if isinstance(lr, Schedule) else lr


def _check(lr: Rate, clip: float | None) -> None:
    if not isinstance(lr, Schedule) and lr < 0:
        raise SettingError(f"lr must not be negative, got {lr}")
    if clip is not None and clip <= 0:
        raise SettingError(f"max_grad_norm must be above 0 or None, got {clip}")


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """What optax's does, by one factor for all gradients. Optax's divides each and selects, which takes an eighth of a small network's update."""

    def scaled(gradients: Any, _: Any) -> Any:
        norm = optax.tree.norm(gradients)
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients)

    return optax.stateless(scaled)


def _clipped(
    clip: float | None, rule: optax.GradientTransformation
) -> optax.GradientTransformation:
    return rule if clip is None else optax.chain(clip_by_global_norm(clip), rule)


class Optimizer(ABC):
    """Settings that become an optax transformation."""

    @abstractmethod
    def build(self) -> optax.GradientTransformation:
        """The optax transformation."""


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) where `weight_decay` is above 0.

    Args:
        lr: the learning rate, a number or a schedule.
        eps: added to the root of the second moment; the field uses 1e-5 for on-policy methods.
        max_grad_norm: the largest global norm of the gradients; None for any.
    """

    lr: Rate = 3e-4
    eps: float = 1e-5
    max_grad_norm: float | None = None
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lr, self.max_grad_norm)

    def build(self) -> optax.GradientTransformation:
        """`optax.adam` or `optax.adamw`, behind the clipping of the norm."""
        if self.weight_decay:
            return _clipped(
                self.max_grad_norm,
                optax.adamw(
                    _rate(self.lr), self.b1, self.b2, self.eps, weight_decay=self.weight_decay
                ),
            )
        return _clipped(self.max_grad_norm, optax.adam(_rate(self.lr), self.b1, self.b2, self.eps))


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """RMSProp (Tieleman and Hinton 2012), with TensorFlow's initial scale of 1 as A2C and IMPALA had it.

    Args:
        lr: the learning rate, a number or a schedule.
        decay: of the moving average of squared gradients.
        eps: added under the root.
        max_grad_norm: the largest global norm of the gradients; None for any.
    """

    lr: Rate = 7e-4
    decay: float = 0.99
    eps: float = 1e-5
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self.lr, self.max_grad_norm)

    def build(self) -> optax.GradientTransformation:
        """`optax.rmsprop`, behind the clipping of the norm."""
        return _clipped(
            self.max_grad_norm,
            optax.rmsprop(_rate(self.lr), self.decay, self.eps, initial_scale=1.0),
        )


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum where it is above 0.

    Args:
        lr: the learning rate, a number or a schedule.
        max_grad_norm: the largest global norm of the gradients; None for any.
    """

    lr: Rate = 1e-2
    momentum: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self.lr, self.max_grad_norm)

    def build(self) -> optax.GradientTransformation:
        """`optax.sgd`, behind the clipping of the norm."""
        return _clipped(self.max_grad_norm, optax.sgd(_rate(self.lr), self.momentum or None))


class Optax(Spec):
    """A user's own optax transformation, by the function that makes it: ``Optax(optax.lion, learning_rate=1e-4)``."""

    def build(self) -> optax.GradientTransformation:
        """Call the function."""
        return self.fn(**self.settings)


def as_transformation(optimizer: Any) -> optax.GradientTransformation:
    """The optax transformation of an optimiser of ours, or the user's own as it is.

    Raises:
        SettingError: it is neither.
    """
    if isinstance(optimizer, Optimizer | Optax):
        return optimizer.build()
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    raise SettingError(
        f"optimizer must be one such as fl.Adam(3e-4) or an optax transformation, got {optimizer!r}"
    )
