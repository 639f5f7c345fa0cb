"""Graphs over environments of several agents in JAX: in every runtime, and as one program."""

from functools import cache

import pytest

import flowrl as fl
from conftest import RAY, close, timeless
from flowrl.runtime.fusable import program_report
from jax_teams import TINY, Chaos, Corridors, fixed, two_rates
from teams import ppo_and_dqn

SEATS = {"red": "learner", "blue": "opponent"}
OF = {"a": "red", "b": "blue", "c": "blue"}
XLA = fl.XlaRuntime(chunk=2)


def rows_of(graph, runtime="local", count=2):
    """The first rows of a run, and the run, which tests share."""
    return _rows_of(graph, runtime, count)


def taken(graph, runtime, count):
    with fl.run(graph, runtime=runtime) as run:
        for _ in range(count):
            next(run)
    return timeless(run.rows[:count]), run


_rows_of = cache(taken)


@pytest.mark.system
@pytest.mark.parametrize(
    ("env", "of"),
    [
        pytest.param(Corridors, None, id="at once", marks=pytest.mark.system),
        pytest.param(Chaos, OF, id="turns"),
    ],
)
def test_one_program_gives_the_rows_of_the_local_runtime(env, of):
    graph = two_rates(env, of, ratio=1 if of else 4)
    if of:
        graph = graph.insert(after="sync_red", play=fl.Evaluate(every=2, episodes=2, max_steps=20))
    found, run = rows_of(graph, XLA, 4)
    close(found, rows_of(graph, count=4)[0])
    assert run.audit().closed
    # A turn that waits for its reward is trained with the version that acted.
    assert (max(row["lag_max"] for row in found) > 0) == (env is Chaos)
    assert ("eval/return_mean/red" in found[1]) == (env is Chaos)


@pytest.mark.system
def test_learners_at_rates_of_one_and_four_are_one_program_that_counts_what_is_planned():
    graph = two_rates()
    plan = graph.compile()
    assert (plan.found.exact, plan.found.rows, plan.found.warmup_rows, plan.lag) == (True, 1, 0, 0)
    assert [plan.per_row("updates", f"train_{name}") for name in ("red", "blue")] == [4, 1]
    possible, text = program_report(plan)
    says = "xla: one program of all 10 operators; it unrolls 4 rounds with 5 updates\n"
    assert possible and text == says
    for runtime in (XLA, "local"):
        run = rows_of(graph, runtime, 4)[1]
        counted = run.counts()
        for name in ("updates", "requests", "publishes", "trained_steps", "sampled_steps"):
            assert counted[name] == plan.per_row(name) * len(run.rows), name
    row = run.rows[-1]
    assert (row["updates/red"], row["updates/blue"]) == (16, 4)
    assert row["agent_steps"] == row["agent_steps/red"] + row["agent_steps/blue"]


@pytest.mark.system
def test_on_ray_the_rows_are_those_of_this_process_where_only_actions_are_random(ray_up):
    graph = two_rates(fixed, ratio=1, num_runners=2)
    close(taken(graph, RAY, 2)[0], rows_of(graph)[0])


@pytest.mark.system
def test_one_policy_for_all_agents_is_one_program():
    small = {"num_runners": 1, "envs_per_runner": 2, "rollout_length": 4, "batch_size": 16}
    graph = fl.ppo(Corridors, minibatch_size=8, epochs=1, policy=TINY, **small)
    found, run = rows_of(graph, XLA)
    close(found, rows_of(graph)[0])
    assert found[-1]["agent_steps"] > found[-1]["env_steps"] and run.audit().closed


@pytest.mark.system
def test_two_algorithms_on_one_stream_are_one_program_with_a_replay_on_the_device():
    graph = ppo_and_dqn(Corridors, envs_per_runner=2, rollout_length=16)
    graph = graph.set("report.every", 2).set("replayed.learning_starts", 32)
    found, run = rows_of(graph, fl.XlaRuntime(chunk=1), 2)
    close(found, rows_of(graph)[0])
    assert (found[-1]["updates/red"], found[-1]["updates/blue"]) == (2, 2) and run.audit().closed


@pytest.mark.system
def test_several_seeds_are_each_what_it_is_alone():
    graph = two_rates(ratio=1)
    with fl.run(graph, runtime=fl.XlaRuntime(seeds=2, chunk=2)) as run:
        next(run)
    close(timeless(run.curves().rows[0]), rows_of(graph)[0], rtol=1e-3)


def test_a_scripted_policy_acts_on_the_host_and_in_no_program():
    graph = two_rates(ratio=1).remove("select_blue", "batch_blue", "train_blue", "sync_blue")
    graph = graph.remove("both", "blue", "report").then(after="sync_red", report=fl.Report())
    graph = graph.set("runners.policy.blue", fl.Scripted())
    batch = graph.resources["runners"].open().collect()
    assert list(batch.batches) == ["red"] and batch["red"].shape == (4, 2)
    with pytest.raises(fl.errors.CheckError, match="written in JAX, .* and no scripted policies"):
        fl.run(graph, runtime="xla")


def test_a_league_plays_agents_in_jax_on_the_host_alone():
    graph = fl.self_play(fl.ppo(Corridors, policy=TINY))
    # Swapped seats are on the host.
    assert graph.compile().found.exact and graph.resources["runners"].jax_env is None
    graph = graph.set("runners.wrappers", ()).set("runners.policy.fn", SEATS)
    with pytest.raises(
        fl.errors.FlowrlError, match="in which a league keeps no score yet; give it"
    ):
        graph.compile()


@pytest.mark.system
def test_a_run_goes_on_from_its_snapshot(tmp_path):
    graph = two_rates(Chaos, OF, ratio=1)
    with fl.run(graph, snapshots=fl.Snapshots(every=0), out=tmp_path / "x") as run:
        next(run)
        begun = len(run.rows)
    with fl.resume(tmp_path / "x", allow=["jax_teams"]) as run:
        while len(run.rows) < begun + 2:
            next(run)
    found = timeless(run.rows)
    close(found, rows_of(graph, count=len(found))[0])
