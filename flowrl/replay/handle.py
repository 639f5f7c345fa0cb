"""`ReplayHandle`: what operators may call of a replay of any kind; and `Stock`, its accounts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.core.items import Batch, Filling
from flowrl.errors import ContractError, GraphError
from flowrl.graph.protocols import Handle, Site
from flowrl.rollout.handle import RunnersHandle

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = Any


@dataclass(frozen=True)
class Stock:
    """What came into a replay, and its whereabouts: added = held + evicted + lost.

    Args:
        added: steps that were ever added.
        held: steps that are there now.
        evicted: steps that newer ones replaced.
        lost: steps that were in shards whose process ended.
    """

    added: int
    held: int
    evicted: int
    lost: int

    def __str__(self) -> str:
        return (
            f"{self.added:,} steps added = {self.held:,} held + {self.evicted:,} evicted "
            f"+ {self.lost:,} lost"
        )

    @property
    def closed(self) -> bool:
        """Whether everything is accounted for."""
        return self.added == self.held + self.evicted + self.lost


class ReplayHandle(Handle):
    """What operators may call of a replay of any kind.

    A reader, which samples from it, waits for a first number of steps. From then on it may keep a
    ratio of batches to the steps that are added.

    Args:
        spec: the settings of the replay.
        site: what the runtime offers to it.
    """

    shared: ClassVar[tuple[str, ...]] = (
        "expect",
        "due",
        "claim",
        "has_capacity",
        "add",
        "sample",
        "prioritize",
    )

    lasting: ClassVar[tuple[str, ...]] = ("steps", "pending")
    # Readers say again what they expect when their nodes are made.
    remade: ClassVar[tuple[str, ...]] = (
        "spec",
        "site",
        "runners",
        "lock",
        "most_awaited",
        "readers",
        "independent",
    )

    def __init__(self, spec: Replay, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.runners: RunnersHandle = site.resource(spec.runners)
        self.lock = RLock()
        self.most_awaited = 0
        """The most steps that any reader waits for."""
        self.steps = 0
        """The steps that were added, counted up to `most_awaited`: more make no difference."""
        self.readers: dict[str, tuple[int, Fraction | None]] = {}
        """By reader, the steps that it waits for, and its batches for each step from then on.

        The second is None if it keeps no ratio.
        """
        self.pending: dict[str, int] = {}
        """By reader with a ratio, what it has not claimed yet.

        The unit is one part of a batch, of as many parts as the ratio's denominator says.
        """
        self.independent: list[str] = []
        """Readers with a ratio that sample by themselves.

        Adding waits for these. For a reader that is given items it can't wait, or no items would
        come.
        """

    def expect(
        self, reader: str, learning_starts: int, ratio: Fraction | None, alone: bool
    ) -> None:
        """Register a reader, which waits for a number of steps.

        Args:
            reader: its name.
            learning_starts: steps that must have been added before it samples.
            ratio: batches that it samples for each step that is added from then on, all steps of
                the add that reaches `learning_starts` among them; None for any number.
            alone: whether it samples by itself, not when it is given an item.

        Raises:
            GraphError: it waits for more steps than can be held.
        """
        if learning_starts > self.spec.buffer_size:
            raise GraphError(
                f"waits for {learning_starts:,} steps, but {self.site.name} holds "
                f"{self.spec.buffer_size:,}; lower learning_starts or raise buffer_size"
            )
        self.most_awaited = max(self.most_awaited, learning_starts)
        self.readers[reader] = learning_starts, ratio
        if ratio is not None:
            self.pending[reader] = 0
            if alone:
                self.independent.append(reader)

    def due(self, reader: str) -> int:
        """Return how many batches a reader is to sample; 1 where it keeps no ratio."""
        learning_starts, ratio = self.readers[reader]
        if self.steps < learning_starts:
            return 0
        return 1 if ratio is None else self.pending[reader] // ratio.denominator

    def claim(self, reader: str, batches: int) -> None:
        """Count batches that are due as sampled, before a reader samples them one by one.

        Args:
            reader: its name.
            batches: how many; below 0 for those that were claimed and could not be sampled.
        """
        _, ratio = self.readers[reader]
        if ratio is not None:
            with self.lock:
                self.pending[reader] -= batches * ratio.denominator

    def has_capacity(self) -> bool:
        """Return whether more may be added: once independent readers claimed what is due."""
        return not any(map(self.due, self.independent))

    def _note_added(self, steps: int) -> None:
        """Count steps that were added, and the batches that they call for."""
        with self.lock:
            self.steps = min(self.most_awaited, self.steps + steps)
            for reader in self.pending:
                learning_starts, ratio = self.readers[reader]
                if ratio is not None and self.steps >= learning_starts:
                    self.pending[reader] += steps * ratio.numerator
        self.site.count(added_steps=steps)

    def _note_sampled(self, size: int) -> None:
        """Count a batch of `size` transitions or sequences that a reader has sampled."""
        self.site.count(draws=1, replayed_steps=size * (self.spec.sequence_length or 1))

    def _note_prioritized(self, feedback: dict[str, Array]) -> None:
        """Count transitions or sequences whose priorities are set.

        Raises:
            ContractError: the replay keeps no priorities.
        """
        if not self.spec.prioritized:
            raise ContractError(
                f"{self.site.name} keeps no priorities; "
                "write Replay(..., prioritized=True), or remove this operator"
            )
        self.site.count(prioritized_steps=feedback["slot"].shape[0])

    def _nothing_to_sample(self) -> GraphError:
        what = f"no step in it is followed by {self.spec.n_step} more, or by an end"
        if self.spec.sequence_length is not None:
            what = f"no environment has {self.spec.sequence_length} rows in it from a rollout on"
        return GraphError(f"{self.site.name} has nothing to sample: {what}; raise learning_starts")

    @property
    def static(self) -> dict[str, Any]:
        """The part of the state that decides when a reader may sample."""
        awaited = [start for start, _ in self.readers.values() if start > self.steps]
        next_mark = min(awaited, default=self.steps)
        return {
            # Between two marks nothing depends on the steps, so the abstract trace may skip them.
            "steps": Filling(self.steps, next_mark) if self.drawable else self.steps,
            "pending": dict(self.pending),
        }

    @property
    def drawable(self) -> bool:
        """Whether every part of it holds something to sample; until then each step may count."""
        return True

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Add rollouts ``[T, B]`` as runners give them.

        Raises:
            ContractError: a field or column is missing.
        """

    @abstractmethod
    def sample(self, size: int, reader: str, ahead: int = 0) -> Batch | None:
        """Return a batch ``[1, size]`` of transitions, or ``[sequence_length, size]``.

        It is None where all was lost, and rollouts must be added again first.

        Args:
            size: transitions or sequences.
            reader: the name of the reader that samples.
            ahead: batches of this size that it may ask for beforehand, so that they are there
                when they are needed.
        """

    @abstractmethod
    def prioritize(self, feedback: dict[str, Array]) -> None:
        """Set the priorities of sampled transitions to those that an update computed."""

    @abstractmethod
    def stock(self) -> Stock:
        """Return what was added so far, and its whereabouts."""
