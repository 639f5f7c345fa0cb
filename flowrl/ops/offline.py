"""Operators around datasets: read transitions from one, and write episodes into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from flowrl.core.items import Batch
from flowrl.core.texts import amount
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Ref, Stateless
from flowrl.graph.settings import check_at_least_1
from flowrl.offline.dataset import DatasetHandle
from flowrl.offline.writing import DatasetWriterHandle
from flowrl.ops.batch import need


@dataclass(frozen=True)
class ReadDataset(Stateless):
    """Read batches ``[1, batch_size]`` of transitions from a dataset, without end.

    It stands at a start, or after another node, of which each item then calls for one batch.

    Args:
        batch_size: transitions in a batch.
        dataset: name of the dataset that is read (default ``dataset``).

    Raises:
        SettingError: `batch_size` is below 1.
        SaveError: an episode is damaged, or does not fit the environment.
    """

    batch_size: int
    dataset: Ref[DatasetHandle] = "dataset"

    source: ClassVar[bool] = True
    adds: ClassVar[tuple[str, ...]] = ("next_obs", "discount")

    def __post_init__(self) -> None:
        check_at_least_1(self, "batch_size")

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return how many transitions a batch has, and how often one is read in a Row."""
        counts = plan.counts(node)
        if not counts["draws"]:
            return None
        return (
            f"{amount(Fraction(self.batch_size), 'transition')} from {self.dataset}",
            plan.a_row(counts["draws"], "batch"),
        )

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the batch that comes next."""
        yield ctx[self.dataset].sample(self.batch_size)


@dataclass(frozen=True)
class WriteDataset(Stateless):
    """Write every rollout into a dataset, and pass the item on.

    An episode goes to disk when it ends.

    Args:
        writer: name of the `DatasetWriter` that writes (default ``writer``).

    Raises:
        ContractError: a field or column that a dataset needs is missing.
        SaveError: the dataset is there already, or can't be written.
    """

    writer: Ref[DatasetWriterHandle] = "writer"

    writes: ClassVar[tuple[str, ...]] = ("writer",)

    def line(self, plan: Plan, node: str) -> tuple[str, str] | None:
        """Return where to, and how many steps in a Row."""
        steps = plan.counts(node)["written_steps"]
        return (f"steps -> {self.writer}", plan.a_row(steps, "step")) if steps else None

    def step(self, state: None, batch: Any, ctx: Context) -> Iterator[Batch]:
        """Write the batch, then yield it."""
        ctx[self.writer].add(need(batch))
        yield batch
