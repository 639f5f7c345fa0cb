"""Policy versions in the state of a graph, and the learner whose updates count each of them.

Every learner counts its own updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from flowrl.graph.graph import Graph, Node
from flowrl.graph.protocols import Handle
from flowrl.graph.refs import refs

VERSION = "version"
"""The key of a policy version, be it that of weights or those of a batch's columns."""
Newest = dict[str, int]
"""By learner: its newest policy version."""


def is_version(path: Any, x: Any) -> bool:
    """Return whether a leaf of a graph's state is a policy version, or an array of them."""
    return getattr(path[-1], "key", None) == VERSION and isinstance(x, np.ndarray | np.generic)


class VersionOwners:
    """Map from every part of a graph's state to the learner whose updates count its versions.

    What a learner holds is its own. What runners, or a part of them, hold belongs to the learner
    that publishes weights to them; what nodes and queues hold, to the learner whose weights sampled
    it. A node that takes batches of several learners' runners is counted by the first one.

    Args:
        graph: the graph.
        handles: the open handles of its resources, by name.
    """

    def __init__(self, graph: Graph, handles: Mapping[str, Handle]) -> None:
        learners = [
            name
            for name, handle in handles.items()
            if isinstance(handle.state, Mapping) and VERSION in handle.state
        ]
        self.nodes = {node.name: node for node in graph.nodes}
        self.owners = {name: name for name in learners}
        """By resource: the learner whose updates count its versions."""
        for node in graph.nodes:
            self._add_written(node, learners)
        # Where no node publishes: a learner owns the runners that it names, since it sends their
        # first weights, and a replay has the owner of the runners that it names. Learners come
        # first, so that these runners have an owner by then.
        for name in (*learners, *graph.resources):
            for target, _ in refs(graph.resources[name]).values():
                owner, other = (name, target) if name in learners else (target, name)
                if owner in self.owners and other not in self.owners:
                    self.owners[other] = self.owners[owner]
        # What such a resource publishes are versions of the learner that it names.
        for name, resource in graph.resources.items():
            fed = [refs(resource)[field][0] for field in resource.feeds]
            if name in self.owners:
                self.owners.update((target, self.owners[name]) for target in fed)
        # A trace asks for every leaf of a state: of batches that are held there can be thousands.
        self.of_node = cache(self._of_node)
        self.sampled_from = cache(self._sampled_from)

    def _add_written(self, node: Node, learners: Sequence[str]) -> None:
        """Give the resources that a node writes to the first learner that it refers to."""
        targets = {field: target for field, (target, _) in refs(node.op).items()}
        referred = [target for target in targets.values() if target in learners]
        if not referred:
            return
        # Who published first stays the owner.
        written = [targets[field] for field in node.op.writes if field in targets]
        new = [name for name in written if name not in self.owners]
        self.owners.update(dict.fromkeys(new, referred[0]))

    def _of_node(self, name: str) -> str:
        """Return the learner whose versions a node or queue holds."""
        node = self.nodes[name]
        if node.after:
            # Upstream of an operator that takes a part out, items hold those of several learners.
            part = f"{self.sampled_from(name)}.{node.op.takes_part}"
            return self.owners.get(part) or self.of_node(node.after[0])
        return next(
            (self.owners[target] for target, _ in refs(node.op).values() if target in self.owners),
            "",
        )

    def of(self, path: Any) -> str:
        """Return the learner of a leaf of a graph's state.

        Args:
            path: its path in (states of operators by stage, of resources, of queues).
        """
        part = path[0].idx
        if part == 1:
            resource, inner = path[1].key, path[2:]
            owner = self.owners.get(resource, "")
        else:
            node, inner = (path[2].key, path[3:]) if part == 0 else (path[1].key, path[2:])
            resource, owner = self.sampled_from(node), self.of_node(node)
        if owner:
            return owner
        # Several learners own parts of it, by whose names its state and its items are parted.
        parts = (f"{resource}.{getattr(step, 'key', '')}" for step in inner)
        return next((self.owners[name] for name in parts if name in self.owners), "")

    def _sampled_from(self, name: str) -> str:
        """Return the resource from which the items of a node were sampled; empty if from none."""
        node = self.nodes[name]
        if node.after:
            return self.sampled_from(node.after[0])
        return next((target for target, _ in refs(node.op).values()), "")

    def newest(self, paths: Iterable[tuple[Any, Any]]) -> Newest:
        """Return the newest version of each learner in the state of a graph.

        Args:
            paths: the leaves of the state, each with its path.
        """
        found: Newest = {}
        for path, x in paths:
            if is_version(path, x):
                learner = self.of(path)
                found[learner] = max(found.get(learner, 0), int(np.max(x)))
        return found


def later(versions: Newest, rises: Newest, times: int = 1) -> Newest:
    """Return the versions after each rose a number of times.

    Args:
        versions: by learner: its version.
        rises: by learner: by how much its version rises each time.
        times: how many times.
    """
    return {
        learner: versions.get(learner, 0) + times * rises.get(learner, 0)
        for learner in {**versions, **rises}
    }
