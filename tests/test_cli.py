"""The command line: what it prints, where, with which exit status, and what it says of mistakes."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import gymnasium as gym
import pytest

import flowrl as fl
from conftest import same
from flowrl.algos import STOCK
from flowrl.algos.named import build, find, parse_value
from flowrl.cli.arguments import import_named, runtime_of
from flowrl.cli.ending import program
from flowrl.cli.main import main, parser
from flowrl.errors import GraphError
from flowrl.observe.goal import parse_until
from flowrl.observe.sinks import columns

SMALL = [
    "--set",
    "envs_per_runner=4",
    "--set",
    "rollout_length=16",
    "--set",
    "batch_size=64",
    "--set",
    "minibatch_size=32",
    "--set",
    "epochs=1",
    "--untuned",
]


@pytest.fixture
def flowrl(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        try:
            status = main(args)
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


MINE = """
from __future__ import annotations
from typing import TYPE_CHECKING
import gymnasium as gym
import flowrl as fl
if TYPE_CHECKING:
    from collections.abc import Callable


class Corridor(gym.Env):
    pass


def mine(env: str = "CartPole-v1", lr: float = 1e-3, hook: Callable | None = None):
    return fl.ppo(env, lr=lr)
"""


def test_a_type_that_only_type_checkers_import_is_no_obstacle(tmp_path):
    file = tmp_path / "typed_for_checkers.py"
    file.write_text(MINE)
    source = find(f"{file}:mine")
    assert source.hints == {"env": str, "lr": float}
    assert build(source, None, {}, [("lr", 0.5)]).resources["learner"].optimizer.lr == 0.5
    with pytest.raises(GraphError, match=r"Corridor is an environment.*--env FILE\.py:Corridor"):
        find(f"{file}:Corridor")


def test_list_is_a_line_for_each_stock_graph(flowrl):
    status, out, _ = flowrl("list")
    assert status == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names == list(STOCK) and len(names) == len(set(names)) == 22


def test_check_plan_and_draw(flowrl, tmp_path):
    assert flowrl("check", "ppo")[:2] == (0, "ppo is sound: 7 operators, 2 resources, 1 stage\n")
    assert (
        "320 gradient steps"
        in flowrl(
            "plan",
            "ppo",
            "--env",
            "CartPole-v1",
            "--set",
            "batch_size=4096",
            "--set",
            "minibatch_size=128",
        )[1]
    )
    assert "● " in flowrl("draw", "a2c")[1]
    assert flowrl("draw", "ppo", "--format", "mermaid")[1].startswith("flowchart")
    assert flowrl("draw", "ppo", "--format", "svg", "-o", "ppo.svg")[:2] == (0, "")
    drawn = (tmp_path / "ppo.svg").read_text()
    assert drawn.startswith("<svg")
    status, _, err = flowrl("draw", "a2c", "--format", "svg", "-o", "ppo.svg")
    assert status == 2 and "ppo.svg exists already" in err and "-o FILE" in err
    assert (tmp_path / "ppo.svg").read_text() == drawn


def test_run_then_eval(flowrl, tmp_path):
    status, out, err = flowrl(
        "run", "ppo", *SMALL, "--steps", "200", "--out", "here", "--seed", "3"
    )
    assert (status, out) == (0, "")
    assert err.startswith(
        "ppo on CartPole-v1, default settings, set envs_per_runner=4, rollout_length=16, batch"
    )
    assert "done: 2" in err
    assert "last    flowrl eval here" in err.replace(sys.argv[0], "flowrl")
    status, out, _ = flowrl("eval", "here", "--episodes", "3")
    assert status == 0
    assert out.startswith("3 episodes, 3 different returns: mean ")
    assert Path("here/command.txt").exists()
    Path("there/seed-1").mkdir(parents=True)
    Path("there/seed-1/mine").touch()
    for more, says in (
        (("here",), "here exists already"),
        (("here", "--seeds", "2"), "here is the directory of one run"),
        (("there", "--seeds", "2"), "there/seed-1 exists already"),
    ):
        status, _, err = flowrl("run", "ppo", "--out", *more)
        assert status == 2
        # It says nothing of a run that can't be.
        assert err.startswith(f"flowrl: {says}")


@pytest.mark.system
def test_what_a_script_starts_in_the_background_can_be_ended_and_saves(tmp_path):
    ignored = [
        "sh",
        "-c",
        "trap '' INT; exec \"$@\"",
        "sh",
    ]  # as a shell has it for what is started by &
    command = [sys.executable, "-m", "flowrl", "run", "ppo", *SMALL, "--out", str(tmp_path / "run")]
    run = subprocess.Popen([*ignored, *command], stderr=subprocess.DEVNULL)
    rows, deadline = tmp_path / "run/rows.jsonl", time.monotonic() + 240
    while not (rows.exists() and rows.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    try:
        assert run.wait(timeout=240) == 130 and (tmp_path / "run/policy").is_dir()
    finally:
        run.kill()


def test_a_run_by_the_module_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/any/flowrl/__main__.py", "run", "ppo"])
    with fl.run(
        fl.ppo("CartPole-v1", fl.PPOSettings(batch_size=64, rollout_length=16)),
        out=tmp_path / "run",
    ):
        assert (tmp_path / "run/command.txt").read_text().startswith("python -m flowrl run ppo\n")


def test_json_is_one_object_a_row_and_nothing_else(flowrl):
    status, out, err = flowrl("run", "ppo", *SMALL, "--steps", "200", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [r["row"] for r in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["env_steps"] >= 200
    folder = next(Path("runs").iterdir())
    assert folder.name.startswith("ppo-CartPole-v1-2")
    assert [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()] == rows
    assert "rows" in err


def test_a_goal_that_is_not_reached_is_status_1(flowrl):
    status, _, err = flowrl("run", "ppo", *SMALL, "--steps", "100", "--until", "return_mean>=475")
    assert status == 1
    assert "not solved: return_mean>=475 was not reached within" in err
    status, _, err = flowrl("run", "ppo", *SMALL, "--until", "updates>=2")
    assert status == 0
    assert "solved: updates>=2 after" in err


def test_tuned_settings_are_used_and_named(flowrl):
    _, out, _ = flowrl("plan", "ppo", "--env", "Pendulum-v1")
    assert "4 envs x 1,024 steps" in out.replace("1024", "1,024")
    _, _, err = flowrl("run", "ppo", "--env", "CartPole-v1", "--steps", "1")
    assert "tuned settings (" in err.splitlines()[0]
    assert "lr=0.001" in err.splitlines()[0]


def test_graphs_of_the_users_own_by_file_and_by_package(flowrl, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            import flowrl as fl

            def fixed():
                return fl.ppo("CartPole-v1", fl.PPOSettings(batch_size=1024))

            def keywords(env, lr=1e-3, minibatch_size=None):
                made = fl.ppo(env, fl.PPOSettings(lr=lr, minibatch_size=minibatch_size))
                return made.rename("kw")

            @dataclass(frozen=True)
            class Mine:
                size: int = 256

            def withdata(env: str = "Pendulum-v1", settings: Mine = Mine()):
                return fl.ppo(env, fl.PPOSettings(batch_size=settings.size, minibatch_size=None))

            def bad():
                return 3

            def needs(env, width):
                return fl.ppo(env)
            """
        )
    )
    assert flowrl("check", "mine.py:fixed")[0] == 0
    status, _, err = flowrl("check", "mine.py:fixed", "--env", "CartPole-v1")
    assert (status, err) == (
        2,
        "flowrl: fixed takes no environment, so --env CartPole-v1 can't be used; leave it out\n",
    )
    assert (
        "kw: 1 stage"
        in flowrl("plan", "mine.py:keywords", "--env", "CartPole-v1", "--set", "lr=1")[1]
    )
    assert (
        flowrl("plan", "mine.py:keywords")[2] == "flowrl: keywords needs an environment: --env ID\n"
    )
    assert "1,024 steps, [" in flowrl("plan", "mine.py:withdata", "--set", "size=1000")[1]
    monkeypatch.syspath_prepend(tmp_path)
    assert flowrl("check", "mine:withdata")[0] == 0
    assert flowrl("check", "mine.py:bad")[2] == "flowrl: bad returned an int, not a Graph\n"
    assert (
        "its parameter width must have a default"
        in flowrl("check", "mine.py:needs", "--env", "CartPole-v1")[2]
    )
    assert "has no function 'fixd'; did you mean 'fixed'?" in flowrl("check", "mine.py:fixd")[2]


