"""`flowrl resume`, and what it does with a run's directory: real processes, really killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import flowrl as fl
from conftest import same
from flowrl.cli.main import main
from flowrl.observe.saving import RunDir, profiles
from flowrl.observe.snapshots import FOLDER, NEWEST, snapshot_files
from flowrl.runtime.local import LocalRuntime

KILLS = 5
SETTINGS = {
    "envs_per_runner": 4,
    "rollout_length": 16,
    "batch_size": 64,
    "minibatch_size": 32,
    "epochs": 1,
}
STEPS = 6_000
"""Some hundred rows, which take a process some seconds."""
WORDS = ["ppo", "--env", "CartPole-v1", "--untuned", "--steps", str(STEPS)]
WORDS += [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
PATIENCE = 120
LATER = ["--steps", "600"]


def flowrl(*words):
    """A process of the command line."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "flowrl", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)


def wait_for(what, process):
    """Wait until something is so, or the process has ended."""
    deadline = time.monotonic() + PATIENCE
    while not what() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def lines(path):
    file = path / "rows.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def rows(path):
    """The rows of a run without what is never the same."""
    found = map(json.loads, (path / "rows.jsonl").read_text().splitlines())
    timed = ("seconds", "steps_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in found]


def contents(path):
    """Every file below a directory with what is in it."""
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def train(out, seed=0, steps=STEPS, **more):
    with fl.run(fl.ppo("CartPole-v1", **SETTINGS), seed=seed, steps=steps, out=out, **more) as run:
        list(run)
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing interrupted, by seed."""
    folder = tmp_path_factory.mktemp("whole")
    return {seed: train(folder / f"seed-{seed}", seed, snapshots=False) for seed in (0, 1, 2)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A short run with a snapshot of every row, which ended."""
    out = tmp_path_factory.mktemp("kept") / "run"
    return train(out, steps=300, snapshots=fl.Snapshots(every=0))


@pytest.fixture
def run(kept, tmp_path):
    """A copy of that run."""
    return Path(shutil.copytree(kept, tmp_path / "run"))


@pytest.fixture
def refused(capsys):
    """Call a command that ends with status 2, and return what it says."""

    def call(*words):
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    return call


# -- processes that are ended


@pytest.mark.system
def test_a_run_that_is_killed_again_and_again_is_the_run_that_nothing_interrupted(
    whole, tmp_path, capsys
):
    out, moments = tmp_path / "run", random.Random()
    words = ["run", *WORDS, "--snapshot-every", 0, "--out", out]
    for _ in range(KILLS):
        with flowrl(*words) as process:
            # Where a process finds a row, it has gone back to its snapshot.
            goal = lines(out) + moments.randrange(80 // KILLS)
            wait_for(lambda goal=goal: lines(out) > goal, process)
            time.sleep(moments.uniform(0, 0.03))
            process.kill()
        words = ["resume", out]
    assert not (out / "manifest.json").exists() and lines(out)
    assert main(["resume", str(out)]) == 0
    assert "ppo goes on from row " in capsys.readouterr().err
    assert rows(out) == rows(whole[0])
    assert same(fl.load(out).weights, fl.load(whole[0]).weights)
    assert (out / "command.txt").read_text().count("resume") <= KILLS + 1
    profiles(out)


@pytest.mark.system
def test_a_run_that_is_at_work_is_left_to_its_process_and_sigterm_keeps_its_last_row(
    whole, tmp_path, capsys, refused
):
    out = tmp_path / "run"
    with flowrl("run", *WORDS, "--out", out) as process:
        wait_for(lambda: lines(out) > 1, process)
        os.kill(process.pid, signal.SIGSTOP)
        # The call is back before the process has stopped, which may be in the middle of a row.
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        before = contents(out)
        said = refused("resume", out)
        assert "another process is still at work on this run; wait for it, or end it" in said
        assert contents(out) == before
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        # It takes less than a second where no other test is at work.
        said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 130 and f"  resume  flowrl resume {out}\n" in said
    newest = (out / FOLDER / NEWEST).read_text()
    assert newest.startswith(f"row-{lines(out):010}.json ")
    assert main(["resume", str(out)]) == 0
    assert rows(out) == rows(whole[0])
    assert same(fl.load(out).weights, fl.load(whole[0]).weights)


@pytest.mark.system
def test_many_seeds_go_on_where_their_processes_were_killed(whole, tmp_path, capsys, refused):
    out = tmp_path / "runs"
    words = [*WORDS, "--seeds", "3", "--out", out]
    with flowrl("run", *words, "--snapshot-every", "0") as process:
        wait_for(lambda: lines(out / "seed-0") > 5, process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    psutil.wait_procs(children, timeout=PATIENCE)
    assert 5 < lines(out / "seed-0") < lines(whole[0])
    assert json.loads((out / "seeds.json").read_text()) == [0, 1, 2]
    # One seed goes on, one has reached its goal, and one has never begun: there was no core for it.
    for seed in (1, 2):
        shutil.rmtree(out / f"seed-{seed}", ignore_errors=True)
    shutil.copytree(whole[1], out / "seed-1")
    ended = contents(out / "seed-1")
    assert main(["resume", str(out), "--json"]) == 0
    printed, said = capsys.readouterr()
    assert f"{out} goes on: seed 0, 2 of 3 seeds, each from its newest snapshot" in said
    assert "all seeds                        3" in said and contents(out / "seed-1") == ended
    assert {json.loads(line)["seed"] for line in printed.splitlines()} == {0, 2}
    for seed, alone in whole.items():
        assert rows(out / f"seed-{seed}") == rows(alone)
        mine = fl.load(out / f"seed-{seed}")
        assert same(mine.weights, fl.load(alone).weights)
    assert "all runs in" in refused("resume", out)
    assert "--trace is of one run" in refused("resume", out, "--trace", out / "trace.json")


@pytest.mark.system
def test_each_of_many_seeds_goes_on_to_its_own_goal(tmp_path, capsys):
    every = fl.Snapshots(every=0)
    train(tmp_path / "seed-0", 0, steps=128, snapshots=every)
    graph = fl.ppo("CartPole-v1", **SETTINGS)
    with fl.run(graph, seed=1, steps=384, out=tmp_path / "seed-1", snapshots=every) as run:
        while next(run)["env_steps"] < 192:
            pass
    # It is beyond the goal of the lowest seed, and not at its own.
    assert main(["resume", str(tmp_path)]) == 0
    assert "seed 1 of 2 seeds, each from its newest snapshot; until its own goal" in (
        capsys.readouterr().err
    )
    assert rows(tmp_path / "seed-0")[-1]["env_steps"] < 384
    assert rows(tmp_path / "seed-1")[-1]["env_steps"] >= 384


# -- what is refused, and leaves everything as it was


def test_a_goal_that_is_reached_is_an_error_and_a_later_one_goes_on(run, refused, capsys):
    before = contents(run)
    count = rows(run)[-1]["env_steps"]
    said = refused("resume", run)
    assert said == (
        f"flowrl: {run} has reached its goal after {count:.0f} steps; name a later one, such as "
        f"--steps {2 * int(max(count, 300))}, or steps={2 * int(max(count, 300))} of fl.resume\n"
    )
    said = refused("resume", run, "--until", "return_mean>=0")
    assert "has reached this goal (its own is 300 steps) after" in said
    assert contents(run) == before
    words = ["resume", str(run), "--steps", "400", "--until", "return_mean>=400", "--json"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["row"] for line in out.splitlines()] == [*range(6, lines(run) + 1)]
    assert f"({run}/snapshots/row-0000000005.json)" in err.splitlines()[0]
    assert "until return_mean>=400 or 400 steps" in err.splitlines()[0]
    later = 2 * rows(run)[-1]["env_steps"]
    assert f"  resume  flowrl resume {run} --steps {later} --until 'return_mean>=400'\n" in err


def test_a_run_that_was_killed_while_it_was_being_saved_is_saved(run, capsys):
    was = fl.load(run).weights
    (run / "manifest.json").unlink()
    shutil.rmtree(run / "policy")
    count = lines(run)
    assert main(["resume", str(run)]) == 0
    assert "done: " in capsys.readouterr().err
    assert lines(run) == count and same(fl.load(run).weights, was)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("graph.txt", "gamma=0.99", "gamma=0.5", ["its graph is", "gamma=0.5", "gamma=0.99"]),
        ("plan.txt", "1 update", "2 updates", ["its plan is", "2 updates", "1 update"]),
    ],
)
def test_another_graph_or_plan_is_refused_with_what_differs(run, refused, name, old, new, says):
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))
    before = contents(run)
    graph = fl.ppo("CartPole-v1", **SETTINGS)
    with pytest.raises(fl.errors.SaveError) as error:
        fl.resume(run, graph, steps=600)
    for part in says:
        assert part in str(error.value)
    if name == "plan.txt":
        assert "another one now" in refused("resume", run, "--steps", 600)
    assert contents(run) == before


