"""What operators ask of a replay of any kind."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.errors import ContractError, GraphError
from flowrl.graph.protocols import Handle, Site
from flowrl.items import Batch
from flowrl.resources.asking import RunnersHandle

if TYPE_CHECKING:
    from flowrl.resources.replay import Replay

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

    shared: ClassVar[tuple[str, ...]] = ("expect", "holds", "fresh", "take", "add", "sample", "prioritize")

    def __init__(self, spec: Replay, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.runners: RunnersHandle = site.resource(spec.runners)
        self.lock = RLock()
        self.most = 0
        """The steps that anyone waits for; more are not told from them."""
        self.steps = 0
        self.starts: dict[str, int] = {}
        self.came: dict[str, int] = {}
        """By reader that counts: the steps that came since it last took note."""

    def expect(self, reader: str, start: int, counts: bool) -> None:
        """A reader that waits for `start` steps; and whether it counts those that come from then on.

        Raises:
            GraphError: it waits for more than can be held.
        """
        if start > self.spec.capacity:
            raise GraphError(f"waits for {start:,} steps, but {self.site.name} holds {self.spec.capacity:,}; lower start or raise capacity")
        self.most = max(self.most, start)
        self.starts[reader] = start
        if counts:
            self.came[reader] = 0

    def holds(self, start: int) -> bool:
        """Whether so many steps came."""
        return self.steps >= start

    def fresh(self, reader: str) -> int:
        """The steps that came since a reader last took note of them, and since there were enough."""
        return self.came[reader]

    def take(self, reader: str) -> int:
        """Take note of them."""
        with self.lock:
            steps, self.came[reader] = self.came[reader], 0
        return steps

    def _noted(self, steps: int) -> None:
        self.steps = min(self.most, self.steps + steps)
        for reader in self.came:
            if self.holds(self.starts[reader]):
                self.came[reader] += steps
        self.site.count(added_steps=steps)

    @property
    def static(self) -> dict[str, Any]:
        """What decides when who may draw."""
        return {"steps": self.steps, "came": dict(self.came)}

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Add fragments ``[T, B]`` as runners give them.

        Raises:
            ContractError: a field or column is missing.
        """

    @abstractmethod
    def sample(self, size: int) -> Batch:
        """Draw ``[1, size]`` transitions."""

    @abstractmethod
    def prioritize(self, feedback: dict[str, Array]) -> None:
        """Set the priorities of what was drawn to what an update found."""

    @abstractmethod
    def stock(self) -> Stock:
        """What came in and what became of it."""

    def _prioritized(self, feedback: dict[str, Array]) -> None:
        if not self.spec.prioritized:
            raise ContractError(f"{self.site.name} keeps no priorities; write Replay(..., prioritized=True), or remove this operator")
        self.site.count(prioritized_steps=feedback["slot"].shape[0])
