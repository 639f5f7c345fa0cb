"""What differs between two graphs, their plans, and the runs that they left behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.texts import in_bytes
from flowrl.errors import CheckError, GraphError, SaveError, a
from flowrl.graph import values
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.observe.settings import settings_of

WIDE = 60
"""Characters of a value that are shown."""
LACKS = "-"
"""What stands where only the other one has something."""


@dataclass(frozen=True)
class Part:
    """One kind of things that are compared."""

    name: str
    word: str
    """One of these things."""
    lines: tuple[tuple[str, str, str], ...]
    """What differs, and what it is on each side."""
    alike: int
    """How many do not differ."""


@dataclass(frozen=True)
class Diff:
    """Two graphs side by side. `print` shows it; what is alike is only counted."""

    names: tuple[str, str]
    parts: tuple[Part, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return any(part.lines for part in self.parts)

    def __str__(self) -> str:
        every = [("", *self.names), *(line for part in self.parts for line in part.lines)]
        first, second = (max(len(line[i]) for line in every) for i in (0, 1))
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
        differ, word = len(part.lines), part.word
        alike = f"{part.alike} {word}{'s' * (part.alike != 1)} alike"
        return f"{differ} differ{'s' * (differ == 1)}, {alike}" if differ else alike


def diff(
    a: Graph | Plan,
    b: Graph | Plan,
    names: tuple[str, str] | None = None,
    results: tuple[Path | None, Path | None] = (None, None),
) -> Diff:
    """Compare two graphs: their nodes, the settings of nodes and resources by address, and what their plans say.

    Args:
        a: one.
        b: the other.
        names: what to call them; their own names by default.
        results: the directories of their runs, whose rows are compared too.

    Raises:
        GraphError: one of them is no graph.
        SaveError: a directory holds no rows.

    >>> import flowrl as fl
    >>> print(fl.diff(fl.ppo(), fl.ppo().rename("calm").set("learner.loss.clip_ratio", 0.1)).parts[1].lines)
    (('learner.loss.clip_ratio', '0.2', '0.1'),)
    """
    one, other = (_graph(x) for x in (a, b))
    parts = [
        _part("nodes", "node", _nodes(one, other), _nodes(other, one)),
        _part("settings", "setting", _settings(one, other), _settings(other, one)),
        _part("plan", "number", _numbers(a), _numbers(b)),
    ]
    if results != (None, None):
        parts.append(
            _part(
                "results", "result", *({} if path is None else _results(path) for path in results)
            )
        )
    return Diff(names or (one.name, other.name), tuple(parts))


def _graph(value: Graph | Plan) -> Graph:
    graph = value.graph if isinstance(value, Plan) else value
    if not isinstance(graph, Graph):
        raise GraphError(f"diff takes two graphs, got {a(value)}")
    return graph


def _part(name: str, word: str, one: Mapping[str, str], other: Mapping[str, str]) -> Part:
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
    """By node and resource: its kind; with its settings if the other graph has none of that name, with its place if it has another there."""
    found = {}
    for name, owner in _owners(graph).items():
        text = (
            type(owner).__name__
            if name in _owners(other)
            else values.to_text(owner, defaults=False)
        )
        here, there = _behind(name, graph, other), _behind(name, other, graph)
        found[name] = (
            text
            if None in (here, there) or here == there
            else f"{text}, behind {', '.join(here or ()) or 'nothing'}"
        )
    return found


def _behind(name: str, graph: Graph, other: Graph) -> list[str] | None:
    """The nodes nearest before a node that both graphs have; None of what is no node."""
    after, both = (
        {node.name: node.after for node in graph.nodes},
        {node.name for node in other.nodes},
    )

    def nearest(name: str) -> Iterator[str]:
        for before in after[name]:
            yield from (before,) if before in both else nearest(before)

    return sorted(set(nearest(name))) if name in after else None


def _settings(graph: Graph, other: Graph) -> dict[str, Any]:
    """The settings of what both have."""
    return {
        address: text
        for address, text in settings_of(graph, strings=True).items()
        if address.partition(".")[0] in _owners(other)
    }


def _numbers(graph: Graph | Plan) -> dict[str, str]:
    """What a plan says, by what it is called; of a graph that has none, why."""
    try:
        plan = graph if isinstance(graph, Plan) else graph.compile()
    except CheckError as error:
        return {"no plan": error.problems[0]}
    lag = "any" if math.isnan(plan.lag) else f"{plan.lag:g}"
    bound = (
        "none"
        if math.isinf(plan.lag_bound) or math.isnan(plan.lag_bound)
        else f"{plan.lag_bound:g}"
    )
    named = {
        "steps a row": "sampled_steps",
        "updates a row": "updates",
        "steps used a row": "used_steps",
        "gradient steps a row": "gradient_steps",
        "syncs a row": "publishes",
    }
    return {
        "stages": str(len(plan.graph.stages())),
        **{name: f"{plan.per_row(counter):,.6g}" for name, counter in named.items()},
        "lag in lock-step": lag,
        "lag bound": bound,
        "memory set aside": in_bytes(sum(plan.found.nbytes.values())),
    }


BEST: Mapping[str, Callable[[list[float]], float]] = {"return_mean": max, "eval/return_mean": max}
"""Columns of which the best one is compared too."""


def _results(path: Path) -> dict[str, str]:
    """What a run's directory says of how it went."""
    rows = list(_rows(path / "rows.jsonl"))
    found = {"rows": f"{len(rows):,}", "ended": _reason(path / "events.jsonl")}
    for name, best in BEST.items():
        if told := [row[name] for row in rows if row.get(name) is not None]:
            found[f"best {name}"] = f"{best(told):,.6g}"
    last = rows[-1] if rows else {}
    if last.get("seconds"):
        found["steps/s, all in all"] = f"{last['env_steps'] / last['seconds']:,.6g}"
    return found | {
        f"last {name}": "nan" if value is None else f"{value:,.6g}"
        for name, value in last.items()
        if name != "row"
    }


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise SaveError(f"{path.parent} holds no {path.name}: it is no run's directory") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError:  # a killed run's last line may be half written
            if number < text.count("\n"):
                raise SaveError(
                    f"{path}, line {number} is damaged: it is not the JSON that was written"
                ) from None


def _reason(path: Path) -> str:
    ends = (
        [event for event in _rows(path) if event.get("event") == "ended"] if path.is_file() else []
    )
    return ends[-1]["reason"] if ends else "not told"
