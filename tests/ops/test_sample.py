"""Operators that get experience."""

from drive import Calls, batch, drive

import flowrl as fl


def test_parallel_sample_yields_one_batch_a_round():
    joined = batch(2, 6)
    runners = Calls(collect=joined)
    assert drive(fl.ParallelSample(), None, None, runners=runners) == [[joined], [joined]]
    assert runners.calls == [("collect", 1.0), ("collect", 1.0)]


def test_parallel_sample_asks_the_runners_that_it_names():
    others = Calls(collect="theirs")
    assert drive(fl.ParallelSample(runners="others"), None, runners=Calls(), others=others) == [["theirs"]]


def test_parallel_sample_is_a_source_and_writes_nothing():
    assert fl.ParallelSample().source and fl.ParallelSample().writes == () and fl.ParallelSample().init() is None


def test_runners_of_two_give_one_batch_side_by_side():
    runners = fl.Runners("CartPole-v1", fl.Policy(fl.MLP, hidden=(4,)), count=2, envs=3, fragment=5).open()
    try:
        ((got,), (again,)) = drive(fl.ParallelSample(), None, None, runners=runners)
    finally:
        runners.close()
    assert got.shape == again.shape == (5, 6) and got.steps == 30
    assert got.columns["producer"].tolist() == [0, 0, 0, 1, 1, 1]
    assert (got.columns["bootstrap_obs"] == again["obs"][0]).all(), "the second round goes on where the first ended"
