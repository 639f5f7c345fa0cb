"""Where the time goes: every instant is counted once, in every process.

And the sentence on waiting for the slowest.
"""

import dataclasses
import time
from pathlib import Path

import pytest

import flowrl as fl
from environments import Clockwork
from flowrl.core.clock import KINDS, REPLAY, STEP, WAITING, By, Clock, by_kind
from flowrl.core.profile import Profile
from flowrl.graph.site import HereSite, Place
from flowrl.graph.stages import Schedule
from flowrl.observe.breakdown import table
from flowrl.runtime.base import Session


@REPLAY
def drawn(sleep):
    sleep(5)


def test_every_instant_is_of_one_kind(monkeypatch):
    now = [100]
    monkeypatch.setattr("flowrl.core.clock.perf_counter", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    clock = Clock("outside")
    with By(clock):
        with WAITING:
            sleep(30)
            with STEP:
                sleep(20)
            sleep(10)
            drawn(sleep)
        sleep(3)
    with STEP:  # of this thread's own clock
        sleep(7)
    within = {"waiting": 40, "step": 20, "replay": 5}
    assert by_kind(clock.read()) == within | {"outside": 0}, "what is not over holds nothing up"
    with By(clock), WAITING:
        assert by_kind(clock.read()) == within | {"outside": 10}


def test_what_a_clock_did_not_count_of_its_start_is_counted_once(monkeypatch):
    now = [100]
    monkeypatch.setattr("flowrl.core.clock.perf_counter", lambda: now[0])
    clock = Clock("waiting")
    now[0] = 130
    clock.started(90)
    now[0] = 135
    assert by_kind(clock.read()) == {"start": 40, "waiting": 5}


def test_the_seconds_of_rows_hold_the_start_of_what_the_runtime_needs():
    class Late:
        """A runtime in this process that starts something first, as Ray is started."""

        def open(self, plan, seed, stream=None):
            graph = plan.graph
            place = Place(
                graph.name, graph.resources, seed, HereSite, plan.found.totals, stream, pick=None
            )

            def start():
                self.starting = time.perf_counter()
                return lambda: None

            self.session = Session(plan, place, Schedule, start=start)
            return self.session

    graph = fl.ppo(Clockwork, num_runners=1, envs_per_runner=1, rollout_length=8, batch_size=8,
                   minibatch_size=None)  # fmt: skip
    late = Late()
    with fl.run(graph, runtime=late) as run:
        row = next(run)
    rows = late.session.rows
    assert late.session.began == rows.started < late.starting
    assert row["seconds"] == rows.last - rows.started


class Slow(Clockwork):
    """Every step takes 2 ms, every 20th 40 ms."""

    taken = 0

    def step(self, action):
        self.taken += 1
        time.sleep(0.04 if self.taken % 20 == 0 else 0.002)
        return super().step(action)


def test_the_seconds_of_all_runners_are_their_nodes_own_where_a_chain_works_on_each_rollout():
    settings = fl.PPOSettings(
        num_runners=3, envs_per_runner=1, rollout_length=8, batch_size=24, minibatch_size=None
    )
    graph = fl.ppo(Slow, settings).set("sample.local", fl.chain(same=fl.Map(same)))
    with fl.run(graph) as run:
        next(run)
        spent = run.profile().processes["this process"]
    assert spent["sample", "step"] > 0 and spent.get(("", "step"), 0.0) == 0


def same(batch):
    return batch


@pytest.mark.system
def test_environments_in_jax_step_in_the_local_runtime_too():
    settings = fl.PPOSettings(epochs=1, minibatch_size=None, envs_per_runner=2, batch_size=128)
    with fl.run(fl.ppo("gymnax:CartPole-v1", settings)) as run:
        next(run)
        spent = run.profile().processes["this process"]
    assert spent["sample", "step"] > 0 and ("sample", "update") not in spent
    assert spent["train", "update"] > 0


def test_a_program_counts_the_seconds_of_its_opening_once():
    settings = fl.PPOSettings(epochs=1, minibatch_size=None, envs_per_runner=2, batch_size=128)
    plan, opened = fl.ppo("gymnax:CartPole-v1", settings).compile(), time.perf_counter()
    with fl.run(plan, runtime="xla") as run:
        spent = run.profile().wall("this process")
    assert spent <= time.perf_counter() - opened


@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        ("ppo", "local"),
        pytest.param("ppo", "ray", marks=(pytest.mark.ray, pytest.mark.system)),
        pytest.param("impala", "ray", marks=(pytest.mark.ray, pytest.mark.system)),
    ],
)
@pytest.mark.usefixtures("ray_up")
def test_the_seconds_of_every_process_add_up_to_its_wall(runtime, name):
    settings = {
        "ppo": fl.PPOSettings(epochs=1, minibatch_size=None),
        "impala": fl.IMPALASettings(report_every=1),
    }[name]
    graph = getattr(fl, name)(Slow, settings)
    graph = (
        graph.set("runners.num_runners", 2)
        .set("runners.envs_per_runner", 2)
        .set("runners.rollout_length", 20)
        .set("batch.batch_size", 80)
    )
    plan, opened = graph.compile(), time.perf_counter()
    with fl.run(plan, runtime=runtime) as run:
        next(run)
        begins, tables, ends = [], [], []
        for seconds in (1.5, 0.0):
            begins.append(time.perf_counter())
            tables.append(run.profile())
            ends.append(time.perf_counter())
            while time.perf_counter() - ends[-1] < seconds:
                next(run)
        first, last = tables
        shortest, longest = (
            begins[1] - ends[0],
            ends[1] - begins[0],
        )  # between two moments within the calls
    assert ("this process" in last.processes) == (runtime == "local")
    assert len(last.processes) == {"local": 1, "ray": {"ppo": 3, "impala": 4}[name]}[runtime]
    for process in [p for p in last.processes if p.startswith(("stage", "this"))]:
        assert 0.95 * (begins[1] - opened) < last.wall(process) < 1.05 * (ends[1] - opened), process
    for process, spent in ((name, by_kind(x)) for name, x in last.processes.items()):
        assert set(spent) <= set(KINDS)
        grown = {
            kind: spent[kind] - by_kind(first.processes[process]).get(kind, 0.0) for kind in spent
        }
        assert 0.95 * shortest < sum(grown.values()) < 1.05 * longest, process
        assert grown.get("other", 0.0) < 0.2 * shortest, (process, grown)
        if "step" in spent:
            assert grown["step"] > grown["inference"] > 0
    text = str(run.explain())
    assert all(process in text for process in last.processes)


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_waiting_for_the_slowest_is_reported_with_what_would_fix_it(tmp_path):
    settings = fl.PPOSettings(
        num_runners=2,
        envs_per_runner=1,
        rollout_length=10,
        batch_size=20,
        epochs=1,
        minibatch_size=None,
        policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
    )
    graph = fl.ppo(Lame, settings).set("runners.env_settings", {"mark": str(tmp_path / "mark")})
    with fl.run(graph, runtime="ray") as run:
        for _ in range(8):
            next(run)
    (reported,) = run.profile().findings
    assert (
        reported.startswith("runners: ")
        and (
            "% of the runners' time in rounds goes to waiting for the slowest; mode='async' with "
            "a Queue"
        )
        in reported
    )
    assert 25 < int(reported.removeprefix("runners: ").partition("%")[0]) <= 50, (
        "one of two waits nearly all the time"
    )


