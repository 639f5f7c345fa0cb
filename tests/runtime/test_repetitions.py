"""What repeats itself within a round: in a program it is a loop that does the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import pytest

import flowrl as fl
from conftest import close, timeless
from flowrl.extend import Stateless
from flowrl.runtime.packing import Element, packed, taken_out
from flowrl.runtime.periodicity import Part, Repetition, Stretch, parts_of, periodicity

SMALL = fl.DQNSettings(
    envs_per_runner=4,
    rollout_length=4,
    learning_starts=32,
    batch_size=8,
    updates_per_step=1.0,
    report_every=32,
    target_update_every=3,
    hidden=(4,),
    prioritized=True,
)
"""Sixteen updates in a round, each of which changes the priorities that the next one samples by."""
SIXTEEN = fl.dqn("gymnax:CartPole-v1", SMALL)


def found(graph):
    return periodicity(graph, graph.compile().found)


def stretches(graph):
    (section,) = found(graph).sections
    return section.stretches


@pytest.mark.parametrize(
    ("seen", "parts"),
    [
        ("aaaa", [(1, 3)]),
        ("baaa", [(1, 1), (1, 2)]),
        ("abab", [(2, 1), (1, 1)]),
        ("ababab", [(2, 2), (1, 1)]),
        ("xyabab", [(2, 1), (2, 1), (1, 1)]),
        ("abcd", [(3, 1)]),
    ],
)
def test_parts_are_those_after_which_a_state_is_seen_again(seen, parts):
    assert parts_of(seen) == tuple(Part(*part) for part in parts)


def scans(*parts, closes=False):
    return Repetition(tuple(Part(*part) for part in parts), closes)


REPETITIONS = {
    "no row": ({}, [Stretch(1, 2, (scans((1, 16)),))]),
    "a row within": (
        {"report.every": 24},
        [*[Stretch(1, 1, (scans((1, 16)),))] * 2, Stretch(1, 1, (scans((1, 8), (1, 8)),))],
    ),
    "a row with each": ({"report.every": 1}, [Stretch(1, 1, (scans((1, 16), closes=True),))]),
    "rows of two": ({"report.every": 2}, [Stretch(1, 1, (scans((2, 8), closes=True),))]),
    "rows of three": (
        {"report.every": 3},
        [
            Stretch(1, 1, (scans((1, 2), *[(1, 3)] * 4, (1, 2)),)),
            Stretch(1, 1, (scans((1, 1), (3, 5), closes=True),)),
            Stretch(1, 1, (scans((3, 5), (1, 1), closes=True),)),
        ],
    ),
    "two or three": (
        {"batch.updates_per_step": 5 / 32, "report.every": 10},
        [Stretch(2, 2, (scans((1, 2)), scans((1, 3))))],
    ),
    "a counter": ({"sync.every": 3}, [Stretch(2, 1, (scans((3, 5), (1, 1)),) * 2)] * 3),
}


@pytest.mark.parametrize("name", REPETITIONS)
def test_a_program_has_updates_that_are_alike_once(name):
    assert list(stretches(changed(name))) == REPETITIONS[name][1]


def changed(name):
    graph = SIXTEEN
    for path, value in REPETITIONS[name][0].items():
        graph = graph.set(path, value)
    return graph


def rows_of(graph, updates, runtime="local"):
    """Rows of at least so many updates."""
    rows = []
    with fl.run(graph, runtime=runtime) as run:
        while not rows or rows[-1]["updates"] < updates:
            rows.append(next(run))
        with run._session.turns.still():
            version = run._session.place.handles["learner"].state["version"]
    # What was traced once counts as often as it ran.
    done, audit = run.counts()["updates"], run.audit()
    (every,) = (node.op.every for node in graph.nodes if node.op.reports)
    assert 0 <= done - run.rows[-1]["updates"] < every and version == done
    edges = {edge.after: edge.put.items for edge in audit.edges}
    assert {edges[name] for name in ("prio", "target", "sync", "report")} == {done}
    assert audit.closed
    return rows


def alike(graph, updates=80, runtime=None):
    rows, others = rows_of(graph, updates), rows_of(graph, updates, runtime or ONE_BY_ONE)
    assert len(rows) == len(others)
    close(timeless(rows), timeless(others), rtol=2e-3, atol=1e-4)


ONE_BY_ONE = fl.XlaRuntime(chunk=1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a row within", marks=pytest.mark.system),
        pytest.param("a row with each", marks=pytest.mark.system),
        pytest.param("no row", marks=pytest.mark.system),
        "two or three",
        pytest.param("rows of three", marks=pytest.mark.system),
        pytest.param("rows of two", marks=pytest.mark.system),
        pytest.param("a counter", marks=pytest.mark.system),
    ],
)
def test_a_program_does_in_loops_what_the_local_runtime_does_one_by_one(name):
    alike(changed(name))


@dataclass(frozen=True)
class Thrice(Stateless):
    """Yield each batch three times."""

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield from ctx.repeat(3, lambda: item)


@pytest.mark.parametrize(
    ("per_step", "expected"),
    [(1 / 16, scans((1, 3))), (1.0, scans((1, 16), closes=True))],
    ids=["alone", "in"],
)
def test_operators_of_users_repeat_what_they_make_also_within_what_repeats_itself(
    per_step, expected
):
    graph = SIXTEEN.insert(after="batch", thrice=Thrice()).set("batch.updates_per_step", per_step)
    graph = graph.set("report.every", 3)
    assert [stretch.repetitions for stretch in stretches(graph)] == [(expected,)]
    alike(graph, 24 if per_step < 1 else 144)


@pytest.mark.system
def test_a_row_that_closes_within_an_item_closes_there_in_a_program():
    graph = SIXTEEN.insert(after="batch", thrice=Thrice()).set("report.every", 16)
    (first, *_) = stretches(graph)
    (repetition,) = first.repetitions
    # The 16th of three updates each is the first of the sixth item.
    assert repetition.parts[:3] == (Part(1, 5), Part(1, 1), Part(1, 4)) and not repetition.closes
    alike(graph, 144)


@dataclass(frozen=True)
class Sums(fl.Report):
    """Add up what it is given, as operators of users may."""

    def init(self) -> dict[str, Any]:
        return {**super().init(), "sum": jnp.float32(0)}

    def step(self, held: dict[str, Any], item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        most = ctx.call(jnp.max, item.metrics.values)
        held["sum"] = ctx.run(added, held["sum"], item.metrics.values, most)
        yield from super().step(held, item, ctx)


def added(total, values, most):
    return total + values.sum() + most


@pytest.mark.system
def test_a_reporting_operator_of_the_user_s_own_computes_with_what_it_is_given():
    sums = []
    for runtime in ("local", ONE_BY_ONE):
        with fl.run(SIXTEEN.replace(report=Sums(32)), runtime=runtime, steps=160) as run:
            rows = list(run)
            states = [loop.states for loop in run._session.turns.loops]
        sums += [state["report"]["sum"] for state in states if "report" in state]
    close(*sums, rtol=2e-3)
    assert len(rows) == 5


EVALUATED = [
    # What was played is kept until a row takes it, so the first item after a row differs.
    (1, 6, scans((1, 2), *[(1, 1), (1, 5)] * 2, (1, 1), (1, 1))),
    # Updates between two evaluations are alike, whatever their number.
    pytest.param(8, 8, scans(*[(1, 7), (1, 1)] * 2), marks=pytest.mark.system),
]


@pytest.mark.system
@pytest.mark.parametrize(("every", "row", "expected"), EVALUATED)
def test_evaluations_between_repeated_updates_are_in_the_same_rows(every, row, expected):
    play = fl.Evaluate(every=every, episodes=2, max_steps=20)
    graph = SIXTEEN.insert(after="sync", play=play).set("report.every", row)
    assert stretches(graph)[0].repetitions == (expected,)
    assert any("eval/return_mean" in each for each in rows_of(graph, 80))
    alike(graph)


@pytest.mark.parametrize(
    ("after", "every", "row", "per_step"),
    [
        pytest.param("sync", 8, 8, 1, marks=pytest.mark.system),
        pytest.param("sync", 4, 12, 0.75, marks=pytest.mark.system),
        ("sample", 1, 32, 1),
    ],
    ids=["item", "last item", "round"],
)
def test_what_follows_a_row_in_its_item_or_round_is_in_the_next_row(after, every, row, per_step):
    play = fl.Evaluate(every=every, episodes=2, max_steps=20)
    # The branch to it is the node's last one, after that to the reporting operator.
    graph = SIXTEEN.then(after=after, play=play).set("report.every", row)
    graph = graph.set("batch.updates_per_step", per_step)
    first, second, *_ = rows_of(graph, 80)
    assert ("eval/return_mean" in first) == (row > 8) and "eval/return_mean" in second
    alike(graph, 60)


@pytest.mark.system
def test_many_runs_repeat_themselves_too():
    graph = changed("a row within")
    alone = [rows_of(graph, 72, fl.XlaRuntime(seeds=1)), rows_of(graph, 72)]
    close(timeless(alone[0]), timeless(alone[1]), rtol=2e-3, atol=1e-4)


def test_a_row_of_many_updates_takes_no_more_arrays_out_of_a_program_than_one_of_few():
    arrays = []
    for every in (32, 160):
        with fl.run(SIXTEEN.set("report.every", every), runtime="xla") as run:
            turns = run._session.turns
            while turns.warmup_left:
                turns.round(1)
            turns._trace()
            ((_, segment),) = turns.segments
            packing = segment.packing
        arrays.append(len({number for number, _ in packing.leaves}))
        assert len(packing.leaves) > every
    assert arrays[0] == arrays[1] < 32


def test_a_tree_is_packed_into_the_arrays_that_its_leaves_are_elements_of():
    stacked, other = jnp.arange(6.0).reshape(3, 2), jnp.float32(7)
    tree = {"a": [Element(stacked, (i,)) for i in range(3)], "b": other, "c": 8}
    arrays, packing = packed(tree)
    assert [x.shape for x in arrays] == [(3, 2), (), ()]
    close(packing.unpacked(lambda number, index: arrays[number][index]), taken_out(tree))
    close(taken_out(tree), {"a": list(stacked), "b": 7.0, "c": 8})
    # A scan stacks each array once more.
    turns = packing.turns([jnp.stack([x, x + 1]) for x in arrays], 2)
    close(taken_out(turns[1]), {"a": list(stacked + 1), "b": 8.0, "c": 9})
    assert Element(stacked, (1,)).shape == (2,)