def test_a_network_in_a_file_is_loaded_by_the_command_that_the_run_prints(flowrl, tmp_path):
    (tmp_path / "netfile.py").write_text(
        textwrap.dedent(
            """
            from flax import nnx
            import flowrl as fl

            class Net(nnx.Module):
                def __init__(self, obs_space, action_space, *, rngs):
                    outputs = fl.networks.action_outputs(action_space) + 1
                    self.out = nnx.Linear(obs_space.shape[0], outputs, rngs=rngs)

                def __call__(self, obs):
                    x = self.out(obs)
                    return x[:, :-1], x[:, -1]

            def g():
                settings = fl.PPOSettings(
                    envs_per_runner=2, rollout_length=8, batch_size=16, minibatch_size=None,
                    policy=fl.Policy(Net),
                )
                return fl.ppo("CartPole-v1", settings)

            fl.run(g()) if __name__ == "__main__" else None
            """
        )
    )
    _, _, err = flowrl("run", "netfile.py:g", "--steps", "20", "--out", "nf")
    assert re.search(r"last +\S*flowrl eval nf --import netfile.py\n", err)
    assert "allow it with --import netfile" in flowrl("eval", "nf")[2]
    assert flowrl("eval", "nf", "--episodes", "1", "--import", "netfile.py")[0] == 0
    del sys.modules["netfile"]
    assert flowrl("eval", "nf", "--episodes", "1", "--import", "netfile.py")[0] == 0


