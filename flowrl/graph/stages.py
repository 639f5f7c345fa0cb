"""Stages: the parts of a graph that is cut at its queues, and the channels between them.

`Schedule` gives the stages their turns in one thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from flowrl.core.clock import OTHER, By, Clock
from flowrl.core.items import Tally
from flowrl.core.keeping import Keeping
from flowrl.core.ledger import Ledger
from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Loop
from flowrl.graph.protocols import Handle, Site


class Channel:
    """Bounded queue between two stages: one puts items and the other takes them.

    Args:
        name: the queue's node.
        after: the nodes that put items.
        capacity: the largest number of items.
        full: what happens where there is no capacity left: ``block``, ``drop_oldest`` or
            ``drop_newest``.
        order: the order in which items are taken: ``fifo`` or ``lifo``.
    """

    def __init__(
        self, name: str, after: tuple[str, ...], capacity: int, full: str, order: str
    ) -> None:
        self.name = name
        self.after = after
        self.capacity = capacity
        self.full = full
        self.order = order
        self.items: deque[tuple[str, Any]] = deque()
        """Pairs of the node that an item came from, and the item."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def has_capacity(self) -> bool:
        """Whether the stage before it may go on."""
        return self.full != "block" or len(self.items) < self.capacity

    def put(self, source: str, item: Any) -> tuple[str, Any] | None:
        """Put an item, and return what is dropped for it, which may be the item itself.

        A queue that blocks takes more than its capacity here: a stage goes on only where
        `has_capacity` holds, and what one pass yields beyond the capacity waits in line.

        Args:
            source: the node that the item comes from.
            item: the item.

        Returns:
            The dropped item and the node that it came from; None if nothing is dropped.
        """
        if len(self.items) < self.capacity or self.full == "block":
            self.items.append((source, item))
            return None
        if self.full == "drop_newest":
            return source, item
        # What is left is "drop_oldest".
        self.items.append((source, item))
        return self.items.popleft()

    def take(self) -> tuple[str, Any] | None:
        """Take the next item, and return it with the node that it came from; None if empty."""
        if not self.items:
            return None
        return self.items.pop() if self.order == "lifo" else self.items.popleft()


def channels_of(graph: Graph, kind: Callable[..., Channel] = Channel) -> dict[str, Channel]:
    """Return a channel for each queue of a graph, by the queue's name.

    Args:
        graph: the graph.
        kind: what makes a channel, with the arguments of `Channel`.
    """
    channels: dict[str, Channel] = {}
    for node in graph.nodes:
        if bounds := node.op.queue:
            channels[node.name] = kind(
                node.name, node.after, bounds.capacity, bounds.full, bounds.order
            )
    return channels


def loops_of(
    graph: Graph,
    handles: Mapping[str, Handle],
    site_of: Callable[[Sequence[str]], Site],
    ledger: Ledger,
    channels: Mapping[str, Channel],
    failed: Callable[[str, Exception], None] | None = None,
) -> list[Loop]:
    """Return a loop for each stage, in the order of the stages' first nodes in the graph.

    Args:
        graph: the graph.
        handles: the handles of the resources, by name.
        site_of: gives the site of the nodes of a stage.
        ledger: where everything is counted.
        channels: the channels of the queues, by name.
        failed: what is called with a node's name and its error in place of raising the error.
    """
    loops = []
    for stage in graph.stages():
        nodes = [n for n in graph.nodes if n.name in stage]
        site = site_of(stage)
        loops.append(Loop(graph.name, nodes, handles, site, ledger, failed, channels))
    return loops


Make = Callable[[Mapping[str, Channel]], list[Loop]]
"""A function that makes the loops of a graph, given its channels."""


