"""All settings of a graph, each by its address."""

from __future__ import annotations

import math
from typing import Any

from flowrl.graph import values
from flowrl.graph.graph import Graph


def settings_of(graph: Graph, *, strings: bool = False) -> dict[str, Any]:
    """Return every setting of a graph by its address, such as ``learner.loss.clip_ratio``.

    A value with settings of its own is listed by the name of its class, followed by its settings.

    Args:
        graph: whose nodes and resources have the settings.
        strings: return all values as text; else numbers, booleans and None stay as they are.
    """
    found: dict[str, Any] = {}

    def walk(address: str, value: Any) -> None:
        inner = values.settings(value)
        if not inner and not isinstance(value, values.Spec):
            is_plain = isinstance(value, bool | int | float | str | None)
            if is_plain and not strings:
                found[address] = value
            else:
                found[address] = values.to_text(value, defaults=False, width=math.inf)
            return
        # The address of a node or a resource itself has no dot.
        if "." in address and isinstance(value, values.Spec):
            found[address] = values.to_text(value.fn, defaults=False)
        elif "." in address:
            found[address] = type(value).__name__
        for name, deeper in inner.items():
            walk(f"{address}.{name}", deeper)

    for name, owner in [*((node.name, node.op) for node in graph.nodes), *graph.resources.items()]:
        walk(name, owner)
    return {address: value for address, value in found.items() if "." in address}
