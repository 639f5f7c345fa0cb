"""Compilation of a graph to a plan.

The rules of structure come first, then the abstract trace, then the rules that use what it found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import filterfalse

from flowrl.core.garbage import rarely_collected
from flowrl.core.items import Trained
from flowrl.errors import CheckError
from flowrl.graph.check import Problem, broken, downstream_of_queues, ends, hiding
from flowrl.graph.graph import Graph
from flowrl.graph.period import Did
from flowrl.graph.plan import Plan
from flowrl.graph.refs import refs, resource_and_part
from flowrl.graph.trace import Trace, Traffic, trace
from flowrl.graph.use import REPLAYED, SAMPLED, Use


def compile_graph(graph: Graph) -> Plan:
    """Check the graph, run it abstractly, and return its plan in numbers.

    Raises:
        CheckError: all the problems found, each with its node and the way out.
    """
    # Fields that hide what the rules look at make every other rule meaningless.
    if problems := list(hiding(graph)):
        raise _rejected(graph, problems)
    problems = list(broken(graph))
    # A graph that is broken can't be traced, but its other problems are reported with it.
    found = Trace()
    traced = not problems
    of_settings = [(n.name, text) for n in graph.nodes for text in n.op.review(graph)]
    problems += [*ends(graph), *of_settings]
    if traced:
        with rarely_collected():
            found = trace(graph)
        # What is wrong with the settings of a node explains better why it fails.
        problems += [x for x in found.problems if x[0] not in dict(of_settings)]
        problems += _unreported(graph, found)
        problems += _ambiguous(found)
    reviewed = list(review(graph, found, traced and bool(found.rows) and not found.problems))
    # A resource that found a problem explains better why no Row closes.
    problems += reviewed or _never(graph, found)
    if problems:
        raise _rejected(graph, problems)
    return Plan(graph, found)


def _rejected(graph: Graph, problems: list[Problem]) -> CheckError:
    """Return the error that lists the problems, each once."""
    lines = [
        f"{graph.name}.{where}: {text}" if where else f"{graph.name}: {text}"
        for where, text in problems
    ]
    return CheckError(graph.name, dict.fromkeys(lines))


def review(graph: Graph, found: Trace, traced: bool) -> Iterator[Problem]:
    """Yield what the resources find wrong with how they are used.

    Args:
        graph: the graph.
        found: what the abstract trace found.
        traced: whether it closed a Row and found no problem, so that its numbers can be relied on.
    """
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for node, traffic in found.steady.items():
        for used, counters in traffic.counts.items():
            counts.setdefault(used, {})[node] = dict(counters)
    queues = downstream_of_queues(graph)
    largest_lags = {node: _largest(lags) for node, lags in found.lags.items()}
    stuck = found.exact and bool(found.steady) and not found.rows
    replays = _sources(graph, found.ever, REPLAYED, passed_on=False)
    samplers = _sources(graph, found.ever, SAMPLED, passed_on=True)
    for name, resource in graph.resources.items():
        users = _users(graph, name)
        use = Use(
            name=name,
            resources=graph.resources,
            traced=traced,
            exact=traced and found.exact,
            counts=counts,
            users=users,
            ever=found.ever,
            lags={n: lag for n, lag in largest_lags.items() if n in counts.get(name, {})},
            gradient_data_lags={
                n: lag for (n, of), lag in found.gradient_data_lags.items() if of == name
            },
            idle=[n for n in users if stuck and not found.steady[n].given],
            queues={n: queue for n, queue in queues.items() if n in users},
            replays={n: of for n, of in replays.items() if n in users},
            strangers=_strangers(graph, name, {n: samplers[n] for n in users}),
        )
        yield from resource.review(use)


def _strangers(
    graph: Graph, name: str, samplers: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return by node the runners upstream that a resource neither names nor gets weights to.

    Args:
        graph: the graph.
        name: the resource.
        samplers: by node that refers to it: the runners upstream, or the parts of them.
    """
    near = {str(target) for target, _ in refs(graph.resources[name]).values()}
    for node in (n for n in graph.nodes if n.name in samplers):
        targets = {field: str(target) for field, (target, _) in refs(node.op).items()}
        near |= {targets[field] for field in node.op.writes if field in targets}

    # Who takes a part out of what all of them sampled may be an operator of the user's own.
    near |= {resource_and_part(target)[0] for target in near}
    return {node: list(filterfalse(near.__contains__, of)) for node, of in samplers.items()}


