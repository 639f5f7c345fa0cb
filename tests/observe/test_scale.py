"""Clusters on paper: the simulation gives what is calculated by hand, and the command prints it."""

import json
import math
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.cli.main import main
from flowrl.core.profile import Profile, to_text
from flowrl.errors import GraphError
from flowrl.graph.bounds import Bounds
from flowrl.observe.pass_costs import Costs, NodeCost, RunnerCost, Sampling, costs_of
from flowrl.observe.simulated_runners import Cluster
from flowrl.observe.simulation import Simulation, simulate
from flowrl.observe.virtual_time import Servers, World

GOLDEN = Path(__file__).parent / "scale.txt"
ROUNDS, COMING = Sampling(), Sampling(in_flight=1, min_fraction=None)
FOUR, NODE = Bounds(4), Cluster()
ONE = RunnerCost(seconds=(1.0,), steps=10, cpu=0.0)
"""A rollout of 10 steps in a second, in which the runner sleeps."""


def serial(update=0.0, runner=ONE):
    """One stage: rounds of all runners, and an update of each."""
    nodes = (
        NodeCost("sample", sampling=ROUNDS),
        NodeCost("train", ("sample",), per_item=update, updates=1),
        NodeCost("sync", ("train",), publishes=1),
    )
    return Costs((("sample", "train", "sync"),), {n.name: n for n in nodes}, runner, stage_cpu=0.0)


def beside(update=0.0, runner=ONE, queue=FOUR, gathers=10, sampling=COMING, paced=None):
    """Two stages: rollouts as they come, and after a queue an update of each `gathers` steps."""
    nodes = (
        NodeCost("sample", sampling=sampling),
        NodeCost("batch", ("sample",), gathers=gathers),
        NodeCost("queue", ("batch",), queue=queue, paced=paced),
        NodeCost("train", ("queue",), per_item=update, updates=1),
        NodeCost("sync", ("train",), publishes=1),
    )
    stages = (("sample", "batch"), ("queue", "train", "sync"))
    return Costs(stages, {n.name: n for n in nodes}, runner, stage_cpu=0.0)


def speed(costs, runners, cluster=NODE):
    flow = simulate(costs, cluster, runners)
    return flow.env_steps / flow.seconds


def bounded_by(costs, runners, cluster=NODE):
    use = simulate(costs, cluster, runners).use
    return max(use, key=use.get)


def test_a_server_serves_in_line_and_knows_how_long_it_was_taken():
    world, ends = World(), []
    servers = Servers(world, 2)

    def job(seconds):
        yield servers
        yield seconds
        servers.release()
        ends.append((seconds, world.now))

    for seconds in (3.0, 1.0, 1.0, 2.0):
        world.start(job(seconds))
    world.run(lambda: False)
    # Two begin at once; each of the others begins when a server is free.
    assert ends == [(1.0, 1.0), (1.0, 2.0), (3.0, 3.0), (2.0, 4.0)]
    assert servers.seconds == 7.0


def test_one_runner_and_one_learner_take_turns():
    assert speed(serial(update=0.5), 1) == pytest.approx(10 / 1.5, rel=1e-4)
    assert simulate(serial(update=0.5), Cluster(), 1).lag_max == 0


def test_a_round_waits_for_the_slowest_runner_and_what_comes_does_not():
    uneven = replace(ONE, seconds=(1.0, 3.0))
    assert speed(serial(runner=uneven), 2) == pytest.approx(20 / 3, rel=1e-4)
    assert speed(beside(runner=uneven), 2) == pytest.approx(10 + 10 / 3, rel=0.02)
    # Variation makes the slowest slower, the more so the more runners there are.
    varied = serial(runner=replace(ONE, spread=0.2))
    two, many = (speed(varied, n) / n for n in (2, 32))
    assert many < two < 10 and many == pytest.approx(10 / (1 + 0.2 * 2.07), rel=0.08)


