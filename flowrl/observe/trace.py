"""Traces of runs: a track per process and node, and arrows along the edges.

A trace opens in Perfetto, or is sent to a collector of OpenTelemetry.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.core.spans import Mark, Span

HIDDEN = ("paused", "outside")
"""Kinds of work that no track shows."""
SHORTEST = 1e-6
"""Shorter spans than this, in seconds, have no slice of their own."""


@dataclass(frozen=True)
class Arrow:
    """An item that went from one track to another."""

    before: tuple[str, str, float]
    """The process, node and time that it came from; the node is empty for a worker."""
    after: tuple[str, str, float]
    """The process, node and time that it came to."""


@dataclass(frozen=True)
class Trace:
    """What every process of a run did and when, in seconds since 1970."""

    name: str
    """The name of the graph."""
    edges: frozenset[tuple[str, str]]
    """The edges of the graph, as pairs of nodes."""
    tracks: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """By process: its spans in order of time."""
    arrows: Sequence[Arrow] = ()
    """The items that went along the edges."""

    @staticmethod
    def of(
        name: str,
        edges: Iterable[tuple[str, str]],
        by_process: Mapping[str, Iterable[Span | Mark]],
    ) -> Trace:
        """Make a trace of the readings of clocks.

        Args:
            name: of the graph.
            edges: of the graph, as pairs of nodes.
            by_process: the spans and marks of each process.
        """
        known = frozenset(edges)
        tracks: dict[str, list[Span]] = {}
        marks: dict[str, list[Mark]] = {}
        for process, readings in by_process.items():
            seen = list(readings)
            marks[process] = [x for x in seen if isinstance(x, Mark)]
            if spans := _joined(x for x in seen if isinstance(x, Span)):
                tracks[process] = spans
        arrows = [
            *_along(known, tracks),
            *_through_queues(tracks, marks),
            *_from_workers(tracks, marks),
        ]
        return Trace(name, known, tracks, arrows)

    def perfetto(self) -> str:
        """Return the trace as JSON of Chrome's trace events, which Perfetto opens."""
        events = _Events(self.tracks)
        for process, spans in self.tracks.items():
            for span in spans:
                if span.kind not in HIDDEN and span.end - span.start >= SHORTEST:
                    events.add_span(process, span)
        for number, arrow in enumerate(self.arrows, 1):
            events.add_arrow(number, arrow)
        about = {"displayTimeUnit": "ms", "otherData": {"graph": self.name}}
        return json.dumps({"traceEvents": events.events, **about})


class _Events:
    """Collects Chrome's trace events, and names processes and threads at their first event.

    Times are in microseconds since the first span.

    Args:
        tracks: of the trace.
    """

    def __init__(self, tracks: Mapping[str, Sequence[Span]]) -> None:
        self.origin = min((spans[0].start for spans in tracks.values()), default=0.0)
        self.pids = {process: number for number, process in enumerate(tracks, 1)}
        self.tids: dict[tuple[str, str], int] = {}
        """By process and node: the number of the thread that stands for them."""
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            for process, pid in self.pids.items()
        ]

    def add_span(self, process: str, span: Span) -> None:
        """Add a span as a slice."""
        place = self._place(process, span.node, span.start)
        duration = round(1e6 * (span.end - span.start), 3)
        self.events.append(
            {"ph": "X", "name": span.kind, "cat": "flowrl", "dur": duration, **place}
        )

    def add_arrow(self, number: int, arrow: Arrow) -> None:
        """Add an arrow as a flow with two ends."""
        about = {"bp": "e", "name": "item", "cat": "edge", "id": number}
        for phase, end in (("s", arrow.before), ("f", arrow.after)):
            # The place comes first, because it may add the event that names its thread.
            place = self._place(*end)
            self.events.append({"ph": phase, **about, **place})

    def _place(self, process: str, node: str, at: float) -> dict[str, Any]:
        """Return where and when an event is, and name the thread if it is new."""
        if (process, node) not in self.tids:
            tid = self.tids[process, node] = len(self.tids) + 1
            name = {"pid": self.pids[process], "tid": tid, "args": {"name": node or process}}
            self.events.append({"ph": "M", "name": "thread_name", **name})
        time = round(1e6 * (at - self.origin), 3)
        return {"pid": self.pids[process], "tid": self.tids[process, node], "ts": time}


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order of time, with those joined that continue the same node and kind."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start):
        last = found[-1] if found else None
        if (
            last is not None
            and (last.node, last.kind) == (span.node, span.kind)
            and span.start - last.end < SHORTEST
        ):
            found[-1] = last._replace(end=span.end)
        elif span.end > span.start:
            found.append(span)
    return found


def _along(
    edges: frozenset[tuple[str, str]], tracks: Mapping[str, Sequence[Span]]
) -> Iterator[Arrow]:
    """Yield the arrows within threads: from a span to the next one if an edge leads there."""
    for process, spans in tracks.items():
        for a, b in itertools.pairwise(spans):
            if (a.node, b.node) in edges:
                # An arrow must begin within a slice.
                leaves = max(a.start, a.end - SHORTEST)
                yield Arrow((process, a.node, leaves), (process, b.node, b.start))


def _through_queues(
    tracks: Mapping[str, Sequence[Span]], marks: Mapping[str, Sequence[Mark]]
) -> Iterator[Arrow]:
    """Yield the arrows from where an item was put into a queue to where it was taken."""
    put: dict[tuple[str, int], tuple[str, str, float]] = {}
    handed_on = (
        (process, mark)
        for process, of_process in marks.items()
        for mark in of_process
        if mark.what in ("put", "taken")
    )
    for process, mark in sorted(handed_on, key=lambda x: x[1].at):
        if mark.what == "put":
            put[mark.where, mark.item] = (process, mark.node, mark.at)
        elif (before := put.pop((mark.where, mark.item), None)) is not None:
            # An item is taken just before its node is at work: the arrow ends where that begins.
            spans = tracks.get(process, ())
            later = itertools.islice(
                spans, bisect_left(spans, mark.at, key=lambda s: s.start), None
            )
            begins = next((s.start for s in later if s.node == mark.where), mark.at)
            yield Arrow(before, (process, mark.where, begins))


def _from_workers(
    tracks: Mapping[str, Sequence[Span]], marks: Mapping[str, Sequence[Mark]]
) -> Iterator[Arrow]:
    """Yield the arrows from the workers that collected rollouts to the nodes that got them.

    The rollouts of a worker are matched in the order in which it returned them.
    """
    arrivals: defaultdict[str, list[tuple[float, str, str]]] = defaultdict(list)
    for process, of_process in marks.items():
        for mark in of_process:
            if mark.what == "received" and mark.where in tracks:
                arrivals[mark.where].append((mark.at, process, mark.node))
    for worker, of_worker in arrivals.items():
        returned_at = deque(mark.at for mark in marks[worker] if mark.what == "returned")
        for arrived_at, process, node in sorted(of_worker):
            # A rollout whose return was not kept has no arrow.
            if returned_at and returned_at[0] <= arrived_at:
                yield Arrow((worker, "", returned_at.popleft()), (process, node, arrived_at))