def test_environments_of_a_file_are_named_by_it_and_another_one_may_play(flowrl, tmp_path):
    (tmp_path / "arcade.py").write_text(
        textwrap.dedent(
            """
            from functools import partial
            import gymnasium as gym
            import flowrl as fl
            from environments import Clockwork

            class Short(Clockwork):
                def __init__(self, length=2):
                    super().__init__((length,))

            def other():
                return gym.make("Pendulum-v1")

            def g():
                policy = fl.Policy(fl.networks.MLP, hidden=(4,))
                settings = fl.PGSettings(
                    envs_per_runner=2, rollout_length=8, batch_size=16, policy=policy
                )
                graph = fl.pg("CartPole-v1", settings)
                graph = graph.set("runners.env", partial(Short, length=3))
                return graph.set("runners.wrappers", (lambda env: env,))

            def p():
                return g().set("runners.wrappers", ())
            """
        )
    )
    assert (
        "--env arcade.py needs what makes the environment in it: arcade.py:NAME; it has Short, "
        "other, g, p" in flowrl("plan", "pg", "--env", "arcade.py")[2]
    )
    assert (
        "arcade.py has no function or class 'Shrt'; did you mean 'Short'?"
        in flowrl("plan", "pg", "--env", "arcade.py:Shrt")[2]
    )
    _, _, err = flowrl("run", "arcade.py:p", "--steps", "20", "--out", "p")
    assert (
        re.search(r"last +\S*flowrl eval p --import arcade.py\n", err)
        and "of Short"
        in Path("p/plan.txt").read_text() + flowrl("plan", "p", "--import", "arcade.py")[1]
    )
    assert ": mean 3.0," in flowrl("eval", "p", "--episodes", "1", "--import", "arcade.py")[1], (
        "a partial is saved with its arguments"
    )
    _, _, err = flowrl("run", "arcade.py:g", "--steps", "20", "--out", "g", "--record")
    assert (
        "records flowrl rerun g --import arcade.py" in err
        and "eval g --env FILE.py:FUNCTION, for the environment has no name" in err
    )
    assert "flowrl eval DIR --env FILE.py:FUNCTION" in flowrl("eval", "g")[2]
    assert ": mean 2.0," in flowrl("eval", "g", "--env", "arcade.py:Short", "--episodes", "1")[1]
    assert (
        "other has other spaces than this policy: obs Box("
        in flowrl("eval", "g", "--env", "arcade.py:other")[2]
    )


