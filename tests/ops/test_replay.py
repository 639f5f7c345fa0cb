"""Operators around a replay."""

from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from drive import Calls, Context, batch, drive, trained

import flowrl as fl


def astype(x, dtype):
    return x.astype(dtype)


@dataclass(frozen=True)
class Retyped(fl.extend.Stateless):
    """Makes a field numbers of another kind."""

    field: str
    dtype: str

    def step(self, state, batch, ctx):
        made = ctx.run(astype, batch[self.field], dtype=self.dtype)
        yield batch.with_(**{self.field: made})


class Held(fl.extend.ReplayHandle):
    """A replay that only counts."""

    close = prioritize = stock = lambda *_: None

    def __init__(self):
        super().__init__(
            fl.Replay(1_000),
            SimpleNamespace(
                name="replay", resource=lambda name: None, count=lambda **numbers: None
            ),
        )
        self.drawn = []

    def sample(self, size, reader, ahead=0):
        self._note_sampled(size)
        self.drawn.append(size)
        return f"draw {len(self.drawn)}"

    def add(self, batch):
        self._note_added(batch.steps)


def run(op, *steps, root=False):
    """How often it draws after each of so many steps were added, and whether more may then be
    added."""
    replay = Held()
    ctx, draws, rooms = Context({"replay": replay}, (), root=root), [], []
    op.prepare(ctx)
    for n in steps:
        list(fl.ReplayAdd().step(None, batch(n, 1), ctx))
        rooms.append(fl.ReplayAdd().has_capacity(None, ctx))
        ready = op.ready(None, ctx)
        draws.append(len(list(op.step(None, None if root else "item", ctx))))
        assert ready == (draws[-1] > 0)
    return draws, rooms


def test_replay_add_passes_on_what_it_adds():
    replay, item = Calls(), batch()
    assert drive(fl.ReplayAdd(), item, replay=replay) == [[item]] and replay.calls == [
        ("add", item)
    ]
    with pytest.raises(fl.errors.ContractError, match="needs a Batch"):
        drive(fl.ReplayAdd(), 1, replay=replay)


@pytest.mark.parametrize(
    ("field", "dtype", "says"),
    [
        ("reward", "int8", r"reward is int8, but a replay takes fractions: .*\(np.float32\)"),
        ("valid", "float32", r"valid is float32, but a replay takes True or False: .*\(bool\)"),
        ("terminated", "int32", r"terminated is int32, but a replay takes True or False: "),
    ],
)
def test_returns_are_computed_from_fractions_and_flags(field, dtype, says):
    graph = fl.dqn("CartPole-v1", hidden=(4,), n_step=3)
    with pytest.raises(fl.errors.CheckError, match=rf"dqn\.add: {says}"):
        graph.insert(after="sample", retyped=Retyped(field, dtype)).compile()
    graph.insert(after="sample", retyped=Retyped("reward", "float16")).compile()


@pytest.mark.parametrize("ratio", [0.25, 1 / 3, 0.7, 2.0, 1.5])
def test_the_ratio_is_kept_exactly_from_the_first_steps_on(ratio):
    draws, _ = run(fl.ReplaySample(8, learning_starts=100, updates_per_step=ratio), *[7] * 100)
    assert not any(draws[:14]) and sum(draws) == int(
        Fraction(ratio).limit_denominator(1000) * 7 * 86
    )


def test_at_a_start_there_is_one_draw_a_turn_and_adding_waits_until_none_is_due():
    draws, rooms = run(
        fl.ReplaySample(8, learning_starts=10, updates_per_step=0.5),
        9,
        1,
        1,
        3,
        1,
        1,
        2,
        6,
        root=True,
    )
    assert draws == [0, 0, 1, 1, 1, 0, 1, 1] and rooms == [
        True,
        True,
        False,
        False,
        False,
        True,
        False,
        False,
    ]


def test_adding_does_not_wait_for_a_reader_that_is_given_items():
    draws, rooms = run(
        fl.ReplaySample(8, learning_starts=10, updates_per_step=0.5), 9, 1, 1, 3, 1, 1, 2
    )
    assert sum(draws) == 4 and all(rooms)


@pytest.mark.parametrize("root", [True, False])
def test_without_a_ratio_there_is_one_draw_with_each_item_and_adding_never_waits(root):
    assert run(fl.ReplaySample(8, learning_starts=10), 4, 4, 4, 4, root=root) == (
        [0, 0, 1, 1],
        [True] * 4,
    )


def test_a_priority_is_never_0():
    with pytest.raises(fl.errors.SettingError, match="eps must be above 0"):
        fl.Replay(100, eps=0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 1, "learning_starts": 0},
        *({"batch_size": 1, "updates_per_step": x} for x in (0.0, float("nan"), float("inf"))),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(fl.errors.SettingError, match="must be"):
        fl.ReplaySample(**wrong)


def test_first_priorities_are_how_far_off_the_newest_values_are():
    values = np.zeros((3, 1, 2), np.float32)
    # A return of one step would be another: the second row's best value is not 1 + 0.5 * 8.
    values[:, 0] = [[1, 2], [3, 4], [5, 8]]
    learner, item = Calls(action_values=values), batch(2, 1, fill=1.0, action=np.array([[0], [1]]))
    ((out,),) = drive(fl.InitialPriorities(gamma=0.5, n_step=2), item, learner=learner)
    np.testing.assert_allclose(
        out["priority"], [[abs(1 + 0.5 * (1 + 0.5 * 8) - 1)], [abs(1 + 0.5 * 8 - 4)]]
    )
    with pytest.raises(fl.errors.SettingError, match="n_step at least 1"):
        fl.InitialPriorities(n_step=0)


def test_priorities_go_back_to_where_their_rows_were_drawn():
    replay, feedback = (
        Calls(),
        {"slot": np.arange(4), "stamp": np.ones(4), "shard": np.zeros(4), "priority": np.ones(4)},
    )
    update = fl.extend.Trained(4, trained(4).metrics, (0.0, 0.0), feedback)
    assert drive(fl.UpdatePriorities(), update, replay=replay) == [[update]] and replay.calls == [
        ("prioritize", feedback)
    ]
    with pytest.raises(fl.errors.ContractError, match="put it after TrainOneStep"):
        drive(fl.UpdatePriorities(), batch(), replay=replay)
    with pytest.raises(fl.errors.ContractError, match="sampled without priorities"):
        drive(fl.UpdatePriorities(), trained(4), replay=replay)
    with pytest.raises(fl.errors.ContractError, match="the loss reports no priority"):
        drive(
            fl.UpdatePriorities(),
            fl.extend.Trained(4, trained(4).metrics, (0.0, 0.0), {"slot": np.arange(4)}),
            replay=replay,
        )


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
