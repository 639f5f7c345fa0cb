"""A graph as plain data: where everything stands in its picture, and all settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from flowrl.graph.draw import BOX, HIGH, layout, style_of
from flowrl.graph.graph import Graph
from flowrl.graph.refs import refs
from flowrl.graph.values import to_text

SHOWN = 200
"""The most characters that are shown of a setting."""


def drawing(graph: Graph) -> dict[str, Any]:
    """Return a graph as plain data: what the live page draws, and what a click on a node shows.

    Args:
        graph: the graph.

    Returns:
        ``name``, ``size`` of the picture and of a box in pixels, ``nodes``, ``resources``,
        ``edges`` and ``uses``, each a list with a dict for each of them.
    """
    found = layout(graph)
    nodes = []
    for node in graph.nodes:
        targets = {field: str(target) for field, (target, _) in refs(node.op).items()}
        nodes.append(
            {
                "name": node.name,
                "spot": found.spots[node.name],
                "style": style_of(node),
                "writes": [x for field, x in targets.items() if field in node.op.writes],
                "reads": [x for field, x in targets.items() if field not in node.op.writes],
                **_shown(node.op),
            }
        )
    resources = [
        {"name": name, "spot": found.spots[name], "text": each.describe(), **_shown(each)}
        for name, each in graph.resources.items()
    ]
    return {
        "name": graph.name,
        "size": found.size,
        "box": (BOX, HIGH),
        "nodes": nodes,
        "resources": resources,
        "edges": [{"from": a, "to": b, "path": d} for (a, b), d in found.edges.items()],
        "uses": [{"from": a, "to": b, "path": d} for (a, b), d in found.uses.items()],
    }


def _shown(value: Any) -> dict[str, Any]:
    """Return the class of an operator or a resource, what it says of itself, and its settings."""
    doc = inspect.getdoc(type(value)) or ""
    return {"kind": type(value).__name__, "doc": doc, "settings": dict(_settings(value))}


def _settings(value: Any) -> Iterator[tuple[str, str]]:
    for field in fields(value) if is_dataclass(value) else ():
        text = to_text(getattr(value, field.name), defaults=False, width=math.inf)
        yield field.name, text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
