"""Stages in threads: who waits for whom, what `still` promises, and whose error ends a run."""

import re
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import ClassVar

import pytest

import flowrl as fl
from flowrl.core.events import Stream, Tap, Warned
from flowrl.core.items import Tally
from flowrl.graph.site import HereSite, Place
from flowrl.graph.stages import loops_of
from flowrl.runtime.threads import Threads

CAPACITY = 3


class Makes(fl.extend.Stateless):
    """Makes numbers, and notes while it does so. With number `fails` it raises."""

    source: ClassVar[bool] = True

    def __init__(self, fails=None):
        self.fails, self.made, self.within = fails, 0, False
        self.may_fail = Event()
        self.may_fail.set()

    def step(self, state, item, ctx):
        self.within = True
        time.sleep(0.002)  # so that another thread finds it at work
        if self.made == self.fails:
            self.may_fail.wait()
            raise ZeroDivisionError("no more")
        self.made += 1
        yield self.made
        self.within = False


@dataclass(frozen=True)
class Queue(fl.extend.Stateless):
    queue: ClassVar[fl.extend.Bounds] = fl.extend.Bounds(CAPACITY)

    def step(self, state, item, ctx):
        yield item


@dataclass(frozen=True)
class Closes(fl.extend.Stateless):
    reports: ClassVar[bool] = True

    def step(self, state, item, ctx):
        yield Tally((), {"item": item})


def threads(makes, stream=None):
    graph = fl.Graph("g").then(make=makes, queue=Queue(), close=Closes())
    place = Place("g", {}, 0, HereSite, stream=stream)
    return Threads(graph, partial(loops_of, graph, place.open(), place.site_of, place.ledger))


def test_while_all_is_still_no_other_stage_is_within_a_pass():
    makes = Makes()
    turns = threads(makes)
    try:
        for number in range(1, 21):
            turns.wait()
            (tally,) = turns.round(1)
            assert tally.episodes == {"item": number}
            with turns.still():
                made = makes.made
                assert not makes.within
                time.sleep(0.004)
                assert makes.made == made
    finally:
        turns.close()
    assert not any(thread.is_alive() for thread in turns.threads)


def test_a_stage_waits_where_its_queue_is_full_and_goes_on_when_something_was_taken():
    makes = Makes()
    turns = threads(makes)
    try:
        turns.wait()
        for taken in (1, 2, 3):
            with turns.turn:
                turns.turn.wait_for(lambda taken=taken: makes.made == CAPACITY + taken - 1)
            with turns.still():
                assert (
                    len(turns.channels["queue"]) == CAPACITY and makes.made == CAPACITY + taken - 1
                )
            turns.wait()
            turns.round(1)
    finally:
        turns.close()


def test_what_ends_another_stage_is_raised_where_rows_are_waited_for():
    turns = threads(Makes(fails=1))
    try:
        with pytest.raises(ZeroDivisionError, match="no more") as raised:
            for _ in range(3):
                turns.wait()
                turns.round(1)
        assert "in g.make" in raised.value.__notes__
    finally:
        turns.close()


def test_what_a_stage_that_fails_or_hangs_holds_is_no_whole_state(monkeypatch):
    makes = Makes(fails=1)
    makes.may_fail.clear()
    turns = threads(makes)
    turns.wait()
    turns.round(1)
    makes.may_fail.set()
    with turns.turn:
        turns.turn.wait_for(lambda: turns.error is not None)
    with turns.still() as whole:
        assert not whole
    turns.close()
    monkeypatch.setattr("flowrl.runtime.threads.CLOSING_SECONDS", 0.01)
    turns = threads(Makes())
    turns.close()
    with turns.still() as whole:
        assert whole
    with turns.locks[0], turns.still() as whole:
        assert not whole


def test_an_error_that_nobody_waited_for_becomes_one_warning():
    warnings = []
    makes = Makes(fails=1)
    makes.may_fail.clear()
    turns = threads(makes, Stream([Tap(warnings.append, Warned)]))
    turns.wait()
    makes.may_fail.set()
    turns.threads[0].join()
    turns.close()
    turns.close()
    (warning,) = warnings
    says = r"g: a stage failed too late to end the run: ZeroDivisionError: no more \(test_threads"
    assert re.match(says, warning.text)


class Growing(Counter):
    """Gets a new key while it is gone through, as from another thread."""

    def items(self):
        for item in super().items():
            self[f"more than {item[0]}"] += 1
            yield item


def test_what_is_counted_may_grow_while_it_is_read():
    with fl.run(fl.ppo("CartPole-v1")) as run:
        run._session.place.ledger.counts["sample", "runners"] = Growing(sampled_steps=3)
        assert run.counts()["sampled_steps"] == 3


def test_a_second_error_is_noted_at_the_first():
    turns = threads(Makes(fails=0))
    with pytest.raises(ZeroDivisionError):
        turns.wait()
    loop = next(loop for loop in turns.loops if loop is not turns.main)
    turns._work(loop, turns.locks[0])
    assert turns.error.__notes__[-1] == "and then ZeroDivisionError: no more"
    turns.close()
