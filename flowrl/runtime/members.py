"""Many runs at once, as one program: their seeds, and settings of which each has its own value."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import numpy as np

from flowrl.core.arguments import Argument
from flowrl.core.curves import Curves
from flowrl.core.items import Row, Tally
from flowrl.core.keeping import Keeping
from flowrl.errors import EnvError, NotFiniteError, SettingError, unknown
from flowrl.graph.graph import Chain, Graph
from flowrl.graph.values import settings, with_setting
from flowrl.runtime.rows import RowMaker

Array = Any
SEEDS = 2**32
"""How many seeds there are: a program takes one as an unsigned number of 32 bits."""


class Sweep:
    """Settings of which many runs at once have different values, in every combination.

    >>> Sweep(lr=[1e-3, 3e-4], gamma=[0.98, 0.99])
    Sweep(lr=[0.001, 0.0003], gamma=[0.98, 0.99])

    Args:
        settings: by name, lists of numbers. ``lr`` stands for every setting of the graph with that
            name; ``**{"learner.loss.clip_ratio": [0.1, 0.2]}`` for that one.

    Raises:
        SettingError: no numbers are given for a setting.
    """

    def __init__(self, **settings: Sequence[float]) -> None:
        self.settings = {name: _as_numbers(name, values) for name, values in settings.items()}
        for name, values in self.settings.items():
            if not values:
                raise SettingError(f"{name} has no values; give a list of numbers")

        self.listed = False
        """Whether the i-th values of all settings belong together, as `points` has them."""

    @staticmethod
    def points(points: Sequence[Mapping[str, float]]) -> Sweep:
        """Return a sweep of a list of points, in place of every combination.

        >>> Sweep.points([{"lr": 1e-3, "gamma": 0.98}, {"lr": 3e-4, "gamma": 0.99}])
        Sweep.points([{'lr': 0.001, 'gamma': 0.98}, {'lr': 0.0003, 'gamma': 0.99}])

        Args:
            points: for each run its settings by name, the same ones in all of them.

        Raises:
            SettingError: there is none, or they do not all have the same settings.
        """
        names = list(points[0]) if points else []
        if not names or any(set(point) != set(names) for point in points):
            raise SettingError(f"Sweep.points takes the same settings in each, got {points!r}")
        settings: dict[str, list[float]] = {}
        for name in names:
            settings[name] = [point[name] for point in points]
        made = Sweep(**settings)
        made.listed = True
        return made

    @staticmethod
    def read(text: str) -> Sweep:
        """Return the sweep whose `repr` is this text; nothing in it is executed.

        Raises:
            ValueError: it is the text of no sweep.
        """
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError(f"{text!r} is no sweep")  # noqa: TRY004 - the text is wrong
        if call.args:
            return Sweep.points(ast.literal_eval(call.args[0]))
        settings: dict[str, Sequence[float]] = {}
        for keyword in call.keywords:
            value = ast.literal_eval(keyword.value)
            settings |= value if keyword.arg is None else {keyword.arg: value}
        return Sweep(**settings)

    def runs(self) -> list[dict[str, float]]:
        """Return the values of each run, by name."""
        columns = self.settings.values()
        rows = zip(*columns, strict=True) if self.listed else itertools.product(*columns)
        return [dict(zip(self.settings, row, strict=True)) for row in rows]

    def __repr__(self) -> str:
        if self.listed:
            return f"Sweep.points({self.runs()})"
        if not all(name.isidentifier() for name in self.settings):
            return f"Sweep(**{ {name: list(values) for name, values in self.settings.items()} })"
        settings = [f"{name}={list(values)}" for name, values in self.settings.items()]
        return f"Sweep({', '.join(settings)})"


def _as_numbers(name: str, values: Any) -> tuple[float, ...]:
    """Return the values of a setting as numbers, or refuse them."""
    # The letters of a text would pass for its items.
    if not isinstance(values, str):
        with suppress(TypeError, ValueError):
            return tuple(map(float, values))
    raise SettingError(
        f"sweep: {name} takes a list of numbers, got {values!r}; write {name}=[1e-3, 3e-4]"
    )


@dataclass(frozen=True)
class Members:
    """The runs that go on at once."""

    seeds: tuple[int, ...]
    """By run: its seed."""
    values: tuple[dict[str, float], ...]
    """By run: the values of what is swept."""
    many: bool
    """Whether they are mapped; a run without `seeds` and without a sweep is not."""

    @staticmethod
    def of(seed: int, seeds: int | None, sweep: Sweep | None) -> Members:
        """Return one run for each seed and combination of a sweep's settings.

        Args:
            seed: the first seed.
            seeds: how many consecutive seeds each combination has; None for one.
            sweep: the settings and their values.

        Raises:
            SettingError: a seed would be above 2**32 - 1.
        """
        if seed + (seeds or 1) > SEEDS:
            raise SettingError(
                f"seeds={seeds} from seed {seed} on would go beyond 2**32 - 1; take a first seed "
                f"of at most {SEEDS - (seeds or 1)}"
            )
        grid = sweep.runs() if sweep else [{}]
        every = [(seed + i, values) for values in grid for i in range(seeds or 1)]
        return Members(
            tuple(s for s, _ in every),
            tuple(v for _, v in every),
            seeds is not None or bool(sweep and sweep.settings),
        )

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self.seeds)

    def inputs(self) -> tuple[Array, dict[str, Array]]:
        """Return seeds and swept values as a program takes them.

        Each is an array ``[count]``; of a run that is not mapped there is only its seed, a scalar.
        """
        seeds = np.asarray(self.seeds, np.uint32)
        if not self.many:
            return seeds[0], {}
        swept = {}
        for name in self.values[0]:
            swept[name] = np.asarray([values[name] for values in self.values], np.float32)
        return seeds, swept

    def label(self, member: int) -> str:
        """Return what to call a run: its swept values and its seed."""
        values = _joined(self.values[member])
        return ", ".join([*([values] if values else []), f"seed {self.seeds[member]}"])


def swept_graph(graph: Graph, sweep: Sweep | None) -> Graph:
    """Return the graph with an `Argument` in the place of each swept setting.

    Raises:
        SettingError: a setting is unknown, or no number that a program may have as an input.
    """
    for name, values in (sweep.settings if sweep else {}).items():
        known = dict(_numbers(graph))
        # A bare name stands for every setting called so.
        paths = [path for path in known if path == name or path.rpartition(".")[2] == name]
        if not paths:
            every = [path for path, _ in _settings(graph)]
            if any(path == name or path.endswith(f".{name}") for path in every):
                raise SettingError(
                    f"sweep: {name} shapes the program, so it can't be swept; make one run for "
                    "each value. Only fractional numbers can be swept"
                )
            names = sorted({path.rpartition(".")[2] for path in known})
            raise SettingError(
                f"sweep: {unknown('setting', name, names)}. Only fractional numbers can be swept"
            )
        for path in paths:
            meant = known[path]
            if isinstance(meant, Argument):
                raise SettingError(
                    f"sweep: {path} is meant by {meant.name} and by {name}; give one of them"
                )
            # This raises for a value that the setting can't take.
            for value in values:
                _with_number(graph, path, value)
            graph = _with_number(graph, path, Argument(name, values[0], path))
    return graph


def numbers_at(graph: Graph, paths: Sequence[str]) -> dict[str, float]:
    """Return the fractional numbers among a graph's settings at some paths."""
    found = dict(_numbers(graph))
    return {path: found[path] for path in paths}


