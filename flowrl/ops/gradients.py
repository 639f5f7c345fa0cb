"""Operators that train in two halves: the gradients of a batch, and a step by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from flowrl.core.items import Gradients, Trained
from flowrl.core.texts import amount
from flowrl.errors import ContractError, GraphError, a
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.graph.settings import check_at_least_1
from flowrl.learner.core import Core, core_of
from flowrl.learner.gradients import arrays_of, as_item, gradients_of_rollout, versions_of
from flowrl.learner.learner import LearnerHandle
from flowrl.learner.rules import lacking
from flowrl.ops.batch import need
from flowrl.ops.train import ADDED
from flowrl.rl.averaging import average


def need_gradients(item: Any) -> Gradients:
    """Return an item as gradients.

    Raises:
        ContractError: it is something else.
    """
    if not isinstance(item, Gradients):
        raise ContractError(f"needs gradients, got {a(item)}; put it after a ComputeGradients")
    return item


@dataclass(frozen=True)
class ComputeGradients(Stateless):
    """Compute the gradients of the learner's loss on each batch, and yield them as `Gradients`.

    With `ApplyGradients` after it, it does what `TrainOneStep` does with one epoch and one
    minibatch. It also works at the sampler (`ParallelSample.local`), with the behaviour policy's
    weights: then gradients travel, and not batches (A3C, Mnih et al. 2016).

    Args:
        learner: name of the learner whose loss it is (default ``learner``).

    Raises:
        ContractError: the batch lacks a field that the loss needs.
        GraphError: at the sampler, the loss needs a target network or numbers that adapt, which
            only the learner has.
    """

    learner: Ref[LearnerHandle] = "learner"

    def at_sampler(self, ctx: Context) -> Operator:
        """Return the operator that computes them by the behaviour policy's weights.

        Raises:
            GraphError: the loss needs what only the learner has.
        """
        core: Core = ctx[self.learner].core
        only = "a target network" if core.loss.target_network else "numbers that adapt"
        if core.loss.target_network or core.loss.init():
            raise GraphError(
                f"ComputeGradients can't work at the sampler: {type(core.loss).__name__} needs "
                f"{only}, which only the learner has; move it after ParallelSample"
            )
        # The optimiser stays with the learner.
        return GradientsAtSampler(
            core_of(core.policy, core.spaces, core.loss, None), str(self.learner)
        )

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return how many numbers the gradients have, and how often they are computed."""
        item = plan.found.first_items.get(node)
        if not isinstance(item, Gradients):
            return None
        size = sum(int(np.prod(x.shape)) for x in item.params.values())
        return f"gradients of {size:,} numbers", plan.a_row(plan.found.steady[node].given, "time")

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Gradients]:
        """Yield the gradients of the batch."""
        learner = ctx[self.learner]
        if wrong := learner.lacking(need(batch), ADDED):
            raise ContractError(wrong)
        yield learner.gradients(batch)


@dataclass(frozen=True)
class GradientsAtSampler(Stateless):
    """Compute the gradients of a loss on each rollout by the weights that it was sampled with.

    `ComputeGradients` becomes this at a sampler.

    Args:
        core: the functions of the learner.
        learner: its name.
    """

    core: Core
    learner: Ref[LearnerHandle]

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Gradients]:
        """Yield the gradients of the rollout."""
        core: Core = self.core
        if wrong := lacking(core.loss, need(batch), ADDED):
            raise ContractError(wrong)
        # Here it is no learner, but the behaviour policy.
        acting: Any = ctx[self.learner]
        data, columns = arrays_of(core, batch)
        key = acting.site.key("gradients") if core.loss.random else None
        found = ctx.run(
            gradients_of_rollout,
            acting.state,
            key,
            batch.columns["first"],
            data,
            columns,
            core=core,
        )
        # The weights are those of the newest row; of several agents the first one may be older.
        versions = batch.columns.get("last_version", versions_of(batch)[0])
        version = ctx.call(np.max, versions)
        yield as_item(acting.site, str(self.learner), found, batch, version)


@dataclass(frozen=True)
class AverageGradients(Operator):
    """Collect gradients of a number of batches, and yield their mean.

    Each is weighted by its number of valid rows, so the mean is the gradient of one batch that
    holds the rows of all: a large batch is so computed in parts that fit into memory. A loss that
    scales rows by the others of its batch, as ``APPOLoss(standardize=True)`` and the first update
    of `MARWILLoss` do, scales each part by its own.

    Args:
        count: number of gradients of which the mean is yielded.

    Raises:
        SettingError: `count` is below 1.
        ContractError: an item holds no gradients, or those of another learner.
    """

    count: int

    def __post_init__(self) -> None:
        check_at_least_1(self, "count")

    def init(self) -> list[Gradients]:
        """Return the list of the gradients held, empty at first."""
        return []

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return of how many gradients it yields the mean, and how often."""
        given = plan.found.steady[node].given
        if not given:
            return None
        return f"mean of {self.count} gradients", plan.a_row(given, "time")

    def step(self, held: list[Gradients], item: Any, ctx: Context) -> Iterator[Gradients]:
        """Hold the gradients, and yield the mean once there are enough."""
        held.append(need_gradients(item))
        if len(held) == self.count:
            # A step commits its state before it yields.
            several = list(held)
            held.clear()
            yield average(several, ctx.run)


@dataclass(frozen=True)
class ApplyGradients(Stateless):
    """Take a step of the learner's optimiser by gradients, and yield a `Trained`.

    The gradients may be of older weights than those that they are applied to. An on-policy loss
    allows that where the data was of the very weights that the gradients are of.

    Args:
        learner: name of the learner that is trained (default ``learner``).

    Raises:
        ContractError: an item holds no gradients, or those of another learner.
    """

    learner: Ref[LearnerHandle] = "learner"

    writes: ClassVar[tuple[str, ...]] = ("learner",)

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return which learner it updates, how often, and by how many steps each time."""
        counts = plan.counts(node)
        if not (updates := counts["updates"]):
            return None
        each = amount(Fraction(counts["trained_steps"], updates), "step")
        return f"updates {self.learner}", f"{plan.a_row(updates, 'time')}, by {each} each"

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Trained]:
        """Apply the gradients, and yield what the update returned."""
        yield ctx[self.learner].apply(need_gradients(item))