def _sources(
    graph: Graph, ever: Did, counters: Collection[str], *, passed_on: bool
) -> dict[str, tuple[str, ...]]:
    """Return by node the resources that it, or what is upstream of it, ever took experience from.

    Downstream of an operator that takes a part out, that is the part, such as ``runners.red``.

    Args:
        graph: the graph.
        ever: by node, resource and counter: what was done.
        counters: what counts steps that are taken from such a resource.
        passed_on: whether what takes experience in the middle of a line may pass on what it is
            given, in place of that; then nothing is known of what comes after it.
    """
    taken = [(node, of, what) for (node, of, what), number in ever.items() if number]
    takers = {node for node, _, what in taken if what in (*SAMPLED, *REPLAYED, "draws")}
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        own = [of for name, of, what in taken if name == node.name and what in counters]
        before = () if node.name in takers else node.after
        # Nodes stand in the order of the graph, so these are known already.
        upstream = [source for each in before for source in found[each]]
        if part := node.op.takes_part:
            upstream = [f"{resource_and_part(source)[0]}.{part}" for source in upstream]
        unknown = passed_on and node.name in takers and node.after
        found[node.name] = () if unknown else tuple(dict.fromkeys((*own, *upstream)))
    return found


def _largest(lags: Sequence[float]) -> float:
    """Return the largest policy lag, NaN if one is unknown."""
    return max(lags, key=lambda lag: math.inf if math.isnan(lag) else lag)


def _users(graph: Graph, resource: str) -> list[str]:
    """Return the nodes that refer to a resource."""
    users = []
    for node in graph.nodes:
        targets = [resource_and_part(str(target))[0] for target, _ in refs(node.op).values()]
        if resource in targets:
            users.append(node.name)
    return users


def _never(graph: Graph, found: Trace) -> Iterator[Problem]:
    """Yield why no Row ever closes."""
    reporting = [n.name for n in graph.nodes if n.op.reports]
    if not found.steady or found.rows or not reporting:
        return
    for node in graph.nodes:
        traffic = found.steady.get(node.name)
        # Without a period, a Report may close its first Row later than the trace waits. Another
        # operator that took so many items and yielded none is taken for a mistake.
        if traffic and traffic.taken and not traffic.given and (found.exact or not node.op.reports):
            problem = (
                f"took {traffic.taken:,} items and yielded none, so no Row closes; "
                "let it fire sooner"
            )
            yield node.name, problem
            return
    if found.exact:
        yield reporting[0], "no Row closes: the passes repeat without one"


def _ambiguous(found: Trace) -> Iterator[Problem]:
    """Yield the metrics of operators that have the name of one that a loss returns."""
    of_losses: set[str] = set()
    for item in found.first_items.values():
        if isinstance(item, Trained):
            of_losses.update(item.metrics.names)
    for name in sorted(found.metrics.keys() & of_losses):
        yield (
            found.metrics[name],
            f"reports the metric '{name}', which comes from the loss already; give it another name",
        )


def _updates(traffic: Traffic) -> int:
    return sum(counters["updates"] for counters in traffic.counts.values())


def _unreported(graph: Graph, found: Trace) -> Iterator[Problem]:
    """Yield the updates that no Row would report: nobody would see a loss of NaN."""
    if found.problems or found.opaque or not found.rows:
        return
    updates = {name: _updates(traffic) for name, traffic in found.steady.items()}
    # Means over rows need not agree to the last update.
    if sum(updates.values()) == found.reported or (found.reported and not found.exact):
        return
    reporting = [n.name for n in graph.nodes if n.op.reports]
    # Other rules say that there is only one, and that it is an end.
    if reporting[0] not in graph.ends() or len(reporting) > 1:
        return
    import networkx as nx

    training = [name for name, number in updates.items() if number]
    upstream = nx.ancestors(graph.digraph(), reporting[0])
    apart = [name for name in training if name not in upstream]
    for node in apart or training[:1]:
        problem = (
            f"its updates do not each reach {reporting[0]} once, so rows would not report them; "
            f"put {reporting[0]} after it, in one line"
        )
        yield node, problem
