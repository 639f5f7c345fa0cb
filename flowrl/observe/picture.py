"""The last part of a trace as a picture in SVG.

It has a lane per process and node, colours for the kinds of work, and arrows where items go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from flowrl.core.clock import KINDS
from flowrl.core.spans import Span
from flowrl.observe.trace import Trace

Lane = tuple[str, str]
"""A process, and a node in it."""
SECONDS = 0.25
"""The seconds that a picture shows."""
LANE, LEFT, WIDE, TOP = 22, 190, 900, 34
"""The height of a lane, and the left margin, width and top margin of all lanes, in pixels."""
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
            "#d4d4c8",
            "#ffffff",
        ),
        strict=True,
    )
)
"""By kind of work: its colour."""
OTHER_COLOUR = "#e15759"
"""The colour of the epochs within updates, which are no kind of work."""


def svg(trace: Trace) -> str:
    """Return the text of an SVG of the last `SECONDS` of a trace before the end of an update.

    Where there is no update, they are those before the end of the last span.
    """
    ends = [(s.kind == "update", s.end) for track in trace.tracks.values() for s in track]
    end = max(ends, default=(False, 0.0))[1]
    return "\n".join(_Picture(trace, end).lines()) + "\n"


class _Picture:
    """Draws the `SECONDS` of a trace before `end`, in seconds since 1970."""

    def __init__(self, trace: Trace, end: float) -> None:
        self.trace, self.start, self.end = trace, end - SECONDS, end
        self.lanes = _lanes(trace, self.start, end)
        # As nodes come first in the whole trace, which is the order of the graph.
        every = [(name, span.node) for name, track in trace.tracks.items() for span in track]
        in_order = [lane for lane in dict.fromkeys(every) if lane in self.lanes]
        self.row = {lane: i for i, lane in enumerate(in_order)}

    def x(self, at: float) -> float:
        """Return the horizontal position of a time, within the margins."""
        return LEFT + WIDE * min(max((at - self.start) / SECONDS, 0.0), 1.0)

    def y(self, lane: Lane) -> float:
        """Return the upper edge of a lane."""
        return TOP + LANE * self.row[lane]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the SVG."""
        width, height = LEFT + WIDE + 20, TOP + LANE * len(self.row) + 30
        title = f"{escape(self.trace.name)}, {1e3 * SECONDS:.0f} ms"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12">'
        )
        yield (
            '<rect width="100%" height="100%" fill="#ffffff"/>'
            f'<text x="8" y="20" font-weight="bold">{title}</text>'
        )
        yield from _legend(self.lanes)
        for lane, found in self.lanes.items():
            yield from self._lane(lane, found)
        yield from self._arrows()
        yield "</svg>"

    def _lane(self, lane: Lane, found: Sequence[Span]) -> Iterator[str]:
        """Draw the name of a lane, the line below it, and its spans."""
        process, node = lane
        name = f"{process}: {node}" if node else process
        top, bottom = self.y(lane), self.y(lane) + LANE - 1
        yield f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>'
        yield (
            f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{bottom}" y2="{bottom}" stroke="#e3e6ea"/>'
        )
        for span in found:
            left = self.x(span.start)
            # A span that is shorter than a pixel must be visible too.
            width = max(self.x(span.end) - left, 0.4)
            colour = COLOURS.get(span.kind, OTHER_COLOUR)
            yield (
                f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{LANE - 6}" '
                f'fill="{colour}"/>'
            )

    def _arrows(self) -> Iterator[str]:
        """Draw the arrows whose ends are both in the picture."""
        for arrow in self.trace.arrows:
            (process, node, left_at), (to_process, to_node, came_at) = arrow.before, arrow.after
            source, target = (process, node), (to_process, to_node)
            shown = source in self.row and target in self.row
            if not shown or left_at < self.start or came_at > self.end:
                continue
            x1, x2 = self.x(left_at), self.x(came_at)
            y1, y2 = self.y(source) + LANE / 2, self.y(target) + LANE / 2
            yield (
                f'<path d="M{x1:.1f} {y1}L{x2:.1f} {y2}" stroke="#333" stroke-width="0.8" '
                'fill="none" opacity="0.6"/>'
            )
            yield f'<circle cx="{x2:.1f}" cy="{y2}" r="2.2" fill="#333"/>'


def _lanes(trace: Trace, start: float, end: float) -> dict[Lane, list[Span]]:
    """Return the spans of each process and node that overlap with the time from start to end."""
    lanes: dict[Lane, list[Span]] = {}
    for process, track in trace.tracks.items():
        for span in track:
            overlaps = span.end > start and span.start < end
            # Waiting outside of nodes says nothing about any of them.
            idle = not span.node and span.kind in ("waiting", "blocked")
            if overlaps and not idle and span.kind not in ("paused", "outside"):
                lanes.setdefault((process, span.node), []).append(span)
    return lanes


def _legend(lanes: Mapping[Lane, Sequence[Span]]) -> Iterator[str]:
    """Draw the colours of the kinds of work that are in the picture."""
    seen = {span.kind for found in lanes.values() for span in found}
    for i, kind in enumerate(kind for kind in KINDS if kind in seen):
        at = LEFT + 95 * i
        yield (
            f'<rect x="{at}" y="10" width="11" height="11" fill="{COLOURS[kind]}" '
            'stroke="#888" stroke-width="0.3"/>'
        )
        yield f'<text x="{at + 15}" y="20">{kind}</text>'
