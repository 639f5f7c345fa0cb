"""``run.json`` says how a run was started, and `flowrl run DIR` does it again."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.cli.arguments import runtime_in_place_of, runtime_of
from flowrl.cli.main import main, parser
from flowrl.observe.about import about, read, settings_of_runtime

NAMES = (
    *("ppo", "a2c", "a3c", "pg", "impala", "appo", "dqn", "rainbow", "apex", "r2d2"),
    *("sac", "td3", "ddpg", "es", "ars"),
)
BOX = ("sac", "td3", "ddpg")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(path):
    found = [json.loads(line) for line in (Path(path) / "rows.jsonl").read_text().splitlines()]
    return [
        {name: x for name, x in row.items() if name not in ("seconds", "steps_per_second")}
        for row in found
    ]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("ppo", "dqn") else pytest.param(name, marks=pytest.mark.system)
        for name in NAMES
    ],
)
def test_every_stock_graph_is_repeated_bit_for_bit(name, capsys):
    env = "Pendulum-v1" if name in BOX else "CartPole-v1"
    early = (
        ["--set", "learning_starts=200"] if name in ("dqn", "rainbow", "apex", "r2d2", *BOX) else []
    )
    if name == "sac":
        early += ["--set", "policy=Policy(networks.SACNetwork, hidden=(8,))"]
    elif name in BOX:
        early += ["--set", "hidden=(8,)"]
    words = ["run", name, "--env", env, *early, "--set", "lr=0.002"]
    steps = 300 if name in BOX else 1500
    assert main([*words, "--seed", "5", "--steps", str(steps), "--out", "first"]) == 0
    capsys.readouterr()
    assert main(["run", "first", "--out", "second"]) == 0
    said = capsys.readouterr().err
    assert f"seed 5; until {steps:,} steps" in said and "repeats first from its start\n" in said
    assert rows("first") == rows("second") and rows("first")[-1]["env_steps"] >= steps


SMALL = ["--set", "envs_per_runner=2", "--set", "batch_size=256"]


def test_it_says_all_about_a_run(monkeypatch):
    # The cores that this process may use, however many the machine has.
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)))
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x"]
        subprocess.run(["git", *identity, *words], check=True)
    runtime = fl.LocalRuntime(schedule="random")
    with fl.run(fl.pg("CartPole-v1"), runtime=runtime, seed=9, steps=1500, out="here") as run:
        about = json.loads(Path("here/run.json").read_text())
        assert "ended" not in about
        list(run)
    about = read("here")
    assert (about["graph"], about["seed"], about["steps"], about["until"]) == ("pg", 9, 1500, None)
    assert (about["runtime"], about["runtime_settings"]) == ("local", {"schedule": "'random'"})
    assert {"python", "flowrl", "jax", "gymnasium"} <= set(about["versions"])
    assert len(about["git"]["commit"]) == 40 and about["git"]["changed"] is False
    assert about["machine"]["cores"] == 5 and about["machine"]["devices"] == ["cpu (cpu)"]
    ended = about["ended"]
    assert (ended["reason"], ended["rows"]) == ("steps", len(run.rows))
    assert ended["env_steps"] == run.rows[-1]["env_steps"]
    run.save("later")
    later = read("later")
    assert {**later, "versions": 0, "git": 0} == {**about, "versions": 0, "git": 0}
    # Repeated with the same schedule, and so with the same rows.
    assert main(["run", "here", "--out", "again"]) == 0
    assert rows("here") == rows("again")
    assert read("again")["runtime_settings"] == about["runtime_settings"]


def test_what_is_given_takes_the_place_of_what_was_saved(capsys):
    words = ["run", "pg", "--env", "CartPole-v1", *SMALL, "--until", "return_mean>=5"]
    assert main([*words, "--out", "first"]) == 0
    assert read("first")["until"] == "return_mean>=5"
    capsys.readouterr()
    assert main(["run", "first", "--out", "same"]) == 0
    assert "seed 0; until return_mean>=5" in capsys.readouterr().err
    assert main(["run", "first", "--out", "other", "--seed", "4", "--steps", "300"]) == 0
    assert "seed 4; until 300 steps\n" in capsys.readouterr().err
    assert rows("first") == rows("same") != rows("other")


def test_versions_that_differ_and_a_goal_that_is_a_function_are_said(capsys):
    with fl.run(fl.pg("CartPole-v1"), until=lambda row: True, out="first") as run:
        list(run)
    about = json.loads(Path("first/run.json").read_text())
    about["versions"]["jax"] = "0.0.1"
    about["machine"]["devices"] = ["gpu (H100)"]
    Path("first/run.json").write_text(json.dumps(about))
    assert main(["run", "first", "--steps", "100", "--out", "a"]) == 0
    said = capsys.readouterr().err
    assert "versions or devices are others (jax 0.0.1, now " in said and "function" not in said
    assert "gpu (H100), now cpu" in said
    Path("first/run.json").write_text(json.dumps({**about, "steps": 100}))
    assert main(["run", "first", "--out", "b"]) == 0
    assert "its goal was a function, so there is none now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda about: {"graph": about["graph"]}, "run.json is damaged: 'seed'"),
        (lambda about: [], "run.json is damaged: list indices"),
        (
            lambda about: {**about, "runtime_settings": {"place": "{Actor()}"}},
            "place={Actor()} of its runtime can't be read back; name the runtime yourself",
        ),
    ],
    ids=["no seed", "no object", "settings that are no plain values"],
)
def test_a_file_that_can_not_be_read_says_so(change, says, capsys):
    with fl.run(fl.pg("CartPole-v1"), steps=10, out="first") as run:
        list(run)
    about = json.loads(Path("first/run.json").read_text())
    Path("first/run.json").write_text(json.dumps(change(about)))
    assert main(["run", "first", "--out", "a"]) == 2
    assert says in capsys.readouterr().err


def noted(runtime):
    """What a run with this runtime notes of itself before it starts."""
    return about(fl.pg("CartPole-v1").compile(), runtime, 0, None, None, 0.0)


def test_where_things_run_on_ray_is_said_on_the_command_line_and_in_a_saved_run_says_it_too():
    words = ["--place", "learner", "--place", "sample=Actor(count=2, gpus=0.5)"]
    words += ["--address", "head:6379", "--processes", "3"]
    args = parser().parse_args(["run", "pg", "--runtime", "ray", *words])
    args.imports = ()
    place = {"learner": fl.Actor(), "sample": fl.Actor(count=2, gpus=0.5)}
    runtime = fl.RayRuntime(address="head:6379", processes=3, place=place)
    assert runtime_of(args) == runtime
    # What is given takes the place of what was saved.
    saved = noted(runtime)
    args = parser().parse_args(["run", "somewhere", "--runtime", "ray", "--address", "auto"])
    args.imports, args.runtime_settings = (), settings_of_runtime(saved, "somewhere", fl.RayRuntime)
    assert runtime_of(args) == dataclasses.replace(runtime, address="auto")


@pytest.mark.parametrize(
    "runtime", [fl.LocalRuntime(threads=3), fl.XlaRuntime(threads=3), fl.RayRuntime(threads=3)]
)
def test_threads_are_said_on_the_command_line_and_in_a_saved_run(runtime):
    name = type(runtime).__name__.removesuffix("Runtime").lower()
    args = parser().parse_args(["run", "pg", "--runtime", name, "--threads", "3"])
    args.imports = ()
    assert runtime_of(args) == runtime
    saved = settings_of_runtime(noted(runtime), "somewhere", type(runtime))
    for words, threads in (([], 3), (["--threads", "2"], 2)):
        args = parser().parse_args(["run", "somewhere", "--runtime", name, *words])
        args.imports, args.runtime_settings = (), dict(saved)
        assert runtime_of(args) == dataclasses.replace(runtime, threads=threads)


def test_a_resumed_run_takes_the_threads_that_are_given(tmp_path):
    graph = fl.pg("CartPole-v1", rollout_length=8)
    with fl.run(graph, steps=64, out=tmp_path / "run", runtime=fl.LocalRuntime(threads=1)) as run:
        list(run)
    args = parser().parse_args(["resume", str(tmp_path / "run"), "--threads", "2"])
    args.imports = ()
    assert runtime_in_place_of(args, tmp_path / "run") == fl.LocalRuntime(threads=2)


def test_a_saved_run_notes_no_secret_of_its_runtime_and_names_what_it_leaves_out():
    environment = {"env_vars": {"KEY": "secret"}, "working_dir": "."}
    actor = fl.Actor(gpus=1, options={"runtime_env": environment, "num_cpus": 2})
    init = {"runtime_env": environment}
    runtime = fl.RayRuntime(place={"learner": actor}, init=init)
    saved = noted(runtime)
    assert "secret" not in str(saved) and saved["runtime_left_out"] == ["place", "init"]
    assert settings_of_runtime(saved, "x", fl.RayRuntime) == {
        "place": {"learner": fl.Actor(gpus=1, options={"num_cpus": 2})},
        "init": {"runtime_env": {"working_dir": "."}},
    }
    assert noted(fl.RayRuntime())["runtime_left_out"] == []
