"""Text tables of a profile: seconds of processes, shares of nodes, and the flow on edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrl.core.clock import KINDS, by_kind
from flowrl.core.profile import Profile, idle, use

MANY = 8
"""Up to this many processes of one resource have a line each. Of more, the table shows the mean
and the process that steps environments for the longest time."""
SHOWN = 0.005
"""A kind of work has a column if it takes more than this share of the time of any process."""


# -- seconds of processes


def table(p: Profile) -> list[str]:
    """Format the seconds of every process by kind of work.

    The seconds in a line add up to the wall time of its process.

    Args:
        p: the profile of a run, or of a part of it.

    Returns:
        The lines of the table, the first of which is its header.
    """
    kinds = {name: by_kind(spent) for name, spent in p.processes.items()}
    shown = _columns(kinds)
    merged = _merged(kinds)
    wide = max((len(process) for process, _ in merged), default=7)
    lines = [f"{'seconds':<{wide}}{_cells(['wall', *shown])}"]
    for process, spent in merged:
        cells = {kind: spent.get(kind, 0.0) for kind in shown}
        # What is too little for a column of its own counts as other work, so that the line adds up.
        if "other" in cells:
            cells["other"] += sum(x for kind, x in spent.items() if kind not in shown)
        seconds = [sum(spent.values()), *cells.values()]
        lines.append(f"{process:<{wide}}{_cells([_seconds(x) for x in seconds])}")
    return lines


def _columns(kinds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the kinds of work that have a column, in the order of `KINDS`."""
    shown = [kind for kind in KINDS if _is_notable(kind, kinds)]
    left_over = any(
        seconds > 0
        for spent in kinds.values()
        for kind, seconds in spent.items()
        if kind not in shown
    )
    if left_over:
        shown = [kind for kind in KINDS if kind in (*shown, "other")]
    return shown


def _is_notable(kind: str, kinds: Mapping[str, Mapping[str, float]]) -> bool:
    return any(
        spent.get(kind, 0.0) > SHOWN * max(sum(spent.values()), 1e-9) for spent in kinds.values()
    )


def _merged(processes: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    """Return the lines of the table: all processes, or two lines for a resource that has many."""
    groups: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
    for name, spent in processes.items():
        groups.setdefault(name.split(", ")[0], []).append((name, spent))
    rows: list[tuple[str, Mapping[str, float]]] = []
    for group, members in groups.items():
        if len(members) <= MANY:
            rows += members
            continue
        mean = {kind: _mean(kind, members) for kind in KINDS}
        longest_stepping = max(members, key=lambda member: member[1].get("step", 0.0))
        rows += [(f"{group}, mean of {len(members)}", mean), longest_stepping]
    return rows


def _mean(kind: str, members: Sequence[tuple[str, Mapping[str, float]]]) -> float:
    return sum(spent.get(kind, 0.0) for _, spent in members) / len(members)


# -- shares of nodes


@dataclass(frozen=True)
class Share:
    """How a node, or the remote workers of a resource, spend their time, in shares from 0 to 1."""

    node: str
    """The name of the node or of the resource."""
    does: str
    """The name of the node's operator, or the number of workers."""
    busy: float
    """The share of the time of its thread or processes in which it works."""
    starved: float
    """The share in which it waits for something to do, or its stage does if it is first in it."""
    blocked: float
    """The share in which its stage waits because there is no capacity for its output."""
    trains: bool = False
    """Whether the node updates a learner."""


def shares(p: Profile) -> list[Share]:
    """Return the busy, starved and blocked shares of every node and every set of remote workers.

    Waiting for an update counts as work of the node that dispatched the update.

    Args:
        p: the profile of a run, or of a part of it.

    Returns:
        The sets of remote workers, then the nodes in the order of the graph.
    """
    order = list(p.ops)
    found = [*_worker_shares(p), *_node_shares(p)]
    return sorted(found, key=lambda share: order.index(share.node) if share.node in order else -1)


def _worker_shares(p: Profile) -> Iterator[Share]:
    for name in p.facts:
        if workers := p.workers(name):
            wall = max(sum(sum(spent.values()) for spent in workers.values()), 1e-9)
            busy = sum(use(spent) * sum(spent.values()) for spent in workers.values())
            starved = sum(map(idle, workers.values()))
            yield Share(name, f"{len(workers)} workers", busy / wall, starved / wall, 0.0)


def _node_shares(p: Profile) -> Iterator[Share]:
    for thread, names in p.stages.items():
        wall, work = p.uptime(thread), p.work(thread)
        for node in names:
            spent = p.node_seconds(node)
            busy = sum(x for (name, _), x in work.items() if name == node)
            trains = any(
                counts.get("updates") for (name, _), counts in p.counts.items() if name == node
            )
            starved, blocked = spent.get("waiting", 0.0), spent.get("blocked", 0.0)
            yield Share(node, p.ops[node], busy / wall, starved / wall, blocked / wall, trains)


def nodes(p: Profile) -> list[str]:
    """Format the shares that `shares` returns as a table.

    Args:
        p: the profile of a run, or of a part of it.

    Returns:
        The lines of the table, the first of which is its header; none of a program of XLA, whose
        time is not measured by node.
    """
    if not (every := shares(p)):
        return []
    wide = max(4, *(len(share.node) for share in every))
    wide_does = max(len(share.does) for share in every)
    lines = [f"{'node':<{wide}}  {'':<{wide_does}}{_cells(['busy', 'starved', 'blocked'])}"]
    for share in every:
        percents = [f"{x:.0%}" for x in (share.busy, share.starved, share.blocked)]
        lines.append(f"{share.node:<{wide}}  {share.does:<{wide_does}}{_cells(percents)}")
    return lines


# -- flow on edges


def edges(p: Profile) -> list[str]:
    """Format the items and environment steps that went over every edge, and the level of queues.

    Args:
        p: the profile of a run, or of a part of it.

    Returns:
        The lines of the table, the first of which is its header.
    """
    wide = max((len(f"{a} -> {b}") for a, b in p.edges), default=4)
    lines = [f"{'edge':<{wide}}{_cells(['items', 'steps', 'steps/s'])}"]
    for (a, b), (items, steps) in p.edges.items():
        level = f"  queue holds {p.queues[b][0]} of {p.queues[b][1]}" if b in p.queues else ""
        flow = [f"{items:,}", f"{steps:,}", f"{steps / p.going:,.0f}"]
        lines.append(f"{f'{a} -> {b}':<{wide}}{_cells(flow)}{level}")
    return lines


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"{text:>13}" for text in texts)


def _seconds(x: float) -> str:
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}"
