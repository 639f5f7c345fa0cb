"""Many seeds: each run is what it is alone, one that fails ends no other, and Ctrl-C saves all."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

import flowrl as fl
from conftest import RAY, remembered, timeless
from environments import Corridor, Faulty
from flowrl.cli.main import main
from flowrl.core.items import Row
from flowrl.core.machine import usable_cores
from flowrl.observe.saving import RunDir
from flowrl.seeding.lines import log_warning
from flowrl.seeding.runs import SeedRuns, _Child

ROOT = Path(__file__).parents[1]
SMALL = fl.PPOSettings(
    envs_per_runner=2,
    rollout_length=8,
    batch_size=16,
    epochs=1,
    minibatch_size=None,
    policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
)
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}

SCRIPT = """
import json
import os
import gymnasium as gym
import flowrl as fl
from flowrl.networks import MLP
from environments import Clockwork

class Net(MLP):
    pass

class Own(Clockwork):
    def step(self, action):
        # One process of all fails: the first that makes this file.
        if os.environ.get("FAILS"):
            try:
                os.close(os.open("claimed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                raise OSError("the simulator is gone")
        return super().step(action)

def graph(env=Own):
    settings = fl.PPOSettings(
        envs_per_runner=2, rollout_length=8, batch_size=16, epochs=1, minibatch_size=None,
        policy=fl.Policy(Net, hidden=(4,)),
    )
    return fl.ppo(env, settings)

if __name__ == "__main__":
    goal = 40
    curves = fl.run_seeds(
        graph(), seeds=2, seed=3, until=lambda row: row["env_steps"] >= goal, out="many"
    )
    print(json.dumps({"labels": curves.labels, "rows": [len(rows) for rows in curves.rows]}))
    with fl.run(graph(), seed=4, steps=40, out="alone") as run:
        list(run)
"""


def rows(path):
    found = [json.loads(line) for line in (Path(path) / "rows.jsonl").read_text().splitlines()]
    return timeless(found)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_script.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


@pytest.mark.system
def test_what_a_script_defines_is_run_with_every_seed_as_it_is_alone(script):
    command = [sys.executable, "own_script.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["labels"] == ["seed 3", "seed 4"]
    assert rows("many/seed-4") == rows("alone") != rows("many/seed-3")
    for name in ("graph.txt", "plan.txt", "command.txt", "policy/policy.json"):
        assert Path("many/seed-4", name).read_text() == Path("alone", name).read_text(), name
    assert 'load("own_script:Own")' in Path("alone/graph.txt").read_text()
    assert "seed 3: " in done.stderr and "return" in done.stderr


@pytest.mark.system
def test_a_run_that_fails_is_named_at_the_end_and_ends_no_other(script, monkeypatch, capsys):
    monkeypatch.setenv("FAILS", "1")
    # The way out names the program as the user did.
    monkeypatch.setattr("sys.argv", ["bin/flowrl"])
    words = ["run", "own_script.py:graph", "--env", "own_script.py:Own", "--steps", "40"]
    assert main([*words, "--seeds", "2", "--out", "many", "--json", "--to", "csv"]) == 2
    out, err = capsys.readouterr()
    printed = [json.loads(line) for line in out.splitlines()]
    (good,) = {row["seed"] for row in printed}
    bad = 1 - good
    failed = next(line for line in err.splitlines() if f"  seed {bad} failed: " in line)
    assert "raised in step" in failed and "OSError: the simulator is gone" in failed
    assert "interquartile mean" in err and "bin/flowrl compare many" in err
    monkeypatch.delenv("FAILS")
    assert main([*words, "--seed", str(good), "--out", "alone"]) == 0
    assert rows("alone") == rows(f"many/seed-{good}") and len(rows("alone")) == len(printed) > 1
    assert timeless([{k: v for k, v in row.items() if k != "seed"} for row in printed]) == rows(
        "alone"
    )
    assert Path(f"many/seed-{good}/rows.csv").exists()
    # What is there is never written over.
    assert main([*words, "--seeds", "2", "--out", "many"]) == 2
    assert "many/seed-0 exists already" in capsys.readouterr().err
    assert main([*words, "--seeds", "2", "--out", "alone"]) == 2
    assert "alone is the directory of one run; name another one" in capsys.readouterr().err


@pytest.mark.system
def test_ctrl_c_ends_and_saves_all_runs(tmp_path):
    command = [sys.executable, "-m", "flowrl", "run", "ppo", "--untuned", "--json"]
    for name in ("rollout_length=8", "batch_size=64", "epochs=1", "minibatch_size=64"):
        command += ["--set", name]
    command += ["--seeds", "2", "--out", str(tmp_path / "many")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENV) as process:
        seen = set()
        while len(seen) < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            seen.add(json.loads(line)["seed"])
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 130, said
    for seed in (0, 1):
        fl.load(tmp_path / f"many/seed-{seed}")
        about = json.loads((tmp_path / f"many/seed-{seed}/run.json").read_text())
        assert about["ended"]["reason"] == "interrupted" and about["seed"] == seed
    assert "interquartile mean" in said and "compare many" in said.replace(
        str(tmp_path) + os.sep, ""
    )


@pytest.mark.system
@pytest.mark.ray
def test_on_ray_the_seeds_are_run_one_after_another_in_one_ray(tmp_path):
    graph = fl.ppo("CartPole-v1", SMALL)
    runtime = replace(RAY, init={"include_dashboard": False})
    options = {"steps": 40, "out": tmp_path / "x", "progress": False}
    curves = fl.run_seeds(graph, seeds=2, runtime=runtime, **options)
    assert curves.labels == ("seed 0", "seed 1")
    # Each run notes the runtime as it was given.
    for seed in (0, 1):
        about = json.loads((tmp_path / f"x/seed-{seed}/run.json").read_text())
        assert about["runtime_left_out"] == ["init"]
    alone = remembered(graph, 3)[0]
    found = rows(tmp_path / "x/seed-0")
    assert [row["return_mean"] for row in found[1:3]] == [row["return_mean"] for row in alone[1:3]]


@pytest.mark.system
def test_the_xla_runtime_runs_all_seeds_as_one_program(tmp_path):
    graph = fl.ppo("CartPole-v1", SMALL).set("runners.env", Corridor)
    out, runtime = tmp_path / "x", fl.XlaRuntime(chunk=1)
    curves = fl.run_seeds(graph, seeds=2, runtime=runtime, steps=30, out=out, progress=False)
    assert curves.labels == ("seed 0", "seed 1")
    loaded = fl.Curves.load(out)
    # A run that is refused ends its line of progress, too, though no event says so.
    before = set(threading.enumerate())
    with pytest.raises(fl.errors.SaveError, match="exists already"):
        fl.run_seeds(graph, seeds=2, runtime=runtime, steps=30, out=out)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    assert loaded.groups == ("", "") and loaded.labels[1] == f"{out}, seed 1"
    # The run that ends first gives the grid, so its rows are as they were.
    ends = [rows[-1]["env_steps"] for rows in curves.rows]
    first = ends.index(min(ends))
    assert timeless(loaded.rows[first]) == timeless(curves.rows[first])
    # A program of trials is filled up with its last run.
    file = out / "members.jsonl"
    last = [line for line in file.read_text().splitlines(True) if '"run": "seed 1"' in line]
    with file.open("a") as more:
        more.writelines(last)
    assert timeless(fl.Curves.load(out).rows[1]) == timeless(loaded.rows[1])
    # What a run wrote at its end is none of it when it goes on.
    folder = RunDir.again(out)
    folder.go_on(0, {})
    folder.close()
    assert not any((out / name).exists() for name in ("members.jsonl", "curves.txt"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seeds": 0}, "seeds must be a whole number, at least 1, got 0"),
        ({"seed": 2**32 - 1, "seeds": 2}, r"seed 4294967296 is above 2\*\*32 - 1"),
        ({"at_once": 0}, "at_once must be a whole number, at least 1 or None, got 0"),
        ({"record": True}, "give out="),
        ({"until": "x"}, "until takes a comparison such as"),
        ({"until": lambda row, lock=sys.stdout: True}, "ppo can't be sent to another process"),
        ({"seeds": 3, "at_once": 2}, "2 of 3 runs go on at a time, and without a goal they never"),
        ({"seeds": 2, "runtime": "ray"}, "1 of 2 runs go on at a time"),
    ],
    ids=[
        "none",
        "too high",
        "no process",
        "nowhere",
        "no goal",
        "not picklable",
        "endless",
        "on ray",
    ],
)
def test_a_mistake_is_an_error_before_anything_starts(arguments, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.run_seeds(fl.ppo("CartPole-v1", SMALL), **arguments)


@pytest.mark.system
def test_a_process_that_dies_is_a_run_that_failed():
    dies = fl.ppo(partial(Faulty, 5, "exit"), SMALL)
    says = "no run has a result: seed 6 failed: its process ended with status 7"
    with pytest.raises(fl.errors.RunError, match=says):
        fl.run_seeds(dies, seeds=1, seed=6, steps=40, progress=False)


def test_the_command_line_refuses_what_is_of_one_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "ppo", "--seeds", "2", "--trace", "x.json"]) == 2
    assert "--trace is of one run; leave it out, or leave out --seeds" in capsys.readouterr().err
    for to in ("csv:rows.csv", "tensorboard:logs"):
        assert main(["run", "ppo", "--seeds", "2", "--steps", "9", "--out", "x", "--to", to]) == 2
        kind = to.partition(":")[0]
        assert f"rows of all seeds at one place; write --to {kind}, " in capsys.readouterr().err
    assert not Path("x").exists()


class Child:
    """What stands for a process: it says nothing until it is ended. The second one never starts."""

    def __init__(self, killed, job, inbox, variables):
        self.killed = killed
        self.seeds, self.inbox, self.error, self.is_started = job.seeds, inbox, "", False

    def start(self):
        if self.seeds == [1]:
            raise KeyboardInterrupt
        self.is_started = True

    def end(self):
        self.inbox.put((self, {"seed": self.seeds[0], "ended": "interrupted"}))
        self.inbox.put((self, None))

    def wait(self):
        return 0

    def kill(self):
        self.killed.append(self.seeds[0])


def test_ctrl_c_while_a_process_starts_ends_it_and_names_every_run(monkeypatch, capsys):
    killed = []
    monkeypatch.setattr("flowrl.seeding.runs._Child", partial(Child, killed))
    with pytest.raises(KeyboardInterrupt):
        fl.run_seeds(fl.ppo("CartPole-v1", SMALL), seeds=2, at_once=2)
    assert killed == [1]
    assert capsys.readouterr().err == "seed 0: interrupted after 0 steps, before the first row\n"


@pytest.mark.parametrize("error", [ValueError, BrokenPipeError, OSError])
def test_the_end_of_a_process_is_reported_whatever_happens_to_its_input(error):
    """`end` may close the input between the job and its end: nobody may then wait for ever."""

    class Input(io.BytesIO):
        def flush(self):
            raise error("flush of closed file")

        def close(self):
            pass

    inbox = SimpleQueue()
    child = _Child(SimpleNamespace(seeds=[0]), inbox, {})
    child.process = SimpleNamespace(stdin=Input(), stdout=io.BytesIO(b'{"ended": "steps"}\n'))
    with pytest.raises(OSError) if error is OSError else nullcontext():
        child._talk()
    messages = [] if error is OSError else [(child, {"ended": "steps"})]
    assert [inbox.get(timeout=1) for _ in range(inbox.qsize())] == [*messages, (child, None)]


def test_which_runs_count_is_as_for_saved_runs():
    found = SeedRuns(
        fl.ppo("CartPole-v1", SMALL), range(5), runtime="local", options={"steps": 100}
    )
    ends = {0: ("steps", 100), 1: ("interrupted", 50), 2: ("interrupted", 99), 3: ("failed", 100)}
    for seed, (reason, steps) in ends.items():
        found.runs[seed].reason = reason
        found.runs[seed].rows.append(Row({"env_steps": steps}))
    found.runs[4].reason = "interrupted"
    assert found.curves().labels == ("seed 0", "seed 2")
    failed, left_out = found.problems()
    found.runs[2].reason = found.runs[1].reason = "until"
    assert "the curves end at 50 steps, where seed 1 ends" in found.problems()[-1]
    assert failed.startswith("seed 3 failed: ")
    assert "seed 1 was interrupted after 50 steps, before the others" in left_out
    assert "seed 4 has no rows" in left_out


class Platform(fl.extend.Stateless):
    """Reports whether its process was started for the CPU alone."""

    def step(self, held, batch, ctx):
        ctx.metric("for_cpu", float(os.environ.get("JAX_PLATFORMS") == "cpu"))
        yield batch


WIDE = fl.Policy(fl.networks.MLP, hidden=(2048, 2048))


@pytest.mark.parametrize(
    ("changes", "runtime", "at_once"),
    [
        ({}, "local", usable_cores()),
        ({"policy": WIDE}, "local", 1),
        ({"policy": WIDE}, fl.LocalRuntime(threads=1), usable_cores()),
    ],
    ids=["small", "large", "large with threads"],
)
def test_with_a_gpu_runs_that_compute_on_the_cpu_share_its_cores(
    with_gpu, monkeypatch, changes, runtime, at_once
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    graph = fl.ppo("CartPole-v1", replace(SMALL, **changes))
    assert SeedRuns(graph, range(2), runtime=runtime, options={"steps": 100})._at_once == at_once
    if changes:
        return
    graph = graph.insert(after="sample", where=Platform())
    assert fl.run_seeds(graph, seeds=1, steps=32, progress=False).rows[0][-1]["for_cpu"] == 1


def test_a_process_whose_parent_is_gone_ends_without_a_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    code = "from flowrl.seeding.child import main; main()"
    with os.fdopen(writing, "w") as nobody:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=b"no job",
            stdout=nobody,
            stderr=subprocess.PIPE,
            env=ENV,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_rows_that_a_run_makes_again_are_counted_once():
    graph = fl.ppo("CartPole-v1", SMALL)
    runs = SeedRuns(graph, [7], runtime="local", options={"steps": 1000})
    for number in (1, 2, 3, 2, 3, 4):
        row = {"row": number, "env_steps": 64 * number, "return_mean": 1.0}
        list(runs._events(SimpleNamespace(), {"seed": 7, "row": row}, set()))
    assert [row["env_steps"] for row in runs.runs[7].rows] == [64, 128, 192, 256]


def test_a_warning_of_a_run_is_logged_where_nothing_else_is_printed_of_it(caplog):
    run = SimpleNamespace(label="seed 3")
    for warning in ("it is slow", ""):
        log_warning(SimpleNamespace(run=run, warning=warning, row=None))
    assert [record.getMessage() for record in caplog.records] == ["seed 3: it is slow"]
