"""Traces sent to a collector of OpenTelemetry: one trace over all processes of a run."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.core.clock import IDLE
from flowrl.core.spans import Span
from flowrl.errors import RunError, SettingError, install
from flowrl.observe.trace import Trace

BATCH = 512
"""The most spans in one request."""


@dataclass
class Visit:
    """A time in which a node, or a worker, was at work without a pause."""

    node: str
    """The name of the node; empty for a worker."""
    parts: list[Span]
    """Its kinds of work, in order of time."""
    sent: Any = None
    """The OpenTelemetry span of the visit; None until it is made."""


def visits(spans: Iterable[Span]) -> list[Visit]:
    """Group what a process did by the node that did it, and leave out the time in which it idled.

    Args:
        spans: of one process, in order of time.
    """
    groups = itertools.groupby(spans, key=lambda s: (s.node, s.kind in IDLE))
    return [Visit(node, list(parts)) for (node, idle), parts in groups if not idle]


def _giver(found: Sequence[Visit], at: float) -> Visit | None:
    """Return the visit of a node that holds a time, or the last one before it."""
    index = bisect_right(found, at, key=lambda v: v.parts[0].start) - 1
    return found[index] if index >= 0 else None


def _taker(found: Sequence[Visit], at: float) -> Visit | None:
    """Return the visit of a node that holds a time, or the next one.

    The next one counts because an item is taken just before its node is at work.
    """
    index = bisect_right(found, at, key=lambda v: v.parts[-1].end)
    return found[index] if index < len(found) else None


def send(trace: Trace, endpoint: str) -> None:
    """Send a trace to a collector.

    The run is the root span. Its children are the processes, their children what each node did, and
    the children of these the kinds of work. What a worker did for a rollout is a child of the
    sampling that got the rollout. An edge is a link from what took an item to what gave it.

    Args:
        trace: of a run.
        endpoint: the collector's address, such as ``http://localhost:4318``.

    Raises:
        SettingError: the packages for it are not installed.
        RunError: the collector does not take it.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise SettingError(
            f"sending traces needs OpenTelemetry ({error}): {install('otlp')}"
        ) from None
    if not trace.tracks:
        return
    ended = _spans(trace)
    url = f"{endpoint.rstrip('/')}/v1/traces" if "/v1/" not in endpoint else endpoint
    exporter = OTLPSpanExporter(endpoint=url)
    try:
        for first in range(0, len(ended), BATCH):
            if exporter.export(ended[first : first + BATCH]) is not SpanExportResult.SUCCESS:
                raise RunError(
                    f"the collector at {endpoint} did not take the trace; is it there, and does it "
                    "take OTLP over HTTP?"
                )
    finally:
        exporter.shutdown()


# -- the spans of a trace


def _spans(trace: Trace) -> list[Any]:
    """Return the OpenTelemetry spans of a trace, in the order in which they were made."""
    ended: list[Any] = []
    tracers = {process: _Tracer(process, ended.append) for process in trace.tracks}
    every = [span for spans in trace.tracks.values() for span in spans]
    start, end = min(s.start for s in every), max(s.end for s in every)
    root = next(iter(tracers.values())).span(f"run {trace.name}", None, start, end)
    process_spans = {
        process: tracers[process].span(process, root, spans[0].start, spans[-1].end)
        for process, spans in trace.tracks.items()
    }
    by_process = {process: visits(spans) for process, spans in trace.tracks.items()}
    sources = _sources(trace, by_process)
    for visit, process in _in_order(by_process):
        before = [v.sent for v in sources.get(id(visit), ()) if v.sent is not None]
        # The work of a worker has one source, the sampling that got the rollout: it is the parent.
        worker = not visit.node
        parent = before[0] if before and worker else process_spans[process]
        visit.sent = tracers[process].span(
            visit.node or process.partition(",")[0],
            parent,
            visit.parts[0].start,
            visit.parts[-1].end,
            () if worker else before,
            **{"flowrl.process": process},
        )
        for part in visit.parts:
            tracers[process].span(part.kind, visit.sent, part.start, part.end)
    return ended


def _in_order(by_process: Mapping[str, Sequence[Visit]]) -> list[tuple[Visit, str]]:
    """Return all visits with their processes, by time, those of workers after those of nodes.

    A worker's parent is a node's visit, whose span has to be there first.
    """
    every = [(visit, process) for process, found in by_process.items() for visit in found]
    return sorted(every, key=lambda x: (not x[0].node, x[0].parts[0].start))


def _sources(trace: Trace, by_process: Mapping[str, Sequence[Visit]]) -> dict[int, list[Visit]]:
    """Return by the `id` of a visit the visits that gave it items.

    Those of a worker's visit are the visits that it gave its rollouts to.
    """
    by_node: defaultdict[tuple[str, str], list[Visit]] = defaultdict(list)
    for process, found in by_process.items():
        for visit in found:
            by_node[process, visit.node].append(visit)
    sources: dict[int, list[Visit]] = {}
    for arrow in trace.arrows:
        (source, source_node, sent_at), (target, target_node, got_at) = arrow.before, arrow.after
        giver = _giver(by_node[source, source_node], sent_at)
        taker = _taker(by_node[target, target_node], got_at)
        if giver is None or taker is None:
            continue
        # What a worker did belongs to the sampling that got the rollout.
        from_worker = not source_node
        visit, other = (giver, taker) if from_worker else (taker, giver)
        sources.setdefault(id(visit), []).append(other)
    return sources


class _Tracer:
    """Makes the OpenTelemetry spans of one process.

    Args:
        process: its name.
        keep: called with every span that was made.
    """

    def __init__(self, process: str, keep: Callable[[Any], None]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
        from opentelemetry.trace import Link, set_span_in_context

        class Keep(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                keep(span)

        resource = Resource({"service.name": "flowrl", "service.instance.id": process})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Keep())
        self._tracer = provider.get_tracer("flowrl")
        self._link = Link
        self._context_of = set_span_in_context

    def span(
        self,
        name: str,
        parent: Any,
        start: float,
        end: float,
        links: Iterable[Any] = (),
        **about: str,
    ) -> Any:
        """Make a span from `start` to `end`, in seconds since 1970.

        Args:
            name: of the span.
            parent: the span that it is a part of; None for the root.
            start: its begin.
            end: its end.
            links: the spans that it took items from.
            about: its attributes.
        """
        context = self._context_of(parent) if parent is not None else None
        span = self._tracer.start_span(
            name,
            context,
            start_time=int(1e9 * start),
            links=[self._link(x.get_span_context()) for x in links],
            attributes=about,
        )
        span.end(int(1e9 * end))
        return span