@pytest.mark.parametrize(("runners", "expected"), [(1, 10), (2, 20), (8, 80), (16, 100), (64, 100)])
def test_sleeping_runners_add_up_until_the_learner_is_full(runners, expected):
    costs = beside(update=0.1)
    assert speed(costs, runners) == pytest.approx(expected, rel=0.02)
    assert bounded_by(costs, runners) == ("the runners" if runners < 16 else "the learner")


@pytest.mark.parametrize(("nodes", "cores", "expected"), [(1, 1, 10), (1, 2, 20), (4, 2, 80)])
def test_computing_runners_need_the_cores_of_their_node(nodes, cores, expected):
    costs = beside(runner=replace(ONE, cpu=1.0))
    cluster = Cluster(nodes, cores)
    assert speed(costs, 16, cluster) == pytest.approx(expected, rel=0.05)
    # Half of the time asleep, twice as many runners fill the cores.
    half = beside(runner=replace(ONE, cpu=0.5))
    assert speed(half, 32, cluster) == pytest.approx(2 * expected, rel=0.05)
    assert speed(half, nodes * cores, cluster) == pytest.approx(expected, rel=0.05)


def test_the_network_of_the_learners_node_carries_rollouts_one_after_another():
    costs = beside(runner=replace(ONE, nbytes=1_000, weight_bytes=100))
    wide = simulate(costs, Cluster(nodes=4, cores=4), 16)
    # Of four nodes three are remote.
    assert wide.bytes_in / wide.seconds == pytest.approx(16 * 3 / 4 * 1_000, rel=0.1)
    # A version goes to each node at most once.
    assert wide.bytes_out / wide.updates <= 3 * 100
    narrow = Cluster(nodes=4, cores=4, bandwidth=2_000)
    # Two rollouts a second come by the network, and four from the learner's own node.
    assert speed(costs, 16, narrow) == pytest.approx(60, rel=0.1)
    assert bounded_by(costs, 16, narrow) == "network of the learner's node"


def test_a_full_queue_blocks_or_drops():
    blocking = Simulation(beside(update=1.0), Cluster(), 4)
    flow = blocking.flow()
    assert flow.env_steps / flow.seconds == pytest.approx(10) and blocking.dropped == 0
    dropping = Simulation(beside(update=1.0, queue=Bounds(4, "drop_oldest")), Cluster(), 4)
    flow = dropping.flow()
    assert flow.env_steps / flow.seconds == pytest.approx(40, rel=0.05)
    assert flow.updates / flow.seconds == pytest.approx(1, rel=0.05) and dropping.dropped > 0


def test_the_lag_is_what_is_in_flight_and_in_the_queue():
    # A rollout is asked for when there is capacity again. The updates until its own are those of
    # the 7 others in flight, and of the 4 batches in the queue and in training.
    flow = simulate(beside(update=1.0), Cluster(), 8)
    assert flow.lag_max == 7 + 4 and flow.lag_mean == pytest.approx(11)
    # Where the learner waits for rollouts instead, only those of the other runners are between.
    flow = simulate(beside(update=0.001), Cluster(), 8)
    assert flow.lag_mean <= 8


@pytest.mark.parametrize("max_lag", [0, 2, 5])
def test_paced_requests_keep_the_bound(max_lag):
    queue = Bounds(4, max_lag=max_lag)
    paced = simulate(beside(update=1.0, queue=queue, paced=Fraction(1)), Cluster(), 8)
    assert paced.lag_max <= max_lag and paced.updates > 0
    dropping = Simulation(beside(update=1.0, queue=queue), Cluster(), 8)
    assert dropping.flow().lag_max <= max_lag and dropping.dropped > 0


def replayed(ratio, alone):
    """A replay, from which a stage of its own samples, or one with each rollout."""
    nodes = (
        NodeCost("sample", sampling=COMING),
        NodeCost("add", ("sample",), adds=True),
        NodeCost(
            "batch",
            () if alone else ("add",),
            per_item=0.01,
            draws=True,
            draws_per_step=ratio,
            given_steps=32,
        ),
        NodeCost("train", ("batch",), updates=1),
    )
    names = tuple(node.name for node in nodes)
    stages = (names[:2], names[2:]) if alone else (names,)
    return Costs(stages, {n.name: n for n in nodes}, ONE, stage_cpu=0.0)


