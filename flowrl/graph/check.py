"""The rules of a graph's structure. Rules that know reinforcement learning live with the resources (`Resource.review`)."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import unknown
from flowrl.graph.graph import Graph
from flowrl.graph.protocols import Operator, Resource, hidden, refs

Problem = tuple[str, str]
"""(node or resource, what is wrong and the way out)."""


def hiding(graph: Graph) -> Iterator[Problem]:
    """Yield the fields that hide what a graph asks of every operator and resource; other rules would misread those."""
    for node in graph.nodes:
        if wrong := hidden(node.op, Operator):
            yield node.name, wrong
    for name, resource in graph.resources.items():
        if wrong := hidden(resource, Resource):
            yield name, wrong


def broken(graph: Graph) -> Iterator[Problem]:
    """What keeps a graph from being run at all, even abstractly."""
    if not graph.nodes:
        yield "", "it has no operators; add them with .then(sample=ParallelSample(), ...)"
    yield from _starts(graph)
    yield from _references(graph)


def _starts(graph: Graph) -> Iterator[Problem]:
    for node in graph.nodes:
        kind = type(node.op).__name__
        if not node.after and not node.op.source:
            yield (
                node.name,
                f"{kind} stands at a start, but it makes no items of its own; begin with a source such as ParallelSample()",
            )
        if len(node.after) > 1 and not node.op.joins:
            yield (
                node.name,
                f"takes items from {', '.join(node.after)}, but {kind} is no join (its `joins` is False); let it follow one node only",
            )


def ends(graph: Graph) -> Iterator[Problem]:
    """What is wrong with where a graph ends."""
    if not graph.nodes:
        return
    clocks = [n.name for n in graph.nodes if n.op.reports]
    if not clocks:
        yield (
            graph.ends()[-1],
            "no Report closes a Row, so a run would show nothing and never stop; add .then(report=Report())",
        )
    elif len(clocks) > 1:
        yield clocks[1], f"a graph has exactly one Report, and there is {clocks[0]} too; remove one"
    last = set(graph.ends())
    for node in graph.nodes:
        if node.op.reports and node.name not in last:
            behind = ", ".join(n.name for n in graph.nodes if node.name in n.after)
            yield (
                node.name,
                f"closes Rows and passes nothing on, but {behind} stands behind it; move Report to the end",
            )
        if node.name in last and not node.op.reports and not node.op.writes:
            yield (
                node.name,
                "nothing comes of what it yields: an end must be a Report or an effect such as SyncWeights(); go on from it or remove it",
            )


def _references(graph: Graph) -> Iterator[Problem]:
    used: set[str] = set()
    for name, owner in [*graph.resources.items(), *((n.name, n.op) for n in graph.nodes)]:
        for field, (target, kind) in refs(owner).items():
            used.add(target)
            if target not in graph.resources:
                what = (
                    f"its {field} is '{target}', but that is a node, not a resource"
                    if any(n.name == target for n in graph.nodes)
                    else unknown("resource", target, graph.resources)
                )
                yield (
                    name,
                    f"{what}; add {target}=... to Graph(...), or set {name}.{field} to the right one",
                )
            elif not issubclass(graph.resources[target].handle, kind):
                got = type(graph.resources[target]).__name__
                yield (
                    name,
                    f"its {field} must be what gives a {kind.__name__}, but '{target}' is {got}; set {name}.{field} to the right one",
                )
    for name in graph.resources:
        if name not in used:
            yield (
                name,
                f"no node uses it; remove it with .remove('{name}'), or name it in the operator that should",
            )


def behind_queues(graph: Graph) -> dict[str, str]:
    """By node that stands behind a queue: the nearest such queue."""
    found: dict[str, str] = {}
    ops = {n.name: n.op for n in graph.nodes}
    for node in graph.nodes:
        for before in node.after:
            if ops[before].queue:
                found[node.name] = before
            elif before in found:
                found.setdefault(node.name, found[before])
    return found
