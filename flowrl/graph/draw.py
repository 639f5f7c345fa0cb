"""Drawings of a graph: text for a terminal, Mermaid, DOT, and SVG. Resources are drawn too, joined by dashed lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape

from flowrl.errors import SettingError, unknown
from flowrl.graph.graph import Graph, Node
from flowrl.graph.protocols import refs


def draw(graph: Graph, format: str = "text") -> str:  # noqa: A002 - the field's word for it
    """The graph as ``text``, ``mermaid``, ``dot`` or ``svg``.

    Raises:
        SettingError: an unknown format.
    """
    if format not in FORMATS:
        raise SettingError(unknown("format", format, FORMATS))
    return FORMATS[format](graph)


def _dashed(graph: Graph) -> Iterator[tuple[str, str]]:
    """Edges between nodes and resources: from what is read to what is written."""
    for node in graph.nodes:
        for field, (target, _) in refs(node.op).items():
            if target in graph.resources:
                yield (node.name, target) if field in node.op.writes else (target, node.name)


def _kind(node: Node) -> str:
    return type(node.op).__name__


# -- text ----------------------------------------------------------------------------------------------------------


def text(graph: Graph) -> str:
    """One line per node, the edges as lanes on the left, the resources on the right."""
    behind = {n.name: [m.name for m in graph.nodes if n.name in m.after] for n in graph.nodes}
    wide, kinds = (
        max((len(x) for x in xs), default=0)
        for xs in ([n.name for n in graph.nodes], [_kind(n) for n in graph.nodes])
    )
    lanes: list[str | None] = []  # by lane: the node that its line leads to
    body: list[tuple[str, str]] = []
    for node in graph.nodes:
        mine = [i for i, to in enumerate(lanes) if to == node.name]
        at = mine[0] if mine else _free(lanes, node.name)
        marks = [
            "●" if i == at else "┘" if i in mine else "│" if to else " "
            for i, to in enumerate(lanes)
        ]
        for i in mine[1:]:
            marks[at + 1 : i] = [
                "─" if m == " " else "┼" if m == "│" else m for m in marks[at + 1 : i]
            ]
        body.append(
            (
                "".join(marks).rstrip(),
                f"{node.name:<{wide}}  {_kind(node):<{kinds}}  {_uses(node)}".rstrip(),
            )
        )
        for i in mine:
            lanes[i] = None
        targets = behind[node.name]
        for j, to in enumerate(targets):
            if j == 0:
                lanes[at] = to
            else:
                _free(lanes, to, at + 1)
        if any(lanes):
            split = len(targets) > 1
            marks = [
                "├"
                if split and i == at
                else "╮"
                if split and to in targets[1:] and i != at
                else "│"
                if to
                else " "
                for i, to in enumerate(lanes)
            ]
            if split:
                last = max(i for i, m in enumerate(marks) if m == "╮")
                marks[at + 1 : last] = [
                    "─" if m == " " else "┬" if m == "╮" else "┼" if m == "│" else m
                    for m in marks[at + 1 : last]
                ]
            body.append(("".join(marks).rstrip(), ""))
        while lanes and lanes[-1] is None:
            lanes.pop()
    room = max((len(left) for left, _ in body), default=0)
    lines = [graph.name, *(f"  {left:<{room}}  {right}".rstrip() for left, right in body)]
    if graph.resources:
        names = max(len(n) for n in graph.resources)
        lines += [
            "",
            "resources",
            *(f"  ◆ {n:<{names}}  {r.describe()}" for n, r in graph.resources.items()),
        ]
    return "\n".join(lines) + "\n"


def _free(lanes: list[str | None], name: str, start: int = 0) -> int:
    """The first free lane from `start` on, now leading to `name`."""
    i = next((i for i in range(start, len(lanes)) if lanes[i] is None), len(lanes))
    lanes[i:] = [name, *lanes[i + 1 :]]
    return i


def _uses(node: Node) -> str:
    found = [
        (mark, [t for f, (t, _) in refs(node.op).items() if (f in node.op.writes) == wrote])
        for mark, wrote in (("◁┄", False), ("┄▷", True))
    ]
    return "  ".join(f"{mark} {', '.join(targets)}" for mark, targets in found if targets)


# -- mermaid and dot -----------------------------------------------------------------------------------------------


def mermaid(graph: Graph) -> str:
    """A Mermaid flowchart."""
    lines = ["flowchart LR"]
    for node in graph.nodes:
        shape = ("[(", ")]") if node.op.queue else ("([", "])") if node.op.reports else ("[", "]")
        lines.append(f'    {_id(node.name)}{shape[0]}"{node.name}<br/>{_kind(node)}"{shape[1]}')
    lines += [
        f'    {_id(name)}[/"{name}<br/>{type(r).__name__}"/]' for name, r in graph.resources.items()
    ]
    lines += [f"    {_id(a)} --> {_id(n.name)}" for n in graph.nodes for a in n.after]
    lines += [f"    {_id(a)} -.-> {_id(b)}" for a, b in _dashed(graph)]
    return "\n".join(lines) + "\n"


def _id(name: str) -> str:
    return "n_" + name.replace(".", "-")


def dot(graph: Graph) -> str:
    """A graph for Graphviz."""
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


# -- svg -----------------------------------------------------------------------------------------------------------

BOX, HIGH, GAP, DROP, MARGIN = 118, 46, 40, 34, 20
STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2430;text-anchor:middle}
.kind{font-size:11px;fill:#5b6472}.box{fill:#eef3fb;stroke:#3b6cb7}.queue{fill:#fff3dc;stroke:#c98a1b}.clock{fill:#e9f7ec;stroke:#3a9a55}
.store{fill:#f5eefb;stroke:#8a56b8}.edge{fill:none;stroke:#3b6cb7;stroke-width:1.6}
.ref{fill:none;stroke:#8a56b8;stroke-width:1.3;stroke-dasharray:5 4}
.paper{fill:#fff}"""


