"""All settings of a graph, each by its address."""

from __future__ import annotations

from typing import Any

from flowrl.graph import values
from flowrl.graph.graph import Graph


def settings_of(graph: Graph, *, strings: bool = False) -> dict[str, Any]:
    """By address, such as ``learner.loss.clip_ratio``, every setting of a graph; `strings`: as text, and what holds more settings by its name too."""
    found: dict[str, Any] = {}

    def walk(address: str, value: Any) -> None:
        inner = values.settings(value)
        if not inner and not isinstance(value, values.Spec):
            plain = isinstance(value, bool | int | float | str | None) and not strings
            found[address] = value if plain else values.to_text(value, defaults=False, width=10_000)
            return
        if "." in address:
            found[address] = (
                values.to_text(value.fn, defaults=False)
                if isinstance(value, values.Spec)
                else type(value).__name__
            )
        for name, deeper in inner.items():
            walk(f"{address}.{name}", deeper)

    for name, owner in [*((node.name, node.op) for node in graph.nodes), *graph.resources.items()]:
        walk(name, owner)
    return {address: value for address, value in found.items() if "." in address}
