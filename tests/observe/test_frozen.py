"""Saved policies that act in a run and are not trained."""

import numpy as np
import pytest

import flowrl as fl
from conftest import RAY
from teams import MLP, NAMES, TwoCartPoles, two_learners

ALLOW = ("teams",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run of two learners, whose policies have learned something else."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    graph = two_learners()
    for name in NAMES:
        graph = graph.set(f"{name}.optimizer.lr", 0.05)
    with fl.run(graph, out=folder) as run:
        for _ in range(3):
            next(run)
    return folder


def graph_of(saved, **frozen):
    """Red is trained; blue has the weights of a saved policy."""
    two = two_learners(num_runners=2)
    nodes = {n.name: n.op for n in two.nodes if "blue" not in n.name and n.name != "both"}
    frozen = {"runners": "runners.blue", "policy": "red", "allow": ALLOW, **frozen}
    frozen = fl.Frozen(str(saved), **frozen)
    resources = {"runners": two.resources["runners"], "red": two.resources["red"], "blue": frozen}
    graph = fl.Graph("one", **resources).then(**nodes)
    return graph.insert(after="sync_red", play=fl.Evaluate(1, episodes=4, seed=3))


def blue_plays(saved):
    """How the saved policy plays blue."""
    seats = {"red": "other", "blue": "old"}
    players = {"old": fl.load(saved, policy="red", allow=ALLOW), "other": fl.Scripted()}
    return fl.match(players, seats=seats, episodes=4, seed=3)["old"]


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.system)])
def test_a_frozen_policy_acts_with_the_saved_weights_for_ever(saved, runtime, request):
    if runtime == "ray":
        request.getfixturevalue("ray_up")
        runtime = RAY
    with fl.run(graph_of(saved), runtime=runtime) as run:
        rows = [next(run) for _ in range(3)]
    expected = blue_plays(saved)
    for row in rows:
        assert row["eval/return_mean/blue"] == pytest.approx(expected.mean())
        assert row["eval/return_max/blue"] == expected.max()
    assert run.plan.learners == ("red",) and run.audit().closed


def test_its_text_is_read_back_and_a_resumed_run_has_it_too(saved, tmp_path):
    graph = graph_of(saved)
    assert fl.Graph.from_text(graph.text(), allow=ALLOW) == graph
    assert f"red of {saved}" in str(graph.compile())
    # With this seed both poles never fall at once, after which no generator is found in the dict
    # that holds the poles: such an environment begins again where a run is resumed.
    how = {"seed": 1, "snapshots": fl.Snapshots(every=0)}
    with fl.run(graph, steps=128 * 6, seed=1) as run:
        whole = [row["return_mean"] for row in run]
    with fl.run(graph, steps=128 * 2, out=tmp_path / "x", **how) as run:
        list(run)
    with fl.resume(tmp_path / "x", steps=128 * 6, allow=ALLOW) as run:
        list(run)
    np.testing.assert_array_equal([row["return_mean"] for row in run.rows], whole)


def test_a_run_without_a_learner_samples_with_a_saved_policy(saved, tmp_path):
    with fl.run(fl.ppo("CartPole-v1", policy=MLP), out=tmp_path / "x", steps=1_000) as run:
        list(run)
    runners = fl.Runners("CartPole-v1", MLP, envs_per_runner=2, rollout_length=16)
    graph = fl.Graph("data", runners=runners, old=fl.Frozen(str(tmp_path / "x")))
    graph = graph.then(sample=fl.ParallelSample(), report=fl.Report())
    with fl.run(graph) as again:
        row = next(again)
    assert row["updates"] == 0 and row["env_steps"] > 0


def test_mistakes_are_reported_before_the_run(saved):
    def problem(graph):
        with pytest.raises(fl.errors.FlowrlError) as caught:
            graph.compile()
        return str(caught.value)

    assert "there is no directory" in problem(graph_of("nothing"))
    assert "holds several policies; name one of them" in problem(graph_of(saved, policy=None))
    other = fl.Policy(fl.networks.MLP, hidden=(4,))
    wider = graph_of(saved).set("runners.policy", fl.Team(red=MLP, blue=other))
    assert "blue: runners.blue act with Policy(networks.MLP, hidden=(4,)), but" in problem(wider)
    two = two_learners()
    both = fl.Graph(
        "both", **two.resources, old=fl.Frozen(str(saved), "runners.blue", "red", allow=ALLOW)
    ).then(**{n.name: n.op for n in two.nodes if n.name == "sample"}, report=fl.Report())
    assert "old: blue gives weights to runners.blue, too" in problem(both)
    single = fl.Frozen(str(saved), "runners", "red", allow=ALLOW)
    other_spaces = fl.Graph("x", runners=fl.Runners("Acrobot-v1", MLP), old=single)
    other_spaces = other_spaces.then(sample=fl.ParallelSample(), report=fl.Report())
    assert "was made for Spaces(obs=Box" in problem(other_spaces)
    assert TwoCartPoles.possible_agents == NAMES


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: fl.dqn("CartPole-v1", hidden=(8,), learning_starts=8), "EpsilonGreedy"),
        pytest.param(
            lambda: fl.td3("Pendulum-v1", hidden=(8,), learning_starts=8),
            "GaussianNoise",
            marks=pytest.mark.system,
        ),
    ],
    ids=["action values", "deterministic"],
)
def test_no_actions_are_sampled_where_a_policy_has_no_distribution(make, way, tmp_path):
    graph = make().set("batch.batch_size", 8)
    with fl.run(graph, steps=16, out=tmp_path / "x") as run:
        list(run)
    runners = graph.resources["runners"]
    old = fl.Frozen(str(tmp_path / "x"))
    data = fl.Graph("data", runners=fl.Runners(runners.env, runners.policy), old=old)
    data = data.then(sample=fl.ParallelSample(), report=fl.Report())
    with pytest.raises(fl.errors.CheckError) as caught:
        data.check()
    assert f"give them explore=fl.{way}(...)" in str(caught.value)
    data.set("runners.explore", getattr(fl, way)()).check()
