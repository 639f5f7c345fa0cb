"""Versions of weights in the state of a graph: by whose updates each of them is counted, for every learner counts its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from flowrl.graph.graph import Graph
from flowrl.graph.protocols import Handle, refs

VERSION = "version"
"""The key under which a version stands, be it of weights or of a batch's columns."""
Newest = dict[str, int]
"""By learner: its newest version."""


def is_version(path: Any, x: Any) -> bool:
    """Whether a part of a graph's state is a version, or an array of them."""
    return getattr(path[-1], "key", None) == VERSION and isinstance(x, np.ndarray | np.generic)


class Clocks:
    """For every part of a graph's state the learner whose updates count the versions in it.

    What a learner holds is its own. What runners hold is of the learner that publishes weights to them; what nodes and queues hold, of that whose
    weights sampled it. A node that takes batches of several learners' runners is counted by the first one.
    """

    def __init__(self, graph: Graph, handles: Mapping[str, Handle]) -> None:
        learners = [
            name
            for name, handle in handles.items()
            if isinstance(handle.state, Mapping) and VERSION in handle.state
        ]
        self.nodes = {node.name: node for node in graph.nodes}
        self.owners = {name: name for name in learners}
        """By resource: a learner."""
        for node in graph.nodes:
            named = {field: target for field, (target, _) in refs(node.op).items()}
            mine = [target for target in named.values() if target in learners]
            self.owners.update(
                {
                    named[field]: mine[0]
                    for field in node.op.writes
                    if field in named and mine and named[field] not in self.owners
                }
            )
        for name in (
            *learners,
            *graph.resources,
        ):  # where no node publishes: who gave the first weights, and whose runners feed a replay
            for target, _ in refs(graph.resources[name]).values():
                owner, other = (name, target) if name in learners else (target, name)
                if owner in self.owners and other not in self.owners:
                    self.owners[other] = self.owners[owner]
        self.of_node = cache(self._of_node)

    def _of_node(self, name: str) -> str:
        """The learner whose versions a node or queue holds."""
        node = self.nodes[name]
        if node.after:
            return self.of_node(node.after[0])
        return next(
            (self.owners[target] for target, _ in refs(node.op).values() if target in self.owners),
            "",
        )

    def of(self, path: Any) -> str:
        """The learner by a path in (states of operators by stage, of resources, of queues)."""
        part = path[0].idx
        if part == 1:
            return self.owners.get(path[1].key, "")
        return self.of_node(path[2].key if part == 0 else path[1].key)

    def newest(self, paths: Iterable[tuple[Any, Any]]) -> Newest:
        """The newest version of each learner in the leaves of a state."""
        found: Newest = {}
        for path, x in paths:
            if is_version(path, x):
                learner = self.of(path)
                found[learner] = max(found.get(learner, 0), int(np.max(x)))
        return found


def later(versions: Newest, rises: Newest, times: int = 1) -> Newest:
    """Versions after each rose so many times."""
    return {
        learner: versions.get(learner, 0) + times * rises.get(learner, 0)
        for learner in {**versions, **rises}
    }
