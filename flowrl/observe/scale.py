"""What a graph would do on a cluster, simulated with what one run of it measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.figures import drawn
from flowrl.core.new_files import check_new
from flowrl.core.profile import Profile
from flowrl.core.saved_rows import settings_in
from flowrl.core.texts import decimal, in_bytes, plural
from flowrl.errors import GraphError, SettingError
from flowrl.graph.graph import Graph
from flowrl.observe.pass_costs import Costs, costs_of
from flowrl.observe.saving import profiles
from flowrl.observe.simulated_runners import Cluster
from flowrl.observe.simulation import Flow, simulate

SIMULATED = (
    "num_runners", "in_flight", "min_fraction", "capacity", "full", "order", "max_lag", "on_stale",
)  # fmt: skip
"""The settings in which a graph may differ from that of the measured run: they are simulated."""
NOTABLE = 0.9
"""What bounds a run is named alone where it works for at least this share of the time."""
OFF = 0.1
"""A simulation of the measured run itself that is off by more than this share is reported."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one cluster."""

    runners: int
    """The runners of all nodes together."""
    nodes: int
    """The nodes."""
    steps_per_second: float
    """Environment steps per second."""
    updates_per_second: float
    """Updates of learners per second."""
    lag_mean: float
    """Mean policy lag of what is trained, in updates; NaN where it can't be known."""
    lag_max: float
    """Largest policy lag, in updates; NaN where it can't be known."""
    bytes_in: float
    """Bytes per second that come to the learner's node from other nodes."""
    bytes_out: float
    """Bytes per second that leave it for other nodes."""
    busy_cores: float
    """Cores of all nodes that work, on average."""
    cost: float | None
    """Price of a million environment steps; None where no price of a node is known."""
    bound: str
    """What bounds the speed, with the share of the time in which it works."""
    bound_by: str
    """The same without the share, such as ``the learner``."""