def test_what_is_imported_for_an_id_is_named_where_a_run_ends_and_reaches_every_process(
    flowrl, tmp_path, monkeypatch
):
    monkeypatch.setattr(gym.envs.registration, "registry", known := dict(gym.registry))
    monkeypatch.setattr(gym, "registry", known)
    text = (
        "import gymnasium as gym\nfrom environments import Clockwork\n"
        "gym.register('Own/Clock-v0', entry_point=Clockwork)\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/clocks.py").write_text(text)
    words = ["--import", "json", "--import", "sub/clocks.py"]
    _, _, err = flowrl(
        "run",
        "pg",
        "--env",
        "Own/Clock-v0",
        *words,
        "--set",
        "batch_size=64",
        "--set",
        "rollout_length=8",
        "--steps",
        "20",
        "--out",
        "c",
    )
    assert re.search(r"last +\S*flowrl eval c --import json --import sub/clocks.py\n", err)
    args = parser().parse_args(["run", "pg", *words, "--runtime", "ray", "--working-dir", "sub"])
    import_named(args)
    runtime = runtime_of(args)
    assert runtime.imports == ("json", "sub/clocks.py") and runtime.init == {
        "runtime_env": {"working_dir": "sub"}
    }


def test_a_script_without_a_guard_does_not_train_when_it_is_only_imported(
    flowrl, tmp_path, monkeypatch
):
    (tmp_path / "unguarded.py").write_text("import flowrl as fl\nfl.run(fl.ppo())\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        "put what starts it under `if __name__ == '__main__':`" in flowrl("check", "unguarded:g")[2]
    )


def test_a_saved_graph_runs_again(flowrl):
    flowrl("run", "ppo", *SMALL, "--steps", "60", "--out", "a")
    status, _, err = flowrl("run", "a/graph.txt", "--steps", "60", "--out", "b")
    assert status == 0, err
    assert Path("a/graph.txt").read_text() == Path("b/graph.txt").read_text()
    rows = [
        [json.loads(line)["loss"] for line in Path(f"{d}/rows.jsonl").read_text().splitlines()]
        for d in "ab"
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "graph",
    [
        "ppo",
        "pg",
        "a2c",
        "a3c",
        "impala",
        "appo",
        "dqn",
        "rainbow",
        "apex",
        "r2d2",
        "sac",
        "es",
        "ars",
    ],
)
@pytest.mark.parametrize("name", ["lr", "learner.optimizer.lr"])
def test_a_schedule_is_a_setting_of_every_stock_graph(graph, name):
    env = "Pendulum-v1" if graph == "sac" else "CartPole-v1"
    made = build(find(graph), env, {}, [(name, parse_value(" fl.Cosine(1e-3, 0.0, 65_000)"))])
    assert made.resources["learner"].optimizer.lr == fl.Cosine(1e-3, 0.0, 65_000)


