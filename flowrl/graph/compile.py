"""compile = the rules, then the abstract trace, then the rules that know what was traced; out comes the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowrl.core.items import Trained
from flowrl.errors import CheckError
from flowrl.graph.check import Problem, behind_queues, broken, ends, hiding
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Use, refs
from flowrl.graph.trace import Trace, trace


def compile_graph(graph: Graph) -> Plan:
    """Check the graph, run it abstractly, and return its plan in numbers.

    Raises:
        CheckError: all the problems found, each with its node and the way out.
    """
    if problems := list(hiding(graph)):
        raise _rejected(graph, problems)
    problems = list(broken(graph))
    found = Trace()
    traced = not problems
    problems += [
        *ends(graph),
        *((n.name, text) for n in graph.nodes for text in n.op.review(graph)),
    ]
    if traced:
        found = trace(graph)
        problems += found.problems
        problems += _untold(graph, found)
        problems += _twice(found)
    told = list(review(graph, found, traced and bool(found.rows) and not found.problems))
    problems += told or _never(graph, found)
    if problems:
        raise _rejected(graph, problems)
    return Plan(graph, found)


def _rejected(graph: Graph, problems: list[Problem]) -> CheckError:
    lines = [
        f"{graph.name}.{where}: {text}" if where else f"{graph.name}: {text}"
        for where, text in problems
    ]
    return CheckError(graph.name, dict.fromkeys(lines))


def review(graph: Graph, found: Trace, traced: bool) -> Iterator[Problem]:
    """What the resources say of how they are used."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for node, traffic in found.steady.items():
        for used, counters in traffic.counts.items():
            counts.setdefault(used, {})[node] = dict(counters)
    queues = behind_queues(graph)
    stuck = found.exact and bool(found.steady) and not found.rows
    for name, resource in graph.resources.items():
        users = [
            n.name for n in graph.nodes if any(target == name for target, _ in refs(n.op).values())
        ]
        use = Use(
            name,
            graph.resources,
            traced,
            traced and found.exact,
            counts,
            {
                n: max(lags, key=lambda x: math.inf if math.isnan(x) else x)
                for n, lags in found.lags.items()
                if n in counts.get(name, {})
            },
            [n for n in users if stuck and not found.steady[n].given],
            {n: q for n, q in queues.items() if n in users},
        )
        yield from resource.review(use)


def _never(graph: Graph, found: Trace) -> Iterator[Problem]:
    """A Row that never closes."""
    clocks = [n.name for n in graph.nodes if n.op.reports]
    if not found.steady or found.rows or not clocks:
        return
    for node in graph.nodes:
        traffic = found.steady.get(node.name)
        if traffic and traffic.taken and not traffic.given and (found.exact or not node.op.reports):
            yield (
                node.name,
                f"took {traffic.taken:,} items and yielded none, so no Row closes; let it fire sooner",
            )
            return
    if found.exact:
        yield clocks[0], "no Row closes: the passes repeat without one"


def _twice(found: Trace) -> Iterator[Problem]:
    """A metric of an operator that has the name of one that a loss tells."""
    trained = {
        name
        for form in found.forms.values()
        if isinstance(form, Trained)
        for name in form.metrics.names
    }
    for name in sorted(found.metrics.keys() & trained):
        yield (
            found.metrics[name],
            f"tells the metric '{name}', which comes from the loss already; give it another name",
        )


def _untold(graph: Graph, found: Trace) -> Iterator[Problem]:
    """Updates that no Row would tell of: nobody would see a loss of NaN."""
    if found.problems or found.opaque or not found.rows:
        return
    updates = {
        name: sum(c["updates"] for c in t.counts.values()) for name, t in found.steady.items()
    }
    if sum(updates.values()) == found.reported or (found.reported and not found.exact):
        return
    clock = next(n.name for n in graph.nodes if n.op.reports)
    if clock not in graph.ends() or sum(n.op.reports for n in graph.nodes) > 1:
        return
    import networkx as nx

    behind = nx.ancestors(graph.digraph(), clock)
    for node in [n for n in updates if updates[n] and n not in behind] or [
        n for n in updates if updates[n]
    ][:1]:
        yield (
            node,
            f"its updates do not each reach {clock} once, so rows would not tell of them; put {clock} behind it, in one line",
        )
