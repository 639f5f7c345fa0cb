"""Operators that shape batches."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.core.items import Batch
from flowrl.core.texts import plural
from flowrl.errors import ContractError, a
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.graph.settings import check_at_least_1, check_shares
from flowrl.learner.learner import LearnerHandle
from flowrl.rl.masked import standardized
from flowrl.rl.returns import gae

Array = Any


def need(item: Any, *fields: str) -> Batch:
    """Return an item as a batch that has these fields.

    Raises:
        ContractError: it is no batch, or lacks a field.
    """
    if not isinstance(item, Batch):
        raise ContractError(
            f"needs a Batch, got {a(item)}; "
            "put it where batches flow (after a ParallelSample, before a TrainOneStep)"
        )
    missing = [f for f in fields if not item.has(f)]
    if missing:
        near = difflib.get_close_matches(missing[0], item.data, n=1, cutoff=0.8)
        way = f"did you mean {near[0]}?" if near else "add them before it"
        raise ContractError(
            f"needs the {plural(len(missing), 'field')} {', '.join(missing)}, "
            f"but the batch has {', '.join(item.data)}; {way}"
        )
    return item


@dataclass(frozen=True)
class Concat(Operator):
    """Join batches side by side until there are at least `batch_size` steps.

    It never splits a rollout.

    Args:
        batch_size: least number of environment steps (T x B) of a batch that it yields.

    Raises:
        ContractError: two batches have different lengths in time.
    """

    batch_size: int

    def __post_init__(self) -> None:
        check_at_least_1(self, "batch_size")

    def init(self) -> dict[str, Any]:
        """Return the batches held and the number of their steps, none at first."""
        return {"batches": [], "steps": 0}

    def step(self, held: dict[str, Any], batch: Any, ctx: Context) -> Iterator[Batch]:
        """Hold the batch, and yield all joined once there are enough steps."""
        batches = held["batches"]
        if batches and need(batch).shape[0] != batches[0].shape[0]:
            raise ContractError(
                f"can't join {batch.shape[0]} steps in time with {batches[0].shape[0]}; "
                "give all runners the same rollout_length"
            )
        batches.append(need(batch))
        held["steps"] += batch.steps
        if held["steps"] >= self.batch_size:
            # A step commits its state before it yields.
            held.update(self.init())
            yield Batch.join(batches)


@dataclass(frozen=True)
class Advantages(Stateless):
    """Add ``advantage`` and ``target`` by generalised advantage estimation (Schulman et al. 2016).

    The target is advantage + value: what values are trained towards. After the last row of a
    rollout it bootstraps from the value that the learner gives now.

    Args:
        gamma: discount factor per environment step, from 0 to 1 (default 0.99).
        gae_lambda: weight of longer estimates, from 0 to 1: 1 gives discounted returns, 0 one-step
            differences (default 0.95).
        learner: name of the learner that gives the value of the observation after each column
            (default ``learner``).

    Raises:
        ContractError: the batch has no ``reward value terminated truncated``.
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    learner: Ref[LearnerHandle] = "learner"

    adds: ClassVar[tuple[str, ...]] = ("advantage", "target")

    def __post_init__(self) -> None:
        check_shares(self, "gamma", "gae_lambda")

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the batch with the two fields added."""
        data = need(batch, "obs", "reward", "value", "terminated", "truncated", "valid").data
        end = ctx[self.learner].values(batch)
        advantage, target = ctx.run(
            advantages,
            data["reward"],
            data["value"],
            end,
            data["terminated"],
            data["truncated"],
            data["valid"],
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
    """Return the advantages of every column by `gae`, and advantage + value.

    Args:
        reward: ``[T, B]``.
        value: values of the observations ``[T, B]``.
        end: values of the observations after the last rows ``[B]``.
        terminated: whether an episode terminated at a row ``[T, B]``.
        truncated: whether an episode was truncated at a row ``[T, B]``.
        valid: whether a row holds a step ``[T, B]``; advantages are 0 where not.
        gamma: discount.
        gae_lambda: weight of longer estimates.
    """
    by_column = jax.vmap(gae, in_axes=(1, 1, 0, 1, 1, None, None), out_axes=1)
    estimates = by_column(reward, value, end, terminated, truncated, gamma, gae_lambda)
    advantage = jnp.where(valid, estimates, 0.0)
    return advantage, advantage + value


@dataclass(frozen=True)
class Standardize(Stateless):
    """Shift and scale a field to mean 0 and variance 1 over the valid rows of the batch.

    Args:
        field: name of the field that is changed, ``[T, B]`` (default ``advantage``).

    Raises:
        ContractError: the batch has no such field.
    """

    field: str = "advantage"

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the batch with the field changed."""
        data = need(batch, self.field, "valid").data
        yield batch.with_(**{self.field: ctx.run(standardized, data[self.field], data["valid"])})
