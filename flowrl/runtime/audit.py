"""The conservation audit: on each edge, what was put was taken or dropped, or is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from flowrl.core.items import Batch, Gradients, steps_of
from flowrl.core.ledger import Ledger
from flowrl.graph.loop import Loop
from flowrl.graph.protocols import Handle
from flowrl.graph.stages import Channel


@dataclass(frozen=True)
class Amount:
    """A number of items, and the number of environment steps in them."""

    items: int = 0
    steps: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.items + other.items, self.steps + other.steps)


@dataclass(frozen=True)
class Edge:
    """One edge in the audit.

    Args:
        before: the node that puts items onto the edge.
        after: the node that takes them.
        put: what was put onto the edge.
        got: what the node took and finished with.
        dropped: what a queue dropped.
        held: what a queue holds now.
    """

    before: str
    after: str
    put: Amount
    got: Amount
    dropped: Amount
    held: Amount


@dataclass(frozen=True)
class Audit:
    """The conservation audit: on each edge put = got + dropped + held.

    What a node does with its items inside is not compared.
    """

    edges: tuple[Edge, ...]
    held_steps: dict[str, int]
    """By node: the environment steps that it holds for its next item."""
    stocks: dict[str, Any] = field(default_factory=dict)
    """By replay: the account of what came in and what became of it."""

    @property
    def closed(self) -> bool:
        """Whether every edge and every replay accounts for what came in."""
        return all(e.put == e.got + e.dropped + e.held for e in self.edges) and all(
            stock.closed for stock in self.stocks.values()
        )

    def __str__(self) -> str:
        heads = "".join(f"{head:>12}" for head in ("put", "got", "dropped", "held"))
        # Each of the two words stands above the middle of its four columns.
        lines = [f"{'':<24}{'items':^52}{'steps':^44}".rstrip(), f"{'edge':<24}{heads * 2}"]
        lines += [_line(edge) for edge in self.edges]
        lines += [
            f"{node} holds {steps:,} steps for its next item"
            for node, steps in self.held_steps.items()
        ]
        lines += [f"{name}: {stock}" for name, stock in self.stocks.items()]
        lines.append("the audit closes" if self.closed else "THE AUDIT DOES NOT CLOSE")
        return "\n".join(lines) + "\n"


def _line(edge: Edge) -> str:
    """Return an edge's line of the table: four numbers of items, then four of steps."""
    amounts = (edge.put, edge.got, edge.dropped, edge.held)
    numbers = (*(a.items for a in amounts), *(a.steps for a in amounts))
    name = f"{edge.before} -> {edge.after}"
    return f"{name:<24}" + "".join(f"{n:>12,}" for n in numbers)


def audit(
    ledger: Ledger,
    loops: Sequence[Loop],
    channels: Mapping[str, Channel],
    handles: Mapping[str, Handle],
) -> Audit:
    """Return the audit of all passes so far.

    Args:
        ledger: the counts of all nodes.
        loops: the stages, whose operators' states may hold batches.
        channels: by queue: what it holds.
        handles: by resource: its handle, of which that of a replay has a stock.
    """
    edges = []
    # Every edge on which something went has an entry here, in the order of its first item.
    for edge in list(ledger.put):
        before, after = edge
        edges.append(
            Edge(
                before,
                after,
                _amount(ledger.put, ledger.put_steps, edge),
                _amount(ledger.got, ledger.got_steps, edge),
                _amount(ledger.dropped, ledger.dropped_steps, edge),
                _waiting(channels.get(after), before),
            )
        )
    # Only replays have a stock; other resources keep no items.
    stocks = {name: handle.stock() for name, handle in handles.items()}
    kept = {name: stock for name, stock in stocks.items() if stock is not None}
    return Audit(tuple(edges), _held_steps(loops), kept)


def _amount(
    items: Counter[tuple[str, str]], steps: Counter[tuple[str, str]], edge: tuple[str, str]
) -> Amount:
    return Amount(items[edge], steps[edge])


def _waiting(channel: Channel | None, before: str) -> Amount:
    """Return what waits in a queue's channel of the items that one node put there."""
    if channel is None:
        return Amount()
    # Several nodes may put into one queue.
    waiting = [item for source, item in channel.items if source == before]
    return Amount(len(waiting), sum(map(steps_of, waiting)))


def _held_steps(loops: Sequence[Loop]) -> dict[str, int]:
    """Return, by node, the steps of the items in its operator's state, where there are any."""
    held: dict[str, int] = {}
    for loop in loops:
        for name, state in loop.states.items():
            # Batches and gradients are pytrees themselves: as leaves they still know their steps.
            items = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Batch | Gradients))
            if steps := sum(x.steps for x in items if isinstance(x, Batch | Gradients)):
                held[name] = steps
    return held