def differing_numbers(graphs: Sequence[Graph]) -> list[str] | None:
    """Return the paths of the fractional numbers in which graphs differ.

    Returns:
        None where they differ in anything else, so that they can't be runs of one program.
    """
    numbers = [dict(_numbers(graph)) for graph in graphs]
    if any(found.keys() != numbers[0].keys() for found in numbers):
        return None
    paths = []
    for path, value in numbers[0].items():
        if any(found[path] != value for found in numbers):
            paths.append(path)
    for graph in graphs:
        alike = graph
        for path in paths:
            alike = _with_number(alike, path, numbers[0][path])
        if alike != graphs[0]:
            return None
    return paths


def swept_numbers(graph: Graph) -> dict[str, str]:
    """Return, by path of each swept setting of a graph, its name in the sweep."""
    return {path: value.name for path, value in _numbers(graph) if isinstance(value, Argument)}


def _numbers(graph: Graph) -> list[tuple[str, Any]]:
    """Return the fractional numbers among a graph's settings, each with its path."""
    return [(path, value) for path, value in _settings(graph) if isinstance(value, float)]


def _settings(graph: Graph) -> list[tuple[str, Any]]:
    """Return all settings of a graph, and what is within them, each with its path."""
    found: list[tuple[str, Any]] = []

    def walk(path: str, value: Any) -> None:
        found.append((path, value))
        if is_dataclass(value) and not isinstance(value, type):
            for f in fields(value):
                walk(f"{path}.{f.name}", getattr(value, f.name))
        elif isinstance(value, Chain):
            for name, op in value.items():
                walk(f"{path}.{name}", op)

    for node in graph.nodes:
        walk(node.name, node.op)
    for name, resource in graph.resources.items():
        walk(name, resource)
    return found


