"""Drawings of a graph: text for a terminal, Mermaid, DOT, and SVG.

Resources are drawn too, joined to the nodes that use them by dashed lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from flowrl.errors import SettingError, unknown
from flowrl.graph.graph import Graph, Node
from flowrl.graph.refs import refs, resource_and_part


def draw(graph: Graph, format: str = "text") -> str:  # noqa: A002 - the field's word for it
    """Return a drawing of a graph.

    Args:
        graph: the graph.
        format: ``text``, ``mermaid``, ``dot`` or ``svg``.

    Raises:
        SettingError: an unknown format.
    """
    if format not in FORMATS:
        raise SettingError(unknown("format", format, FORMATS))
    return FORMATS[format](graph)


def _dashed(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the edges between nodes and resources: from what is read to what is written."""
    for node in graph.nodes:
        for field, (target, _) in refs(node.op).items():
            resource = resource_and_part(str(target))[0]
            if resource in graph.resources:
                if field in node.op.writes:
                    yield node.name, resource
                else:
                    yield resource, node.name


def _kind(node: Node) -> str:
    return type(node.op).__name__


# -- text ------------------------------------------------------------------------------------------


_CROSSED = {" ": "─", "│": "┼", "╮": "┬", "┘": "┴"}
"""The mark of a lane where a horizontal line crosses it, by its mark without that line."""


def text(graph: Graph) -> str:
    """Return one line per node, the edges as lanes on the left, the resources below."""
    name_width = max((len(n.name) for n in graph.nodes), default=0)
    kind_width = max((len(_kind(n)) for n in graph.nodes), default=0)
    # By lane: the node that its line leads to, None where the lane is free.
    lanes: list[str | None] = []
    body: list[tuple[str, str]] = []
    for node in graph.nodes:
        label = f"{node.name:<{name_width}}  {_kind(node):<{kind_width}}  {_uses(node)}".rstrip()
        ending = [i for i, target in enumerate(lanes) if target == node.name]
        at = ending[0] if ending else _free(lanes, node.name)
        body.append((_node_marks(lanes, at, ending), label))
        for i in ending:
            lanes[i] = None
        # The first edge goes on in the node's own lane, the others branch off to the right.
        targets = [other.name for other in graph.nodes if node.name in other.after]
        lanes[at] = targets[0] if targets else None
        branches = [_free(lanes, target, at + 1) for target in targets[1:]]
        if any(lanes):
            body.append((_lane_marks(lanes, at, branches), ""))
        while lanes and lanes[-1] is None:
            lanes.pop()
    width = max((len(marks) for marks, _ in body), default=0)
    lines = [graph.name, *(f"  {marks:<{width}}  {label}".rstrip() for marks, label in body)]
    return "\n".join([*lines, *_resource_lines(graph)]) + "\n"


def _node_marks(lanes: list[str | None], at: int, ending: list[int]) -> str:
    """Return the lanes beside a node, which stands in lane `at` and ends the lanes `ending`."""
    marks = ["│" if target else " " for target in lanes]
    for i in ending:
        marks[i] = "┘"
    marks[at] = "●"
    for i in ending[1:]:
        marks[at + 1 : i] = [_CROSSED.get(mark, mark) for mark in marks[at + 1 : i]]
    return "".join(marks).rstrip()


def _lane_marks(lanes: list[str | None], at: int, branches: list[int]) -> str:
    """Return the lanes below a node in lane `at`, from which the lanes `branches` begin."""
    marks = ["│" if target else " " for target in lanes]
    if branches:
        for i in branches:
            marks[i] = "╮"
        marks[at] = "├"
        last = max(branches)
        marks[at + 1 : last] = [_CROSSED.get(mark, mark) for mark in marks[at + 1 : last]]
    return "".join(marks).rstrip()


def _resource_lines(graph: Graph) -> list[str]:
    if not graph.resources:
        return []
    width = max(len(name) for name in graph.resources)
    lines = [f"  ◆ {name:<{width}}  {r.describe()}" for name, r in graph.resources.items()]
    return ["", "resources", *lines]


def _free(lanes: list[str | None], name: str, start: int = 0) -> int:
    """Let the first free lane from `start` on lead to `name`, and return its index."""
    i = next((i for i in range(start, len(lanes)) if lanes[i] is None), len(lanes))
    lanes[i : i + 1] = [name]
    return i


def _uses(node: Node) -> str:
    """Return the resources that a node reads and those that it writes."""
    read: list[str] = []
    written: list[str] = []
    for field, (target, _) in refs(node.op).items():
        (written if field in node.op.writes else read).append(str(target))
    parts = [f"◁┄ {', '.join(read)}"] if read else []
    parts += [f"┄▷ {', '.join(written)}"] if written else []
    return "  ".join(parts)


# -- mermaid and dot -------------------------------------------------------------------------------


