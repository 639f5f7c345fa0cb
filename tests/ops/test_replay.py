"""Operators around a replay."""

from fractions import Fraction

import numpy as np
import pytest
from drive import Calls, Context, batch, drive, trained

import flowrl as fl


class Held:
    """A replay that only counts."""

    def __init__(self):
        self.steps, self.came, self.drawn = 0, 0, []

    def expect(self, reader, start, counts):
        self.start = start

    def holds(self, start):
        return self.steps >= start

    def fresh(self, reader):
        return self.came

    def take(self, reader):
        came, self.came = self.came, 0
        return came

    def sample(self, size):
        self.drawn.append(size)
        return f"draw {len(self.drawn)}"

    def add(self, steps):
        self.steps += steps
        self.came += steps * (self.steps >= self.start)


def run(op, *steps):
    """How often it draws after each of so many steps were added."""
    replay, state = Held(), op.init()
    ctx, draws = Context({"replay": replay}, ()), []
    op.prepare(ctx)
    for n in steps:
        replay.add(n)
        ready = op.ready(state, ctx)
        draws.append(len(list(op.step(state, None, ctx))))
        assert ready == (draws[-1] > 0)
    return draws, replay


def test_replay_add_passes_on_what_it_adds():
    replay, item = Calls(), batch()
    assert drive(fl.ReplayAdd(), item, replay=replay) == [[item]] and replay.calls == [("add", item)]
    with pytest.raises(fl.ContractError, match="needs a Batch"):
        drive(fl.ReplayAdd(), 1, replay=replay)


@pytest.mark.parametrize("ratio", [0.25, 1 / 3, 0.7, 2.0, 1.5])
def test_the_ratio_is_kept_exactly_from_the_first_steps_on(ratio):
    draws, _ = run(fl.ReplaySample(8, start=100, updates_per_step=ratio), *[7] * 100)
    assert not any(draws[:14]) and sum(draws) == int(Fraction(ratio).limit_denominator(1000) * 7 * 86)


def test_without_a_ratio_there_is_one_draw_with_each_item():
    draws, replay = run(fl.ReplaySample(8, start=10), 4, 4, 4, 4)
    assert draws == [0, 0, 1, 1] and replay.drawn == [8, 8]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch": 1, "start": 0}, {"batch": 1, "updates_per_step": 0.0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(fl.SettingError, match="must be"):
        fl.ReplaySample(**wrong)


def test_priorities_go_back_to_where_their_rows_were_drawn():
    replay, feedback = Calls(), {"slot": np.arange(4), "stamp": np.ones(4), "shard": np.zeros(4), "priority": np.ones(4)}
    update = fl.Trained(4, trained(4).metrics, (0.0, 0.0), feedback)
    assert drive(fl.UpdatePriorities(), update, replay=replay) == [[update]] and replay.calls == [("prioritize", feedback)]
    with pytest.raises(fl.ContractError, match="put it behind TrainOneStep"):
        drive(fl.UpdatePriorities(), batch(), replay=replay)
    with pytest.raises(fl.ContractError, match="drawn without priorities"):
        drive(fl.UpdatePriorities(), trained(4), replay=replay)
    with pytest.raises(fl.ContractError, match="the loss tells no priority"):
        drive(fl.UpdatePriorities(), fl.Trained(4, trained(4).metrics, (0.0, 0.0), {"slot": np.arange(4)}), replay=replay)


def test_a_target_moves_with_so_many_items_and_steps():
    def times(op):
        learner, state, found = Calls(), op.init(), []
        for i in range(1, 9):
            before = len(learner.calls)
            assert len(list(op.step(state, trained(4), Context({"learner": learner}, ())))) == 1
            found += [i] * (len(learner.calls) - before)
        return found

    assert times(fl.UpdateTarget()) == list(range(1, 9))
    assert times(fl.UpdateTarget(every=3)) == [3, 6]
    assert times(fl.UpdateTarget(every_steps=10)) == [3, 6]
    assert times(fl.UpdateTarget(every=4, every_steps=10)) == [4, 8]
