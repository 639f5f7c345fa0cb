"""What is Ray's alone: starting, joining, failing to start, interrupts, and a clean end."""

import os
import pkgutil
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

import flowrl as fl
from conftest import RAY, runner_pids
from environments import Clockwork, Faulty
from flowrl.core.events import Restarted, Warned
from flowrl.core.workers import INLINE_BYTES

pytestmark = pytest.mark.ray

SMALL = fl.PPOSettings(
    num_runners=2, envs_per_runner=1, rollout_length=8, batch_size=16, epochs=1, minibatch_size=None
)


def script(text, *args, **kwargs):
    """Start a script in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *args],
        env=env,
        start_new_session=True,
        text=True,
        **kwargs,
    )


def ours(before):
    """Processes of Ray that were not there before."""
    found = {
        p.pid: (p.info["name"], " ".join(p.info["cmdline"] or []))
        for p in psutil.process_iter(["name", "cmdline"])
    }
    return {
        pid: name
        for pid, (name, line) in found.items()
        if pid not in before and ("/ray/" in line or "ray::" in line)
    }


def left(before):
    """Those of them that are not of a Ray that tests share, here or beside, which starts and ends
    workers when it likes."""
    tests = psutil.Process().parent() if "PYTEST_XDIST_WORKER" in os.environ else psutil.Process()
    shared = {p.pid for p in tests.children(recursive=True)}
    return {pid: name for pid, name in ours(before).items() if pid not in shared}


def wait_gone(before, seconds=120):
    deadline = time.monotonic() + seconds
    while left(before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left(before)


@pytest.mark.system
def test_ray_is_started_and_ended_also_on_ctrl_c_and_prints_are_seen_and_what_there_is_gets_saved(
    tmp_path,
):
    before = {p.pid for p in psutil.process_iter()}
    process = script(
        """
        import sys, flowrl as fl
        def seen(env):
            print("made", env)
            return env
        s = fl.PPOSettings(
            num_runners=2, envs_per_runner=1, rollout_length=8, batch_size=16, epochs=1,
            minibatch_size=None,
        )
        graph = fl.ppo("CartPole-v1", s).set("runners.wrappers", (seen,))
        with fl.run(graph, runtime="ray", out=sys.argv[1]) as run:
            for row in run:
                print(row["row"], flush=True)
        """,
        str(tmp_path / "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while (line := process.stdout.readline()).startswith("made <"):
        pass  # by the driver, to find the spaces
    assert line == "1\n"
    assert ours(before)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert "KeyboardInterrupt" in errors and "made <" in errors
    assert process.returncode != 0
    assert wait_gone(before) == {}
    assert (tmp_path / "run/rows.jsonl").read_text().count("\n") >= 1
    fl.load(tmp_path / "run")


@pytest.mark.system
def test_a_ray_that_can_not_be_reached_or_refuses_its_settings_is_one_clear_error():
    result = script(
        """
        import flowrl as fl
        for wrong in ({"address": "127.0.0.1:1"}, {"init": {"num_cpus": -3}}):
            try:
                fl.run(fl.ppo("CartPole-v1"), runtime=fl.RayRuntime(**wrong))
            except fl.errors.RunError as error:
                print(error)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    unreachable, refused = result.communicate(timeout=240)[0].splitlines()
    assert unreachable.startswith("ppo: Ray could not be joined at 127.0.0.1:1: ")
    assert refused.startswith("ppo: Ray could not be started: ")


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_an_actor_that_dies_is_named():
    graph = fl.ppo("CartPole-v1", SMALL)
    graph = graph.replace(
        runners=fl.Runners(
            Faulty,
            graph.resources["runners"].policy,
            num_runners=2,
            envs_per_runner=1,
            rollout_length=8,
            env_settings={"at": 12, "how": "exit"},
            restarts=0,
        )
    )
    with (
        pytest.raises(
            fl.errors.RunError, match=r"ppo\.sample: runners, worker [01]'s process ended"
        ),
        fl.run(graph, runtime=RAY) as run,
    ):
        list(run)
    assert len(run.rows) == 1