def mermaid(graph: Graph) -> str:
    """Return a Mermaid flowchart."""
    lines = ["flowchart LR"]
    for node in graph.nodes:
        left, right = _shape(node)
        lines.append(f'    {_id(node.name)}{left}"{node.name}<br/>{_kind(node)}"{right}')
    lines += [
        f'    {_id(name)}[/"{name}<br/>{type(r).__name__}"/]' for name, r in graph.resources.items()
    ]
    lines += [f"    {_id(a)} --> {_id(n.name)}" for n in graph.nodes for a in n.after]
    lines += [f"    {_id(a)} -.-> {_id(b)}" for a, b in _dashed(graph)]
    return "\n".join(lines) + "\n"


def _shape(node: Node) -> tuple[str, str]:
    """Return the brackets that give a node its shape."""
    if node.op.queue:
        return "[(", ")]"
    return ("([", "])") if node.op.reports else ("[", "]")


def _id(name: str) -> str:
    return "n_" + name.replace(".", "-")


def dot(graph: Graph) -> str:
    """Return a graph for Graphviz."""
    lines = [
        f"digraph {_quote(graph.name)} {{",
        "  rankdir=LR;",
        '  node [shape=box, style=rounded, fontname="Helvetica"];',
    ]
    lines += [f"  {_quote(n.name)} [label={_quote(n.name, _kind(n))}];" for n in graph.nodes]
    lines += [
        f"  {_quote(n)} [label={_quote(n, type(r).__name__)}, shape=cylinder, style=solid];"
        for n, r in graph.resources.items()
    ]
    lines += [f"  {_quote(a)} -> {_quote(n.name)};" for n in graph.nodes for a in n.after]
    lines += [f"  {_quote(a)} -> {_quote(b)} [style=dashed];" for a, b in _dashed(graph)]
    return "\n".join([*lines, "}"]) + "\n"


def _quote(*lines: str) -> str:
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'


# -- svg -------------------------------------------------------------------------------------------