@dataclass(frozen=True)
class Scale:
    """What is predicted of several clusters. `print` shows it as a table."""

    name: str
    """The graph."""
    costs: Costs
    """What the run measured."""
    itself: float
    """The environment steps per second that the simulation gives for the measured run itself.

    NaN for a local run, whose runners took turns, which is not simulated.
    """
    cluster: Cluster
    """A cluster of one node: all of them are of such nodes."""
    predictions: tuple[Prediction, ...]
    """By number of nodes, and then of runners."""
    notes: tuple[str, ...]
    """What the run could not say, and what is assumed in its place."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # A notebook shows this.
        printer.text("Scale(...)" if cycle else str(self))

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._table(), *self._foot()]) + "\n"

    def _head(self) -> list[str]:
        """Return what was measured, and how well the simulation gives that again."""
        measured, count = self.costs.measured_speed, self.costs.count
        off = self.itself / measured - 1
        bits = 8 * self.cluster.bandwidth / 1e9
        cores = f"{self.cluster.cores} {plural(self.cluster.cores, 'core')}"
        on = f"{self.costs.cores} {plural(self.costs.cores, 'core')}"
        of_run = f"{count} {plural(count, 'runner')} on {on}"
        simulated = f"; the simulation gives {self.itself:,.0f} for it ({off:+.1%})"
        if math.isnan(self.itself):
            simulated = ""
        return [
            f"{self.name}, measured with {of_run}: {measured:,.0f} steps/s{simulated}",
            f"nodes of {cores} and {bits:g} Gb/s; the learner is on the first of them",
        ]

    def _table(self) -> list[str]:
        """Return the lines of the table, its names first."""
        columns: dict[str, Callable[[Prediction], str]] = {
            "runners": lambda p: f"{p.runners:,}",
            "nodes": lambda p: f"{p.nodes:,}",
            "steps/s": lambda p: f"{p.steps_per_second:,.0f}",
            "updates/s": lambda p: decimal(p.updates_per_second),
            "lag": lambda p: _lag(p.lag_mean),
            "most": lambda p: _lag(p.lag_max),
            "in": lambda p: f"{in_bytes(round(p.bytes_in))}/s",
            "out": lambda p: f"{in_bytes(round(p.bytes_out))}/s",
            "busy cores": lambda p: decimal(p.busy_cores),
        }
        if any(p.cost is not None for p in self.predictions):
            columns["1M steps"] = lambda p: "" if p.cost is None else f"{p.cost:,.3g}"
        lines = ["" for _ in range(len(self.predictions) + 1)]
        for name, text in columns.items():
            cells = [name, *map(text, self.predictions)]
            wide = max(map(len, cells))
            lines = [f"{line}{cell:>{wide}}  " for line, cell in zip(lines, cells, strict=True)]
        bounds = ["bound by", *(p.bound for p in self.predictions)]
        return [line + bound for line, bound in zip(lines, bounds, strict=True)]

    def _foot(self) -> list[str]:
        """Return the notes, after an empty line if there are any."""
        return ["", *(f"note: {note}" for note in self.notes)] if self.notes else []

    def plain(self) -> dict[str, Any]:
        """Return the predictions as plain data, for JSON; numbers that are not known are None."""
        rows = []
        for p in self.predictions:
            fields = {k: v for k, v in vars(p).items() if k != "bound"}
            rows.append({k: None if _is_nan(v) else v for k, v in fields.items()})
        return {
            "graph": self.name,
            "measured": {
                "runners": self.costs.count,
                "steps_per_second": self.costs.measured_speed,
                "simulated": None if math.isnan(self.itself) else self.itself,
            },
            "predictions": rows,
            "notes": list(self.notes),
        }

    def picture(self, path: str | Path) -> None:
        """Draw the steps per second over the runners, a line for each number of nodes.

        The marks say what bounds the speed.

        Args:
            path: path of a new file, such as ``scale.svg`` or ``scale.png``.

        Raises:
            SaveError: the file exists already, or matplotlib is not installed.
        """
        check_new(path)
        with drawn(path) as figure:
            self._draw(figure.subplots())

    def _draw(self, axes: Any) -> None:
        """Draw into the axes of a figure."""
        bounds = list(dict.fromkeys(p.bound_by for p in self.predictions))
        marks = dict(zip(bounds, itertools.cycle("os^vDPX*"), strict=False))
        for nodes, of_nodes in itertools.groupby(self.predictions, lambda p: p.nodes):
            points = list(of_nodes)
            x, y = [p.runners for p in points], [p.steps_per_second for p in points]
            (line,) = axes.plot(x, y, label=f"{nodes} {plural(nodes, 'node')}", linewidth=1)
            for p in points:
                color, mark = line.get_color(), marks[p.bound_by]
                axes.plot(p.runners, p.steps_per_second, mark, color=color, markersize=5)
        for bound in bounds:
            axes.plot([], [], marks[bound], color="black", markersize=5, label=bound)
        axes.set_xscale("log", base=2)
        # Numbers at every multiple of a power of ten would cover one another.
        axes.set_yscale("log", subs=(1.5, 2, 3, 5, 7))
        ticks = sorted({p.runners for p in self.predictions})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter("{x:,.0f}")
        axes.set(xlabel="runners", ylabel="environment steps per second")
        axes.grid(alpha=0.3)
        # Beside the axes, for lines of many clusters leave no place within them.
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def scale(
    graph: Graph,
    run: str | Path,
    runners: Sequence[int],
    nodes: Sequence[int] = (1,),
    *,
    cores: int | None = None,
    bandwidth: float = 1.25e9,
    price: float | None = None,
) -> Scale:
    """Predict what a graph does on clusters, by simulation with what a run of it measured.

    Nothing of the graph is run. Where there are fewer runners than nodes, nothing is predicted.

    Args:
        graph: the graph, which may differ from the run's in its number of runners, in how they are
            asked, and in its queues.
        run: directory of a run of it.
        runners: numbers of runners, of all nodes together.
        nodes: numbers of nodes (default one).
        cores: cores of a node; None for as many as the machine of the run had (default None).
        bandwidth: bytes per second of a node's network, each way (default 1.25e9, that is 10 Gb/s).
        price: of a node for an hour, in any currency; None: unknown (default None).

    Raises:
        SaveError: there is no such run, or it has no profile.
        GraphError: it is a run of another graph, or of one that can't be simulated.
        SettingError: there are no numbers that make sense.
    """
    _check_numbers(runners, nodes, cores, bandwidth, price)
    profile = profiles(run)[1]
    check_alike(graph, Path(run), profile)
    costs = costs_of(_planned(graph, profile), profile)
    one = Cluster(1, costs.cores if cores is None else cores, bandwidth)
    speed = math.nan
    if costs.side_by_side:
        itself = simulate(costs, Cluster(1, costs.cores, bandwidth), costs.count)
        speed = itself.env_steps / itself.seconds
    clusters = [
        (count, Cluster(number, one.cores, bandwidth))
        for number in sorted(nodes)
        for count in sorted(runners)
        if count >= number
    ]
    found = tuple(_prediction(costs, cluster, count, price) for count, cluster in clusters)
    notes = (*costs.notes, *_notes(costs, speed, [count for count, _ in clusters]))
    return Scale(graph.name, costs, speed, one, found, notes)


def check_alike(graph: Graph, run: Path, profile: Profile) -> None:
    """Raise an error if a run is one of another graph.

    Args:
        graph: the graph.
        run: directory of the run.
        profile: its profile.

    Raises:
        GraphError: it is, with what differs first.
    """
    file = run / "graph.txt"
    there = settings_in(file.read_text(encoding="utf-8")) if file.is_file() else {}
    here = settings_in(graph.text(strict=False))
    ops = {node.name: type(node.op).__name__ for node in graph.nodes}
    differing = ""
    if dict(profile.ops) != ops:
        one, other = (" ".join(names) for names in (profile.ops, ops))
        differing = f"its nodes are {one}, and here they are {other}"
    # A text with what has no name, such as a lambda, can't be read, and so not be compared.
    elif there and here:
        for address in dict.fromkeys([*there, *here]):
            if address.rpartition(".")[2] in SIMULATED or not address:
                continue
            if there.get(address) != here.get(address):
                one, other = there.get(address, "not set"), here.get(address, "not set")
                differing = f"{address} is {one} there, and {other} here"
                break
    if differing:
        raise GraphError(
            f"{run} is a run of another graph: {differing}; name the run's directory as the graph, "
            "or measure this graph: flowrl run GRAPH --out DIR",
            graph.name,
        )


def _planned(graph: Graph, profile: Profile) -> Any:
    """Return the plan of a graph with as many runners as its run had."""
    for (_, name), counts in profile.counts.items():
        facts = profile.facts.get(name, {})
        if "sampled_steps" in counts and "count" in facts:
            graph = graph.set(f"{name}.num_runners", facts["count"])
    return graph.compile()


def _check_numbers(
    runners: Sequence[int],
    nodes: Sequence[int],
    cores: int | None,
    bandwidth: float,
    price: float | None,
) -> None:
    """Raise an error where numbers make no sense.

    Raises:
        SettingError: with the numbers.
    """
    for name, numbers in (("runners", runners), ("nodes", nodes)):
        if not numbers or any(int(x) != x or x < 1 for x in numbers):
            raise SettingError(f"{name} must be whole numbers from 1 on, got {list(numbers)}")
    if max(runners) < min(nodes):
        raise SettingError(
            f"there are at most {max(runners)} runners for at least {min(nodes)} nodes, so that "
            "nodes would have none; take more runners, or fewer nodes"
        )
    whole = cores is None or (int(cores) == cores and cores >= 1)
    if not (whole and bandwidth > 0 and (price is None or price >= 0)):
        raise SettingError(
            "cores must be a whole number from 1 on, bandwidth above 0 and price not negative, got "
            f"{cores}, {bandwidth} and {price}"
        )


def _prediction(costs: Costs, cluster: Cluster, runners: int, price: float | None) -> Prediction:
    """Return what is predicted of one cluster."""
    flow = simulate(costs, cluster, runners)
    speed = flow.env_steps / flow.seconds
    hours = 1e6 / max(speed, 1e-12) / 3600
    bound, bound_by = _bound(flow)
    return Prediction(
        runners=runners,
        nodes=cluster.nodes,
        steps_per_second=speed,
        updates_per_second=flow.updates / flow.seconds,
        lag_mean=flow.lag_mean,
        lag_max=flow.lag_max,
        bytes_in=flow.bytes_in / flow.seconds,
        bytes_out=flow.bytes_out / flow.seconds,
        busy_cores=flow.busy_cores,
        cost=None if price is None else price * cluster.nodes * hours,
        bound=bound,
        bound_by=bound_by,
    )


def _bound(flow: Flow) -> tuple[str, str]:
    """Return what bounds a run, with and without its share of the time."""
    first, second, *_ = sorted(flow.use, key=flow.use.__getitem__, reverse=True)
    shares = {name: f"{name} ({min(flow.use[name], 1.0):.0%})" for name in (first, second)}
    # Where parts take turns, no single one is the limit.
    alone = flow.use[first] >= NOTABLE or flow.use[second] < 1 - NOTABLE
    return (shares[first] if alone else f"{shares[first]}, {shares[second]}"), first


def _notes(costs: Costs, itself: float, runners: Sequence[int]) -> Iterator[str]:
    """Yield what is assumed of numbers of runners that were not measured."""
    rounds = any(n.sampling and n.sampling.min_fraction for n in costs.nodes.values())
    gathered = max((n.gathers for n in costs.nodes.values()), default=0)
    largest = max(runners, default=0) * costs.runner.steps
    if rounds and largest > max(gathered, costs.count * costs.runner.steps):
        yield (
            f"rounds of {max(runners):,} runners give batches of {largest:,} steps; the seconds of "
            "an update are taken to grow with its steps"
        )
    off = itself / costs.measured_speed - 1
    if math.isfinite(off) and abs(off) > OFF:
        yield (
            f"the simulation is off by {off:+.0%} for the measured run itself, and so may be the "
            "predictions; a longer run, or one on an idle machine, measures better"
        )


def _lag(lag: float) -> str:
    return "-" if math.isnan(lag) else decimal(lag)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
