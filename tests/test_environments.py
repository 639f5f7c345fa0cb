"""Environments of a user's own, however they are named, wherever they run.

From Python and from the command line.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from flowrl.cli.main import main
from flowrl.envs.gym_envs import make_env

TESTS = Path(__file__).parent

ENVS = '''
import os
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np


class Count(gym.Env):
    """Episodes of so many steps, each worth 1. A reset makes a file of its name and its node."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=5, name="none"):
        self.length, self.name = length, name

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        if self.name != "none":
            node = "lacking" if "LACKING" in os.environ else "has"
            Path(os.environ["MARKS"], f"{self.name}-{node}").touch()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), 1.0, self.time == self.length, False, {}


class Times(gym.RewardWrapper, gym.utils.RecordConstructorArgs):
    def __init__(self, env, factor):
        gym.utils.RecordConstructorArgs.__init__(self, factor=factor)
        gym.RewardWrapper.__init__(self, env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


class Class(Count):
    def __init__(self):
        super().__init__(6, f"{WAY}-class")

    def step(self, action):
        if "default_worker" in sys.argv[0]:
            os.write(1, b"loud\\n")  # as a library in C prints, which Ray passes on to the driver
        return super().step(action)


def made():
    return Count(8, f"{WAY}-function")
'''

REGISTERED = """
gym.register(f"Own/{WAY}-v0", entry_point=f"{__name__}:Count", kwargs={"name": f"{WAY}-id"})
gym.register(
    f"Own/{WAY}Wrapped-v0", entry_point=Count, kwargs={"name": f"{WAY}-kwargs"},
    additional_wrappers=(Times.wrapper_spec(factor=10),),
)
"""

GRAPHS = """
import flowrl as fl

def small(env="CartPole-v1"):
    settings = fl.PGSettings(
        num_runners=2, envs_per_runner=4, rollout_length=25, batch_size=200,
        policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
    )
    return fl.pg(env, settings).insert(after="sync", play=fl.Evaluate(every=5, episodes=2))

def wrapped():
    graph = small(f"Own/{WAY}Wrapped-v0").set("runners.env_settings", {"length": 7})
    return graph.set("runners.wrappers", (partial(Times, factor=2),))

def unnamed():
    return small(lambda: Count(9, f"{WAY}-lambda"))

def ninefold():
    return Count(9)
"""

RETURNS = {"id": 5, "kwargs": 140, "class": 6, "lambda": 9, "function": 8}

DRIVER = """
import sys, warnings
warnings.simplefilter("ignore")  # of Ray's own test cluster
WAY = "Python"
{envs}
{registered}
{graphs}
import os, subprocess, contextlib, io, ray
from ray.cluster_utils import Cluster
from flowrl.cli.main import main
from flowrl.algos.named import file_module
from flowrl.runtime.ray import start

CASES = {{
    "id": lambda: small("Own/Python-v0"),
    "kwargs": wrapped,
    "class": lambda: small(Class),
    "lambda": unnamed,
    "function": lambda: small(file_module("filed.py").made),
}}


def in_python(case, runtime):
    with fl.run(CASES[case](), runtime=runtime, steps=2_000) as run:
        rows = list(run)
    played = next(row["eval/return_mean"] for row in rows if "eval/return_mean" in row)
    closed, returns = run.audit().closed, list(run.policy.evaluate(2))
    print(case, runtime, rows[-1]["env_steps"], closed, played, returns, flush=True)


def on_the_command_line(case, runtime, *words):
    # As in a process of its own, which knows nothing of what an earlier one imported.
    sys.modules.pop("shelled", None)
    for name in [name for name in gym.registry if name.startswith("Own/Shell")]:
        del gym.registry[name]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        options = ["--runtime", runtime, "--steps", "2000", "--out", f"{{case}}-{{runtime}}"]
        status = main(["run", *words, *options])
    try_it = [line for line in said.getvalue().splitlines() if line.startswith("  last")]
    try_it = try_it or [f"eval {{said.getvalue()}}"]
    print(f"shell {{case}} {{runtime}} {{status}} {{try_it[0].partition('eval ')[2]}}", flush=True)
    return said.getvalue()


def no_cluster(*words):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(["run", "shelled.py:small", "--runtime", "ray", *words])
    print("error", words[-1], status, said.getvalue().splitlines()[-1], flush=True)


def refused(what, call):
    try:
        call()
    except fl.errors.FlowrlError as error:
        print(what, type(error).__name__, error, flush=True)


def everything(cluster):
    path = os.pathsep.join([sys.argv[1], os.environ["PYTHONPATH"]])
    lacking = {{"LACKING": os.getcwd(), "PYTHONPATH": path}}
    cluster.add_node(num_cpus=1, resources={{"big": 1}}, env_vars=lacking)
    os.environ["RAY_ADDRESS"] = cluster.address
    stop = start(None, {{}})
    for runtime in ("local", "ray"):
        for case in CASES:
            in_python(case, runtime)
    big = fl.Actor(options={{"resources": {{"big": 1}}}})
    placed = fl.RayRuntime(place={{"learner": fl.Actor(), "sample": big}})
    settings = fl.IMPALASettings(
        num_runners=2, envs_per_runner=2, rollout_length=20, batch_size=80, report_every=5,
        policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
    )
    with fl.run(fl.impala("Own/PythonWrapped-v0", settings), runtime=placed, steps=800) as run:
        print("placed", list(run)[-1]["env_steps"] >= 800, list(run.policy.evaluate(1)), flush=True)
    for runtime in ("local", "ray"):
        on_the_command_line(
            "id", runtime, "shelled.py:small", "--env", "Own/Shell-v0", "--import", "shelled.py"
        )
        on_the_command_line("kwargs", runtime, "shelled.py:wrapped")
        on_the_command_line("class", runtime, "shelled.py:small", "--env", "shelled.py:Class")
        on_the_command_line("lambda", runtime, "shelled.py:unnamed")
        on_the_command_line("function", runtime, "shelled.py:small", "--env", "shelled.py:made")
    import packaged
    refused("id", lambda: list(fl.run(small("Own/Packaged-v0"), runtime="ray", steps=200)))
    local = lambda: fl.chain(map=fl.Map(packaged.same))
    chained = lambda: small().set("sample.local", local())
    refused("chain", lambda: list(fl.run(chained(), runtime="ray", steps=200)))
    importing = lambda: fl.RayRuntime(imports=["packaged"])
    refused("imports", lambda: list(fl.run(small(), runtime=importing(), steps=200)))
    there = fl.RayRuntime(place={{"learner": big}})
    mapped = lambda: small().insert(after="sample", map=fl.Map(packaged.same))
    refused("learner", lambda: list(fl.run(mapped(), runtime=there, steps=200)))
    stop()
    del os.environ["RAY_ADDRESS"]
    at = ["--address", cluster.address]
    rows = io.StringIO()
    with contextlib.redirect_stdout(rows):
        heard = on_the_command_line(
            "packaged", "ray", "shelled.py:small", "--env", "packaged:Class", "--working-dir", ".",
            *at, "--processes", "2", "--place", "learner", "--json",
        )
    print("rows", "loud" in heard, rows.getvalue().replace("\\n", " | "), flush=True)
    no_cluster(*at, "--place", "learner=Actor(gpus=2)")
    no_cluster(*at, "--place", "learner=Actor(options={{'num_cpus': 3}})")
    no_cluster("--address", "127.0.0.1:1")
    variables = {{k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}}
    code = "import sys; from flowrl.runtime.ray import start; start(sys.argv[1], {{}})"
    done = subprocess.run(
        [sys.executable, "-c", code, cluster.address], env=variables, text=True, capture_output=True
    )
    print("no token", done.stderr.splitlines()[-1], flush=True)


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1}})
    try:
        everything(cluster)
    finally:  # whatever goes wrong: its processes would live on
        cluster.shutdown()
"""


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    """What one driver says that runs all of it, over a node that has its folder and a node that
    lacks it; the folder, and where runners were."""
    folder, marks = tmp_path_factory.mktemp("driver"), tmp_path_factory.mktemp("marks")
    (folder / "driver.py").write_text(
        DRIVER.format(envs=ENVS, registered=REGISTERED, graphs=GRAPHS)
    )
    (folder / "shelled.py").write_text('WAY = "Shell"\n' + ENVS + REGISTERED + GRAPHS)
    (folder / "filed.py").write_text('WAY = "File"\n' + ENVS)
    (folder / "packaged.py").write_text(
        'WAY = "Packaged"\n' + ENVS + REGISTERED + "\n\ndef same(batch):\n    return batch\n"
    )
    # Every process of the cluster knows the token, which is no secret here.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    env = {**os.environ, **token, "PYTHONPATH": str(TESTS.parent), "MARKS": str(marks)}
    command = [sys.executable, "driver.py", str(TESTS / "lacking")]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines(), folder, {path.name for path in marks.iterdir()}


def said(lines, start):
    """The rest of the line that starts so."""
    found = [line.removeprefix(start) for line in lines if line.startswith(start)]
    assert found, lines
    return found[0].strip()


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(450)
@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("case", RETURNS)
def test_from_python_they_train_and_are_evaluated(everywhere, case, runtime):
    lines, _, marks = everywhere
    value = float(RETURNS[case])
    steps, closed, played, evaluated = said(lines, f"{case} {runtime} ").split(" ", 3)
    assert (
        int(steps) >= 2_000
        and closed == "True"
        and float(played) == value
        and evaluated == str([value, value])
    )
    way = "File" if case == "function" else "Python"
    assert {f"{way}-{case}-has", f"{way}-{case}-lacking"} <= marks, "runners on both nodes"


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(450)
@pytest.mark.parametrize("case", RETURNS)
def test_from_the_command_line_they_train_and_what_is_printed_evaluates_them(
    everywhere, case, capsys, monkeypatch
):
    lines, folder, marks = everywhere
    assert {f"Shell-{case}-has", f"Shell-{case}-lacking"} <= marks, "runners on both nodes"
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MARKS", str(folder))
    for runtime in ("local", "ray"):
        status, command = said(lines, f"shell {case} {runtime} ").split(" ", 1)
        assert status == "0"
        command = command.partition(", for the environment has no name")[0].replace(
            "FILE.py:FUNCTION", "shelled.py:ninefold"
        )
        words = shlex.split(command)
        assert words[0] == f"{case}-{runtime}" and len(words) == 3
        monkeypatch.delitem(sys.modules, "shelled", raising=False)
        for name in [name for name in gym.registry if name.startswith("Own/")]:
            monkeypatch.delitem(gym.registry, name)
        assert main(["eval", words[0]]) == 2, (
            "without what the command names there is no environment"
        )
        assert main(["eval", *words, "--episodes", "2"]) == 0
        assert f"mean {RETURNS[case]:.1f}, std 0.0" in capsys.readouterr().out


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(450)
def test_a_module_that_a_node_lacks_ends_the_run_at_once_with_the_way_out_which_works(everywhere):
    lines, folder, _ = everywhere
    assert said(lines, "placed ") == "True [50.0]"
    for what in ("id", "chain", "imports", "learner"):
        text = said(lines, f"{what} SettingError ")
        assert text.startswith(
            "pg.map: learner: " if what == "learner" else "pg.sample: runners, worker "
        )
        assert " has no module 'packaged'" in text and "restarted" not in text
        assert (
            f"; here it is in the folder {folder.resolve()}. Let Ray copy that to every node: "
            in text
        )
        assert (
            "fl.RayRuntime(init={'runtime_env': {'working_dir': '.'}}), or --working-dir . on the "
            "command line" in text
        )
    assert ": Own/Packaged-v0 could not be made: ModuleNotFoundError: " in said(
        lines, "id SettingError "
    )


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(450)
def test_the_command_line_joins_a_cluster_ships_code_to_it_and_places_the_learner(everywhere):
    lines, folder, marks = everywhere
    assert {"Packaged-class-has", "Packaged-class-lacking"} <= marks, "runners on both nodes"
    assert (folder / "packaged-ray/policy").is_dir()
    # What runners print comes on standard error, so that each line is a row.
    *rows, end = said(lines, "rows True ").removesuffix(" |").split(" | ")
    assert [json.loads(row)["row"] for row in rows] == list(range(1, len(rows) + 1)) != []
    assert end == "shell packaged ray 0 packaged-ray --import packaged"
    about = json.loads((folder / "packaged-ray/run.json").read_text())
    assert {"address", "place", "processes", "init"} <= set(about["runtime_settings"])
    assert "0" * 64 not in str(about), "the token is no part of it"


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(450)
def test_what_a_cluster_can_not_meet_and_a_wrong_address_or_token_are_errors_at_once(everywhere):
    lines, _, _ = everywhere
    assert said(lines, "error learner=Actor(gpus=2) 2 ").startswith(
        "flowrl: pg: place: learner asks for 2 GPU in one process, but the cluster has 0, at most "
        "0 on one of its 2 nodes; ask for less"
    )
    assert said(lines, "error learner=Actor(options={'num_cpus': 3}) 2 ").startswith(
        "flowrl: pg: place: learner asks for 3 CPU in one process, but the cluster has 2, at most "
        "1 on one of its 2 nodes; "
    )
    assert said(lines, "error 127.0.0.1:1 2 ").startswith(
        "flowrl: pg: Ray could not be joined at 127.0.0.1:1: nobody listens there (Connection "
        "refused); check that `ray start --head` runs on that machine, "
    )
    text = said(lines, "no token ")
    assert "Ray could not be joined at " in text and "token is missing or incorrect; take" in text


def test_a_warning_of_mujoco_is_logged_once_and_makes_no_file(tmp_path, monkeypatch, capfd, caplog):
    mujoco = pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    mujoco.set_mju_user_warning(None)
    made = [make_env("InvertedPendulum-v5", 1, (), {}) for _ in range(2)]
    for env in made:
        env.reset(seed=0)
        # So fast that the simulation breaks down.
        env.unwrapped.data.qvel[:] = 1e15
        mujoco.mj_step(env.unwrapped.model, env.unwrapped.data)
    assert [r.getMessage()[:16] for r in caplog.records] == ["MuJoCo: Nan, Inf"]
    mujoco.get_mju_user_warning()("'x' is deprecated")
    assert len(caplog.records) == 1
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []
    mujoco.set_mju_user_warning(own := print)
    made.append(make_env("InvertedPendulum-v5", 1, (), {}))
    assert mujoco.get_mju_user_warning() is own
    mujoco.set_mju_user_warning(None)
    for env in made:
        env.close()
