"""Differences between two graphs, their plans, and the directories of their runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.row_json import numbers_of
from flowrl.core.saved_rows import json_lines
from flowrl.core.texts import in_bytes, plural
from flowrl.errors import CheckError, GraphError, a
from flowrl.graph import values
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.observe.settings import settings_of

WIDE = 60
"""The most characters of a value that are shown."""
LACKS = "-"
"""The text for a value that only the other graph has."""


@dataclass(frozen=True)
class Part:
    """The comparison of one kind of things, such as nodes or settings."""

    name: str
    """The kind, in the plural."""
    word: str
    """The kind, in the singular."""
    lines: tuple[tuple[str, str, str], ...]
    """What differs, and its value on each side."""
    alike: int
    """How many do not differ."""


@dataclass(frozen=True)
class Diff:
    """The comparison of two graphs, which `print` shows; it is true where anything differs."""

    names: tuple[str, str]
    """The names of the two graphs."""
    parts: tuple[Part, ...]
    """What differs in nodes, settings, plan and, where there are runs, results."""

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return any(part.lines for part in self.parts)

    def __str__(self) -> str:
        # Columns have the same width in all parts.
        every = [("", *self.names), *(line for part in self.parts for line in part.lines)]
        first = max(len(line[0]) for line in every)
        second = max(len(line[1]) for line in every)
        text = [f"  {'':<{first}}  {self.names[0]:<{second}}  {self.names[1]}"]
        for part in self.parts:
            text.append(f"{part.name}: {self._count(part)}")
            text += [
                f"  {what:<{first}}  {one:<{second}}  {other}".rstrip()
                for what, one, other in part.lines
            ]
        return "\n".join(line.rstrip() for line in text) + "\n"

    @staticmethod
    def _count(part: Part) -> str:
        differ = len(part.lines)
        alike = f"{part.alike} {plural(part.alike, part.word)} alike"
        if not differ:
            return alike
        return f"1 differs, {alike}" if differ == 1 else f"{differ} differ, {alike}"


def diff(
    a: Graph | Plan,
    b: Graph | Plan,
    names: tuple[str, str] | None = None,
    results: tuple[Path | None, Path | None] = (None, None),
) -> Diff:
    """Compare the nodes, settings and plans of two graphs, and the results of their runs.

    Settings are those of nodes and resources, by address.

    Args:
        a: graph or plan.
        b: other graph or plan.
        names: what to call the two; None: their own names (the default).
        results: directories of their runs, whose rows are compared too; None for a graph without a
            run (default (None, None)).

    Raises:
        GraphError: one of them is no graph.
        SaveError: a directory holds no rows.

    >>> import flowrl as fl
    >>> calm = fl.ppo().rename("calm").set("learner.loss.clip_ratio", 0.1)
    >>> print(fl.diff(fl.ppo(), calm).parts[1].lines)
    (('learner.loss.clip_ratio', '0.2', '0.1'),)
    """
    one, other = (_graph(x) for x in (a, b))
    parts = [
        _part("nodes", "node", _nodes(one, other), _nodes(other, one)),
        _part("settings", "setting", _settings(one, other), _settings(other, one)),
        _part("plan", "number", _numbers(a), _numbers(b)),
    ]
    if results != (None, None):
        first, second = ({} if path is None else _results(path) for path in results)
        parts.append(_part("results", "result", first, second))
    return Diff(names or (one.name, other.name), tuple(parts))


def differences(one: Graph, other: Graph) -> dict[str, Any]:
    """Return what differs between two graphs as plain data; nothing is compiled for it.

    Args:
        one: graph.
        other: other graph.

    Returns:
        ``nodes``, those and the resources that only one graph has or that are of another kind or
        in another place: each its ``name``, ``change`` (``added``, ``removed`` or ``changed``),
        and what is on each side as ``one`` and ``other``; ``settings``, each an ``address`` with
        ``one`` and ``other``; and ``edges``, each ``from`` a node ``to`` another one, with its
        ``change``. What only the other graph has was added.
    """
    nodes = _part("nodes", "node", _nodes(one, other), _nodes(other, one))
    settings = _part("settings", "setting", _settings(one, other), _settings(other, one))
    edges = [
        *({"from": a, "to": b, "change": "removed"} for a, b in _edges(one) - _edges(other)),
        *({"from": a, "to": b, "change": "added"} for a, b in _edges(other) - _edges(one)),
    ]
    return {
        "nodes": [
            {"name": name, "change": _change(here, there), "one": here, "other": there}
            for name, here, there in nodes.lines
        ],
        "settings": [
            {"address": address, "one": here, "other": there}
            for address, here, there in settings.lines
        ],
        "edges": sorted(edges, key=lambda edge: (edge["from"], edge["to"])),
    }


def _change(here: str, there: str) -> str:
    """Return what was done to a node from one graph to another one."""
    if here == LACKS:
        return "added"
    return "removed" if there == LACKS else "changed"


def _edges(graph: Graph) -> set[tuple[str, str]]:
    return {(before, node.name) for node in graph.nodes for before in node.after}


def _graph(value: Graph | Plan) -> Graph:
    graph = value.graph if isinstance(value, Plan) else value
    if not isinstance(graph, Graph):
        raise GraphError(f"diff takes two graphs, got {a(value)}")
    return graph


def _part(name: str, word: str, one: Mapping[str, str], other: Mapping[str, str]) -> Part:
    """Compare two mappings from what is compared to its value as text."""
    keys = list(dict.fromkeys([*one, *other]))
    lines = tuple(
        (key, _short(one.get(key, LACKS)), _short(other.get(key, LACKS)))
        for key in keys
        if one.get(key) != other.get(key)
    )
    return Part(name, word, lines, len(keys) - len(lines))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDE else f"{line[: WIDE - 3]}..."


def _owners(graph: Graph) -> dict[str, Any]:
    return {**{node.name: node.op for node in graph.nodes}, **graph.resources}


def _nodes(graph: Graph, other: Graph) -> dict[str, str]:
    """Return the kind of each node and resource of a graph.

    The settings of a node are added if the other graph has none of that name, and its place if the
    other graph has it in another. So is the order of the nodes of both, if that alone differs.
    """
    found, moved = {}, False
    others = _owners(other)
    for name, owner in _owners(graph).items():
        text = type(owner).__name__
        if name not in others:
            text = values.to_text(owner, defaults=False)
        here, there = _shared_before(name, graph, other), _shared_before(name, other, graph)
        if here is not None and there is not None and here != there:
            text, moved = f"{text}, after {', '.join(here) or 'nothing'}", True
        found[name] = text
    mine, theirs = _order(graph, other), _order(other, graph)
    if mine != theirs and not moved:
        found["order of nodes"] = ", ".join(mine)
    return found


def _order(graph: Graph, other: Graph) -> list[str]:
    """Return the nodes that both graphs have in the order of the first one."""
    shared = {node.name for node in other.nodes}
    return [node.name for node in graph.nodes if node.name in shared]


def _shared_before(name: str, graph: Graph, other: Graph) -> list[str] | None:
    """Return the nearest nodes before a node that both graphs have; None if it is no node.

    Nodes that only one graph has are skipped, so that they do not move those after them.
    """
    before = {node.name: node.after for node in graph.nodes}
    shared = {node.name for node in other.nodes}

    def nearest(name: str) -> Iterator[str]:
        for source in before[name]:
            if source in shared:
                yield source
            else:
                yield from nearest(source)

    return sorted(set(nearest(name))) if name in before else None


def _settings(graph: Graph, other: Graph) -> dict[str, Any]:
    """Return the settings of the nodes and resources that both graphs have, by address."""
    others = _owners(other)
    return {
        address: text
        for address, text in settings_of(graph, strings=True).items()
        if address.partition(".")[0] in others
    }


def _numbers(graph: Graph | Plan) -> dict[str, str]:
    """Return the numbers of a plan by name; of a graph without a plan, the reason."""
    try:
        plan = graph if isinstance(graph, Plan) else graph.compile()
    # Nodes and settings can be compared even if a graph does not compile.
    except CheckError as error:
        return {"no plan": error.problems[0]}
    lag = "any" if math.isnan(plan.lag) else f"{plan.lag:g}"
    bound = f"{plan.lag_bound:g}" if math.isfinite(plan.lag_bound) else "none"
    counters = {
        "steps a row": "sampled_steps",
        "updates a row": "updates",
        "steps used a row": "used_steps",
        "gradient steps a row": "gradient_steps",
        "syncs a row": "publishes",
    }
    return {
        "stages": str(len(plan.graph.stages())),
        **{name: f"{plan.per_row(counter):,.6g}" for name, counter in counters.items()},
        "largest policy lag in lock-step": lag,
        "policy lag bound": bound,
        "memory set aside": in_bytes(sum(plan.found.nbytes.values())),
    }


BEST: Mapping[str, Callable[[list[float]], float]] = {"return_mean": max, "eval/return_mean": max}
"""The columns whose best value is compared too, and how it is found."""


def _results(path: Path) -> dict[str, str]:
    """Return the results that a run's directory holds, by name."""
    rows = [numbers_of(row) for row in json_lines(path / "rows.jsonl")]
    found = {"rows": f"{len(rows):,}", "ended": _reason(path / "events.jsonl")}
    for name, best in BEST.items():
        if known := [row[name] for row in rows if not math.isnan(row.get(name, math.nan))]:
            found[f"best {name}"] = f"{best(known):,.6g}"
    last = rows[-1] if rows else {}
    if last.get("seconds"):
        found["steps/s, all in all"] = f"{last['env_steps'] / last['seconds']:,.6g}"
    return found | {
        f"last {name}": f"{value:,.6g}" for name, value in last.items() if name != "row"
    }


def _reason(path: Path) -> str:
    """Return why a run ended, from its log of events."""
    if not path.is_file():
        return "not recorded"
    # What was resumed after its end goes on, or was killed.
    reasons = [
        event.get("reason", "not recorded")
        for event in json_lines(path)
        if event.get("event") in ("started", "ended")
    ]
    return reasons[-1] if reasons else "not recorded"
