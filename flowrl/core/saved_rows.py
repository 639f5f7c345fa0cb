"""Rows of saved runs: read from their directories, grouped, and put on one grid of steps.

Nothing of a user's is imported for it: a graph is compared by its text.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.counted import STEPS, over_of
from flowrl.core.items import Row
from flowrl.core.row_json import numbers_of
from flowrl.errors import SaveError

Array = Any
SEED = re.compile(r"seed-\d+")
"""The name of the directory of one of several runs."""
MOST_POINTS = 1_000
"""The most rows that a run has on its grid."""
MOST_DIFFERENCES = 4
"""The most differences that a label names, unless it takes more to be unlike all others."""
MOST_NAMED = 5
"""The most runs that an error names."""
WIDE = 40
"""The most characters of a setting in a label."""
SWEPT = re.compile(r"([\w.]+)=(.*?)(?=, [\w.]+=|$)")
"""A setting of a sweep and its value, in which there may be commas."""
OF_MANY = ("seeds", "sweep")
"""The settings of a runtime by which one run holds many."""


@dataclass(frozen=True)
class SavedRun:
    """A saved run: how it was started, and its rows."""

    directory: str
    """The directory that the user named; of one called ``seed-0`` and so on the one around it."""
    label: str
    """Its own directory, and its seed if that holds many runs."""
    seed: int | None
    """Its seed, None if that is not known."""
    graph: str
    """The name of its graph."""
    text: str
    """The graph as text, with what else makes a group: its runtime and what it sweeps."""
    settings: Mapping[str, str]
    """Everything in that text by address, such as ``learner.optimizer.lr``."""
    rows: tuple[Mapping[str, float], ...]
    """Its rows, with NaN where one has no number."""
    reason: str | None
    """Why it ended, as `Run.reason` says; None: it goes on or was killed."""


def read_runs(directories: Iterable[str | Path]) -> list[SavedRun]:
    """Return the runs in directories, each a run's own or one that holds ``seed-*`` of them.

    A run that is named twice is read once, however its directory is written.

    Raises:
        SaveError: a directory holds no run, or a damaged file.
    """
    found, seen = [], set()
    for directory in directories:
        named = Path(directory)
        around = named.parent if SEED.fullmatch(named.name) else named
        for path in _run_directories(named):
            if (resolved := path.resolve()) in seen:
                continue
            seen.add(resolved)
            found += _runs_in(path, str(around))
    return found


def _run_directories(path: Path) -> list[Path]:
    """Return a directory, if it is a run's own, or those of runs within it."""
    if not path.is_dir():
        raise SaveError(no_directory(path))
    if (path / "graph.txt").is_file():
        return [path]
    within = [x for x in path.iterdir() if SEED.fullmatch(x.name) and x.is_dir()]
    if not within:
        raise SaveError(
            f"{path} has no graph.txt and no directories seed-0, seed-1, ...: it holds no run; "
            f"{way_to_runs(path)}"
        )
    return sorted(within, key=lambda x: int(x.name.removeprefix("seed-")))


def way_to_runs(path: Path, what: str = "what is in it") -> str:
    """Return what to name in place of a directory that is no run's: the runs that are in it.

    Args:
        path: the directory.
        what: what to call these runs.
    """
    # A folder of another user that can't be looked into holds no run to name.
    readable = os.access(path, os.R_OK | os.X_OK) and path.is_dir()
    within = sorted(str(x) for x in (path.iterdir() if readable else ()) if _marked(x))
    if not within:
        return "name the directory of a run, as flowrl run --out DIR makes it"
    more = [f"and {len(within) - MOST_NAMED} more"] if len(within) > MOST_NAMED else []
    return f"name {what}: {', '.join([*within[:MOST_NAMED], *more])}"


def _marked(path: Path) -> bool:
    return os.access(path / "graph.txt", os.R_OK) or os.access(path / "seed-0", os.R_OK)


def no_directory(path: str | Path) -> str:
    """Return that there is no such directory or that it is a file, and the runs that are there."""
    parent = Path(path).parent
    if os.access(path, os.F_OK):
        way = f"name its directory, {parent}" if _marked(parent) else way_to_runs(parent)
        return f"{path} is a file; {way}"
    return f"there is no directory {path}; {way_to_runs(parent, 'one of the runs there')}"


