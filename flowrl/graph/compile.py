"""compile = the rules, then the abstract trace, then the rules that know what was traced; out comes the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowrl.errors import CheckError
from flowrl.graph.check import Problem, behind_queues, broken, ends
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Use, refs
from flowrl.graph.trace import Trace, trace


def compile_graph(graph: Graph) -> Plan:
    """Check the graph, run it abstractly, and return its plan in numbers.

    Raises:
        CheckError: all the problems found, each with its node and the way out.
    """
    problems = list(broken(graph))
    stages = graph.stages()
    found = Trace()
    traced = not problems and len(stages) == 1
    problems += ends(graph)
    if traced:
        found = trace(graph)
        problems += found.problems
        problems += _never(graph, found)
    elif len(stages) > 1 and not problems:
        problems.append((stages[1][0], f"cuts the graph into {len(stages)} stages, and the runtimes run graphs of one stage; remove it"))
    problems += review(graph, found, traced and bool(found.rows) and not found.problems)
    if problems:
        lines = [f"{graph.name}.{where}: {text}" if where else f"{graph.name}: {text}" for where, text in problems]
        raise CheckError(graph.name, dict.fromkeys(lines))
    return Plan(graph, found)


def review(graph: Graph, found: Trace, traced: bool) -> Iterator[Problem]:
    """What the resources say of how they are used."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for node, traffic in found.steady.items():
        for used, counters in traffic.counts.items():
            counts.setdefault(used, {})[node] = dict(counters)
    queues = behind_queues(graph)
    for name, resource in graph.resources.items():
        users = {n.name for n in graph.nodes if any(target == name for target, _ in refs(n.op).values())}
        use = Use(
            name,
            graph.resources,
            traced,
            counts,
            {n: max(lags, key=lambda x: math.inf if math.isnan(x) else x) for n, lags in found.lags.items() if n in counts.get(name, {})},
            {n: q for n, q in queues.items() if n in users},
        )
        yield from resource.review(use)


def _never(graph: Graph, found: Trace) -> Iterator[Problem]:
    """A Row that never closes."""
    clocks = [n.name for n in graph.nodes if n.op.clock]
    if found.problems or found.opaque or found.rows or not clocks:
        return
    for node in graph.nodes:
        traffic = found.steady.get(node.name)
        if traffic and traffic.taken and not traffic.given:
            yield node.name, f"took {traffic.taken:,} items and yielded none, so no Row ever closes; let it fire sooner"
            return
    yield clocks[0], "no Row closes: the passes repeat without one"
