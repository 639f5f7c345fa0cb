"""`LocalRuntime`: everything in this process and thread, where pdb works."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.graph.graph import Graph
from flowrl.graph.loop import Hook
from flowrl.graph.site import HereSite, Place
from flowrl.runtime.base import Session


@dataclass(frozen=True)
class LocalRuntime:
    """One plain loop in one thread of this process."""

    def open(self, graph: Graph, seed: int, hook: Hook | None = None) -> Session:
        """Open the graph's resources here."""
        return Session(graph, Place(graph.name, graph.resources, seed, HereSite), hook)
