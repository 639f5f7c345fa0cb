"""The stage loop: order of calls, what is committed when, whose error it was, and the ledger."""

import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from small import Merge

import flowrl as fl
from flowrl.core.events import OperatorRan, Stream, Tap
from flowrl.core.items import Tally
from flowrl.core.ledger import Ledger
from flowrl.graph.loop import Loop, unchangeable
from flowrl.graph.plan import Plan
from flowrl.graph.site import HereSite, Place
from flowrl.graph.trace import Trace


@dataclass(frozen=True)
class Source(fl.extend.Stateless):
    """Yields these items in every pass."""

    items: tuple[Any, ...]

    source: ClassVar[bool] = True

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        assert item is None and ctx.source is None
        yield from self.items


@dataclass(frozen=True)
class Note(fl.extend.Stateless):
    """Notes its items, and when what it yielded was gone through."""

    log: list[str]
    joins: ClassVar[bool] = True

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        self.log.append(f"{ctx.name} takes {item} from {ctx.source}")
        yield item
        self.log.append(f"{ctx.name} is done with {item}")


@dataclass(frozen=True)
class Clock(fl.extend.Stateless):
    """Closes a Row with every item."""

    reports: ClassVar[bool] = True

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield Tally(
            (), {"env_steps": 1, "episodes": 0, "return_mean": math.nan, "length_mean": math.nan}
        )