@pytest.mark.parametrize("alone", [True, False])
def test_a_replay_keeps_its_ratio(alone):
    flow = simulate(replayed(0.5, alone), Cluster(), 4)
    assert flow.updates / flow.env_steps == pytest.approx(0.5, rel=0.05)
    assert math.isnan(flow.lag_mean)
    # 0.05 s of sampling for each rollout hold up the many runners, who wait for batches that are
    # due: 20 rollouts of 10 steps a second.
    assert speed(replayed(0.5, alone), 64) == pytest.approx(200, rel=0.05)
    assert speed(replayed(None, True), 4) == pytest.approx(40, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(
    runners=st.integers(1, 9),
    update=st.sampled_from([0.0, 0.05, 0.7]),
    full=st.sampled_from(["block", "drop_oldest", "drop_newest"]),
    capacity=st.integers(1, 5),
    gathered=st.integers(1, 5),
    in_flight=st.integers(1, 3),
    spread=st.sampled_from([0.0, 0.3]),
    nodes=st.integers(1, 3),
)
@example(4, 0.7, "block", 1, 3, 1, 0.0, 1)
def test_every_rollout_is_trained_dropped_or_somewhere(
    runners, update, full, capacity, gathered, in_flight, spread, nodes
):
    costs = beside(
        update,
        replace(ONE, spread=spread, cpu=0.2),
        Bounds(capacity, full),
        10 * gathered,
        Sampling(in_flight, None),
    )
    simulation = Simulation(costs, Cluster(nodes), runners)
    simulation.flow()
    queued = simulation.channels["queue"].items
    held = sum(len(item.versions) for _, item in queued)
    held += len(simulation.held["batch"].versions)
    rest = simulation.runners.received - simulation.trained - simulation.dropped - held
    # The learner may be at work on a batch, and the stage that samples on a rollout.
    assert rest in (0, 1, gathered, gathered + 1)
    requests = simulation.runners.pending_in_total
    assert requests + len(simulation.runners.idle) == in_flight * runners


def test_a_graph_that_never_learns_is_an_error():
    stuck = beside(gathers=0)
    nodes = {**stuck.nodes, "batch": NodeCost("batch", ("sample",), given=0.0)}
    with pytest.raises(GraphError, match="no update comes of what the runners"):
        simulate(replace(stuck, nodes=nodes), Cluster(), 2)


# -- from a profile


GRAPH = fl.impala("CartPole-v1", num_runners=2, envs_per_runner=2, rollout_length=10, batch_size=40)


def profile():
    """Ten seconds of GRAPH: 100 rollouts of each of two runners in 0.1 s, a quarter of it on cores,
    and 100 updates in 20 ms."""
    spent = {("", "step"): 8.0, ("", "inference"): 1.5, ("", "transfer"): 0.5}
    return Profile(
        seconds=10.0,
        rows=10,
        env_steps=3_800,
        processes={
            "stage of sample": {
                ("sample", "waiting"): 9.0,
                ("sample", "transfer"): 0.4,
                ("sample", "other"): 0.2,
                ("batch", "concat"): 0.4,
            },
            "stage of queue": {
                ("queue", "waiting"): 7.5,
                ("train", "update"): 1.5,
                ("sync", "update"): 0.5,
                ("sync", "weight sync"): 0.2,
                ("report", "other"): 0.1,
                ("", "outside"): 0.2,
            },
            "runners, 0": spent,
            "runners, 1": spent,
        },
        stages={
            "stage of sample": ("sample", "batch"),
            "stage of queue": ("queue", "train", "sync", "report"),
        },
        counts={
            ("sample", "runners"): {"requests": 200, "sampled_steps": 4_000},
            ("train", "learner"): {"updates": 100},
            ("sync", "runners"): {"publishes": 100, "weight_bytes": 100_000},
        },
        edges={
            ("sample", "batch"): (200, 4_000),
            ("batch", "queue"): (100, 4_000),
            ("queue", "train"): (100, 4_000),
            ("train", "sync"): (100, 4_000),
            ("sync", "report"): (100, 4_000),
        },
        queues={"queue": (3, 16)},
        ops={node.name: type(node.op).__name__ for node in GRAPH.nodes},
        facts={
            "runners": {
                "count": 2,
                "envs": 2,
                "singly": True,
                "remote": True,
                "rollouts": [100, 100],
                "rounds": [0.0, 0.0],
            },
        },
        cores=2,
        busy=5.0,
        cpu={"runners, 0": 2.5, "runners, 1": 2.5, "this process": 1.65},
    )


def test_costs_are_read_from_a_profile():
    costs = costs_of(GRAPH.compile(), profile())
    runner, nodes = costs.runner, costs.nodes
    assert runner.seconds == pytest.approx((0.1, 0.1)) and runner.cpu == pytest.approx(0.25)
    assert (runner.steps, runner.env_share, runner.weight_bytes) == (20, 0.95, 1_000)
    # What no row has yet was sampled, too.
    facts = {"runners": {**profile().facts["runners"], "unreported": 100}}
    later = costs_of(GRAPH.compile(), replace(profile(), facts=facts))
    assert later.runner.env_share == 0.975 and later.measured_speed == 390
    # Observations of CartPole alone are four numbers of four bytes for each step.
    assert runner.nbytes > 20 * 16
    how = nodes["sample"].sampling
    assert (how.in_flight, how.min_fraction) == (2, None)
    assert (how.ask, how.receive) == pytest.approx((0.001, 0.002))
    assert nodes["batch"].gathers == 40 and nodes["batch"].per_step == pytest.approx(0.0001)
    # What waits for the update counts for the learner: 20 ms for 40 steps.
    assert nodes["train"].per_step == pytest.approx(0.0005) and nodes["train"].updates == 1
    assert nodes["sync"].per_item == pytest.approx(0.002) and nodes["sync"].publishes == 1
    assert nodes["report"].per_item == pytest.approx(0.001)
    # This process had cores for 1.65 of the 3.3 seconds in which its stages worked.
    assert costs.stage_cpu == pytest.approx(0.5) and costs.notes == ()


def test_what_a_run_does_not_say_is_assumed_and_said():
    plan = GRAPH.compile()
    # Of 5 seconds of cores the stages took 3.3, and 4 seconds are no steps: nothing is left.
    old = costs_of(plan, replace(profile(), cpu={}))
    assert old.runner.cpu == pytest.approx(4 / 20)
    assert "did not measure the seconds of cores by runner" in old.notes[0]
    blind = costs_of(plan, replace(profile(), cpu={}, busy=math.nan))
    assert blind.runner.cpu == 1.0 and "every second of a runner" in blind.notes[0]
    full = costs_of(plan, replace(profile(), busy=19.0))
    assert "the 2 cores were full (95%)" in full.notes[0]


def test_a_local_run_says_less():
    graph = fl.pg(
        "CartPole-v1", num_runners=2, envs_per_runner=2, rollout_length=25, batch_size=100
    )
    with fl.run(graph, steps=2_000) as run:
        rows = list(run)
    costs = costs_of(graph.compile(), run.explain().profile)
    assert "its runners took turns" in costs.notes[0] and len(rows) > 2
    assert 0 < costs.runner.cpu <= 1 and costs.runner.steps == 50
    # In turn two runners take twice as long as side by side, which the simulation knows nothing of.
    assert simulate(costs, Cluster(1, 2), 2).updates > 0


def test_rounds_say_how_much_rollouts_vary():
    facts = {"runners": {**profile().facts["runners"], "rounds": [24.0, 2.0]}}
    costs = costs_of(GRAPH.compile(), replace(profile(), facts=facts))
    # A round of 0.12 s; its results came after 0.11 s, a rollout took 0.1 s.
    assert costs.runner.answer == pytest.approx(0.01)
    # Of the 10 ms until its end, 1 ms goes to receiving one before the other.
    assert costs.runner.spread == pytest.approx(0.009 / 0.589 / 0.1, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"counts": {("train", "learner"): {"updates": 100}}}, "one set of runners, got 0"),
        ({"facts": {}}, "it was one program; measure one with --runtime ray"),
        (
            {"counts": {("sample", "runners"): {"sampled_steps": 4_000}}},
            "made no update after its first row",
        ),
    ],
)
def test_a_run_that_says_nothing_is_refused(changes, says):
    with pytest.raises(GraphError, match=says):
        costs_of(GRAPH.compile(), replace(profile(), **changes))


