"""What other processes get of the driver: registered environments and imports.

And what to say where a node lacks a module.
"""

import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

import flowrl as fl
from conftest import RAY
from environments import Clockwork
from flowrl.envs.jax_envs import package
from flowrl.errors import SettingError
from flowrl.runtime.driver import (
    Imported,
    _read,
    _wrapper,
    context,
    missing,
    on_this_node,
    problem_of,
    way_out,
)

SMALL = fl.PGSettings(
    num_runners=2,
    envs_per_runner=1,
    rollout_length=8,
    batch_size=16,
    policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
)


@pytest.fixture
def registry(monkeypatch):
    """The registry, whose changes end with the test."""
    monkeypatch.setattr(gym.envs.registration, "registry", known := dict(gym.registry))
    monkeypatch.setattr(gym, "registry", known)
    return known


def remote(code, **variables):
    """What a fresh process prints that enters the context of this one and runs code."""
    sent = pickle.dumps(context())
    begin = (
        "import pickle, sys; out = sys.stdout; pickle.loads(sys.stdin.buffer.read()).enter(); "
        "import gymnasium as gym\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        input=sent,
        capture_output=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_what_is_registered_here_is_made_in_other_processes_as_it_is_here(registry):
    lock = threading.Lock()
    gym.register(
        "Own/Long-v1", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=7
    )
    gym.register(
        "Own/Lambda-v0", entry_point=lambda length: Clockwork((length,)), kwargs={"length": 4}
    )
    gym.register(
        "Own/Vector-v0",
        vector_entry_point=lambda num_envs, **_: gym.vector.SyncVectorEnv([Clockwork] * num_envs),
    )
    gym.register("Own/Locked-v0", entry_point=Clockwork, kwargs={"lengths": lock})
    registry["CartPole-v1"] = EnvSpec(
        "CartPole-v1", entry_point=Clockwork, kwargs={"lengths": (2,)}
    )
    code = """
long, vector = gym.spec("Own/Long-v1"), gym.make_vec("Own/Vector-v0", 3, "vector_entry_point")
print(long.max_episode_steps, gym.make("Own/Lambda-v0").unwrapped.lengths, file=out)
print(vector.num_envs, gym.make("CartPole-v1").unwrapped.lengths, file=out)
try:
    gym.make("Own/Locked-v0")
except Exception as error:
    print(type(error).__name__, error, file=out)
"""
    first, second, third = remote(code).splitlines()
    assert first == "7 (4,)" and second == "3 (2,)"
    assert third.startswith(
        "SettingError Own/Locked-v0 (its entry point or kwargs) can't be sent to another process: "
        "cannot pickle '_thread.lock'"
    )


def test_a_file_is_imported_in_other_processes_from_its_text_and_once(tmp_path):
    (tmp_path / "side.py").write_text(
        "import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\nclass Here: ...\n"
    )
    module = context([str(tmp_path / "side.py")]).imports[0]
    (tmp_path / "side.py").unlink()
    try:
        module.enter()
        module.enter()
        assert sys.counted == 1 and sys.modules["side"].Here.__module__ == "side"
    finally:
        del sys.modules["side"], sys.counted
    latin = tmp_path / "latin.py"
    latin.write_bytes(b"name = '\xe9'\n")
    with pytest.raises(SettingError, match=r"imports: .*latin.py can't be read: .*save it as UTF"):
        context([str(latin)])
    latin.write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    assert "name = 'é'" in context([str(latin)]).imports[0].text
    with pytest.raises(SettingError, match=r"imports: .*side.py can't be read: No such file"):
        context([str(tmp_path / "side.py")])


def test_the_drivers_path_is_absolute(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", "tests"])
    assert context().path == (str(Path.cwd()), str(Path.cwd() / "tests"))


def test_what_a_node_lacks_is_found_in_what_it_caused():
    def lacks():
        try:
            import no_such_module  # noqa: F401
        except ImportError as error:
            raise fl.errors.EnvError("could not be made") from error

    with (
        pytest.raises(SettingError, match=r"node .* has no module 'no_such_module'") as raised,
        on_this_node(),
    ):
        lacks()
    assert (
        raised.value.facts["module"] == "no_such_module"
        and pickle.loads(pickle.dumps(raised.value)).facts == raised.value.facts
    )
    with pytest.raises(fl.errors.EnvError, match="another"), on_this_node():
        raise fl.errors.EnvError("another")
    with (
        pytest.raises(SettingError, match="from the beginning"),
        on_this_node(SettingError("from the beginning")),
    ):
        pass
    assert missing(ValueError()) is None and missing(None) is None
    assert "no_such_module" in str(problem_of(Imported("no_such_module").enter))
    assert problem_of(lambda: None) is None
    assert "can't read what the driver sent: KeyError: 3 (test_driver.py:" in str(
        problem_of(lambda: {}[3])
    )


def test_the_way_out_depends_on_where_the_module_is(tmp_path, monkeypatch):
    assert way_out("numpy.linalg").startswith("install it there, as") and way_out(
        "nowhere"
    ).startswith("install it there, as")
    assert way_out("json").startswith("install it there, as")
    (tmp_path / "code/my_pack").mkdir(parents=True)
    (tmp_path / "code/my_pack/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.chdir(tmp_path)
    assert f"in the folder {tmp_path / 'code'}." in way_out(
        "my_pack.envs"
    ) and "'working_dir': 'code'" in way_out("my_pack.envs")
    monkeypatch.chdir(tmp_path / "code/my_pack")
    assert f"--working-dir {tmp_path / 'code'} on the command line" in way_out("my_pack")


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_an_import_reaches_runners_shards_and_what_is_placed(tmp_path):
    (tmp_path / "reaches.py").write_text(
        f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, f'pid-{{os.getpid()}}').touch()\n"
    )
    graph = fl.apex(
        "CartPole-v1",
        fl.ApexSettings(
            envs_per_runner=2,
            rollout_length=8,
            learning_starts=64,
            buffer_size=400,
            batch_size=16,
            report_every=2,
        ),
    )
    runtime = replace(RAY, place={"learner": fl.Actor()}, imports=[str(tmp_path / "reaches.py")])
    with fl.run(graph, runtime=runtime) as run:
        next(run)
        there = [
            len(run._session.place.handles[name].pool.actors) for name in ("runners", "replay")
        ]
    assert there == [1, 1] and len(list(tmp_path.glob("pid-*"))) == 1 + 1 + 1


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_a_function_may_make_a_registered_environment_and_a_module_that_ray_lacks_ends_the_run(
    registry,
):
    registry["Own/Inner-v0"] = EnvSpec("Own/Inner-v0", entry_point=lambda: Clockwork((3,)))
    with fl.run(fl.pg(lambda: gym.make("Own/Inner-v0"), SMALL), runtime=RAY) as run:
        assert next(run)["length_mean"] == 3
    graph = fl.pg(LacksThere, SMALL).set("runners.on_error", "restart")
    text = (
        r"pg\.sample: runners, worker [01]: node .* has no module 'only_there', so .* raised in "
        r"reset: .*; install it there"
    )
    with pytest.raises(SettingError, match=text):
        list(fl.run(graph, runtime=RAY))


class LacksThere(Clockwork):
    def reset(self, *, seed=None, options=None):
        if "default_worker.py" in sys.argv[0]:
            import only_there  # noqa: F401
        return super().reset(seed=seed, options=options)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_what_the_cluster_does_not_have_is_refused_at_once():
    import ray

    cores = f"{ray.cluster_resources()['CPU']:g}"
    runtime = fl.RayRuntime(place={"learner": fl.Actor(gpus=0, options={"num_cpus": 1_000})})
    text = (
        rf"pg: place: learner asks for 1000 CPU in one process, but the cluster has {cores}, at "
        rf"most {cores} on one of its 1 node; ask for less"
    )
    with pytest.raises(SettingError, match=text):
        fl.run(fl.pg("CartPole-v1", SMALL), runtime=runtime)
    with pytest.raises(
        SettingError,
        match=r"pg: place: learner asks for 9 GPU in one process, but the cluster has \d",
    ):
        fl.run(
            fl.pg("CartPole-v1", SMALL), runtime=fl.RayRuntime(place={"learner": fl.Actor(gpus=9)})
        )
    assert ray.is_initialized(), "it is not this run's to end"


def test_imports_are_a_list():
    with pytest.raises(
        SettingError,
        match=r"imports must be a list of modules, got 'mine'; write imports=\['mine'\]",
    ):
        fl.RayRuntime(imports="mine")


def test_a_wrapper_that_can_not_be_sent_or_read_harms_only_who_makes_an_environment_with_it():
    unsent = _read(_wrapper("mine:Locked", threading.Lock()))
    with pytest.raises(
        SettingError, match=r"mine:Locked can't be sent to another process: cannot pickle"
    ):
        unsent(None)
    with pytest.raises(pickle.UnpicklingError):
        _read(b"what no process can read")(None)


def test_two_files_of_one_name_are_not_taken_for_one(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "module_of_that_name", raising=False)
    Imported("module_of_that_name", str(tmp_path / "a/module_of_that_name.py"), "x = 1").enter()
    Imported("module_of_that_name", str(tmp_path / "a/module_of_that_name.py"), "x = 1").enter()
    with pytest.raises(
        SettingError,
        match=r"b/module_of_that_name\.py can't be imported, for another module_of_that_name "
        r"\(.*a/module_of_that_name.py\) was before",
    ):
        Imported("module_of_that_name", str(tmp_path / "b/module_of_that_name.py"), "x = 2").enter()


def test_a_package_of_an_extra_counts_as_a_module_that_a_node_lacks():
    with pytest.raises(SettingError, match=r"pip install 'flowrl\[jax-envs\]'") as raised:
        package("no_such_package")
    assert missing(raised.value) == "no_such_package"
