"""A stretch of a trace as a picture: a lane per process and node, the kinds of work as colours, arrows where items go on."""

from __future__ import annotations

from xml.sax.saxutils import escape

from flowrl.core.clock import KINDS, Span
from flowrl.observe.trace import Trace

SECONDS = 0.25
"""The length of the stretch, unless it is said."""
LANE, LEFT, WIDE, TOP = 22, 190, 900, 34
COLOURS = dict(
    zip(
        KINDS,
        (
            "#9aa3ad",
            "#b07aa1",
            "#4e79a7",
            "#76b7b2",
            "#edc948",
            "#e8eaed",
            "#f3c6c0",
            "#bab0ac",
            "#9c755f",
            "#e15759",
            "#f28e2b",
            "#59a14f",
            "#9c9ede",
            "#ffffff",
        ),
        strict=True,
    )
)


def svg(trace: Trace, seconds: float = SECONDS, end: float | None = None) -> str:
    """The last `seconds` before `end`, a time since 1970: by default the end of the last update."""
    ends = [(span.kind == "update", span.end) for track in trace.tracks.values() for span in track]
    end = max(ends, default=(False, 0.0))[1] if end is None else end
    start = end - seconds
    lanes: dict[tuple[str, str], list[Span]] = {}
    for process, track in trace.tracks.items():
        for span in track:
            if (
                span.end > start
                and span.start < end
                and span.kind != "outside"
                and (span.node or span.kind not in ("waiting", "blocked"))
            ):
                lanes.setdefault((process, span.node), []).append(span)
    processes = list(trace.tracks)
    order = {
        lane: i for i, lane in enumerate(sorted(lanes, key=lambda lane: processes.index(lane[0])))
    }
    high = TOP + LANE * len(order) + 30

    def x(at: float) -> float:
        return LEFT + WIDE * min(max((at - start) / seconds, 0.0), 1.0)

    def y(lane: tuple[str, str]) -> float:
        return TOP + LANE * order[lane]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDE + 20}" height="{high}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="8" y="20" font-weight="bold">{escape(trace.name)}, {1e3 * seconds:.0f} ms</text>',
    ]
    shown = [
        kind for kind in KINDS if any(s.kind == kind for found in lanes.values() for s in found)
    ]
    for i, kind in enumerate(shown):
        at = LEFT + 95 * i
        parts.append(
            f'<rect x="{at}" y="10" width="11" height="11" fill="{COLOURS[kind]}" stroke="#888" stroke-width="0.3"/>'
        )
        parts.append(f'<text x="{at + 15}" y="20">{kind}</text>')
    for lane, found in lanes.items():
        process, node = lane
        name = f"{process}: {node}" if node else process
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(lane) + 15}" text-anchor="end">{escape(name)}</text>'
        )
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y(lane) + LANE - 1}" y2="{y(lane) + LANE - 1}" stroke="#e3e6ea"/>'
        )
        for s in found:
            width = max(x(s.end) - x(s.start), 0.4)
            colour = COLOURS.get(s.kind, "#e15759")
            parts.append(
                f'<rect x="{x(s.start):.1f}" y="{y(lane) + 3}" width="{width:.1f}" height="{LANE - 6}" fill="{colour}"/>'
            )
    for arrow in trace.arrows:
        (a, b, sent), (c, d, came) = arrow.before, arrow.after
        if start <= sent and came <= end and (a, b) in order and (c, d) in order:
            y1, y2 = y((a, b)) + LANE / 2, y((c, d)) + LANE / 2
            parts.append(
                f'<path d="M{x(sent):.1f} {y1}L{x(came):.1f} {y2}" stroke="#333" stroke-width="0.8" fill="none" opacity="0.6"/>'
            )
            parts.append(f'<circle cx="{x(came):.1f}" cy="{y2}" r="2.2" fill="#333"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
