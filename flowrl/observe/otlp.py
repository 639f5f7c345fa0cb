"""A trace sent to a collector of OpenTelemetry: one trace over all processes of a run."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.core.clock import IDLE, Span
from flowrl.errors import RuntimeFailed, SettingError
from flowrl.observe.trace import Trace

BATCH = 512
"""Spans in one request."""


@dataclass
class Visit:
    """A stretch in which a node, or a worker, was at work; `told` is its span once it has one."""

    node: str
    parts: list[Span]
    told: Any = None


def visits(spans: Iterable[Span]) -> list[Visit]:
    """What a process did, by the node that did it; what it did idly is left out."""
    groups = itertools.groupby(spans, key=lambda s: (s.node, s.kind in IDLE))
    return [Visit(node, list(parts)) for (node, idle), parts in groups if not idle]


def _giver(found: Sequence[Visit], at: float) -> Visit | None:
    """Of a node's visits that within which a time lies, or that ended last before it."""
    index = bisect_right(found, at, key=lambda v: v.parts[0].start) - 1
    return found[index] if index >= 0 else None


def _taker(found: Sequence[Visit], at: float) -> Visit | None:
    """Of a node's visits that within which a time lies, or that begins next: something is taken just before the node is at work."""
    index = bisect_right(found, at, key=lambda v: v.parts[-1].end)
    return found[index] if index < len(found) else None


def send(trace: Trace, endpoint: str) -> None:
    """Send it.

    The run is the root; its children are the processes, theirs what each node did, and theirs the kinds of work. What a worker did for a
    fragment is a child of the sampling that got the fragment. An edge is a link from what took an item to what gave it.

    Args:
        trace: of a run.
        endpoint: the collector's address, such as ``http://localhost:4318``.

    Raises:
        SettingError: the packages for it are not installed.
        RuntimeFailed: the collector does not take it.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import Link, set_span_in_context
    except ImportError as error:
        raise SettingError(
            f"sending traces needs OpenTelemetry ({error}): pip install 'flowrl[otlp]'"
        ) from None
    if not trace.tracks:
        return
    ended: list[ReadableSpan] = []

    class Keep(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span)

    def tracer(process: str) -> Any:
        provider = TracerProvider(
            resource=Resource({"service.name": "flowrl", "service.instance.id": process}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(Keep())
        return provider.get_tracer("flowrl")

    def told(
        source: Any,
        name: str,
        parent: Any,
        start: float,
        end: float,
        links: Iterable[Any] = (),
        **about: str,
    ) -> Any:
        context = set_span_in_context(parent) if parent is not None else None
        span = source.start_span(
            name,
            context,
            start_time=int(1e9 * start),
            links=[Link(x.get_span_context()) for x in links],
            attributes=about,
        )
        span.end(int(1e9 * end))
        return span

    tracers = {process: tracer(process) for process in trace.tracks}
    whole = [span for spans in trace.tracks.values() for span in spans]
    start, end = min(s.start for s in whole), max(s.end for s in whole)
    first = next(iter(tracers.values()))
    root = told(first, f"run {trace.name}", None, start, end)
    homes = {
        process: told(tracers[process], process, root, spans[0].start, spans[-1].end)
        for process, spans in trace.tracks.items()
    }
    seen = {process: visits(spans) for process, spans in trace.tracks.items()}
    by_node: defaultdict[tuple[str, str], list[Visit]] = defaultdict(list)
    for process, found in seen.items():
        for visit in found:
            by_node[process, visit.node].append(visit)
    before: dict[int, list[Visit]] = {}
    for arrow in trace.arrows:
        (source, gave, sent), (target, took, came) = arrow.before, arrow.after
        giver, taker = _giver(by_node[source, gave], sent), _taker(by_node[target, took], came)
        if giver is not None and taker is not None:
            into, other = (
                (taker, giver) if gave else (giver, taker)
            )  # the work of a worker belongs to who got the fragment
            before.setdefault(id(into), []).append(other)
    everything = sorted(
        ((v, process) for process, found in seen.items() for v in found),
        key=lambda x: (not x[0].node, x[0].parts[0].start),
    )
    for visit, process in everything:
        others = [v.told for v in before.get(id(visit), ()) if v.told is not None]
        parent = others[0] if others and not visit.node else homes[process]
        links = others if visit.node else ()
        name = visit.node or process.partition(",")[0]
        visit.told = told(
            tracers[process],
            name,
            parent,
            visit.parts[0].start,
            visit.parts[-1].end,
            links,
            **{"flowrl.process": process},
        )
        for part in visit.parts:
            told(tracers[process], part.kind, visit.told, part.start, part.end)
    exporter = OTLPSpanExporter(
        endpoint=f"{endpoint.rstrip('/')}/v1/traces" if "/v1/" not in endpoint else endpoint
    )
    try:
        for start_at in range(0, len(ended), BATCH):
            if exporter.export(ended[start_at : start_at + BATCH]) is not SpanExportResult.SUCCESS:
                raise RuntimeFailed(
                    f"the collector at {endpoint} did not take the trace; is it there, and does it take OTLP over HTTP?"
                )
    finally:
        exporter.shutdown()