def test_what_can_not_be_opened_leaves_everything_as_it_was(run, monkeypatch):
    before = contents(run)

    def fails(*_):
        raise fl.errors.RunError("no machine")

    with monkeypatch.context() as patched:
        patched.setattr(LocalRuntime, "open", fails)
        with pytest.raises(fl.errors.RunError, match="no machine"):
            fl.resume(run, steps=600)
    assert contents(run) == before

    def is_full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", is_full)
        with pytest.raises(fl.errors.SaveError, match=r"\(No space left on device\), and is as"):
            fl.resume(run, steps=600)
    assert contents(run) == before
    # Nothing holds it any more.
    RunDir.again(run).close()


def test_snapshots_that_were_removed_do_not_cost_the_rows(run, refused):
    for file in snapshot_files(run / FOLDER):
        file.unlink()
    (run / FOLDER / NEWEST).unlink()
    before = contents(run)
    assert "has no snapshot, or none any more" in refused("resume", run, "--steps", 600)
    # A run that was killed has no manifest.
    (run / "manifest.json").unlink()
    shutil.rmtree(run / FOLDER)
    assert "has no snapshot, or none any more" in refused("resume", run)
    assert (run / "rows.jsonl").read_bytes() == before[Path("rows.jsonl")]
    # It was killed before the first one.
    (run / FOLDER).mkdir()
    assert main(["resume", str(run)]) == 0
    assert rows(run) == [json.loads(x) | {} for x in map(json.dumps, rows(run))]


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        (shutil.rmtree, [], "there is no directory"),
        (lambda at: (at / "rows.jsonl").unlink(), [], "is no run's directory"),
        (lambda at: (at / "run.json").unlink(), [], "has no run.json"),
        (lambda at: (at / "graph.txt").unlink(), [], "graph.txt can't be read"),
        (lambda at: None, ["--runtime", "xla"], "unknown runtime 'xla'"),
        (lambda at: None, ["--address", "auto"], "--address names the Ray to join"),
        (lambda at: None, ["--until", "retur>=3"], "did you mean"),
        (lambda at: note(at, snapshots=None), [], "was kept without snapshots"),
        (lambda at: note(at, snapshots={"often": 1}), LATER, "run.json is damaged: snapshots"),
        (lambda at: note(at, until="a function of a row"), [], "was a function of Python"),
        (lambda at: note(at, runtime="xla"), ["--runtime", "local", *LATER], "goes on in the xla"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(run, change, words, says, capsys):
    change(run)
    before = contents(run)
    try:
        status = main(["resume", str(run), *words])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert status == 2 and says in said and said.count("\n") == 1
    assert contents(run) == before


def note(run, **facts):
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, **facts}))