def _runs_in(path: Path, directory: str) -> list[SavedRun]:
    """Return the run that a directory holds, or each of many that went on at once."""
    try:
        text = (path / "graph.txt").read_text(encoding="utf-8")
    except OSError:
        raise SaveError(f"{path} has no graph.txt: it is no run's directory") from None
    facts = _facts(path / "run.json")
    runtime = {str(k): str(v) for k, v in facts.get("runtime_settings", {}).items()}
    name = str(facts.get("graph", "graph"))
    reason = facts.get("ended", {}).get("reason")
    how = {"runtime": str(facts.get("runtime", "local"))}
    how |= {f"runtime.{k}": v for k, v in runtime.items() if k not in OF_MANY}

    def run(label: str, seed: int | None, swept: str, rows: Iterable[Any]) -> SavedRun:
        settings = {**settings_in(text), **how, **dict(SWEPT.findall(swept))}
        key = json.dumps([text, how, swept])
        numbers = _numbers(path, rows)
        return SavedRun(directory, label, seed, name, key, settings, numbers, reason)

    if not (path / "members.jsonl").is_file():
        if set(OF_MANY) & set(runtime):
            # It is written when the run ends; until then there are only the means of all runs.
            return [run(str(path), None, "", ())]
        return [run(str(path), facts.get("seed"), "", json_lines(path / "rows.jsonl"))]
    members: dict[str, list[Any]] = {}
    for row in json_lines(path / "members.jsonl"):
        known = members.setdefault(str(row.pop("run", "")), [])
        # A program of trials that was filled up holds its last run several times.
        if not known or row.get("row", math.inf) > known[-1].get("row", 0):
            known.append(row)
    found = []
    for label, rows in members.items():
        swept, _, seed = label.rpartition("seed ")
        if not seed.isdigit():
            raise SaveError(f"{path / 'members.jsonl'} is damaged: {label!r} names no seed")
        found.append(run(f"{path}, {label}", int(seed), swept.rstrip(", "), rows))
    return found or [run(str(path), None, "", ())]


def _facts(file: Path) -> dict[str, Any]:
    """Return what ``run.json`` says of a run; nothing where it was saved without that."""
    if not file.is_file():
        return {}
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        _ = facts.get("runtime_settings", {}).items(), facts.get("ended", {}).get("reason")
    except (ValueError, AttributeError) as error:
        raise SaveError(f"{file} is damaged: {error}") from None
    return dict(facts)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file.

    Raises:
        SaveError: the file is not there, or a line other than the last is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise SaveError(f"{path.parent} holds no {path.name}: it is no run's directory") from None
    except UnicodeDecodeError as error:
        raise SaveError(f"{path} is damaged: it is no UTF-8 ({error.reason})") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield dict(json.loads(line))
        except (ValueError, TypeError):
            # The last line of a killed run may be half written.
            if number <= text.count("\n"):
                raise damaged_line(path, number) from None


def damaged_line(path: Path, number: int) -> SaveError:
    """Return the error that names a line of a file, of which the first has number 1."""
    return SaveError(f"{path}, line {number} is damaged: it is not the JSON that was written")


def _numbers(path: Path, rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, float], ...]:
    """Return rows with their numbers, after a check that each has its steps."""
    found = tuple(map(numbers_of, rows))
    if any(not isinstance(row.get(STEPS), int | float) for row in found):
        raise SaveError(f"{path} is damaged: a row has no {STEPS}")
    return found


# -- groups ------------------------------------------------------------------------------------