def impala(env="CartPole-v1", **runners):
    """A small IMPALA with a Row every few updates."""
    settings = fl.IMPALASettings(
        num_runners=2,
        envs_per_runner=2,
        rollout_length=20,
        batch_size=80,
        report_every=5,
        policy=fl.Policy(fl.networks.MLP, hidden=(8,)),
    )
    graph = fl.impala(env, settings)
    for name, value in runners.items():
        graph = graph.set(f"runners.{name}", value)
    return graph


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_runner_that_is_killed_is_restarted_and_its_lost_steps_are_counted():
    with fl.run(impala(), runtime="ray") as run:
        for _ in range(3):
            next(run)
        first = runner_pids()
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        while (row := next(run)).get("restarts", 0) < 1:
            pass
        for _ in range(3):
            row = next(run)
    assert row["lost_steps"] % 40 == 0 and 40 <= row["lost_steps"] <= 80, (
        "at most the two requests in flight"
    )
    assert run.audit().closed
    counts = run.counts()
    assert counts["restarts"] == 1 and counts["lost_steps"] == row["lost_steps"]


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_runners_that_share_a_process_are_lost_and_restarted_with_it_and_no_others_are():
    graph = impala(num_runners=4)
    with fl.run(graph, runtime=fl.RayRuntime(processes=2)) as run:
        for _ in range(3):
            next(run)
        pids = runner_pids()
        assert len(pids) == 2, "four runners in two processes"
        os.kill(pids[0], signal.SIGKILL)
        while next(run).get("restarts", 0) < 2:
            pass
        for _ in range(10):
            row = next(run)
        assert row["restarts"] == 2 and pids[1] in runner_pids() and pids[0] not in runner_pids()
    assert run.audit().closed and row["lost_steps"] <= 4 * 40


@pytest.mark.usefixtures("ray_up")
def test_an_environment_that_raises_costs_its_process_nothing():
    graph = impala(
        Faulty, num_runners=2, env_settings={"at": 100, "how": "raise"}, on_error="restart"
    )
    with fl.run(graph, runtime=fl.RayRuntime(processes=1)) as run:
        next(run)
        pids = runner_pids()
        while next(run).get("restarts", 0) < 3:
            pass
        assert runner_pids() == pids
    assert run.audit().closed


def test_how_many_processes_is_checked():
    with pytest.raises(fl.errors.SettingError, match="processes must be a whole number, .*, got 0"):
        fl.RayRuntime(processes=0)