def test_a_run_follows_the_schedule_that_the_command_line_gives(flowrl):
    """It ends after the two gradient steps of the first row, so the weights of a longer run are the
    same."""
    weights = []
    for steps in ("64", "128"):
        given = [
            "--set",
            "lr=Linear(1e-2, 0, 2)",
            "--set",
            "policy=Policy(networks.MLP, hidden=(8,))",
        ]
        assert flowrl("run", "ppo", *SMALL, *given, "--steps", steps, "--out", steps)[0] == 0
        weights.append(fl.load(steps).weights)
    assert len(Path("128/rows.jsonl").read_text().splitlines()) > 1
    assert same(*weights) and weights[0].params["actor/layers/0/kernel"].shape == (4, 8)
    assert "lr=Linear(start=0.01, end=0, steps=2)" in Path("64/graph.txt").read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["plan", "pppo"], "unknown graph 'pppo'; did you mean 'ppo'? Known: ppo, a2c, a3c, pg"),
        (
            ["plan", "ppo", "--set", "hidden=64"],
            "ppo.hidden: takes whole numbers such as (64, 64) or None, got 64",
        ),
        (
            ["plan", "ppo", "--set", "epoch=3"],
            "ppo: unknown setting 'epoch'; did you mean 'epochs'? Known: num_runners,",
        ),
        (
            ["plan", "ppo", "--set", "train.epoch=3"],
            (
                "ppo.train: unknown setting 'epoch'; did you mean 'epochs'? Known: epochs, "
                "minibatch_size, shuffle, learner"
            ),
        ),
        (
            ["plan", "ppo", "--set", "trian.epochs=3"],
            "ppo: unknown node or resource 'trian'; did you mean 'train'?",
        ),
        (
            ["plan", "ppo", "--set", "policy.hidden=[3]"],
            "policy is a setting of ppo and is given whole: policy=..., or hidden=...",
        ),
        (["plan", "ppo", "--set", "policy.x=3"], "ppo and is given whole: policy=...\n"),
        (["plan", "ppo", "--set", "epochs=many"], "ppo.epochs: takes a whole number, got 'many'"),
        (["plan", "ppo", "--set", "train.epochs=0"], "ppo.train: epochs must be at least 1, got 0"),
        (
            ["plan", "ppo", "--set", "lr=Linaer(1e-3, 0, 9)"],
            "--set lr: line 1: unknown name 'Linaer'; did you mean 'Linear'?",
        ),
        (
            ["plan", "ppo", "--set", "learner.optimizer.lr=Linear(1e-3, 0"],
            "--set learner.optimizer.lr: line 1 is no value: '(' was never closed",
        ),
        (
            ["plan", "ppo", "--set", "lr=Linear(1e-3)"],
            (
                "--set lr: line 1: Linear.__init__() missing 2 required positional arguments: "
                "'end' and"
            ),
        ),
        (
            ["plan", "ppo", "--set", "lr=Linear(1e-3, 0, 0)"],
            "--set lr: line 1: Linear: steps of a schedule must be at least 1, got 0",
        ),
        (
            ["plan", "ppo", "--set", "lr=Linear(-1, 0, 9)"],
            "start and end of a schedule must be finite and not negative, got start=-1, end=0",
        ),
        (
            ["plan", "ppo", "--set", "lr=Linear('1', 0, 9)"],
            "Linear takes the numbers start, end and steps, got ('1', 0, 9)",
        ),
        (
            ["plan", "ppo", "--set", "lr=Adam()"],
            "ppo.lr: takes a number or Linear(...) or Cosine(...), got Adam(lr=",
        ),
        (
            ["plan", "ppo", "--set", "lr=fast"],
            "ppo.lr: takes a number or Linear(...) or Cosine(...), got 'fast'",
        ),
        (
            ["plan", "ppo", "--set", "learner.optimizer.lr=Adam()"],
            "ppo.learner.optimizer.lr: takes a number or Linear(...) or Cosine(...), got Adam(lr=",
        ),
        (
            ["plan", "ppo", "--set", "lr=__import__('os').system('touch x')"],
            "is more than plain data",
        ),
        (
            ["plan", "ppo", "--set", "lr=load('os:getcwd')()"],
            "this needs code from 'os', which is not flowrl's own; allow it with --import os",
        ),
        (["plan", "ppo", "--set", "epochs"], "--set takes NAME=VALUE, got 'epochs'"),
        (
            ["plan", "ppo", "--set", "learner.loss.clip_ratio=-1"],
            "ppo.learner.loss: clip_ratio must be above 0, got -1.0",
        ),
        (["plan", "ppo", "--env", "CartPole-v9"], "ppo.runners: "),
        (["plan", "ppo", "--env", "Cartpol-v1"], "did you mean 'CartPole-v1'?"),
        (
            ["plan", "ppo", "--set", "minibatch_size=100", "--untuned"],
            (
                "ppo.train: minibatch_size=100 does not divide the batch of 1,024 steps; take 64 "
                "or 128"
            ),
        ),
        (
            ["run", "ppo", "--until", "return_mean"],
            "--until takes a comparison such as 'return_mean>=475', got 'return_mean'",
        ),
        (
            ["run", "ppo", "--until", "return>=475"],
            "--until: unknown column 'return'; did you mean 'return_mean'?",
        ),
        (["run", "ppo", "--steps", "-5"], "must be a whole number of at least 1, got -5"),
        (["run", "ppo", "--runtime", "cloud"], "unknown runtime 'cloud'. Known: local, ray, xla"),
        (["run", "ppo", "--runtime", "GPU"], "local, ray, xla; they use a GPU by themselves if"),
        (["plan", "nothere.py:f"], "there is no file nothere.py; its path begins in the folder"),
        (["plan", "/none/graph.py:f"], "no file /none/graph.py; is its path right?"),
        (["plan", "no.such.module:f"], "can't load 'no.such.module:f'"),
        (["plan", "none/graph.txt"], "there is no file none/graph.txt"),
        (
            ["diff", "runs/none", "ppo"],
            "runs/none is not there; name a run's directory, a stock graph (ppo, a2c",
        ),
        (["plan", "/"], "/ has no graph.txt, so it is no run's directory; name"),
        (["explain", __file__], "test_cli.py is a file; name the directory of a run, as flowrl"),
        (
            ["eval", "nothing"],
            "no directory nothing; name the directory of a run, as flowrl run --out",
        ),
        (
            ["plan", "ppo", "--import", "no_such_package"],
            "--import no_such_package: No module named 'no_such_package'",
        ),
        (
            ["draw", "ppo", "--format", "png"],
            "unknown format 'png'. Known: text, mermaid, dot, svg",
        ),
        (["draw", "ppo", "-o", "/dev/null/x.svg"], "can't be written: /dev/null is no directory"),
        (
            ["plan", "ppo", "--env", "own_envs:Corridor-v9"],
            "would import own_envs; import it yourself (--import own_envs",
        ),
        (
            ["plan", "ppo", "--env", "no.such.module:Corridor"],
            "can't load 'no.such.module:Corridor'",
        ),
        (["plan", "ppo", "--env", "environments:Coridor"], "can't load 'environments:Coridor'"),
        (
            ["plan", "ppo", "--env", "environments:LENGTHS"],
            "--env environments:LENGTHS is a tuple; name a function or a class",
        ),
        (["plan", "ppo", "--env", "nothere.py:f"], "there is no file nothere.py"),
        (
            ["run", "ppo", "--working-dir", "."],
            (
                "--working-dir is copied to the nodes of a Ray cluster: add --runtime ray, or "
                "leave it out"
            ),
        ),
        (
            ["run", "ppo", "--runtime", "xla", "--seeds", "2", "--working-dir", "."],
            "--working-dir is copied to the nodes of a Ray cluster",
        ),
        (
            ["run", "ppo", "--address", "head:6379"],
            "--address names the Ray to join: add --runtime ray, or leave it out",
        ),
        (["run", "ppo", "--place", "learner"], "--place gives Ray processes to resources and"),
        (["run", "ppo", "--processes", "2"], "--processes is how many Ray processes share the"),
        (["run", "ppo", "--processes", "0"], "must be a whole number of at least 1, got 0"),
        (
            ["run", "ppo", "--runtime", "ray", "--place", "learner=gpu:1"],
            (
                "--place takes NAME or 'NAME=Actor(...)', such as learner or "
                "'learner=Actor(gpus=2)', got 'learner=gpu:1'"
            ),
        ),
        (
            ["run", "ppo", "--runtime", "ray", "--place", "learner=Actor(gpus='1')"],
            "--place learner: line 1: gpus must be None or not negative, got '1'",
        ),
        (
            ["run", "ppo", "--runtime", "ray", "--place", "learner", "--place", "learner"],
            "--place names learner twice; give it once",
        ),
        (
            ["run", "ppo", "--runtime", "ray", "--place", "lerner"],
            "place: unknown resource or first node of a stage 'lerner'; did you mean 'learner'?",
        ),
        (
            ["run", "ppo", "--runtime", "ray", "--address", "head"],
            "address must be HOST:PORT of the head of a Ray cluster, such as 10.0.0.5:6379",
        ),
        ([], "required"),
    ],
)
def test_a_mistake_is_one_clear_message_on_standard_error_and_status_2(flowrl, args, says):
    status, out, err = flowrl(*args)
    assert (status, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_a_setting_that_changes_nothing_is_named(capsys):
    mine = ("--set", "policy=Policy(networks.MLP, hidden=(8,))", "--set", "hidden=(64,)")
    for settings, end in (
        ((*mine, "--set", "epochs=3"), "epochs=3, of which hidden changes nothing\n"),
        ((*mine, "--set", "normalize=True"), "of which hidden, normalize change nothing\n"),
        (("--set", "hidden=(64,)", "--set", "lr=0.001"), "set hidden=(64,), lr=0.001\n"),
    ):
        assert main(["plan", "ppo", *settings]) == 0
        assert capsys.readouterr().err.endswith(end)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run ppo --step 10", "run: unknown option --step; did you mean --steps?"),
        ("run ppo --step=10", "run: unknown option --step; did you mean --steps?"),
        ("run ppo --lr 3", "run: unknown option --lr; a setting is given as --set NAME=VALUE."),
        (
            "export here --format onnx",
            "export: unknown option --format; did you mean -o FILE.onnx?",
        ),
        ("export here --out here.onnx", "export: unknown option --out; did you mean -o?"),
        ("run ppo --output x", "run: unknown option --output; did you mean --out?"),
        (
            "run ppo --enviroment Acrobot-v1",
            "run: unknown option --enviroment; did you mean --env?",
        ),
        ("eval here --bogus", "eval: unknown option --bogus."),
        ("run ppo --steps 5k", "run: --steps: must be a whole number of at least 1, got 5k."),
        (
            "run ppo Acrobot-v1",
            "run: unexpected 'Acrobot-v1'; an environment is given as --env Acrobot-v1.",
        ),
        ("run ppo lr=3", "run: unexpected 'lr=3'; a setting is given as --set lr=3."),
        ("explain here there", "explain: unexpected 'there'."),
        ("run", "run: the following arguments are required: GRAPH."),
    ],
)
def test_a_mistyped_option_is_one_line_that_names_the_way_out(flowrl, words, says):
    command = words.split()[0]
    assert flowrl(*words.split()) == (2, "", f"flowrl {says} See flowrl {command} --help\n")


