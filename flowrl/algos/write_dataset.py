"""`write_dataset`: a graph that also writes what its runners sample into a dataset."""

from __future__ import annotations

from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.offline.writing import DatasetWriter
from flowrl.ops.offline import WriteDataset
from flowrl.ops.sample import ParallelSample


def write_dataset(graph: Graph, path: str, *, after: str | None = None) -> Graph:
    """Return a graph that also writes every episode that its runners play into a dataset.

    What it learns stays the same, bit for bit.

    Args:
        graph: a graph that samples.
        path: new directory of the dataset.
        after: the node after which rollouts are written; None for the only ParallelSample.

    Raises:
        GraphError: no node samples, or several do.

    >>> import flowrl as fl
    >>> graph = fl.write_dataset(fl.ppo("CartPole-v1"), "data/cartpole")
    >>> [node.name for node in graph.nodes][:3]
    ['sample', 'write', 'batch']
    """
    samplers = {
        node.name: str(node.op.runners)
        for node in graph.nodes
        if isinstance(node.op, ParallelSample)
    }
    if after is None:
        if len(samplers) != 1:
            names = ", ".join(samplers) or "none"
            raise GraphError(
                f"write_dataset needs one ParallelSample, got {names}; name a node by after=",
                graph.name,
            )
        (after,) = samplers
    runners = samplers.get(after, "runners")
    found = Graph(graph.name, **graph.resources, writer=DatasetWriter(path, runners=runners))
    for node in graph.nodes:
        found = found.then(after=node.after, **{node.name: node.op})
    return found.insert(after=after, write=WriteDataset())
