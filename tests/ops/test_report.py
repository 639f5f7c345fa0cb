"""Operators that measure."""

import pytest
from drive import Calls, batch, drive, trained

import flowrl as fl
from flowrl.core.items import Tally
from flowrl.errors import CheckError
from flowrl.rollout.evaluation import MAX_STEPS


def closed(out):
    """Which items closed a Row, counted from 1."""
    assert all(len(x) <= 1 and all(isinstance(t, Tally) for t in x) for x in out)
    return [i for i, x in enumerate(out, 1) if x]


def test_report_closes_a_row_every_so_many_items():
    items = [trained(n) for n in range(1, 8)]
    out = drive(fl.Report(every=3), *items, runners=Calls(episodes={"episodes": 2}))
    assert closed(out) == [3, 6]
    assert out[2][0].updates == tuple(items[:3]) and out[5][0].updates == tuple(items[3:6])
    assert out[2][0].episodes == {"episodes": 2}


def test_report_asks_for_episodes_once_a_row_and_only_then():
    runners = Calls(episodes={})
    drive(fl.Report(every=2), *[trained(1)] * 5, runners=runners)
    assert runners.calls == [("episodes",)] * 2


def test_report_by_steps_counts_those_of_batches_and_updates():
    assert closed(drive(fl.Report(every_steps=10), *[trained(4)] * 6, runners=Calls())) == [3, 6]
    assert closed(drive(fl.Report(every_steps=10), *[batch(2, 3)] * 4, runners=Calls())) == [2, 4]


def test_report_by_items_and_steps_waits_for_both():
    assert closed(
        drive(fl.Report(every=4, every_steps=10), *[trained(4)] * 9, runners=Calls())
    ) == [4, 8]
    assert closed(
        drive(fl.Report(every=2, every_steps=10), *[trained(4)] * 9, runners=Calls())
    ) == [3, 6, 9]


def test_report_by_seconds_looks_at_the_clock():
    out = drive(
        fl.Report(every_seconds=10.0),
        *[trained(1)] * 6,
        runners=Calls(),
        clock=[100.0, 105.0, 109.9, 110.0, 119.0, 121.0],
    )
    assert closed(out) == [4, 6]
    assert [len(x[0].updates) for x in out if x] == [4, 2]


def test_report_looks_at_no_clock_unless_it_must():
    assert closed(drive(fl.Report(every=2), *[trained(1)] * 4, runners=Calls(), clock=[])) == [2, 4]
    assert closed(
        drive(
            fl.Report(every=3, every_seconds=1.0),
            *[trained(1)] * 4,
            runners=Calls(),
            clock=[5.0, 7.0],
        )
    ) == [4]


def test_report_closes_a_row_with_any_item_and_reports_only_of_updates():
    out = drive(fl.Report(every=2), "one", batch(), runners=Calls())
    assert closed(out) == [2] and out[1][0].updates == ()


def test_report_is_the_clock_and_asks_the_runners_that_it_names():
    players = Calls(episodes={"episodes": 9})
    out = drive(fl.Report(runners="players"), trained(1), runners=Calls(), players=players)
    assert fl.Report().reports and out[0][0].episodes == {"episodes": 9}


def test_evaluate_plays_every_so_many_items_and_passes_all_on():
    runners = Calls(evaluate={"eval/return_mean": 3.0})
    assert drive(
        fl.Evaluate(every=3, episodes=5, seed=7, max_steps=90), *range(1, 8), runners=runners
    ) == [[i] for i in range(1, 8)]
    assert runners.calls == [("evaluate", 5, 7, 90)] * 2


def test_evaluate_plays_before_it_passes_its_item_on():
    runners = Calls()
    op = fl.Evaluate(every=1)
    step = op.step(op.init(), "item", {"runners": runners})
    assert next(step) == "item" and runners.calls == [("evaluate", 10, 0, MAX_STEPS)]


def test_what_was_evaluated_comes_with_the_next_row():
    runners = fl.Runners(
        "CartPole-v1", fl.Policy(fl.networks.MLP, hidden=(4,)), envs_per_runner=2, rollout_length=2
    ).open()
    try:
        drive(fl.Evaluate(every=1, episodes=3), "item", runners=runners)
        ((tally,), (next_,)) = drive(fl.Report(), "item", "item", runners=runners)
    finally:
        runners.close()
    names = {f"eval/return_{k}" for k in ("mean", "std", "min", "max")}
    assert names <= set(tally.episodes) and not names & set(next_.episodes)
    assert (
        tally.episodes["eval/return_min"]
        <= tally.episodes["eval/return_mean"]
        <= tally.episodes["eval/return_max"]
    )


SETTINGS = [
    (lambda: fl.Report(every=0), "every must be at least 1, got 0"),
    (lambda: fl.Report(every_steps=-1), "every_steps must not be negative, got -1"),
    (lambda: fl.Report(every_seconds=-0.5), "every_seconds must not be negative, got -0.5"),
    (lambda: fl.Evaluate(every=0), "Evaluate: every must be at least 1, got 0"),
    (lambda: fl.Evaluate(episodes=0), "episodes must be at least 1, got 0"),
    (lambda: fl.Evaluate(max_steps=0), "max_steps must be at least 1, got 0"),
]


@pytest.mark.parametrize(("make", "message"), SETTINGS, ids=[m for _, m in SETTINGS])
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(fl.errors.SettingError, match=message):
        make()


def test_an_evaluation_whose_result_no_row_has_is_refused():
    graph = fl.ppo("CartPole-v1")
    test = fl.Runners("CartPole-v1", graph.resources["runners"].policy)
    graph = fl.Graph("ppo", test=test, **graph.resources).then(
        **{n.name: n.op for n in graph.nodes}
    )
    graph = graph.insert(after="train", play=fl.Evaluate(runners="test"))
    with pytest.raises(CheckError, match=r"play: lets test play, but no row has the result"):
        graph.compile()
