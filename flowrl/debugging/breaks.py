"""The places where a debugged run stands and where it should stop."""

from __future__ import annotations

from typing import Any, NamedTuple

from flowrl.errors import GraphError, SettingError, unknown
from flowrl.graph.plan import Plan
from flowrl.observe import looking
from flowrl.observe.looking import STATS, Comparison
from flowrl.observe.sinks import columns

ROWS = "row"
"""The name that stands in place of a node's for the closing of a row."""


class Spot(NamedTuple):
    """Place where a run stands, such as ``row 2, at train``."""

    row: int
    how: str
    """How the run stands to the node or row.

    It is ``at`` a node that is about to take an item, ``after`` a node that yielded one,
    ``closed`` for a row, ``failed at`` a node, or ``failed`` where no node is known.
    """
    node: str = ""

    def __str__(self) -> str:
        if self.how == "closed":
            return f"row {self.row} closed"
        return f"row {self.row}, {self.how} {self.node}".rstrip()


class Standing(NamedTuple):
    """What a user finds where a run stands."""

    spot: Spot
    item: Any
    """The item that the node takes or yields there; None where there is none."""


class Break(NamedTuple):
    """Place where a run should stop: at a node, or when a row closes, always or on a condition."""

    node: str
    """The node, `ROWS` for a row, or empty for any node."""
    when: Comparison | None = None
    """The condition, None to stop always."""
    by_row: bool = False
    """Whether the condition is about a column of the last row instead of an item of the node."""

    def __str__(self) -> str:
        return f"{self.node} when {self.when}" if self.when else self.node


def stop_at(plan: Plan, node: str, text: str = "") -> Break:
    """Return the break at a node, with a condition if there is one.

    Args:
        plan: the plan of the run.
        node: a node's name, or `ROWS`.
        text: a comparison such as ``loss>10`` or ``reward.mean<=0``; empty for no condition.

    Raises:
        GraphError: there is no such node.
        SettingError: the text is no comparison, or there is nothing of this name to compare.
    """
    sources = {n.name: n.after for n in plan.graph.nodes}
    if node not in (ROWS, *sources):
        raise GraphError(unknown("node", node, [*sources, ROWS]))
    if not text:
        return Break(node)
    when, items = looking.comparison(text), plan.found.first_items
    # A condition may be about the items that the node yields or those that it takes.
    nearby = [] if node == ROWS else [node, *sources[node]]
    arrays = [name for n in nearby for name in looking.fields(items.get(n))]
    scalars = [name for n in nearby for name in looking.scalars(items.get(n))]
    array, _, stat = when.name.rpartition(".")
    if when.name in scalars or (array in arrays and stat in STATS):
        return Break(node, when)
    row_columns = columns(plan)
    if when.name in row_columns:
        return Break(node, when, by_row=node != ROWS)
    # The plan does not know the items of every node, so the name may be right all the same.
    if plan.found.opaque or any(n not in items for n in nearby):
        return Break(node, when)
    if array in arrays:
        raise SettingError(unknown("number", stat, STATS))
    known = dict.fromkeys([*scalars, *(f"{name}.mean" for name in arrays), *row_columns])
    raise SettingError(unknown("name", when.name, known))