class Turns(Keeping, ABC):
    """What gives stages their turns: the base class of those that there are."""

    remade: ClassVar[tuple[str, ...]] = ("channels", "loops", "clock", "clocks")

    clock: Clock
    """The clock of the thread that runs the reporting operator."""
    clocks: dict[str, Clock]
    """By thread, as a report names it: the clock that measures where its time goes."""
    loops: list[Loop]
    """The loops of the stages."""
    channels: dict[str, Channel]
    """The channels of the queues, by name."""
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes a context in which a thread computes with the run's number of threads of XLA."""

    @abstractmethod
    def stages(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes that each thread of `clocks` runs, where it runs stages."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until a round can begin."""

    @abstractmethod
    def round(self, most: float) -> list[Tally]:
        """Run the next turns to their ends.

        Args:
            most: how many rows are wanted at most.

        Returns:
            What the reporting operator closed meanwhile, from which rows are made.
        """

    @abstractmethod
    def still(self) -> AbstractContextManager[bool]:
        """Return a context in which no stage is within a pass.

        It yields whether that is so, and no pass was broken off by an error: what lasts is whole.
        """

    @abstractmethod
    def close(self) -> None:
        """Let every stage end its pass, and begin no other."""

    def change(self, work: Callable[[], None]) -> None:
        """Change the state of resources before the first round."""
        with self.still():
            work()

    def keep(self) -> Any:
        """Return the states of all operators, and what the queues hold. No stage is in a pass."""
        return {
            **super().keep(),
            "states": [loop.states for loop in self.loops],
            "queues": {name: channel.items for name, channel in self.channels.items()},
        }

    def take(self, state: Any) -> None:
        """Go on with the states and items that were kept, once all resources have taken theirs."""
        own = {name: state.get(name) for name in self.lasting}
        # Where the turns were given in another way, there is nothing to go on from.
        if all((own[name] is None) == (getattr(self, name) is None) for name in own):
            super().take(own)
        for loop, states in zip(self.loops, state["states"], strict=True):
            loop.states = states
        for name, channel in self.channels.items():
            channel.items = state["queues"][name]


class Schedule(Turns):
    """Schedule that gives stages their turns in one thread.

    In lock-step each stage that can takes a pass in each round; with `pick`, one that can is
    picked.

    Args:
        graph: the graph.
        make: makes the loops of the stages.
        pick: picks one of so many stages; None for lock-step.
    """

    lasting = ("pick",)

    def __init__(self, graph: Graph, make: Make, pick: Callable[[int], int] | None = None) -> None:
        self.channels = channels_of(graph)
        self.loops = make(self.channels)
        self.pick = pick
        self.clock = Clock("outside")
        self.clocks = {"this process": self.clock}

    def stages(self) -> dict[str, tuple[str, ...]]:
        """Return all nodes, which this thread runs."""
        return {"this process": tuple(name for loop in self.loops for name in loop.units)}

    def wait(self) -> None:
        """Return at once, for nothing goes on meanwhile."""

    @contextmanager
    def still(self) -> Iterator[bool]:
        """Do nothing: between rounds no stage is within a pass."""
        yield True

    def close(self) -> None:
        """Do nothing: there is no thread to end."""

    def round(self, most: float = math.inf) -> list[Tally]:
        """Run the next turns to their ends.

        Args:
            most: how many rows are wanted at most; a round may close more.

        Returns:
            What the reporting operator closed meanwhile.

        Raises:
            GraphError: no stage can go on.
        """
        with By(self.clock), OTHER:
            return self._round()

    def _round(self) -> list[Tally]:
        ready = [loop for loop in self.loops if loop.ready()]
        if not ready:
            raise self._stuck()
        if self.pick is not None:
            return ready[self.pick(len(ready))].run_pass()
        rows: list[Tally] = []
        for loop in self.loops:
            # Asked again, since the passes before may have changed the answer.
            if loop.ready():
                rows += loop.run_pass()
        return rows

    def _stuck(self) -> GraphError:
        """Return the error that says what each stage waits for."""
        waiting = ", ".join(text for loop in self.loops for text in loop.waits())
        hints = ""
        for loop in self.loops:
            for name, unit in loop.units.items():
                if unit.op.joins and f"capacity at {name}," in f"{waiting},":
                    hints += f"; rates that meet at {name} must be as its weights say"
        return GraphError(
            f"no stage can go on, for each waits for another: {waiting}{hints}",
            self.loops[0].graph,
        )
