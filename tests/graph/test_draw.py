"""Drawings: a chain and a branching graph in text, and the dashed lines in every format.

Those are between nodes and resources.
"""

import xml.etree.ElementTree as ET

import pytest
from small import Merge, Pass, Queue, SyncEvery, recipe, runners

import flowrl as fl

C = fl.Concat

CHAIN = """\
g
  ●  sample  ParallelSample  ◁┄ runners
  │
  ●  batch   Concat
  │
  ●  adv     Advantages      ◁┄ learner
  │
  ●  norm    Standardize
  │
  ●  train   TrainOneStep    ┄▷ learner
  │
  ●  sync    SyncWeights     ◁┄ learner  ┄▷ runners
  │
  ●  report  Report          ◁┄ runners

resources
  ◆ runners  2 runners x 4 envs x 16 steps of CartPole-v1
  ◆ learner  MLP, PPOLoss, Adam
"""

FORK = """\
fork
  ●    a     Pass
  ├┬╮
  ●││  b     Concat
  │││
  │●│  c     Concat
  │││
  ││●  d     Concat
  │││
  ●┴┘  e     Merge
  │
  ●    long  Concat
"""

CROSSING = """\
crossing
  ●    a  Pass
  ├╮
  ●│   b  Concat
  ├┼╮
  ●││  c  Concat
   ││
   │●  d  Concat
   ││
   ●│  e  Concat
   ││
   ●┘  f  Merge
"""

MEETING = """\
meeting
  ●    a  Pass
  ├╮
  ●│   b  Concat
  ├┼╮
  ●││  c  Concat
  │││
  │●┘  e  Merge
  ││
  ●┘   f  Merge
"""

JOINING = """\
joining
  ●    a  Pass
  │
  │●   b  Pass
  ││
  ││●  c  Pass
  │││
  ●┴┘  e  Merge
"""

ROOTS = """\
roots
  ●   a  Pass
  │
  ●   b  Concat
  │
  │●  c  Pass
  ││
  │●  d  Queue
  ││
  ●┘  e  Merge
"""


def fork():
    graph = fl.Graph("fork").then(a=Pass(), b=C(1)).then(after="a", c=C(1)).then(after="a", d=C(1))
    return graph.then(after=("b", "c", "d"), e=Merge(), long=C(1))


def roots():
    graph = fl.Graph("roots").then(a=Pass(), b=C(1)).then(after=(), c=Pass(), d=Queue())
    return graph.then(after=("b", "d"), e=Merge())


def crossing():
    """b splits while the lane from a to e is open."""
    graph = (
        fl.Graph("crossing")
        .then(a=Pass(), b=C(1), c=C(1))
        .then(after="b", d=C(1))
        .then(after="a", e=C(1))
    )
    return graph.then(after=("d", "e"), f=Merge())


def meeting():
    """b branches off to e, to which a's lane is open already."""
    graph = fl.Graph("meeting").then(a=Pass(), b=C(1)).then(after="b", c=C(1))
    return graph.then(after=("a", "b"), e=Merge()).then(after=("c", "e"), f=Merge())


def joining():
    """Three lanes end in e."""
    graph = fl.Graph("joining").then(a=Pass()).then(after=(), b=Pass()).then(after=(), c=Pass())
    return graph.then(after=("a", "b", "c"), e=Merge())


DRAWN = [
    (recipe(), CHAIN), (fork(), FORK), (roots(), ROOTS), (crossing(), CROSSING),
    (meeting(), MEETING), (joining(), JOINING),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "drawing"), DRAWN, ids=[g.name for g, _ in DRAWN])
def test_the_text_drawing(graph, drawing):
    assert graph.draw("text") == drawing
    assert graph.draw() == drawing


def test_a_split_opens_lanes_to_its_right_even_where_one_is_free_on_its_left():
    graph = (
        fl.Graph("g")
        .then(a=Pass(), b=SyncEvery())
        .then(after="a", c=C(1), d=C(1))
        .then(after="c", e=C(1))
        .then(after=("d", "e"), f=Merge())
    )
    for line in graph.draw().splitlines():
        lanes = line[2:].split("  ")[0]
        assert "├" not in lanes or "╮" in lanes.split("├")[1], graph.draw()
        assert "╮" not in lanes or "├" in lanes.split("╮")[0], graph.draw()


