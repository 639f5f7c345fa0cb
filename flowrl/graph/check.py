"""The rules of a graph's structure.

Rules that know reinforcement learning are part of operators and resources (their `review`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowrl.core.declared import hidden
from flowrl.errors import a, unknown
from flowrl.graph.graph import Graph, Node
from flowrl.graph.protocols import Handle, Operator, Resource
from flowrl.graph.refs import refs, resource_and_part

Problem = tuple[str, str]
"""A pair of (node or resource, what is wrong and the way out)."""


def hiding(graph: Graph) -> Iterator[Problem]:
    """Yield the fields of operators and resources that hide an attribute of these classes.

    Other rules would misread these.
    """
    for node in graph.nodes:
        if wrong := hidden(node.op, Operator):
            yield node.name, wrong
    for name, resource in graph.resources.items():
        if wrong := hidden(resource, Resource):
            yield name, wrong


def broken(graph: Graph) -> Iterator[Problem]:
    """Yield what keeps a graph from being run at all, even abstractly."""
    if not graph.nodes:
        yield "", "it has no operators; add them with .then(sample=ParallelSample(), ...)"
    yield from _starts(graph)
    yield from _references(graph)


def _starts(graph: Graph) -> Iterator[Problem]:
    """Yield the starts that are no source, and nodes with several inputs that are no join."""
    for node in graph.nodes:
        kind = type(node.op).__name__
        if not node.after and not node.op.source:
            problem = (
                f"{kind} stands at a start, but it makes no items of its own; "
                "begin with a source such as ParallelSample()"
            )
            yield node.name, problem
        if len(node.after) > 1 and not node.op.joins:
            problem = (
                f"takes items from {', '.join(node.after)}, but {kind} is no join "
                "(its `joins` is False); let it follow one node only"
            )
            yield node.name, problem


def ends(graph: Graph) -> Iterator[Problem]:
    """Yield what is wrong with where a graph ends."""
    if not graph.nodes:
        return
    last = graph.ends()
    reporting = [n.name for n in graph.nodes if n.op.reports]
    if not reporting:
        problem = (
            "no Report closes a Row, so a run would show nothing and never stop; "
            "add .then(report=Report())"
        )
        yield last[-1], problem
    elif len(reporting) > 1:
        problem = f"a graph has exactly one Report, and there is {reporting[0]} too; remove one"
        yield reporting[1], problem
    for node in graph.nodes:
        yield from _ending(graph, node, node.name in last)


def _ending(graph: Graph, node: Node, is_last: bool) -> Iterator[Problem]:
    """Yield what is wrong with a node that ends the graph, or should."""
    if node.op.reports and not is_last:
        following = ", ".join(n.name for n in graph.nodes if node.name in n.after)
        problem = (
            f"closes Rows and passes nothing on, but {following} comes after it; "
            "move Report to the end"
        )
        yield node.name, problem
    # Without an effect, all that leads to this end would be computed for nothing.
    changes = {*node.op.writes} & {*refs(node.op)}
    if is_last and not node.op.reports and not changes:
        problem = (
            "nothing comes of what it yields: an end must be a Report or an effect such as "
            "SyncWeights(); go on from it or remove it"
        )
        yield node.name, problem


def _references(graph: Graph) -> Iterator[Problem]:
    """Yield the references that lead to no fitting resource, and the resources without any."""
    used: set[str] = set()
    # Resources too, since they may refer to one another.
    for name, owner in [*graph.resources.items(), *((n.name, n.op) for n in graph.nodes)]:
        for field, (target, kind) in refs(owner).items():
            if not isinstance(target, str):
                yield name, _unnamed(field, target)
                continue
            used.add(resource_and_part(target)[0])
            if problem := _misleading(graph, field, target, kind):
                yield name, f"{problem} {name}.{field} to the right one"
    for name, resource in graph.resources.items():
        if name not in used and not resource.works_alone:
            problem = (
                f"no node uses it; remove it with .remove('{name}'), "
                "or name it in the operator that should"
            )
            yield name, problem


def _unnamed(field: str, target: Any) -> str:
    """Return the text on a reference that is no name."""
    if isinstance(target, Resource):
        kind = type(target).__name__
        way_out = f"write Graph(..., {field}={kind}(...)) and {field}='{field}'"
    else:
        way_out = "give it the name of a resource of the graph"
    return f"its {field} must be the name of a resource, got {a(target)}; {way_out}"


def _misleading(graph: Graph, field: str, target: str, kind: type[Handle]) -> str:
    """Return the text on a wrong reference, to be followed by its address; empty if right."""
    name, part = resource_and_part(target)
    if name not in graph.resources:
        return f"{_missing(graph, field, name)}; add {name}=... to Graph(...), or set"
    resource = graph.resources[name]
    if part and part not in resource.part_names():
        if not resource.part_names():
            return f"its {field} is '{target}', but '{name}' has no parts; set"
        known = [f"{name}.{each}" for each in resource.part_names()]
        return f"its {field}: {unknown('part of a resource', target, known)}; set"
    if issubclass(resource.handle, kind):
        return ""
    got = type(resource).__name__
    return f"its {field} must be what gives a {kind.__name__}, but '{target}' is {got}; set"


def _missing(graph: Graph, field: str, target: str) -> str:
    """Return what is wrong with a reference to a resource that there is not."""
    if any(n.name == target for n in graph.nodes):
        return f"its {field} is '{target}', but that is a node, not a resource"
    return unknown("resource", target, graph.resources)


def downstream_of_queues(graph: Graph) -> dict[str, str]:
    """Return a queue upstream of each node that has one.

    It is the one directly before the node, else the nearest along the first input that has one.
    """
    found: dict[str, str] = {}
    ops = {n.name: n.op for n in graph.nodes}
    for node in graph.nodes:
        for before in node.after:
            if ops[before].queue:
                found[node.name] = before
            # Nodes stand in the order of the graph, so this is known already.
            elif before in found:
                found.setdefault(node.name, found[before])
    return found
