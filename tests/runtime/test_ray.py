"""What is Ray's alone: starting, joining, failing to start, interrupts, and leaving nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import flowrl as fl
from environments import Clockwork, Faulty

pytestmark = pytest.mark.ray

SMALL = fl.PPOSettings(runners=2, envs=1, fragment=8, batch=16, epochs=1, minibatch=None)


def script(text, *args, **kwargs):
    """Start a script in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text), *args], env=env, start_new_session=True, text=True, **kwargs)


def ours(before):
    """Processes of Ray that were not there before."""
    return {
        p.pid: p.info["name"] for p in psutil.process_iter(["name", "cmdline"]) if p.pid not in before and "ray" in " ".join(p.info["cmdline"] or [])
    }


def wait_gone(before, seconds=20):
    deadline = time.monotonic() + seconds
    while ours(before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return ours(before)


def test_ray_is_started_and_ended_also_on_ctrl_c_and_what_there_is_gets_saved(tmp_path):
    before = {p.pid for p in psutil.process_iter()}
    process = script(
        """
        import sys, flowrl as fl
        s = fl.PPOSettings(runners=2, envs=1, fragment=8, batch=16, epochs=1, minibatch=None)
        with fl.run(fl.ppo("CartPole-v1", s), runtime="ray", out=sys.argv[1]) as run:
            for row in run:
                print(row["row"], flush=True)
        """,
        str(tmp_path / "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "1\n"
    assert ours(before)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    assert wait_gone(before) == {}
    assert (tmp_path / "run/rows.jsonl").read_text().count("\n") >= 1
    fl.load(tmp_path / "run")


def test_a_ray_that_can_not_be_reached_is_one_clear_error():
    result = script(
        """
        import flowrl as fl
        try:
            fl.run(fl.ppo("CartPole-v1"), runtime=fl.RayRuntime(address="127.0.0.1:1"))
        except fl.RuntimeFailed as error:
            print(error)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    out, _ = result.communicate(timeout=100)
    assert out.startswith("ppo: Ray could not be joined at 127.0.0.1:1: "), out


def test_settings_that_ray_refuses_are_one_clear_error():
    result = script(
        """
        import flowrl as fl
        try:
            fl.run(fl.ppo("CartPole-v1"), runtime=fl.RayRuntime(init={"num_cpus": -3}))
        except fl.RuntimeFailed as error:
            print(error)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    out, _ = result.communicate(timeout=100)
    assert out.startswith("ppo: Ray could not be started: "), out


@pytest.mark.usefixtures("ray_up")
def test_an_actor_that_dies_is_named():
    graph = fl.ppo("CartPole-v1", SMALL)
    graph = graph.replace(
        runners=fl.Runners(Faulty, graph.resources["runners"].policy, count=2, envs=1, fragment=8, env_settings={"at": 12, "how": "exit"})
    )
    with pytest.raises(fl.RuntimeFailed, match=r"ppo\.sample: runners, worker [01]'s process ended"), fl.run(graph, runtime="ray") as run:
        list(run)
    assert len(run.rows) == 1


@pytest.mark.usefixtures("ray_up")
def test_what_fails_only_where_the_actors_are_is_named():
    graph = fl.ppo("CartPole-v1", SMALL).set("runners.wrappers", (FailsInAnActor,))
    with (
        pytest.raises(fl.EnvironmentFailed, match=r"ppo\.sample: runners, runner [01]: CartPole-v1 could not be made: LookupError: only here"),
        fl.run(graph, runtime="ray") as run,
    ):
        list(run)


def FailsInAnActor(env):
    if "default_worker.py" in sys.argv[0]:
        raise LookupError("only here")
    return env


@pytest.mark.usefixtures("ray_up")
def test_functions_of_a_file_that_is_no_package_reach_the_actors(tmp_path):
    from flowrl.graphs import build, find

    (tmp_path / "my_graph.py").write_text(
        textwrap.dedent(
            """
            import gymnasium as gym
            import flowrl as fl

            def make():
                return gym.make("CartPole-v1")

            def small(count: int = 2) -> fl.Graph:
                return fl.ppo("CartPole-v1", fl.PPOSettings(runners=count, envs=1, fragment=8, batch=16, minibatch=None)).set("runners.env", make)
            """
        )
    )
    graph = build(find(f"{tmp_path / 'my_graph.py'}:small"), None, {}, [])
    with fl.run(graph, runtime="ray") as run:
        assert next(run)["trained_steps"] == 16


@pytest.mark.usefixtures("ray_up")
def test_lambdas_run_and_more_runners_than_cores_do_too():
    policy = fl.Policy(fl.MLP, hidden=(4,))
    settings = fl.PPOSettings(runners=5, envs=1, fragment=4, batch=20, epochs=1, minibatch=None, policy=policy)
    graph = fl.ppo("CartPole-v1", settings).set("runners.env", lambda: Clockwork((2,)))
    with fl.run(graph, runtime="ray") as run:
        assert next(run)["trained_steps"] == 20
