"""What comes once in many rounds is a program of its own, and the rounds between are another."""

from dataclasses import dataclass

import jax.numpy as jnp
import pytest

import flowrl as fl
from conftest import close, timeless
from flowrl.core.items import Filling
from flowrl.runtime.fusable import program_report
from flowrl.runtime.periodicity import Section, Stretch, periodicity
from flowrl.runtime.state import Structure

PPO = fl.ppo(
    "gymnax:CartPole-v1",
    num_runners=1,
    envs_per_runner=4,
    rollout_length=8,
    batch_size=32,
    epochs=1,
    minibatch_size=None,
    hidden=(4,),
)


def play(every, **changes):
    return fl.Evaluate(every=every, episodes=2, max_steps=20, **changes)


def section(*stretches, times=1):
    return Section(tuple(Stretch(*each) for each in stretches), times)


ROUND = section((1, 1))
GRAPHS = {
    "every 5": (
        PPO.insert(after="sync", play=play(5)),
        [section((1, 1), times=4), ROUND],
    ),
    "every million": (
        PPO.insert(after="sync", play=play(1_000_000)),
        [section((1, 1), times=999_999), ROUND],
    ),
    # What is played after a row is in the next one.
    "after the row": (
        PPO.then(after="sync", play=play(5)),
        [section((1, 1), times=3), section((1, 1), (1, 1))],
    ),
    "6 and 4": (
        PPO.insert(after="sync", play=play(6), other=play(4, seed=1)),
        [
            section((1, 1), times=3),
            section(*[(1, 1)] * 5),
            section((1, 1), times=3),
            ROUND,
        ],
    ),
    "rows of 5, every 1,000": (
        PPO.insert(after="sync", play=play(1_000)).set("report.every", 5),
        [section((1, 5), times=199), section((1, 4), (1, 1))],
    ),
    "every 5 and 50": (
        PPO.insert(after="sync", play=play(5), more=play(50)),
        [section((1, 1), times=4), section((1, 1))] * 10,
    ),
    # Row after row the evaluation comes at another moment, so nothing is skipped.
    "rows of 5, every 4": (
        PPO.insert(after="sync", play=play(4)).set("report.every", 5),
        [section(*((1, n) for n in (3, 1, 1, 2, 1, 2, 1, 1, 3, 1, 3, 1)))],
    ),
    "rows of 20, every 5": (
        PPO.insert(after="sync", play=play(5)).set("report.every", 20),
        [section(*[(1, 4), (1, 1)] * 4)],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_rounds_between_evaluations_are_a_program_that_comes_many_times(name):
    graph, sections = GRAPHS[name]
    plan = graph.compile()
    found = periodicity(graph, plan.found)
    assert list(found.sections) == sections
    assert sum(s.times * sum(x.rounds * x.times for x in s.stretches) for s in sections) == (
        found.period
    )


@pytest.mark.parametrize(
    "name",
    [
        "every 5",
        pytest.param("after the row", marks=pytest.mark.system),
        pytest.param("6 and 4", marks=pytest.mark.system),
    ],
)
def test_rows_and_evaluations_are_those_of_the_local_runtime(name):
    graph, sections = GRAPHS[name]
    each = []
    # Chunks of 3 rounds end before the section of 4 does, and at its end.
    for runtime in ("local", fl.XlaRuntime(chunk=3)):
        with fl.run(graph, runtime=runtime, seed=3) as run:
            each.append([next(run) for _ in range(23)])
        assert run.audit().closed
    close(timeless(each[0]), timeless(each[1]), rtol=2e-3, atol=1e-4)
    assert len(run._session.turns.segments) <= len(sections)
    played = [i for i, row in enumerate(each[1]) if "eval/return_mean" in row]
    assert played[0] == {"every 5": 4, "after the row": 5, "6 and 4": 3}[name]


@dataclass(frozen=True)
class Alternate(fl.extend.Operator):
    """Hold a number with every other turn of so many items, and double it with each of them."""

    every: int = 4

    def init(self):
        return {"count": fl.extend.Filling(0, self.every), "held": None}

    def step(self, held, item, ctx):
        held["count"] = fl.extend.Filling.after(held["count"], self.every)
        if held["count"] == 0:
            held["held"] = jnp.float32(1) if held["held"] is None else None
        elif held["held"] is not None:
            held["held"] = ctx.run(doubled, held["held"])
        yield item


def doubled(x):
    return 2 * x


@pytest.mark.parametrize("seeds", [None, pytest.param(2, marks=pytest.mark.system)])
def test_an_operator_of_the_user_s_own_may_hold_other_arrays_in_some_rounds(seeds):
    graph = PPO.insert(after="sync", other=Alternate())
    held = []
    for runtime in ("local", fl.XlaRuntime(seeds=seeds, chunk=1)):
        with fl.run(graph, runtime=runtime) as run:
            for _ in range(14):
                next(run)
            with run._session.turns.still():
                states = [loop.states for loop in run._session.turns.loops]
        held += [float(state["other"]["held"]) for state in states]
    # It began with the fourth of fourteen rounds, ended with the eighth and began with the twelfth.
    assert held == [4.0, 4.0]
    sections = run._session.turns.periodicity.sections
    assert [s.times for s in sections] == [3, 1, 3, 1]


def test_a_program_says_that_it_has_two_rounds_of_many():
    graph, _ = GRAPHS["every million"]
    good, text = program_report(graph.compile())
    assert good and "it unrolls 2 of 1000000 rounds" in text


def structure(*filled, static=()):
    return Structure(None, static, tuple(Filling(*each) for each in filled))


@pytest.mark.parametrize(
    ("now", "before", "after", "times", "later"),
    [
        # It rises below its mark, from wherever it is.
        ((3, 10), (0, 10), (2, 10), 3, (9, 10)),
        ((3, 10), (0, 10), (2, 10), 4, None),
        # It begins again, but only from the same number, and again only if it comes back to it.
        ((9, 10), (9, 10), (0, 10, 1), 1, (0, 10)),
        ((8, 10), (9, 10), (0, 10, 1), 1, None),
        ((9, 10), (9, 10), (0, 10, 1), 2, None),
        ((4, 10), (4, 10), (4, 10, 1), 7, (4, 10)),
        # It has reached its mark for good.
        ((10, 10), (10, 10), (10, 10), 7, (10, 10)),
    ],
)
def test_a_count_is_later_where_it_would_be_if_each_turn_had_run(now, before, after, times, later):
    found = structure(now).later(structure(before), structure(after), times)
    assert (found and found.filled) == (later and (Filling(*later),))


def test_a_structure_that_differs_otherwise_is_not_the_same():
    one, other = structure((0, 9)), structure((0, 9), static=(("value", 1),))
    assert one.later(other, other, 1) is None
    assert one.later(one, other, 1) == other
    assert one.later(one, other, 2) is None
    assert one.later(one, other, 0) == one


@dataclass(frozen=True)
class EveryTenth(fl.extend.Operator):
    """Does something with every tenth item, and begins to count again by itself."""

    def init(self):
        return {"n": Filling(0, 10), "sum": jnp.float32(0)}

    def step(self, state, item, ctx):
        state["n"] = Filling(state["n"] + 1, 10) if state["n"] < 9 else Filling(0, 10)
        if state["n"] == 0:
            state["sum"] = state["sum"] + 1
        yield item


def test_a_count_that_an_operator_begins_again_itself_is_a_section_too():
    graph = PPO.insert(after="sync", own=EveryTenth())
    plan = graph.compile()
    found = periodicity(graph, plan.found)
    assert plan.found.exact and found.period == 10 and found.rounds == 2
    assert list(found.sections) == [section((1, 1), times=9), section((1, 1))]
    with fl.run(graph, runtime="xla") as run:
        for _ in range(25):
            next(run)
        held = run._session.turns.loops[0].states["own"]
    assert (held["n"], float(held["sum"])) == (run.rows[-1]["row"] % 10, run.rows[-1]["row"] // 10)