def test_ray_is_ended_where_what_it_has_can_not_be_asked_for(monkeypatch):
    from flowrl.runtime import ray as runtime_of_ray

    ended = []
    monkeypatch.setattr(runtime_of_ray, "start", lambda *_: lambda: ended.append(True))
    monkeypatch.setattr(runtime_of_ray, "node_amounts", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fl.run(fl.ppo("CartPole-v1"), runtime=fl.RayRuntime())
    assert ended == [True]


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_runner_that_hangs_is_killed_and_restarted(tmp_path):
    with fl.run(
        impala(HangsOnce, env_settings={"mark": str(tmp_path / "mark")}, timeout=8.0), runtime="ray"
    ) as run:
        while (row := next(run)).get("restarts", 0) < 1:
            pass
        next(run)
    assert run.audit().closed and row["lost_steps"] > 0


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
@pytest.mark.parametrize("restarts", [3, 0])
def test_an_evaluation_that_hangs_is_given_up_and_its_runner_restarted(restarts):
    graph = fl.ppo(HangsInEvaluations, SMALL).set("runners.evaluation_timeout", 5.0)
    graph = graph.set("runners.restarts", restarts)
    play = fl.Evaluate(every=2, episodes=4, seed=HangsInEvaluations.first)
    warnings, restarted = [], []

    def watch(event):
        (warnings if isinstance(event, Warned) else restarted).append(str(event))

    watch.kinds = (Warned, Restarted)
    # Each runner has a process of its own, so the other one plays its episodes to their end.
    runtime = fl.RayRuntime(processes=2)
    with fl.run(graph.insert(after="sync", play=play), runtime=runtime, observers=[watch]) as run:
        rows = [next(run) for _ in range(2)]
        late = r"took longer than 5 s \(evaluation_timeout\); raise it .* the max_steps of Evaluate"
        assert rows[1]["eval/return_mean"] > 0
        assert re.search(f"lacks the episodes of runner 0: they {late}", first_of(warnings))
        if restarts == 0:
            with pytest.raises(
                fl.errors.RunError, match=f"runner 0: its process was ended for .* {late}"
            ):
                next(run)
            return
        assert next(run)["restarts"] == 1
        why = first_of(restarted)
        assert re.search(f"runner 0: its process was ended for .* {late}", why)
    assert run.audit().closed


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_time_at_a_prompt_dilutes_no_share_of_the_runners():
    def walls():
        profile = run.profile()
        return profile.seconds, [profile.wall(name) for name in profile.workers("runners")]

    with fl.run(fl.ppo("CartPole-v1", SMALL), runtime=RAY) as run:
        for _ in range(3):
            next(run)
        seconds, before = walls()
        time.sleep(5)
        then, at_prompt = walls()
        # It takes some time until all processes have answered.
        assert then - seconds < 0.1 and len(before) == 2
        assert max(np.subtract(at_prompt, before)) < 2
        # Once the run goes on, it was time between rows, in which the runners had nothing to do.
        next(run)
        assert min(np.subtract(walls()[1], before)) > 5


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_runner_that_hangs_for_ever_does_not_keep_a_run_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.runtime.ray.CLOSING_SECONDS", 1.0)
    with fl.run(
        impala(HangsOnce, env_settings={"mark": str(tmp_path / "mark")}), runtime="ray"
    ) as run:
        while not (tmp_path / "mark").exists():
            next(run)
    assert run.audit().closed  # the test's own time-out says if it never ends
    run.policy.act(np.zeros(run.policy.spaces.obs.shape, np.float32))


def first_of(events):
    """The first of some events, which come to an observer by a thread of their own."""
    began = time.monotonic()
    while not events and time.monotonic() - began < 60:
        time.sleep(0.05)
    return events[0]


class HangsInEvaluations(Clockwork):
    """Hangs in the first episode of evaluations whose seed is `first`."""

    first = 1_000_000

    def reset(self, *, seed=None, options=None):
        if seed == self.first:
            time.sleep(600)
        return super().reset(seed=seed, options=options)


class HangsOnce(Clockwork):
    """Hangs in its 30th step, unless the file `mark` says that another did so before."""

    def __init__(self, mark, seconds=600):
        super().__init__()
        self.mark, self.life, self.seconds = Path(mark), 0, seconds

    def step(self, action):
        self.life += 1
        if self.life == 30:
            with suppress(FileExistsError):  # of two that come here at once only one is to hang
                self.mark.touch(exist_ok=False)
                time.sleep(self.seconds)
        return super().step(action)


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
@pytest.mark.parametrize("graph", [fl.impala, fl.ppo])
def test_a_runner_that_gives_nothing_for_long_is_reported_though_it_has_no_time_out(
    graph, tmp_path, monkeypatch
):
    monkeypatch.setattr("flowrl.rollout.requests.SILENT_SECONDS", 1.0)
    mark, warnings = tmp_path / "mark", []

    def watch(event):
        warnings.extend([event.text] if mark.exists() else [])

    watch.kinds = (Warned,)
    settings = {"mark": str(mark), "seconds": 20}
    hangs = graph(HangsOnce, num_runners=2, envs_per_runner=2, rollout_length=8)
    hangs = hangs.set("runners.env_settings", settings)
    with fl.run(hangs, runtime=RAY, observers=[watch]) as run:
        while not warnings:
            next(run)
    assert re.search(r"runners: runner \d( \(and 1 more\))? has given nothing", warnings[0])
    assert "set the `timeout` of Runners" in warnings[0]


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_an_evaluation_that_gives_nothing_for_long_is_reported(monkeypatch):
    monkeypatch.setattr("flowrl.runtime.ray_calls.SILENT_SECONDS", 1.0)
    warnings = []

    def watch(event):
        warnings.append(event.text)

    watch.kinds = (Warned,)
    # An evaluation has environments of its own.
    graph = fl.ppo(SlowToMake, SMALL).insert(after="sync", play=fl.Evaluate(every=1, episodes=1))
    with fl.run(graph, runtime=RAY, observers=[watch]) as run:
        next(run)
    assert any(re.match(r"runners, worker \d has given nothing for 1 s", w) for w in warnings)


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_waits_for_what_it_asks_for_is_reported(count, monkeypatch):
    monkeypatch.setattr("flowrl.runtime.ray_calls.ASKING_SECONDS", 0.5)
    monkeypatch.setattr("flowrl.runtime.ray_calls.HUNG_SECONDS", 10.0)
    monkeypatch.setattr("flowrl.runtime.ray_keepers.SILENT_SECONDS", 2.0)
    cores = ray.cluster_resources()["CPU"]
    # Another user of the cluster has all of its cores until the first warning.
    other = ray.remote(num_cpus=cores)(lambda: time.sleep(600)).remote()
    while ray.available_resources().get("CPU"):
        time.sleep(0.1)
    warnings = []

    def watch(event):
        warnings.append(event.text)
        ray.cancel(other, force=True)

    watch.kinds = (Warned,)
    place = {"learner": fl.Actor(count=count, options={"num_cpus": 1})}
    runtime = replace(RAY, place=place)
    with fl.run(fl.ppo(Clockwork, SMALL), runtime=runtime, observers=[watch]) as run:
        assert next(run)["updates"] > 0
    assert re.match(
        r"learner(, [01])?'s process has not answered in the \d+ s since it was asked to start; "
        "Ray may wait until 1 CPU is free on a node: `ray status` shows",
        warnings[0],
    )


class SlowToMake(Clockwork):
    def __init__(self):
        super().__init__()
        time.sleep(5)


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_runner_that_always_dies_is_given_up_after_some_tries():
    graph = impala(Faulty, env_settings={"at": 3, "how": "exit"}, restarts=1)
    with (
        pytest.raises(
            fl.errors.RunError,
            match=r"impala\.sample: runners, worker [01]'s process ended.*restarted 1 time in a "
            r"row, and failed again",
        ),
        fl.run(graph, runtime=RAY) as run,
    ):
        list(run)


@pytest.mark.system
@pytest.mark.parametrize("runtime", ["local", "ray"], indirect=True)
def test_an_environment_that_raises_now_and_then_stops_the_run_or_restarts_its_runner(runtime):
    graph = impala(Faulty, env_settings={"at": 100, "how": "raise"})
    with (
        pytest.raises(fl.errors.EnvError, match="a joint broke"),
        fl.run(graph, runtime=runtime) as run,
    ):
        list(run)
    with fl.run(graph.set("runners.on_error", "restart"), runtime=runtime) as run:
        while (row := next(run)).get("restarts", 0) < 3:
            pass
    assert row["env_steps"] > 200 and run.audit().closed
    assert re.search(
        r"runners: restarted \d+ times, the last time because: .* a joint broke",
        str(run.explain()),
    )


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_what_fails_only_where_the_actors_are_is_named():
    graph = fl.ppo("CartPole-v1", SMALL).set("runners.wrappers", (FailsInAnActor,))
    with (
        pytest.raises(
            fl.errors.EnvError,
            match=r"ppo\.sample: runners, runner [01]: CartPole-v1 could not be made: "
            r"LookupError: only here",
        ),
        fl.run(graph, runtime=RAY) as run,
    ):
        list(run)


def FailsInAnActor(env):
    if "default_worker.py" in sys.argv[0]:
        raise LookupError("only here")
    return env


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_functions_of_a_file_that_is_no_package_reach_the_actors(tmp_path):
    from flowrl.algos.named import build, find

    (tmp_path / "my_graph.py").write_text(
        textwrap.dedent(
            """
            import gymnasium as gym
            import flowrl as fl

            def make():
                return gym.make("CartPole-v1")

            def small(count: int = 2) -> fl.Graph:
                settings = fl.PPOSettings(
                    num_runners=count, envs_per_runner=1, rollout_length=8, batch_size=16,
                    minibatch_size=None,
                )
                return fl.ppo("CartPole-v1", settings).set("runners.env", make)
            """
        )
    )
    graph = build(find(f"{tmp_path / 'my_graph.py'}:small"), None, {}, [])
    with fl.run(graph, runtime=RAY) as run:
        assert next(run)["trained_steps"] == 16


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_lambdas_run_and_more_runners_than_cores_do_too():
    policy = fl.Policy(fl.networks.MLP, hidden=(4,))
    settings = fl.PPOSettings(
        num_runners=5,
        envs_per_runner=1,
        rollout_length=4,
        batch_size=20,
        epochs=1,
        minibatch_size=None,
        policy=policy,
    )
    graph = fl.ppo("CartPole-v1", settings).set("runners.env", lambda: Clockwork((2,)))
    with fl.run(graph, runtime="ray") as run:
        assert next(run)["trained_steps"] == 20


@pytest.mark.system
def test_no_process_is_left_where_the_driver_is_killed():
    process = script(
        """
        import flowrl as fl
        s = fl.IMPALASettings(
            num_runners=2, envs_per_runner=1, rollout_length=8, batch_size=16, report_every=1
        )
        with fl.run(fl.impala("CartPole-v1", s), runtime="ray") as run:
            for row in run:
                print(row["row"], flush=True)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == "1\n"
    started = psutil.Process(process.pid).children(recursive=True)
    working = [
        p for p in started if "Agent" not in " ".join(p.cmdline())
    ]  # Ray's two ask a dead Ray for half a minute before they end too
    assert len(working) >= 5 and any("ray::Host" in " ".join(p.cmdline()) for p in working)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while (
        left := [p for p in working if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.mark.usefixtures("ray_up")
@pytest.mark.parametrize(
    ("hidden", "where"),
    [
        pytest.param((64, 64), "flowrl.runtime.ray.Pickled", id="small"),
        pytest.param((256, 256), "ray.put", id="large", marks=pytest.mark.system),
    ],
)
def test_weights_are_packed_once_a_version_and_their_bytes_are_those_of_the_plan(
    hidden, where, monkeypatch
):
    put, there = [], pkgutil.resolve_name(where)
    monkeypatch.setattr(where, lambda value: put.append(value) or there(value))
    graph = fl.impala("CartPole-v1", rollout_length=20, batch_size=160, hidden=hidden)
    plan = graph.compile()
    with fl.run(plan, runtime=RAY) as run:
        for _ in range(4):
            row = next(run)
    weights = [value for value in put if isinstance(value, tuple)]
    versions = [int(version) for _, version in weights]
    assert versions == list(range(len(versions))) and len(versions) >= row["updates"]
    per_version = sum(x.nbytes for part in weights[-1][0] for x in part.values())
    assert (where == "ray.put") == (per_version > INLINE_BYTES)
    assert per_version == plan.per_row("weight_bytes") / plan.per_row("publishes")
    assert run.counts()["weight_bytes"] == per_version * run.counts()["publishes"]


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_paced_requests_keep_the_bound_on_ray_too_where_nothing_waits_for_weights():
    graph = (
        impala()
        .set("queue.max_lag", 2)
        .set("queue.on_stale", "pace")
        .set("sync.wait", False)
        .set("sync.to", "producer")
    )
    with fl.run(graph, runtime=RAY) as run:
        assert run.plan.lag_bound == 2
        rows = [next(run) for _ in range(20)]
    assert max(r["lag_max"] for r in rows) <= 2 and rows[-1]["dropped_steps"] == 0
    assert run.audit().closed
