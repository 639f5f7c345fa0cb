"""Where the time of a run goes, by process, in a table; and what would mend it, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowrl.clock import KINDS


@dataclass(frozen=True)
class Diagnosis:
    """The seconds of every process of a run by kind of work. `print` shows the table.

    The processes on other machines or of their own are runners and the like; the others are threads of this one, each with a stage. What a
    device computes counts as ``update`` where a thread waits for it.
    """

    processes: Mapping[str, Mapping[str, float]]
    """By process: seconds by kind, of `flowrl.clock.KINDS`."""
    findings: tuple[str, ...] = ()

    def wall(self, process: str) -> float:
        """The seconds since a process began, which are the sum of its kinds."""
        return sum(self.processes[process].values())

    def __str__(self) -> str:
        shown = [kind for kind in KINDS if any(spent.get(kind, 0.0) >= 0.05 for spent in self.processes.values())]
        wide = max(map(len, self.processes), default=0)
        lines = [f"{'seconds':<{wide}}{_cells(['wall', *shown])}"]
        for process, spent in _merged(self.processes):
            lines.append(f"{process:<{wide}}{_cells([f'{x:.1f}' for x in (sum(spent.values()), *(spent.get(k, 0.0) for k in shown))])}")
        return "\n".join([*lines, *self.findings]) + "\n"


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>13}" for text in texts)


MANY = 8
"""So many processes of one resource are shown each; of more, the mean and the one that works most."""


def _merged(processes: Mapping[str, Mapping[str, float]]) -> Sequence[tuple[str, Mapping[str, float]]]:
    groups: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
    for name, spent in processes.items():
        groups.setdefault(name.split(", ")[0], []).append((name, spent))
    rows: list[tuple[str, Mapping[str, float]]] = []
    for group, members in groups.items():
        if len(members) <= MANY:
            rows += members
            continue
        mean = {kind: sum(spent.get(kind, 0.0) for _, spent in members) / len(members) for kind in KINDS}
        rows += [(f"{group}, mean of {len(members)}", mean), max(members, key=lambda m: m[1].get("step", 0.0))]
    return rows