def _with_number(graph: Graph, path: str, value: float) -> Graph:
    """Return the graph with another number at a path that `_numbers` found."""
    for node in graph.nodes:
        for field, chain in settings(node.op).items():
            # `Graph.set` takes a chain as a whole, so its operator is changed here.
            for name, op in chain.items() if isinstance(chain, Chain) else ():
                address = f"{node.name}.{field}.{name}"
                if path.startswith(f"{address}."):
                    where = f"{graph.name}.{address}"
                    changed = with_setting(op, path.removeprefix(f"{address}."), value, where)
                    return graph.set(f"{node.name}.{field}", Chain({**chain, name: changed}))
    return graph.set(path, value)


class MemberRows(Keeping):
    """Makes the Rows of many runs: each run's own, and their means."""

    remade = ("members", "makers", "rows", "runs")

    def __init__(
        self, graph: str, started: float, members: Members, learners: Sequence[str]
    ) -> None:
        self.members = members
        self.makers = [RowMaker(graph, started, learners) for _ in range(members.count)]
        self.rows: list[list[Row]] = [[] for _ in range(members.count)]
        """By run: its Rows so far."""
        self.runs = members.count

    def keep(self) -> Any:
        """Return the rows of every run, and what their makers keep."""
        rows = [list(map(dict, each)) for each in self.rows]
        return {"makers": [maker.keep() for maker in self.makers], "rows": rows}

    def take(self, state: Any) -> None:
        """Go on from the rows that were kept."""
        for maker, kept in zip(self.makers, state["makers"], strict=True):
            maker.take(kept)
        self.rows = [list(map(Row, each)) for each in state["rows"]]

    @property
    def last(self) -> float:
        """When the last Row closed, by `time.perf_counter`."""
        return self.makers[0].last

    @property
    def totals(self) -> dict[str, int]:
        """The totals of the run with the fewest environment steps.

        The rows that this run still needs are enough for the mean over all runs, too.
        """
        return min((maker.totals for maker in self.makers), key=lambda totals: totals["env_steps"])

    def row(self, tally: Tally, now: float | None = None, **extra: float) -> Row:
        """Make the next Row of each run, and return their means.

        Args:
            tally: what gathered since the last Row, with an axis of runs first.
            now: when the Row closed, by `time.perf_counter`; this moment by default.
            extra: more columns.

        Raises:
            EnvError: an environment gave NaN or infinity; the message names the run.
            NotFiniteError: an update gave NaN or infinity; the message names the run.
        """
        newest: list[Row] = []
        # One transfer for all runs.
        tally = jax.device_get(tally)
        for i, maker in enumerate(self.makers):
            of_run = jax.tree.map(lambda x, i=i: x[i], tally)
            try:
                newest.append(maker.row(of_run, now, **extra))
            except (EnvError, NotFiniteError) as error:
                error.message = f"{self.members.label(i)}: {error.message}"
                error.facts["run"] = i
                raise
        for rows, row in zip(self.rows, newest, strict=True):
            rows.append(row)
        means = {}
        for name in newest[0]:
            means[name] = float(np.mean([row[name] for row in newest]))
        return Row(means)

    @property
    def best(self) -> int:
        """The index of the run whose newest mean return is the highest."""
        returns = [rows[-1]["return_mean"] if rows else np.nan for rows in self.rows]
        return 0 if np.isnan(returns).all() else int(np.nanargmax(returns))

    def curves(self) -> Curves:
        """Return the Rows of every run, with labels.

        Runs with the same values and seed are one, as where a run is repeated to fill a program.
        """
        members = self.members
        # By label: the first of the runs that are called so.
        first = {members.label(i): i for i in reversed(range(members.count))}
        every = sorted(first.values())
        return Curves(
            tuple(members.label(i) for i in every),
            tuple(_joined(members.values[i]) for i in every),
            tuple(tuple(self.rows[i]) for i in every),
        )


def _joined(values: Mapping[str, float]) -> str:
    """Return swept values as a text, such as ``lr=0.001, gamma=0.99``."""
    texts = []
    for name, value in values.items():
        # Values that differ only beyond six digits are groups of their own.
        short = f"{value:g}"
        texts.append(f"{name}={short if float(short) == value else value}")
    return ", ".join(texts)