def test_a_missing_file_is_reported_with_the_one_that_is_there(flowrl, tmp_path):
    (tmp_path / "crossq.py").touch()
    status, _, err = flowrl("plan", f"{tmp_path}/crosq.py:crossq")
    assert status == 2
    assert f"no file {tmp_path}/crosq.py; did you mean {tmp_path}/crossq.py?" in err


def test_without_a_command_all_are_listed_and_version_is_one_line(flowrl):
    status, _, err = flowrl()
    assert status == 2 and "train step by step" in err
    assert flowrl("--version") == (0, f"flowrl {fl.__version__}\n", "")


def test_a_missing_run_is_reported_with_those_that_are_there(flowrl, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/graph.txt").touch()
    for words in ("eval", "resume", "explain", "why", "rerun"):
        status, _, err = flowrl(words, str(tmp_path / "mien"))
        assert (status, f"{tmp_path}/mien; name one of the runs there: {tmp_path}/mine" in err) == (
            2,
            True,
        )


NOBODY = """
import os, sys
from flowrl.core.saved_rows import no_directory
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
print(no_directory(sys.argv[1] + "/mien"), no_directory(sys.argv[1] + "/secret/mien"))
"""


def test_folders_of_other_users_do_not_hide_a_missing_run():
    # Not in tmp_path, which is this user's alone.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "mine").mkdir()
        (Path(folder) / "mine/graph.txt").touch()
        (Path(folder) / "secret").mkdir(0)
        command = [sys.executable, "-c", NOBODY, folder]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.startswith(f"there is no directory {folder}/mien; name one of the runs there: ")
        assert "/secret/mien; name the directory of a run, as flowrl" in said


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            "fl.Replay(num_slots=3)",
            "Replay: unknown setting 'num_slots'; did you mean 'n_step'? Known: ",
        ),
        ("fl.Concat(1.5)", "Concat.batch_size: takes a whole number, got 1.5 (mistaken.py:5)\n"),
        ("1 / 0", "ZeroDivisionError: division by zero (mistaken.py:5)\n(--debug shows more)"),
        ("json.loads('{')", "(mistaken.py:5)\n(--debug shows more)"),
    ],
)
def test_a_mistake_in_a_file_of_the_users_own_is_reported_with_its_line(
    wrong, says, flowrl, tmp_path
):
    file = tmp_path / f"mistaken_{len(says)}.py"
    file.write_text(f"import json\nimport flowrl as fl\n\ndef graph():\n    return {wrong}\n")
    status, _, err = flowrl("plan", f"{file}:graph")
    assert status == 2
    shown = err.replace(file.name, "mistaken.py")
    assert says in shown and "(mistaken.py:5)" in shown


