"""A run as a trace: a track per process and node, arrows along the edges. Opens in Perfetto; or goes to a collector of OpenTelemetry."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.core.clock import Mark, Span

HIDDEN = ("outside",)
"""Kinds that no track shows."""
SHORTEST = 1e-6
"""Seconds below which a span is no slice of its own."""


@dataclass(frozen=True)
class Arrow:
    """Something that went from one track to another: from (process, node, time) to (process, node, time)."""

    before: tuple[str, str, float]
    after: tuple[str, str, float]


@dataclass(frozen=True)
class Trace:
    """What every process of a run did and when, in seconds since 1970."""

    name: str
    edges: frozenset[tuple[str, str]]
    tracks: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """By process, in order of time."""
    arrows: Sequence[Arrow] = ()

    @staticmethod
    def of(
        name: str, edges: Iterable[tuple[str, str]], told: Mapping[str, Iterable[Span | Mark]]
    ) -> Trace:
        """Put together what clocks told, by process."""
        known = frozenset(edges)
        tracks = {
            process: _joined(x for x in spans if isinstance(x, Span))
            for process, spans in told.items()
        }
        tracks = {process: spans for process, spans in tracks.items() if spans}
        marks = {
            process: [x for x in spans if isinstance(x, Mark)] for process, spans in told.items()
        }
        return Trace(
            name,
            known,
            tracks,
            [
                *_along(known, tracks),
                *_through_queues(tracks, marks),
                *_from_workers(tracks, marks),
            ],
        )

    def perfetto(self) -> str:
        """As JSON of Chrome's trace events, which Perfetto opens."""
        origin = min((spans[0].start for spans in self.tracks.values()), default=0.0)
        threads: dict[tuple[str, str], int] = {}
        pids = {process: number for number, process in enumerate(self.tracks, 1)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            for process, pid in pids.items()
        ]

        def place(process: str, node: str, at: float) -> dict[str, Any]:
            if (process, node) not in threads:
                tid = threads[process, node] = len(threads) + 1
                name = {"pid": pids[process], "tid": tid, "args": {"name": node or process}}
                events.append({"ph": "M", "name": "thread_name", **name})
            return {
                "pid": pids[process],
                "tid": threads[process, node],
                "ts": round(1e6 * (at - origin), 3),
            }

        for process, spans in self.tracks.items():
            for span in spans:
                if span.kind not in HIDDEN and span.end - span.start >= SHORTEST:
                    where = place(process, span.node, span.start)
                    events.append(
                        {
                            "ph": "X",
                            "name": span.kind,
                            "cat": "flowrl",
                            "dur": round(1e6 * (span.end - span.start), 3),
                            **where,
                        }
                    )
        for number, arrow in enumerate(self.arrows, 1):
            for phase, end in (("s", arrow.before), ("f", arrow.after)):
                events.append(
                    {
                        "ph": phase,
                        "bp": "e",
                        "name": "item",
                        "cat": "edge",
                        "id": number,
                        **place(*end),
                    }
                )
        return json.dumps(
            {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"graph": self.name}}
        )


def _joined(spans: Iterable[Span]) -> list[Span]:
    """In order of time, those of one node and kind that follow on from one another as one."""
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
    """Within a thread an item goes on where the next node of an edge follows."""
    for process, spans in tracks.items():
        for a, b in itertools.pairwise(spans):
            if (a.node, b.node) in edges:
                yield Arrow((process, a.node, _inside(a, a.end)), (process, b.node, b.start))


def _through_queues(
    tracks: Mapping[str, Sequence[Span]], marks: Mapping[str, Sequence[Mark]]
) -> Iterator[Arrow]:
    """From where an item was put to where it was taken."""
    put: dict[tuple[str, int], tuple[str, str, float]] = {}
    moments = sorted(
        (
            (m.at, process, m)
            for process, ms in marks.items()
            for m in ms
            if m.what in ("put", "taken")
        ),
        key=lambda x: x[0],
    )
    for at, process, mark in moments:
        if mark.what == "put":
            put[mark.where, mark.item] = (process, mark.node, at)
        elif (before := put.pop((mark.where, mark.item), None)) is not None:
            spans = tracks.get(process, ())  # it is taken just before its node is at work
            begins = (
                s.start
                for s in spans[bisect_left(spans, at, key=lambda s: s.start) :]
                if s.node == mark.where
            )
            yield Arrow(before, (process, mark.where, next(begins, at)))


def _from_workers(
    tracks: Mapping[str, Sequence[Span]], marks: Mapping[str, Sequence[Mark]]
) -> Iterator[Arrow]:
    """From the worker that gave a fragment, in the order in which it gave them, to the node that got it."""
    came: defaultdict[str, list[tuple[float, str, str]]] = defaultdict(list)
    for process, ms in marks.items():
        for mark in ms:
            if mark.what == "came" and mark.where in tracks:
                came[mark.where].append((mark.at, process, mark.node))
    for worker, times in came.items():
        gave = deque(mark.at for mark in marks[worker] if mark.what == "gave")
        for at, process, node in sorted(times):
            if gave and gave[0] <= at:
                start = gave.popleft()
                yield Arrow((worker, "", start), (process, node, at))


def _inside(span: Span, at: float) -> float:
    """A time that lies within a span, for an arrow begins at a slice."""
    return max(span.start, at - SHORTEST)
