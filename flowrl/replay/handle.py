"""What operators ask of a replay of any kind."""

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
    """What came into a replay, in steps, and what became of it: added = held + evicted + lost."""

    added: int
    held: int
    evicted: int
    lost: int

    def __str__(self) -> str:
        return f"{self.added:,} steps added = {self.held:,} held + {self.evicted:,} evicted + {self.lost:,} lost"

    @property
    def closed(self) -> bool:
        """Whether everything is accounted for."""
        return self.added == self.held + self.evicted + self.lost


class ReplayHandle(Handle):
    """What operators ask of a replay of any kind. Whoever draws from it waits for a first number of steps, and may go by how many came since."""

    shared: ClassVar[tuple[str, ...]] = (
        "expect",
        "due",
        "has_capacity",
        "add",
        "sample",
        "prioritize",
    )

    def __init__(self, spec: Replay, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.runners: RunnersHandle = site.resource(spec.runners)
        self.lock = RLock()
        self.most = 0
        """The steps that anyone waits for; more are not told from them."""
        self.steps = 0
        self.readers: dict[str, tuple[int, Fraction | None]] = {}
        """By reader: the steps that it waits for, and its draws for each step from then on, if it has a ratio."""
        self.pending: dict[str, int] = {}
        """By reader with a ratio: what it has not drawn yet, in parts of a draw as small as its ratio needs."""
        self.alone: list[str] = []
        """Readers with a ratio that draw by themselves: for who is given items adding can't wait, or none would come."""

    def expect(self, reader: str, start: int, ratio: Fraction | None, alone: bool) -> None:
        """A reader that waits for some steps.

        Args:
            reader: its name.
            start: steps.
            ratio: how many draws it takes for each step that comes from then on; None for any number.
            alone: whether it draws by itself, not when it is given an item.

        Raises:
            GraphError: it waits for more than can be held.
        """
        if start > self.spec.buffer_size:
            raise GraphError(
                f"waits for {start:,} steps, but {self.site.name} holds {self.spec.buffer_size:,}; lower start or raise capacity"
            )
        self.most = max(self.most, start)
        self.readers[reader] = start, ratio
        if ratio is not None:
            self.pending[reader] = 0
            self.alone += [reader] * alone

    def due(self, reader: str) -> bool:
        """Whether a reader is to draw."""
        start, ratio = self.readers[reader]
        return self.steps >= start and (ratio is None or self.pending[reader] >= ratio.denominator)

    def has_capacity(self) -> bool:
        """Whether more may be added: not before all that is due was drawn by who draws by itself."""
        return not any(map(self.due, self.alone))

    def _noted(self, steps: int) -> None:
        with self.lock:
            self.steps = min(self.most, self.steps + steps)
            for reader in self.pending:
                start, ratio = self.readers[reader]
                if ratio is not None and self.steps >= start:
                    self.pending[reader] += steps * ratio.numerator
        self.site.count(added_steps=steps)

    def _nothing(self) -> GraphError:
        return GraphError(
            f"{self.site.name} has nothing to draw: no step in it is followed by {self.spec.n_step} more, or by an end; raise start"
        )

    def _drew(self, reader: str, size: int) -> None:
        _, ratio = self.readers[reader]
        if ratio is not None:
            with self.lock:
                self.pending[reader] -= ratio.denominator
        self.site.count(draws=1, drawn_steps=size)

    @property
    def static(self) -> dict[str, Any]:
        """What decides when who may draw."""
        mark = min(
            (start for start, _ in self.readers.values() if start > self.steps), default=self.steps
        )
        return {
            "steps": Filling(self.steps, mark) if self.drawable else self.steps,
            "pending": dict(self.pending),
        }

    @property
    def drawable(self) -> bool:
        """Whether every part of it holds something that may be drawn; until then each step may count."""
        return True

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Add fragments ``[T, B]`` as runners give them.

        Raises:
            ContractError: a field or column is missing.
        """

    @abstractmethod
    def sample(self, size: int, reader: str, ahead: int = 0) -> Batch | None:
        """Draw ``[1, size]`` transitions; None where all was lost, and is yet to come anew.

        Args:
            size: transitions.
            reader: for whom.
            ahead: draws of this size that it may ask for beforehand, so that they are there when they are wanted.
        """

    @abstractmethod
    def prioritize(self, feedback: dict[str, Array]) -> None:
        """Set the priorities of what was drawn to what an update found."""

    @abstractmethod
    def stock(self) -> Stock:
        """What came in and what became of it."""

    def _prioritized(self, feedback: dict[str, Array]) -> None:
        if not self.spec.prioritized:
            raise ContractError(
                f"{self.site.name} keeps no priorities; write Replay(..., prioritized=True), or remove this operator"
            )
        self.site.count(prioritized_steps=feedback["slot"].shape[0])