# -- the command


WORDS = ["--set", "num_runners=2", "--set", "envs_per_runner=2", "--set", "rollout_length=10"]
WORDS += ["--set", "batch_size=40", "--env", "CartPole-v1", "--untuned"]


@pytest.fixture
def saved(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "graph.txt").write_text(GRAPH.text())
    (run / "profile.json").write_text(to_text(profile(), profile()))
    return run


@pytest.fixture
def scaled(capsys, saved):
    def call(*words, graph="impala", run=saved):
        try:
            status = main(["scale", graph, "--from", str(run), *words])
        except SystemExit as error:
            status = error.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_the_table_of_a_fixed_profile(scaled):
    status, out, err = scaled(
        *WORDS, "--runners", "8..64", "--nodes", "1..4", "--cores-per-node", "4", "--price", "1.5"
    )
    assert (status, err) == (0, "")
    if os.environ.get("FLOWRL_UPDATE_GOLDEN"):
        GOLDEN.write_text(out, encoding="utf-8")
    assert out == GOLDEN.read_text(), "FLOWRL_UPDATE_GOLDEN=1 writes it again"


def test_the_run_itself_names_the_graph_and_json_holds_the_same(scaled, saved, tmp_path):
    picture = tmp_path / "scale.svg"
    words = ["--runners", "4,6", "--json", "--picture", str(picture)]
    status, out, err = scaled(*words, graph=str(saved))
    assert status == 0 and err == f"the picture is in {picture}\n"
    found = json.loads(out)
    assert [(p["runners"], p["nodes"], p["cost"]) for p in found["predictions"]] == [
        (4, 1, None),
        (6, 1, None),
    ]
    assert found["measured"]["steps_per_second"] == 380
    assert picture.read_text().startswith("<?xml")
    status, _, err = scaled(*words, graph=str(saved))
    assert status == 2 and "exists already" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--runners", "64..8"], "must begin with the smaller number, got 64..8; write 8..64"),
        (["--runners", "0..8"], "must be a whole number of at least 1, got 0"),
        (["--runners", "4", "--nodes", "8..16"], "at most 4 runners for at least 8 nodes"),
        (["--runners", "4", "--network", "fast"], "must be a speed such as 10Gb/s"),
        (["--runners", "4", "--network", "0Gb/s"], "must be a speed such as 10Gb/s"),
        (["--runners", "4", "--price", "-1"], "must be a price, at least 0, got -1"),
        ([], "the following arguments are required: --runners"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(scaled, saved, words, says):
    status, out, err = scaled(*words, graph=str(saved))
    assert (status, out) == (2, "") and says in err


def test_runs_that_are_none_or_of_another_graph_are_refused(scaled, saved, tmp_path):
    _, _, err = scaled(*WORDS, "--runners", "4", run=tmp_path / "rum")
    assert f"there is no directory {tmp_path}/rum; name one of the runs there: {saved}" in err
    _, _, err = scaled("--env", "CartPole-v1", "--untuned", "--runners", "4")
    assert "runners.envs_per_runner is 2 there, and 8 here" in err
    assert "name the run's directory as the graph" in err
    _, _, err = scaled("--env", "CartPole-v1", "--runners", "4", graph="pg")
    assert "its nodes are sample batch queue train sync report, and here they are sample" in err
    # What is simulated may differ.
    status, _, _ = scaled(*WORDS, "--set", "queue.capacity=4", "--runners", "4")
    assert status == 0
    (saved / "profile.json").unlink()
    _, _, err = scaled(*WORDS, "--runners", "4")
    assert "has no profile.json: its run has only begun" in err
