"""The graph of a run as plain data, with what its nodes yield by the plan."""

from __future__ import annotations

from typing import Any

from flowrl.graph.drawing import drawing
from flowrl.graph.plan import Plan
from flowrl.observe.looking import plain


def drawn(plan: Plan) -> dict[str, Any]:
    """Return the graph of a plan, as `flowrl.graph.drawing.drawing` returns it.

    Args:
        plan: the plan.

    Returns:
        The same; each node whose items the plan knows has ``yields``, the first of them; and
        ``metrics``, by name of a metric that an operator or an environment reports: which one.
    """
    found = {**drawing(plan.graph), "metrics": dict(plan.found.metrics)}
    for node in found["nodes"]:
        if (item := plan.found.first_items.get(node["name"])) is not None:
            node["yields"] = plain(item)
    return found
