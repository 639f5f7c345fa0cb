"""Stages: a graph cut at its queues, what stands at the cuts, and the order in which one thread gives each stage its turn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from flowrl.core.clock import OTHER, By, Clock
from flowrl.core.items import Tally
from flowrl.core.ledger import Ledger
from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Loop
from flowrl.graph.protocols import Handle, Site


class Channel:
    """What a queue holds: items that one stage put and another takes. `after`: the nodes that put."""

    def __init__(
        self, name: str, after: tuple[str, ...], capacity: int, full: str, order: str
    ) -> None:
        self.name = name
        self.after = after
        self.capacity = capacity
        self.full = full
        self.order = order
        self.items: deque[tuple[str, Any]] = deque()
        """The node that each item came from, and the item."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def has_capacity(self) -> bool:
        """Whether the stage before may go on."""
        return self.full != "block" or len(self.items) < self.capacity

    def put(self, source: str, item: Any) -> tuple[str, Any] | None:
        """Put an item; what had to go for it is returned, be it the item itself.

        One that blocks takes more than its capacity here: in one thread a stage goes on only where there is `room`, and what one pass
        yields beyond it waits at the door.
        """
        if len(self.items) < self.capacity or self.full == "block":
            self.items.append((source, item))
            return None
        if self.full == "drop_newest":
            return source, item
        self.items.append((source, item))
        return self.items.popleft()

    def take(self) -> tuple[str, Any] | None:
        """The next item; None where there is none."""
        return (
            (self.items.pop() if self.order == "lifo" else self.items.popleft())
            if self.items
            else None
        )


def channels_of(graph: Graph, kind: Callable[..., Channel] = Channel) -> dict[str, Channel]:
    """A channel for each queue of a graph, by the queue's name."""
    return {
        n.name: kind(n.name, n.after, q.capacity, q.full, q.order)
        for n in graph.nodes
        if (q := n.op.queue)
    }


def loops_of(
    graph: Graph,
    handles: Mapping[str, Handle],
    site_of: Callable[[Sequence[str]], Site],
    ledger: Ledger,
    channels: Mapping[str, Channel],
    failed: Callable[[str, Exception], None] | None = None,
) -> list[Loop]:
    """A loop for each stage, those first that others wait for."""
    return [
        Loop(
            graph.name,
            [n for n in graph.nodes if n.name in stage],
            handles,
            site_of(stage),
            ledger,
            failed,
            channels,
        )
        for stage in graph.stages()
    ]


Make = Callable[[Mapping[str, Channel]], list[Loop]]
"""Makes the loops of a graph between its channels."""


class Turns(Protocol):
    """What gives stages their turns."""

    clock: Clock
    """Of the thread of the graph's clock."""
    clocks: dict[str, Clock]
    """By thread at work, as a reader calls it: where its time goes."""

    @property
    def loops(self) -> list[Loop]:
        """By stage."""

    def stages(self) -> dict[str, tuple[str, ...]]:
        """By those threads of `clocks` that run stages: the nodes."""

    @property
    def channels(self) -> dict[str, Channel]:
        """By queue."""

    def wait(self) -> None:
        """Wait until a round can begin."""

    def round(self, most: float) -> list[Tally]:
        """The next turns, gone through to their ends. What the clock closed meanwhile is returned: rows, of which `most` are wanted."""

    def still(self) -> AbstractContextManager[None]:
        """While no stage is within a pass."""

    def close(self) -> None:
        """Let every stage end its pass, and no more."""


class Schedule:
    """Gives stages their turns in one thread. In lock-step each takes a pass a round, if it can; with `pick`, one that can is picked."""

    def __init__(self, graph: Graph, make: Make, pick: Callable[[int], int] | None = None) -> None:
        self.channels = channels_of(graph)
        self.loops = make(self.channels)
        self.pick = pick
        self.clock = Clock("outside")
        self.clocks = {"this process": self.clock}

    def stages(self) -> dict[str, tuple[str, ...]]:
        """All nodes are run by this thread."""
        return {"this process": tuple(name for loop in self.loops for name in loop.units)}

    def wait(self) -> None:
        """Nothing goes on meanwhile."""

    @contextmanager
    def still(self) -> Iterator[None]:
        """While no stage is within a pass, as ever between rounds."""
        yield

    def close(self) -> None:
        """Nothing to end."""

    def round(self, most: float = math.inf) -> list[Tally]:
        """The next turns, gone through to their ends. What the clock closed meanwhile is returned.

        Raises:
            GraphError: no stage can go on.
        """
        with By(self.clock), OTHER:
            return self._round()

    def _round(self) -> list[Tally]:
        rows: list[Tally] = []
        ready = [loop for loop in self.loops if loop.ready()]
        if not ready:
            waiting = ", ".join(text for loop in self.loops for text in loop.waits())
            joins = [
                n
                for loop in self.loops
                for n, unit in loop.units.items()
                if unit.op.joins and f"capacity at {n}" in waiting
            ]
            waiting += "".join(
                f"; rates that meet at {n} must be as its weights say" for n in joins
            )
            raise GraphError(
                f"no stage can go on, for each waits for another: {waiting}", self.loops[0].graph
            )
        if self.pick is not None:
            return ready[self.pick(len(ready))].run_pass()
        for loop in self.loops:
            if loop.ready():
                rows += loop.run_pass()
        return rows