@dataclass(frozen=True)
class Pairs(fl.extend.Operator):
    """Yields every second item together with the one before."""

    def init(self) -> list[Any]:
        return []

    def step(self, held: list[Any], item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        held.append(item)
        if len(held) == 2:
            pair = tuple(held)
            held.clear()
            yield pair


@dataclass(frozen=True)
class Breaks(fl.extend.Stateless):
    """Raises, before or after it yields."""

    error: BaseException
    late: bool = False

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        if not self.late:
            careless(self.error)
        yield item
        careless(self.error)


def careless(error):
    raise error


def loop_of(graph, hook=None, failed=None):
    stream = Stream(
        [Tap(lambda event: hook(event.node, event.seconds, event.item), OperatorRan)]
        if hook
        else ()
    )
    place = Place(graph.name, graph.resources, 0, HereSite, stream=stream)
    return Loop(graph.name, graph.nodes, place.open(), place.site, place.ledger, failed)


def batch(rows, columns):
    return fl.extend.Batch({"reward": np.zeros((rows, columns))})


# -- order


def test_calls_go_depth_first_over_branches():
    log = []
    graph = (
        fl.Graph("g").then(s=Source((1, 2)), a=Note(log), b=Note(log)).then(after="a", c=Note(log))
    )
    loop_of(graph).run_pass()
    one = [
        "a takes 1 from s",
        "b takes 1 from a",
        "b is done with 1",
        "c takes 1 from a",
        "c is done with 1",
        "a is done with 1",
    ]
    assert log == one + [x.replace("1", "2") for x in one]


def test_a_join_takes_each_item_at_once_and_knows_where_it_comes_from():
    log = []
    graph = (
        fl.Graph("g")
        .then(s=Source((1,)), a=Merge())
        .then(after="s", b=Merge())
        .then(after=("a", "b"), c=Note(log))
    )
    loop_of(graph).run_pass()
    assert [x for x in log if "takes" in x] == ["c takes 1 from a", "c takes 1 from b"]


def test_every_root_gets_one_turn_a_pass_in_the_order_of_the_graph():
    log = []
    graph = (
        fl.Graph("g")
        .then(s=Source((1, 2)), a=Note(log))
        .then(after=(), t=Source((3,)), b=Note(log))
    )
    loop = loop_of(graph)
    loop.run_pass()
    loop.run_pass()
    assert [x.split(" from")[0] for x in log if "takes" in x] == [
        "a takes 1",
        "a takes 2",
        "b takes 3",
    ] * 2


def test_a_node_that_yields_nothing_ends_its_branch():
    log = []
    loop = loop_of(fl.Graph("g").then(s=Source((1, 2, 3)), p=Pairs(), a=Note(log)))
    loop.run_pass()
    assert [x for x in log if "takes" in x] == ["a takes (1, 2) from p"]
    assert loop.states == {"s": None, "p": [3], "a": None}
    loop.run_pass()
    assert [x for x in log if "takes" in x][1:] == [
        "a takes (3, 1) from p",
        "a takes (2, 3) from p",
    ]


def test_states_can_be_put_back():
    log = []
    loop = loop_of(fl.Graph("g").then(s=Source((1,)), p=Pairs(), a=Note(log)))
    loop.run_pass()
    loop.states = {**loop.states, "p": [7]}
    loop.run_pass()
    assert "a takes (7, 1) from p" in log


# -- what is committed when


@pytest.mark.parametrize("op", [fl.Concat(8), fl.Concat(12)], ids=["the first", "the second"])
def test_concat_commits_before_it_yields(op):
    graph = fl.Graph("g").then(
        s=Source((batch(4, 2), batch(4, 2))), op=op, x=Breaks(OSError("disk"))
    )
    loop = loop_of(graph)
    with pytest.raises(OSError, match="disk"):
        loop.run_pass()
    assert loop.states["op"] == {"batches": [], "steps": 0}


def test_report_commits_before_it_yields():
    class Handle:
        def episodes(self):
            return {}

    reported = []
    graph = fl.Graph("g").then(s=Source((1, 2, 3)), report=fl.Report(every=2))
    stream = Stream([Tap(lambda event: reported.append((event, held["items"])), OperatorRan)])
    loop = Loop(
        "g",
        graph.nodes,
        {"runners": Handle()},
        Place("g", {}, 0, HereSite, stream=stream).site,
        Ledger(),
    )
    held = loop.states["report"]
    assert len(loop.run_pass()) == 1
    assert [
        items for event, items in reported if event.node == "report" and event.item is not None
    ] == [0]
    assert held["items"] == 1


def test_rows_come_only_after_the_pass_ran_to_its_end():
    log = []
    graph = (
        fl.Graph("g")
        .then(s=Source((1, 2)), a=Note(log), clock=Clock())
        .then(after="a", late=Note(log))
    )
    session = fl.LocalRuntime().open(Plan(graph, Trace()), 0)
    rows = iter(session)
    next(rows)
    assert log[-1] == "a is done with 2" and sum("late takes" in x for x in log) == 2
    length = len(log)
    next(rows)
    assert len(log) == length, "the second row is of the same pass"
    next(rows)
    assert len(log) == 2 * length


def test_a_pass_returns_what_the_clock_closed():
    assert len(loop_of(fl.Graph("g").then(s=Source((1, 2, 3)), clock=Clock())).run_pass()) == 3
    assert loop_of(fl.Graph("g").then(s=Source(()), clock=Clock())).run_pass() == []


# -- errors


def broken(op, log=None):
    return fl.Graph("g").then(
        s=Source((1,)),
        a=Note([] if log is None else log),
        bad=op,
        b=Note([] if log is None else log),
    )


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_flowrl_names_the_node(late):
    with pytest.raises(fl.errors.ContractError) as caught:
        loop_of(broken(Breaks(fl.errors.ContractError("no reward"), late))).run_pass()
    assert caught.value.where == "g.bad" and str(caught.value) == "g.bad: no reward"


@pytest.mark.parametrize("late", [False, True])
def test_any_other_error_names_the_node_in_a_note_and_shows_the_frames_of_the_user(late):
    with pytest.raises(ZeroDivisionError, match="a joint broke") as caught:
        loop_of(broken(Breaks(ZeroDivisionError("a joint broke"), late))).run_pass()
    assert caught.value.__notes__ == ["in g.bad"]
    text = "".join(traceback.format_exception(caught.value))
    assert "in careless" in text and "in g.bad" in text and __file__ in text
    assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][-2:] == [
        "step",
        "careless",
    ]


def test_an_address_that_is_there_already_is_kept():
    with pytest.raises(fl.errors.ContractError, match="other.inner: no reward") as caught:
        loop_of(broken(Breaks(fl.errors.ContractError("no reward", "other.inner")))).run_pass()
    assert caught.value.where == "other.inner"


def test_an_error_after_a_branch_is_not_blamed_on_the_branch_before():
    graph = (
        fl.Graph("g")
        .then(s=Source((1,)), a=Merge())
        .then(after="s", b=Breaks(KeyError("x")))
        .then(after="a", c=Merge())
    )
    with pytest.raises(KeyError) as caught:
        loop_of(graph).run_pass()
    assert caught.value.__notes__ == ["in g.b"]


def test_a_step_that_returns_in_place_of_yielding_is_reported():
    class Returns(fl.extend.Stateless):
        def step(self, state, item, ctx):
            return None

    class ReturnsAList(fl.extend.Stateless):
        def step(self, state, item, ctx):
            return [item]

    for op in (Returns(), ReturnsAList()):
        with pytest.raises(
            fl.errors.ContractError,
            match=r"g\.bad: its step returned (None|a list); .*`yield item`",
        ):
            loop_of(broken(op)).run_pass()