def test_options_that_contradict_one_another_are_refused(refused, tmp_path):
    out = tmp_path / "run"
    words = ["run", *WORDS, "--out", out, "--no-snapshots"]
    assert "leaves no snapshots for --keep; leave out" in refused(*words, "--keep", "3")
    assert "for --snapshot-every; leave" in refused(*words, "--snapshot-every", "3")
    assert not out.exists()


def test_tables_of_seeds_that_are_there_already_are_refused_before_anything_starts(
    run, refused, tmp_path
):
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    run.rename(seeds / "seed-0")
    (seeds / "seed-0/rows.csv").write_text("row\n")
    says = refused("resume", seeds, "--steps", "999_999", "--to", "csv")
    assert "seed-0/rows.csv exists already" in says and "or leave out --to csv" in says


def test_code_of_the_users_own_is_imported_only_if_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("resumed_by_name.py").write_text(
        "from dataclasses import dataclass\n"
        "import flowrl as fl\n"
        "@dataclass(frozen=True)\n"
        "class Bonus(fl.extend.Stateless):\n"
        "    def step(self, state, batch, ctx):\n"
        "        yield batch\n"
        f"settings = {SETTINGS}\n"
        "def mine():\n"
        "    return fl.ppo('CartPole-v1', **settings).insert(after='sample', bonus=Bonus())\n"
        "def unnamed():\n"
        "    class Local(Bonus): pass\n"
        "    return fl.ppo('CartPole-v1', **settings).insert(after='sample', bonus=Local())\n"
    )
    words = ["--steps", "100", "--until", "return_mean>=400"]
    assert main(["run", "resumed_by_name.py:mine", *words, "--out", "a"]) == 1
    command = next(x for x in capsys.readouterr().err.splitlines() if x.startswith("  resume "))
    assert main(["resume", "a", "--steps", "200"]) == 2
    assert "allow it with --import resumed_by_name" in capsys.readouterr().err
    assert "--import resumed_by_name" in command
    assert main(command.split("flowrl ")[1].replace("'", "").split()) == 1
    capsys.readouterr()
    # A class without a name can't be found again; the script still has it.
    assert main(["run", "resumed_by_name.py:unnamed", *words, "--out", "b"]) == 1
    assert "  resume " not in capsys.readouterr().err
    assert main(["resume", "b", "--steps", "200"]) == 2
    assert "from the script that makes the graph: fl.resume('b', graph)" in capsys.readouterr().err


def test_repeating_a_run_that_was_not_finished_points_to_resume(run, tmp_path, capsys):
    note(run, ended={"reason": "interrupted"})
    assert main(["run", str(run), "--steps", "64", "--out", str(tmp_path / "again")]) == 0
    said = capsys.readouterr().err
    assert f"repeats {run} from its start; to go on where it stopped: flowrl resume {run}\n" in said
