"""Operators that shape batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.core.items import Batch
from flowrl.errors import ContractError, SettingError, a
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.learner.learner import LearnerHandle
from flowrl.rl.losses import standardized
from flowrl.rl.returns import gae

Array = Any


def need(item: Any, *fields: str) -> Batch:
    """`item` as a batch that has these fields.

    Raises:
        ContractError: it is no batch, or lacks one.
    """
    if not isinstance(item, Batch):
        raise ContractError(
            f"needs a Batch, got {a(item)}; put it where batches flow (behind a ParallelSample, before a TrainOneStep)"
        )
    missing = [f for f in fields if f not in item.data]
    if missing:
        raise ContractError(
            f"needs the field{'s' * (len(missing) > 1)} {', '.join(missing)}, but the batch has {', '.join(item.data)}; add them before it"
        )
    return item


@dataclass(frozen=True)
class Concat(Operator):
    """Join batches side by side until there are at least `batch_size` steps. Never splits a fragment.

    Args:
        batch_size: T x B of what is yielded, at least.

    Raises:
        ContractError: batches of different lengths in time meet.
    """

    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, got {self.batch_size}")

    def init(self) -> list[Batch]:
        """The batches held."""
        return []

    def step(self, held: list[Batch], batch: Any, ctx: Context) -> Iterator[Batch]:
        """Hold it, and yield all once there are enough."""
        if held and need(batch).shape[0] != held[0].shape[0]:
            raise ContractError(
                f"can't join {batch.shape[0]} steps in time with {held[0].shape[0]}; give all runners the same fragment"
            )
        held.append(need(batch))
        if sum(b.steps for b in held) >= self.batch_size:
            done = list(held)
            held.clear()
            yield Batch.join(done)


@dataclass(frozen=True)
class Advantages(Stateless):
    """Add ``advantage`` and ``target`` by generalised advantage estimation (Schulman et al. 2016).

    The target is advantage + value: what values are trained towards. What follows a fragment's last row is worth what the
    learner says now.

    Args:
        gamma: discount.
        gae_lambda: weight of longer estimates: 1 for discounted returns, 0 for one-step differences.
        learner: gives the value of the observation behind each column.

    Raises:
        ContractError: the batch has no ``reward value terminated truncated``.
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    learner: Ref[LearnerHandle] = "learner"

    adds: ClassVar[tuple[str, ...]] = ("advantage", "target")

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """One batch in, the same with two more fields out."""
        d = need(batch, "obs", "reward", "value", "terminated", "truncated", "valid").data
        end = ctx[self.learner].values(batch)
        advantage, target = ctx.run(
            advantages,
            d["reward"],
            d["value"],
            end,
            d["terminated"],
            d["truncated"],
            d["valid"],
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        yield batch.with_(advantage=advantage, target=target)


def advantages(
    reward: Array,
    value: Array,
    end: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """`gae` of every column ``[T, B]``, with 0 at invalid rows; and advantage + value."""
    one = jax.vmap(gae, in_axes=(1, 1, 0, 1, 1, None, None), out_axes=1)
    advantage = jnp.where(
        valid, one(reward, value, end, terminated, truncated, gamma, gae_lambda), 0.0
    )
    return advantage, advantage + value


@dataclass(frozen=True)
class Standardize(Stateless):
    """Shift and scale a field to mean 0 and variance 1 over the valid rows of the batch.

    Args:
        field: the field's name.

    Raises:
        ContractError: the batch has no such field.
    """

    field: str = "advantage"

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """One batch in, the same with the field changed out."""
        d = need(batch, self.field, "valid").data
        yield batch.with_(**{self.field: ctx.run(standardized, d[self.field], d["valid"])})