def svg(graph: Graph) -> str:
    """A picture without any outside program: layers from left to right, resources below, weights and the like dashed."""
    layers = _layers(graph)
    tall = max((len(layer) for layer in layers), default=1)
    spots: dict[str, tuple[float, float]] = {
        name: (MARGIN + i * (BOX + GAP), MARGIN + j * (HIGH + DROP))
        for i, layer in enumerate(layers)
        for j, name in enumerate(layer)
    }
    floor = MARGIN + tall * (HIGH + DROP) + 2 * DROP
    wide = max(len(layers), len(graph.resources)) * (BOX + GAP) - GAP + 2 * MARGIN
    stores = _by_use(graph, spots)
    apart = max(BOX + GAP, (wide - 2 * MARGIN - BOX) / (len(stores) + 1))
    first = (wide - BOX - apart * (len(stores) - 1)) / 2
    spots.update({name: (first + k * apart, floor) for k, name in enumerate(stores)})
    parts = [
        f'<path class="edge" marker-end="url(#tip)" d="{_across(spots[a], spots[n.name])}"/>'
        for n in graph.nodes
        for a in n.after
    ]
    dashed = list(_dashed(graph))
    parts += [
        f'<path class="ref" marker-end="url(#ref)" d="{_down(graph, spots, a, b, dashed)}"/>'
        for a, b in dashed
    ]
    parts += [
        _box(
            n.name,
            _kind(n),
            *spots[n.name],
            "queue" if n.op.queue else "clock" if n.op.reports else "box",
        )
        for n in graph.nodes
    ]
    parts += [
        _box(name, type(r).__name__, *spots[name], "store") for name, r in graph.resources.items()
    ]
    high = (floor + HIGH if graph.resources else MARGIN + tall * (HIGH + DROP) - DROP) + MARGIN + 12
    tips = "".join(
        f'<marker id="{i}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{c}"/></marker>'
        for i, c in (("tip", "#3b6cb7"), ("ref", "#8a56b8"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{high:g}" viewBox="0 0 {wide:g} {high:g}" role="img">'
        f"<title>{escape(graph.name)}</title><style>{STYLE}</style><defs>{tips}</defs>"
        f'<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _layers(graph: Graph) -> list[list[str]]:
    import networkx as nx

    order = {n.name: i for i, n in enumerate(graph.nodes)}
    return [
        sorted(layer, key=order.__getitem__)
        for layer in nx.topological_generations(graph.digraph())
    ]


def _by_use(graph: Graph, spots: dict[str, tuple[float, float]]) -> list[str]:
    """The resources, each near the nodes that use it."""
    uses: dict[str, list[float]] = {name: [] for name in graph.resources}
    for node in graph.nodes:
        for target, _ in refs(node.op).values():
            if target in uses:
                uses[target].append(spots[node.name][0])
    return sorted(uses, key=lambda name: sum(uses[name]) / max(len(uses[name]), 1))


def _box(name: str, kind: str, x: float, y: float, style: str) -> str:
    middle = x + BOX / 2
    return (
        f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{BOX}" height="{HIGH}" rx="8"/>'
        f'<text x="{middle:g}" y="{y + 20:g}">{escape(name)}</text><text class="kind" x="{middle:g}" y="{y + 36:g}">{escape(kind)}</text>'
    )


def _across(a: tuple[float, float], b: tuple[float, float]) -> str:
    x0, y0, x1, y1 = a[0] + BOX, a[1] + HIGH / 2, b[0] - 2, b[1] + HIGH / 2
    bend = max((x1 - x0) / 2, 12)
    return f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"


def _down(
    graph: Graph,
    spots: dict[str, tuple[float, float]],
    a: str,
    b: str,
    dashed: list[tuple[str, str]],
) -> str:
    """A dashed line between a node and a resource below it."""
    store = a if a in graph.resources else b
    ends = sorted(
        (x for pair in dashed for x in pair if store in pair and x != store),
        key=lambda n: spots[n][0],
    )
    other = b if store == a else a
    port = spots[store][0] + BOX * (ends.index(other) + 1) / (len(ends) + 1)
    spot = spots[other][0] + BOX / 2 + (12 if store == a else -12)
    top, low = spots[other][1] + HIGH, spots[store][1]
    bend = (low - top) * 0.55
    if store == a:
        return f"M{port:g} {low:g}C{port:g} {low - bend:g} {spot:g} {top + bend:g} {spot:g} {top + 2:g}"
    return f"M{spot:g} {top:g}C{spot:g} {top + bend:g} {port:g} {low - bend:g} {port:g} {low - 2:g}"


FORMATS: dict[str, Callable[[Graph], str]] = {
    "text": text,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
}