BOX, HIGH = 118, 46
"""The width and height of a box, in pixels."""
GAP, DROP, MARGIN = 40, 34, 20
"""The space between columns, between rows, and around the picture, in pixels."""
Point = tuple[float, float]
"""The x and y of a box's upper left corner, in pixels from the upper left of the picture."""
STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2430;text-anchor:middle}
.kind{font-size:11px;fill:#5b6472}.box{fill:#eef3fb;stroke:#3b6cb7}\
.queue{fill:#fff3dc;stroke:#c98a1b}.clock{fill:#e9f7ec;stroke:#3a9a55}
.store{fill:#f5eefb;stroke:#8a56b8}.edge{fill:none;stroke:#3b6cb7;stroke-width:1.6}
.ref{fill:none;stroke:#8a56b8;stroke-width:1.3;stroke-dasharray:5 4}
.paper{fill:#fff}"""


@dataclass(frozen=True)
class Layout:
    """Where everything in a picture of a graph stands, in pixels from its upper left corner."""

    size: Point
    """The width and height of the picture."""
    spots: Mapping[str, Point]
    """The upper left corner of the box of each node and resource, by name; a box is `BOX` wide and
    `HIGH` high."""
    edges: Mapping[tuple[str, str], str]
    """The path of each edge, as an SVG path's ``d``."""
    uses: Mapping[tuple[str, str], str]
    """The same between nodes and resources: from what is read to what is written."""


def layout(graph: Graph) -> Layout:
    """Return where everything stands: layers of nodes from left to right, resources below them."""
    layers = _layers(graph)
    rows = max((len(layer) for layer in layers), default=1)
    wide = max(len(layers), len(graph.resources)) * (BOX + GAP) - GAP + 2 * MARGIN
    bottom = MARGIN + rows * (HIGH + DROP) + 2 * DROP
    spots = _spots(graph, layers, wide, bottom)
    low = bottom + HIGH if graph.resources else MARGIN + rows * (HIGH + DROP) - DROP
    pairs = [(before, node.name) for node in graph.nodes for before in node.after]
    edges = {(a, b): _across(spots[a], spots[b]) for a, b in pairs}
    dashed = list(_dashed(graph))
    uses = {(a, b): _down(graph, spots, a, b, dashed) for a, b in dashed}
    return Layout((wide, low + MARGIN + 12), spots, edges, uses)


def svg(graph: Graph) -> str:
    """Return a picture, made without any outside program.

    What a node reads or writes, such as weights, is a dashed line.
    """
    found = layout(graph)
    wide, high = found.size
    parts = [*_lines(found.edges, "edge", "tip"), *_lines(found.uses, "ref", "ref")]
    parts += _boxes(graph, found.spots)
    tips = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for name, colour in (("tip", "#3b6cb7"), ("ref", "#8a56b8"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{high:g}" '
        f'viewBox="0 0 {wide:g} {high:g}" role="img">'
        f"<title>{escape(graph.name)}</title><style>{STYLE}</style><defs>{tips}</defs>"
        f'<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _lines(paths: Mapping[tuple[str, str], str], style: str, tip: str) -> list[str]:
    return [f'<path class="{style}" marker-end="url(#{tip})" d="{d}"/>' for d in paths.values()]


def _spots(graph: Graph, layers: list[list[str]], wide: float, bottom: float) -> dict[str, Point]:
    """Return where each node and each resource stands.

    Args:
        graph: the graph.
        layers: the nodes by column.
        wide: the width of the picture.
        bottom: the y of the resources.
    """
    spots: dict[str, Point] = {}
    for column, layer in enumerate(layers):
        for row, name in enumerate(layer):
            spots[name] = (MARGIN + column * (BOX + GAP), MARGIN + row * (HIGH + DROP))
    stores = _by_use(graph, spots)
    # The resources are spread over the width, and the row of them is centred.
    distance = max(BOX + GAP, (wide - 2 * MARGIN - BOX) / (len(stores) + 1))
    left = (wide - BOX - distance * (len(stores) - 1)) / 2
    spots.update({name: (left + i * distance, bottom) for i, name in enumerate(stores)})
    return spots


def _boxes(graph: Graph, spots: Mapping[str, Point]) -> list[str]:
    boxes = [_box(n.name, _kind(n), *spots[n.name], style_of(n)) for n in graph.nodes]
    for name, resource in graph.resources.items():
        boxes.append(_box(name, type(resource).__name__, *spots[name], "store"))
    return boxes


def style_of(node: Node) -> str:
    """Return the class of a node's box in a style sheet: ``queue``, ``clock`` or ``box``."""
    if node.op.queue:
        return "queue"
    return "clock" if node.op.reports else "box"


def _layers(graph: Graph) -> list[list[str]]:
    """Return the nodes by their longest distance from a start, in the order of the graph."""
    import networkx as nx

    order = {n.name: i for i, n in enumerate(graph.nodes)}
    return [
        sorted(layer, key=order.__getitem__)
        for layer in nx.topological_generations(graph.digraph())
    ]


def _by_use(graph: Graph, spots: dict[str, Point]) -> list[str]:
    """Return the resources from left to right, each near the nodes that use it."""
    uses: dict[str, list[float]] = {name: [] for name in graph.resources}
    for node in graph.nodes:
        for target, _ in refs(node.op).values():
            resource = resource_and_part(str(target))[0]
            if resource in uses:
                uses[resource].append(spots[node.name][0])
    return sorted(uses, key=lambda name: sum(uses[name]) / max(len(uses[name]), 1))


def _box(name: str, kind: str, x: float, y: float, style: str) -> str:
    middle = x + BOX / 2
    return (
        f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{BOX}" height="{HIGH}" rx="8"/>'
        f'<text x="{middle:g}" y="{y + 20:g}">{escape(name)}</text>'
        f'<text class="kind" x="{middle:g}" y="{y + 36:g}">{escape(kind)}</text>'
    )


def _across(a: Point, b: Point) -> str:
    """Return the curve from the right side of one box to the left side of another."""
    x0, y0, x1, y1 = a[0] + BOX, a[1] + HIGH / 2, b[0] - 2, b[1] + HIGH / 2
    bend = max((x1 - x0) / 2, 12)
    return f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"


def _down(
    graph: Graph,
    spots: dict[str, Point],
    a: str,
    b: str,
    dashed: list[tuple[str, str]],
) -> str:
    """Return the curve from `a` to `b`, of which one is a node and one a resource below it."""
    store, node = (a, b) if a in graph.resources else (b, a)
    # The lines of one resource end side by side on its upper edge, in the order of the nodes.
    ends = sorted(
        (name for pair in dashed for name in pair if store in pair and name != store),
        key=lambda name: spots[name][0],
    )
    x_store = spots[store][0] + BOX * (ends.index(node) + 1) / (len(ends) + 1)
    # A node's incoming and outgoing lines don't touch.
    x_node = spots[node][0] + BOX / 2 + (12 if store == a else -12)
    top, low = spots[node][1] + HIGH, spots[store][1]
    bend = (low - top) * 0.55
    if store == a:
        start, end = f"{x_store:g} {low:g}", f"{x_node:g} {top + 2:g}"
        return f"M{start}C{x_store:g} {low - bend:g} {x_node:g} {top + bend:g} {end}"
    start, end = f"{x_node:g} {top:g}", f"{x_store:g} {low - 2:g}"
    return f"M{start}C{x_node:g} {top + bend:g} {x_store:g} {low - bend:g} {end}"


FORMATS: dict[str, Callable[[Graph], str]] = {
    "text": text,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
}