def test_lanes_part_and_meet_as_often_as_edges_do():
    for graph, _ in DRAWN:
        drawing = graph.draw()
        edges = sum(len(n.after) for n in graph.nodes)
        sources = {a for n in graph.nodes for a in n.after}
        assert drawing.count("╮") + drawing.count("┬") == edges - len(sources)
        assert drawing.count("┘") + drawing.count("┴") == edges - len(
            [n for n in graph.nodes if n.after]
        )


DASHED = [
    ("runners", "sample"),
    ("learner", "adv"),
    ("train", "learner"),
    ("learner", "sync"),
    ("sync", "runners"),
    ("runners", "report"),
]


def test_mermaid_has_dashed_edges_from_what_is_read_to_what_is_written():
    lines = recipe().draw("mermaid").splitlines()
    assert lines[0] == "flowchart LR"
    assert [tuple(x.strip().split(" -.-> ")) for x in lines if "-.->" in x] == [
        (f"n_{a}", f"n_{b}") for a, b in DASHED
    ]
    assert "    n_train --> n_sync" in lines and '    n_runners[/"runners<br/>Runners"/]' in lines


def test_dot_has_dashed_edges_from_what_is_read_to_what_is_written():
    text = recipe().draw("dot")
    assert text.startswith('digraph "g" {\n') and text.endswith("}\n")
    assert [x for x in text.splitlines() if "dashed" in x] == [
        f'  "{a}" -> "{b}" [style=dashed];' for a, b in DASHED
    ]
    assert '  "train" -> "sync";\n' in text


def box_of(root, name):
    """(x, y, width, height) of the box in which a name is written."""
    boxes = [
        tuple(float(e.get(k)) for k in ("x", "y", "width", "height"))
        for e in root.iter()
        if e.tag.endswith("}rect") and e.get("rx")
    ]
    (text,) = [
        e
        for e in root.iter()
        if e.tag.endswith("}text") and e.text == name and e.get("class") is None
    ]
    x, y = float(text.get("x")), float(text.get("y"))
    return next(b for b in boxes if b[0] <= x <= b[0] + b[2] and b[1] <= y <= b[1] + b[3])


def test_svg_has_dashed_lines_between_the_boxes_of_nodes_and_resources():
    root = ET.fromstring(recipe().draw("svg"))
    paths = [e for e in root.iter() if e.tag.endswith("}path") and e.get("class") == "ref"]
    assert len(paths) == len(DASHED)
    assert "stroke-dasharray" in next(e.text for e in root.iter() if e.tag.endswith("}style"))
    for path, (a, b) in zip(paths, DASHED, strict=True):
        start, end = path.get("d").lstrip("M").split("C")[0], path.get("d").rsplit(" ", 2)[1:]
        for name, (x, y) in ((a, map(float, start.split())), (b, map(float, end))):
            left, top, wide, high = box_of(root, name)
            assert left <= x <= left + wide and top - 3 <= y <= top + high + 3, (a, b)


def test_svg_needs_nothing_from_outside_and_scales():
    root = ET.fromstring(recipe().draw("svg"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert not [e for e in root.iter() if any("href" in k for k in e.attrib)]


def test_names_are_escaped():
    graph = fl.Graph('a<b> & "c"', runners=runners()).then(x=C(1))
    root = ET.fromstring(graph.draw("svg"))
    assert next(e.text for e in root.iter() if e.tag.endswith("}title")) == 'a<b> & "c"'
    assert r'digraph "a<b> & \"c\"" {' in graph.draw("dot")


def test_two_names_are_two_things_in_mermaid():
    graph = fl.Graph("g").then(a=fl.chain(b=C(1)), a__b=C(2))
    ids = [x.split("[")[0].strip() for x in graph.draw("mermaid").splitlines() if "[" in x]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("form", ["text", "mermaid", "dot", "svg"])
def test_an_empty_graph_draws(form):
    assert fl.Graph("nothing").draw(form)


def test_a_node_without_edges_has_no_lane():
    assert fl.Graph("alone").then(a=Pass()).draw() == "alone\n  ●  a  Pass\n"


class Printer:
    """What IPython gives to `_repr_pretty_`."""

    def text(self, text):
        self.printed = text


def test_a_notebook_shows_the_text_of_a_plan():
    plan, printer = recipe().compile(), Printer()
    plan._repr_pretty_(printer, cycle=False)
    assert printer.printed == str(plan)


def test_a_notebook_shows_the_graph():
    assert recipe()._repr_svg_() == recipe().draw("svg")