class Lame(Clockwork):
    """The first that is stepped is slow."""

    def __init__(self, mark):
        super().__init__()
        self.mark, self.slow = Path(mark), None

    def step(self, action):
        if self.slow is None:
            try:
                self.mark.touch(exist_ok=False)
                self.slow = True
            except FileExistsError:
                self.slow = False
        time.sleep(0.03 if self.slow else 0)
        return super().step(action)


def test_many_processes_are_shown_by_their_mean_and_the_busiest():
    processes = {
        f"runners, {i}": {("", "step"): float(i), ("", "waiting"): 10.0 - i} for i in range(10)
    }
    lines = table(Profile(processes=processes))
    assert [line.split("  ")[0] for line in lines] == [
        "seconds",
        "runners, mean of 10",
        "runners, 9",
    ]
    assert lines[1].split()[-3:] == ["10.0", "4.50", "5.50"]
    assert len({len(line) for line in lines}) == 1, "columns stand one below another"


def test_the_seconds_of_a_node_are_summed_over_the_threads_that_ran_it():
    fields = {field.name: {} for field in dataclasses.fields(Profile)}
    threads = {"one": {("sync", "waiting"): 1.0}, "other": {("sync", "waiting"): 2.0}}
    stages = {"one": ("sync",), "other": ("train",)}
    profile = Profile(**{**fields, "processes": threads, "stages": stages})
    assert profile.node_seconds("sync") == {"waiting": 3.0}