def test_debug_shows_the_traceback(flowrl):
    status, _, err = flowrl("plan", "ppo", "--set", "epoch=3", "--debug")
    assert status == 2
    assert "Traceback" in err
    assert err.rstrip().endswith("policy. Any field of the graph works too: --set node.field=value")


def test_an_error_in_the_users_own_operator_names_its_node(flowrl, tmp_path):
    (tmp_path / "broken.py").write_text(
        textwrap.dedent(
            """
            import flowrl as fl
            import numpy as np

            def graph():
                return fl.ppo("CartPole-v1").insert(after="batch", mine=fl.Map(oops))

            def oops(batch):
                if np.asarray(batch["obs"]).any():
                    raise KeyError("speed")
                return batch
            """
        )
    )
    status, _, err = flowrl("run", "broken.py:graph", "--steps", "10")
    assert status == 2
    assert "in ppo.mine" in err
    assert "KeyError" in err
    assert "Traceback" not in err


def test_python_dash_m_and_the_script_are_the_same():
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    out = subprocess.run(
        [sys.executable, "-m", "flowrl", "list"],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    ).stdout
    assert out.startswith("ppo ")


def test_until_compares():
    names = ["return_mean", "loss/policy"]
    assert parse_until("return_mean >= 10", names)({"return_mean": 10})
    assert not parse_until("loss/policy<0", names)({"loss/policy": 0.5})
    assert not parse_until("return_mean>=10", names)({"return_mean": float("nan")})


