"""Where a run that is debugged stands, and where it is to stop."""

from __future__ import annotations

from typing import NamedTuple

from flowrl.errors import GraphError, SettingError, unknown
from flowrl.graph.plan import Plan
from flowrl.observe import looking
from flowrl.observe.looking import STATS, Comparison
from flowrl.observe.sinks import columns

ROWS = "row"
"""What stands for the closing of a row where else a node's name does."""


class Spot(NamedTuple):
    """Where a run stands: ``row 2, at train``."""

    row: int
    how: str
    """``at`` a node that is about to take an item, ``behind`` one that gave one, ``closed`` for a row, or ``failed at`` a node."""
    node: str = ""

    def __str__(self) -> str:
        return (
            f"row {self.row} closed"
            if self.how == "closed"
            else f"row {self.row}, {self.how} {self.node}".rstrip()
        )


class Break(NamedTuple):
    """Where to stop: at a node, at any (``""``), or when a row closes; always, or if a comparison holds."""

    node: str
    when: Comparison | None = None
    by_row: bool = False
    """Whether the comparison is of a column of the last row, and not of an item of the node's."""

    def __str__(self) -> str:
        return f"{self.node} when {self.when}" if self.when else self.node


def stop_at(plan: Plan, node: str, text: str = "") -> Break:
    """A place to stop: a node, or `ROWS`, and a comparison if there is one.

    Raises:
        GraphError: there is no such node.
        SettingError: it is no comparison, or there is nothing of this name to compare.
    """
    after = {n.name: n.after for n in plan.graph.nodes}
    if node not in (ROWS, *after):
        raise GraphError(unknown("node", node, [*after, ROWS]))
    if not text:
        return Break(node)
    when, rows, forms = looking.comparison(text), columns(plan), plan.found.forms
    near = [] if node == ROWS else [node, *after[node]]
    head, _, stat = when.name.rpartition(".")
    arrays = [name for n in near for name in looking.fields(forms.get(n))]
    plain = [name for n in near for name in looking.scalars(forms.get(n))]
    if when.name in plain or (head in arrays and stat in STATS):
        return Break(node, when)
    if when.name in rows:
        return Break(node, when, by_row=node != ROWS)
    if plan.found.opaque or any(n not in forms for n in near):  # what the plan can't foresee
        return Break(node, when)
    if head in arrays:
        raise SettingError(unknown("number", stat, STATS))
    raise SettingError(
        unknown(
            "name", when.name, dict.fromkeys([*plain, *(f"{name}.mean" for name in arrays), *rows])
        )
    )
