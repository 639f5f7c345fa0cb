"""Run many simulated schedules of each graph, and print a table; this is ``make faults``.

python tests/faults/run_schedules.py                  # 1,000 schedules of each graph
python tests/faults/run_schedules.py impala --seed 17 # one schedule, with all that happened
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from simulated_graphs import Case, cases
from simulator import KINDS, Simulation

AGAIN = 20
"""Every so many schedules one is run again, for the same seed has to give the same events."""


@dataclass
class Found:
    """What came of the schedules of one graph."""

    graph: str
    schedules: int = 0
    updates: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    """By schedule in which something was found: all that happened in it."""


def case_of(graph: str, seed: int) -> Case:
    """Return the case of a seed: those of a graph take turns."""
    several = cases()[graph]
    return several[seed % len(several)]


def one(graph: str, seed: int, twice: bool = False) -> Simulation:
    """Run a schedule, and once more if `twice`, which must give the same events."""
    sim = Simulation(case_of(graph, seed), seed)
    sim.run()
    if twice:
        again = Simulation(sim.case, seed)
        again.run()
        both = zip([*sim.log, ""], [*again.log, ""], strict=False)
        if sim.log != again.log:
            text = next(f"{x!r}, then {y!r}" for x, y in both if x != y)
            sim.found("the_same_seed_gives_the_same_events", text)
    return sim


def run_schedules(
    graph: str, seeds: Iterable[int], progress: Callable[[Found], None] = lambda found: None
) -> Found:
    """Run a schedule of a graph for each seed.

    Args:
        graph: its name.
        seeds: the seeds.
        progress: is called after each.
    """
    found, began = Found(graph), time.perf_counter()
    for seed in seeds:
        sim = one(graph, seed, twice=seed % AGAIN == 0)
        found.schedules += 1
        found.updates += sim.updates
        found.faults += sim.faults
        found.seconds = time.perf_counter() - began
        if sim.violations:
            found.violations.append(report(graph, sim))
        progress(found)
    return found


def table(several: Iterable[Found]) -> str:
    """Return a line for each graph."""
    heads = ("schedules", *KINDS, "updates", "violations", "seconds")
    lines = [f"{'graph':<8}" + "".join(f"{head:>11}" for head in heads)]
    for found in several:
        numbers = [
            f"{found.schedules:,}",
            *(f"{found.faults[kind]:,}" for kind in KINDS),
            f"{found.updates:,}",
            f"{len(found.violations):,}",
            f"{found.seconds:.1f}",
        ]
        lines.append(f"{found.graph:<8}" + "".join(f"{number:>11}" for number in numbers))
    return "\n".join(lines)


def report(graph: str, sim: Simulation) -> str:
    """Return what happened in a schedule, and how to run it again."""
    command = f"{sys.executable} {Path(__file__)} {graph} --seed {sim.seed}"
    found = "\n".join(sim.violations) or "no violation"
    events = "\n".join(sim.log)
    return f"{events}\n\n{sim.case.name}, seed {sim.seed}: {found}\nagain: {command}\n"


def schedules_of(number: int, graph: str) -> Found:
    """Run so many schedules of a graph, with a line of progress for each tenth of them."""

    def progress(found: Found) -> None:
        if found.schedules % max(number // 10, 1) == 0:
            text = f"{graph}: {found.schedules:,} of {number:,} schedules"
            print(f"{text}, {len(found.violations)} with a violation", file=sys.stderr, flush=True)

    return run_schedules(graph, range(number), progress)


def main() -> int:
    """Run what the command line asks for; the status is 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help="ppo, impala, apex; all of them")
    parser.add_argument("--schedules", type=int, default=1000, help="of each graph (default 1000)")
    parser.add_argument("--seed", type=int, help="run only this one, and print all that happens")
    options = parser.parse_args()
    graphs = options.graphs or list(cases())
    if unknown := sorted(set(graphs) - set(cases())):
        parser.error(f"no graph {', '.join(unknown)}; known: {', '.join(cases())}")
    if options.seed is not None:
        several = [one(graph, options.seed, twice=True) for graph in graphs]
        for graph, sim in zip(graphs, several, strict=True):
            print(report(graph, sim))
        return int(any(sim.violations for sim in several))

    # The first two take as long as the third, so two processes share the work.
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        several = list(pool.map(partial(schedules_of, options.schedules), graphs))
    for found in several:
        # The first ones say enough.
        print("\n".join(found.violations[:3]), end="")
    print(table(several))
    return int(any(found.violations for found in several))


if __name__ == "__main__":
    sys.exit(main())