def settings_in(text: str) -> dict[str, str]:
    """Return everything that the text of a graph says, by address; nothing is imported or run.

    Args:
        text: as `Graph.text` returns it.

    >>> settings_in('Graph("g", learner=Learner(optimizer=Adam(lr=0.001)))')["learner.optimizer.lr"]
    '0.001'
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    # What has no name stands in a text as <...>, which is no Python.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[str, str] = {}

    def walk(address: str, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found[address] = node.value
            return
        if not isinstance(node, ast.Call):
            found[address] = ast.unparse(node)
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr == "then":
            walk(address, node.func.value)
        else:
            positional = ", ".join(map(ast.unparse, node.args))
            found[address] = f"{ast.unparse(node.func)}({positional})"
        for keyword in node.keywords:
            walk(f"{address}.{keyword.arg}".lstrip("."), keyword.value)

    walk("", tree.body)
    return found


def grouped(runs: Sequence[SavedRun]) -> list[tuple[str, list[SavedRun]]]:
    """Return runs in groups that differ only in their seeds, each with its label.

    Runs of equal settings and equal seeds must differ in something that is not recorded, such as
    the code, so these are groups by the directories in which they were found.
    """
    by_settings: dict[str, list[SavedRun]] = {}
    for run in runs:
        by_settings.setdefault(run.text, []).append(run)
    groups: list[list[SavedRun]] = []
    for alike in by_settings.values():
        seeds = [run.seed for run in alike]
        if len(set(seeds)) == len(seeds):
            groups.append(alike)
            continue
        by_directory: dict[str, list[SavedRun]] = {}
        for run in alike:
            by_directory.setdefault(run.directory, []).append(run)
        groups += by_directory.values()
    first = [group[0] for group in groups]
    return list(zip(_labels(first), groups, strict=True))


def _labels(first: Sequence[SavedRun]) -> list[str]:
    """Return a label for each group, of which these are the first runs; no two are equal."""
    differing = [_differences(run, first) for run in first]
    labels = [_label(texts, MOST_DIFFERENCES) for texts in differing]
    for most in range(MOST_DIFFERENCES + 1, max(map(len, differing), default=0) + 1):
        labels = [
            _label(texts, most) if labels.count(label) > 1 else label
            for label, texts in zip(labels, differing, strict=True)
        ]
    labels = [
        label if labels.count(label) == 1 else ", ".join(filter(None, [label, run.directory]))
        for label, run in zip(labels, first, strict=True)
    ]
    # Long texts may differ where they are cut, and unreadable ones say nothing at all.
    return _numbered(labels)


def _numbered(labels: Sequence[str]) -> list[str]:
    """Return labels with a number after each that is the same as an earlier one."""
    found: list[str] = []
    for label in labels:
        unique, number = label, 1
        while unique in found or (number > 1 and unique in labels):
            number += 1
            unique = f"{label} ({number})"
        found.append(unique)
    return found


def _label(texts: Sequence[str], most: int) -> str:
    """Return what differs, cut after so many texts."""
    return ", ".join([*texts[:most], *(["..."] if len(texts) > most else [])])


def _differences(run: SavedRun, every: Sequence[SavedRun]) -> list[str]:
    """Return what differs between a run and others, of which each is the first of its group."""
    parts = [run.graph] if len({other.graph for other in every}) > 1 else []
    same_graph = [other for other in every if other.graph == run.graph]
    addresses = dict.fromkeys(name for other in same_graph for name in other.settings)
    # The values that an address has in all groups, where these differ.
    differing = {}
    for name in addresses:
        found = tuple(other.settings.get(name, "none") for other in same_graph)
        if len(set(found)) > 1:
            differing[name] = found
    named: dict[str, str] = {}
    for name, found in differing.items():
        last = name.rpartition(".")[2]
        # One setting of a graph's function may be at several addresses: it is named once.
        alike = [x for n, x in differing.items() if n.rpartition(".")[2] == last]
        named[last if all(x == found for x in alike) else name] = run.settings.get(name, "none")
    return [*parts, *(f"{name}={_short(text)}" for name, text in named.items())]


def _short(text: str) -> str:
    return text if len(text) <= WIDE else f"{text[: WIDE - 3]}..."


# -- one grid ----------------------------------------------------------------------------------


def aligned(runs: Sequence[Sequence[Mapping[str, float]]]) -> list[tuple[Row, ...]]:
    """Return the rows of runs at the same environment steps, or updates where they take none.

    The steps are those of the run that ends first, at most `MOST_POINTS` of them. Columns are
    interpolated linearly between the rows that have a number; before the first of these there is
    none, so NaN stays where no episode has ended.

    Args:
        runs: the rows of each run, of which each has some.
    """
    column = over_of(runs)
    shortest = min(runs, key=lambda rows: rows[-1][column])
    steps = np.array([row[column] for row in shortest], float)
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).round().astype(int)
    grid = steps[chosen]
    columns = dict.fromkeys(name for rows in runs for row in rows for name in row)
    return [_on_grid(rows, list(columns), column, grid) for rows in runs]


def _on_grid(
    rows: Sequence[Mapping[str, float]], columns: Sequence[str], over: str, grid: Array
) -> tuple[Row, ...]:
    """Return the rows of a run at other values of the column `over`."""
    steps = np.array([row[over] for row in rows], float)
    values = np.stack([_interpolated(rows, name, steps, grid) for name in columns], axis=1)
    return tuple(Row(dict(zip(columns, numbers, strict=True))) for numbers in values.tolist())


def _interpolated(
    rows: Sequence[Mapping[str, float]], name: str, steps: Array, grid: Array
) -> Array:
    """Return a column of a run, whose rows are at these steps, at other ones."""
    column = np.array([row.get(name, np.nan) for row in rows], float)
    # An infinite number is one, and not to be filled up from the rows around it.
    known = ~np.isnan(column)
    if not known.any():
        return np.full(len(grid), np.nan)
    # Seeds close their first rows at slightly different steps, before which that row counts.
    first = column[0] if known[0] else np.nan
    return np.interp(grid, steps[known], column[known], left=first)