def test_ctrl_c_is_not_touched():
    with pytest.raises(KeyboardInterrupt) as caught:
        loop_of(broken(Breaks(KeyboardInterrupt()))).run_pass()
    assert not hasattr(caught.value, "__notes__")


def test_with_failed_an_error_is_reported_and_the_pass_goes_on():
    log, reported = [], []
    graph = (
        fl.Graph("g")
        .then(s=Source((1, 2)), bad=Breaks(OSError("disk")))
        .then(after="s", a=Note(log))
    )
    loop_of(graph, failed=lambda node, error: reported.append((node, str(error)))).run_pass()
    assert reported == [("bad", "disk")] * 2
    assert [x for x in log if "takes" in x] == ["a takes 1 from s", "a takes 2 from s"]


# -- hooks and ledger


def test_hooks_are_reported_of_every_advance():
    reported = []
    graph = fl.Graph("g").then(s=Source((1, 2, 3)), p=Pairs(), a=Merge())
    loop_of(
        graph, lambda node, seconds, item: reported.append((node, item, seconds >= 0))
    ).run_pass()
    assert reported == [
        ("s", 1, True),
        ("p", None, True),
        ("s", 2, True),
        ("p", (1, 2), True),
        ("a", (1, 2), True),
        ("a", None, True),
        ("p", None, True),
        ("s", 3, True),
        ("p", None, True),
        ("s", None, True),
    ]


def test_a_hook_is_reported_a_nodes_own_seconds_and_not_those_of_the_nodes_after_it(monkeypatch):
    spent, now = {}, [0]
    monkeypatch.setattr("flowrl.graph.loop.time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(fl.extend.Stateless):
        def step(self, state, item, ctx):
            now[0] += 20
            yield item
            now[0] += 3

    graph = fl.Graph("g").then(s=Source((1,)), slow=Slow(), a=Merge())
    loop_of(
        graph, lambda node, seconds, _: spent.update({node: spent.get(node, 0) + seconds})
    ).run_pass()
    assert spent == {"s": 0, "slow": 23, "a": 0}


def test_the_ledger_has_put_and_got_alike_on_every_edge():
    log = []
    items = (batch(4, 2), batch(4, 3), "no steps")
    graph = (
        fl.Graph("g")
        .then(s=Source(items), a=Merge(), b=Note(log))
        .then(after="a", c=Pairs(), d=Merge())
    )
    loop = loop_of(graph)
    for _ in range(2):
        loop.run_pass()
    ledger = loop.ledger
    assert ledger.put == ledger.got == {("s", "a"): 6, ("a", "b"): 6, ("a", "c"): 6, ("c", "d"): 3}
    assert (
        ledger.put_steps
        == ledger.got_steps
        == {("s", "a"): 40, ("a", "b"): 40, ("a", "c"): 40, ("c", "d"): 0}
    )


def test_an_item_whose_node_failed_was_put_and_not_got():
    loop = loop_of(broken(Breaks(OSError("disk"))))
    with pytest.raises(OSError, match="disk"):
        loop.run_pass()
    assert (
        loop.ledger.put == {("s", "a"): 1, ("a", "bad"): 1} and sum(loop.ledger.got.values()) == 0
    )


def test_counters_go_to_the_node_at_work():
    class Counts(fl.extend.Stateless):
        def step(self, state, item, ctx):
            ctx["box"].site.count(calls=1, bytes=item)
            yield item
            ctx["box"].site.count(calls=10)

    class Box:
        def __init__(self, site):
            self.site = site
            site.count(opened=1)

        def close(self):
            pass

    class Spec:
        def open(self, site):
            return Box(site)

    graph = fl.Graph("g").then(s=Source((5, 7)), a=Counts(), b=Counts())
    place = Place("g", {"box": Spec()}, 0, HereSite)
    Loop("g", graph.nodes, place.open(), place.site, place.ledger).run_pass()
    assert place.ledger.counts == {
        ("", "box"): {"opened": 1},
        ("a", "box"): {"calls": 22, "bytes": 12},
        ("b", "box"): {"calls": 22, "bytes": 12},
    }


@dataclass(frozen=True)
class Held:
    inner: object


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (({"n": 0},), True),
        (Held([0]), True),
        ((1, ("a", None)), False),
        (Held(2.0), False),
        ([], True),
    ],
    ids=["a dict in a tuple", "a list in a frozen value", "a tuple", "a frozen value", "a list"],
)
def test_a_state_counts_as_one_that_a_step_can_change_if_anything_in_it_does(state, kept):
    assert unchangeable(state) != kept