def test_evaluations_are_columns_where_there_are_some():
    with_it = fl.ppo().insert(after="sync", play=fl.Evaluate(every=2)).compile()
    assert "eval/return_mean" in columns(with_it) and "eval/return_mean" not in columns(
        fl.ppo().compile()
    )


@pytest.mark.system
def test_a_terminated_run_is_saved(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [
        sys.executable,
        "-m",
        "flowrl",
        "run",
        "ppo",
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout.readline()
        process.terminate()
        _, said = process.communicate(timeout=240)
    assert process.returncode == 130 and "interrupted after" in said
    fl.load(tmp_path / "run")


@pytest.mark.system
def test_a_run_whose_rows_nobody_reads_any_more_has_not_failed(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "flowrl", "run", "ppo", "--json", "--out", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=240) == 0
    assert not (folder / "failure.json").exists()
    fl.load(folder)


def test_a_runs_directory_is_a_graph(tmp_path, capsys):
    with fl.run(fl.pg("CartPole-v1"), out=tmp_path / "run"):
        pass
    assert main(["check", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("pg is sound")


def test_a_program_on_the_path_goes_by_its_name_alone(tmp_path, monkeypatch):
    there = tmp_path / "flowrl"
    there.write_text("#!/bin/sh")
    there.chmod(0o700)
    monkeypatch.setattr("sys.argv", [str(there)])
    assert program() in (os.path.relpath(there), str(there))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "flowrl"


@pytest.mark.system
def test_seeds_in_one_program_leave_the_environment_variables_as_they_were(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    command = ["run", "ppo", "--env", "gymnax:CartPole-v1", "--runtime", "xla", "--seeds", "2"]
    small = ["--set", "runners.num_runners=1", "--steps", "64", "--out", str(tmp_path / "x")]
    assert main([*command, *small, "--set", "batch.batch_size=64"]) == 0
    assert "XLA_FLAGS" not in os.environ
    assert main(["resume", str(tmp_path / "x"), "--steps", "2000"]) == 0
    assert "XLA_FLAGS" not in os.environ
