"""What a run says before it starts: what may not be meant."""

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl
from flowrl.core.events import Tap, Warned
from flowrl.observe.advice import advice


def cartpole():
    return gym.make("CartPole-v1")


def vector(mode):
    return lambda: SyncVectorEnv([cartpole] * 2, autoreset_mode=mode)


def said(env, **settings):
    graph = fl.r2d2(env, hidden=(4,), size=4, envs_per_runner=2, **settings)
    return list(advice(graph.compile()))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_sequences_over_a_vector_that_skips_steps_are_cut(mode):
    texts = said(vector(mode))
    assert len(texts) == (mode is not AutoresetMode.NEXT_STEP)
    assert all(text.startswith("replay: the vector of environments does not") for text in texts)
    # Transitions of single steps do not need rollouts that follow on.
    assert not list(advice(fl.dqn(vector(mode), envs_per_runner=2).compile()))


@pytest.mark.parametrize(("rollout", "lost"), [(20, 0), (24, 4), (30, 10)])
def test_rows_that_no_sequence_trains_on_are_said(rollout, lost):
    texts = said("CartPole-v1", rollout_length=rollout, sequence_length=20, burn_in=10)
    assert len(texts) == bool(lost)
    for text in texts:
        assert f"replay: {lost} of the {rollout} rows of each rollout are never trained" in text
        assert "set rollout_length to at most 20, or take a shorter burn_in" in text


def test_a_replay_of_a_part_of_runners_is_looked_at_too():
    small = {"hidden": (4,), "size": 4, "rollout_length": 30}
    graph = fl.self_play(fl.r2d2("pettingzoo:classic.tictactoe_v3", **small))
    (text,) = advice(graph.compile())
    assert "10 of the 30 rows of each rollout" in text and "take a shorter burn_in" in text


def test_runners_that_nobody_gives_weights_are_said(tmp_path):
    policy = fl.Policy(fl.networks.MLP)
    graph = fl.Graph("collect", runners=fl.Runners("CartPole-v1", policy)).then(
        sample=fl.ParallelSample(), report=fl.Report()
    )
    (text,) = advice(graph.compile())
    assert text.startswith("runners: they act with their first, random weights")
    assert "teacher=fl.Frozen(DIR)" in text
    with fl.run(fl.ppo("CartPole-v1", policy=policy), out=tmp_path / "teacher") as run:
        next(run)
    teacher = fl.Frozen(str(tmp_path / "teacher"))
    taught = fl.Graph("collect", runners=fl.Runners("CartPole-v1", policy), teacher=teacher)
    taught = taught.then(sample=fl.ParallelSample(), report=fl.Report())
    assert not list(advice(taught.compile()))
    for make in (fl.ppo, fl.es, fl.bc):
        assert not list(advice(make("CartPole-v1").compile()))


def test_steps_of_runners_that_no_row_counts_are_said():
    policy = fl.Policy(fl.networks.MLP)
    runners = {name: fl.Runners("CartPole-v1", policy) for name in ("runners", "other")}
    graph = fl.Graph("two", **runners).then(sample=fl.ParallelSample())
    graph = graph.then(after=(), more=fl.ParallelSample(runners="other"))
    graph = graph.then(after=("sample", "more"), mix=fl.Merge({"sample": 1, "more": 1}))
    texts = list(advice(graph.then(report=fl.Report()).compile()))
    (text,) = (text for text in texts if text.startswith("report: "))
    assert "the steps and episodes of other are in no row, for it reports runners" in text


def test_a_run_warns_of_it_once():
    warnings = []
    graph = fl.r2d2("CartPole-v1", hidden=(4,), size=4, rollout_length=30)
    tap = Tap(lambda event: warnings.append(event.text), Warned)
    fl.run(graph, steps=10_000, observers=(tap,)).close()
    assert warnings == said("CartPole-v1", rollout_length=30)
