"""Many runs at once, as one program: seeds, and settings of which each has its own value."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np

from flowrl.core.items import Row, Tally
from flowrl.errors import EnvironmentFailed, NotFinite, SettingError, unknown
from flowrl.graph.graph import Graph
from flowrl.observe.curves import Curves
from flowrl.runtime.base import RowMaker

Array = Any


class Sweep:
    """Settings of which many runs at once have different values, every one with every other.

    >>> Sweep(lr=[1e-3, 3e-4], gamma=[0.98, 0.99])
    Sweep(lr=[0.001, 0.0003], gamma=[0.98, 0.99])

    Args:
        settings: by name, numbers. ``lr`` stands for every setting of the graph called so; ``**{"learner.loss.clip_ratio": [0.1, 0.2]}`` for that one.

    Raises:
        SettingError: no numbers are given for a setting.
    """

    def __init__(self, **settings: Sequence[float]) -> None:
        self.settings = {name: tuple(float(x) for x in values) for name, values in settings.items()}
        for name, values in self.settings.items():
            if not values:
                raise SettingError(f"{name} has no values; give a list of numbers")

    def __repr__(self) -> str:
        return f"Sweep({', '.join(f'{name}={list(values)}' for name, values in self.settings.items())})"


class Swept(float):
    """In a graph: a number that each of many runs has another value of. Where it is no part of a program it is the first one's."""

    name: str

    def __new__(cls, name: str, value: float) -> Self:
        """Of a name, with the first run's value."""
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Swept) and self.name == other.name

    def __hash__(self) -> int:
        return hash(("swept", self.name))


class Values(dict[str, Array]):
    """What is swept, by name, and which of it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Array:
        self.read.add(name)
        return super().__getitem__(name)


def substituted(value: Any, swept: Mapping[str, Array]) -> Any:
    """A value with numbers in the place of what is swept, within frozen dataclasses and tuples too."""
    if isinstance(value, Swept):
        return swept[value.name]
    if isinstance(value, tuple) and any(isinstance(x, Swept) for x in value):
        return tuple(substituted(x, swept) for x in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    old = {f.name: getattr(value, f.name) for f in fields(value)}
    new = {name: substituted(x, swept) for name, x in old.items()}
    if all(new[name] is old[name] for name in old):
        return value
    made = object.__new__(type(value))
    made.__dict__.update(new)
    return made


@dataclass(frozen=True)
class Members:
    """Which runs there are."""

    seeds: tuple[int, ...]
    """Of each of them."""
    values: tuple[dict[str, float], ...]
    """Of each of them: what is swept."""
    many: bool
    """Whether they are more than the one of a run without seeds and a sweep."""

    @staticmethod
    def of(seed: int, seeds: int | None, sweep: Sweep | None) -> Members:
        """`seeds` runs from `seed` on, of every combination of a sweep's settings."""
        settings = sweep.settings if sweep else {}
        grid = [
            dict(zip(settings, values, strict=True))
            for values in itertools.product(*settings.values())
        ]
        every = [(seed + i, values) for values in grid for i in range(seeds or 1)]
        return Members(
            tuple(s for s, _ in every),
            tuple(v for _, v in every),
            seeds is not None or bool(settings),
        )

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.seeds)

    def inputs(self) -> tuple[Array, dict[str, Array]]:
        """Seeds and values as a program takes them: ``[count]`` each, or of the only one."""
        seeds = np.asarray(self.seeds, np.uint32)
        swept = {
            name: np.asarray([v[name] for v in self.values], np.float32) for name in self.values[0]
        }
        return (seeds, swept) if self.many else (seeds[0], {})

    def label(self, member: int) -> str:
        """What to call one."""
        return ", ".join(
            [*(f"{k}={v:g}" for k, v in self.values[member].items()), f"seed {self.seeds[member]}"]
        )


def swept_graph(graph: Graph, sweep: Sweep | None) -> Graph:
    """The graph with what is swept in its place.

    Raises:
        SettingError: a setting is unknown, or no number that a program may have as an input.
    """
    for name, values in (sweep.settings if sweep else {}).items():
        known = dict(_numbers(graph))
        paths = [path for path in known if path == name or path.rpartition(".")[2] == name]
        if not paths:
            raise SettingError(
                f"sweep: {unknown('setting', name, sorted({p.rpartition('.')[2] for p in known}))}. Only fractional numbers can be swept"
            )
        for path in paths:
            if isinstance(known[path], Swept):
                raise SettingError(
                    f"sweep: {path} is meant by {known[path].name} and by {name}; give one of them"
                )
            for value in values:
                graph.set(path, value)  # which says if it can't be taken
            graph = graph.set(path, Swept(name, values[0]))
    return graph


def swept_names(graph: Graph) -> set[str]:
    """What is swept in a graph."""
    return {value.name for _, value in _numbers(graph) if isinstance(value, Swept)}


def _numbers(graph: Graph) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, float):
            found.append((path, value))
        elif is_dataclass(value) and not isinstance(value, type):
            for f in fields(value):
                walk(f"{path}.{f.name}", getattr(value, f.name))

    for node in graph.nodes:
        walk(node.name, node.op)
    for name, resource in graph.resources.items():
        walk(name, resource)
    return found


class MemberRows:
    """Makes Rows of many runs: each one's own, and their means."""

    def __init__(self, graph: str, started: float, members: Members) -> None:
        self.members = members
        self.makers = [RowMaker(graph, started) for _ in range(members.count)]
        self.rows: list[list[Row]] = [[] for _ in range(members.count)]
        self.runs = members.count

    @property
    def last(self) -> float:
        """When the last one closed."""
        return self.makers[0].last

    @property
    def totals(self) -> dict[str, int]:
        """Those of the run that has come least far."""
        return min((maker.totals for maker in self.makers), key=lambda totals: totals["env_steps"])

    def row(self, tally: Tally, now: float | None = None, **extra: float) -> Row:
        """The means of the next Row of each.

        Raises:
            EnvironmentFailed, NotFinite: an environment or an update gave NaN or infinity; which seed's is told.
        """
        import jax

        tally, newest = jax.device_get(tally), []
        for i, maker in enumerate(self.makers):
            try:
                newest.append(maker.row(jax.tree.map(lambda x, i=i: x[i], tally), now, **extra))
            except (EnvironmentFailed, NotFinite) as error:
                error.message = f"{self.members.label(i)}: {error.message}"
                raise
        for rows, row in zip(self.rows, newest, strict=True):
            rows.append(row)
        return Row({name: float(np.mean([row[name] for row in newest])) for name in newest[0]})

    @property
    def best(self) -> int:
        """The run whose newest return is the highest."""
        returns = [rows[-1]["return_mean"] if rows else np.nan for rows in self.rows]
        return 0 if np.isnan(returns).all() else int(np.nanargmax(returns))

    def curves(self) -> Curves:
        """All that every one told."""
        labels = tuple(self.members.label(i) for i in range(self.members.count))
        groups = tuple(
            ", ".join(f"{k}={v:g}" for k, v in values.items()) for values in self.members.values
        )
        return Curves(labels, groups, tuple(tuple(rows) for rows in self.rows))
