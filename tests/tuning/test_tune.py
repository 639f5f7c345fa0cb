"""Whole studies: on Ray, killed in the middle, and as one XLA program."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import flowrl as fl
from flowrl.algos.named import parse_value
from flowrl.cli.main import main
from flowrl.cli.tuning import _ending
from flowrl.core.items import Row
from flowrl.runtime.members import MemberRows, Members, differing_numbers
from flowrl.tuning import results
from flowrl.tuning.journal import Journal, Options
from flowrl.tuning.program import _train, run_program
from flowrl.tuning.progress import best, ranked
from flowrl.tuning.trial import ending_on_disk
from flowrl.tuning.trials import Trials

ROOT = Path(__file__).parents[2]
OWN = """
import flowrl as fl

def mine(env="CartPole-v1", n=1, note=""):
    if n == 2:
        raise ValueError("two is no number")
    policy = fl.Policy(fl.networks.MLP, hidden=(8,))
    return fl.ppo(env, lr=n * 1e-3, policy=policy, num_runners=1, envs_per_runner=4,
                  rollout_length=32, batch_size=128, epochs=1)
"""


def journal(study):
    """The whole lines of a study's journal."""
    file = study / "journal.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ends(study):
    """By trial: how often it ended."""
    return Counter(each["trial"] for line in journal(study) for each in line.get("ended", ()))


def flowrl(*words, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "flowrl", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A study of all settings of a user's own graph, killed when one trial had ended, and what it
    printed when it was called again."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "own.py").write_text(OWN)
    words = ["tune", "own.py:mine", "--search", "n=randint(1, 4)", "--trials", "4"]
    words += ["--steps", "600", "--parallel", "1", "--out", "study", "--set", "note='a  b'"]
    with flowrl(*words, cwd=folder) as first:
        until = time.monotonic() + 200
        while not ends(folder / "study") and first.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.communicate()
    before = journal(folder / "study")
    with flowrl("tune", "study", cwd=folder) as again:
        printed = again.communicate(timeout=200)
    return folder, before, again.returncode, printed


@pytest.mark.system
@pytest.mark.ray
def test_a_study_that_is_killed_goes_on_and_no_trial_is_lost_or_ends_twice(killed):
    folder, before, status, (_, err) = killed
    assert 1 <= sum(len(line.get("ended", ())) for line in before) < 4
    assert status == 0, err
    assert ends(folder / "study") == dict.fromkeys(range(4), 1)
    assert journal(folder / "study")[: len(before)] == before
    points = [line["settings"]["n"] for line in journal(folder / "study") if "settings" in line]
    assert sorted(points) == [1, 2, 3, 4]
    assert "of 4 trials have ended before" in err


@pytest.mark.system
@pytest.mark.ray
def test_a_study_leaves_a_table_a_picture_and_the_best_settings(killed, monkeypatch):
    folder, _, _, (out, err) = killed
    monkeypatch.chdir(folder)
    study = folder / "study"
    header, *rows = (study / "trials.csv").read_text().splitlines()
    assert header == "trial,state,value,env_steps,seconds,n,directory,error" and len(rows) == 4
    assert "ValueError: two is no number" in out and "1 failed" in out
    assert sum("ValueError: two is no number" in row for row in rows) == 1
    assert (study / "results.svg").read_text().startswith("<?xml")
    best = max((row.split(",") for row in rows if "failed" not in row), key=lambda r: float(r[2]))
    config = fl.Config.load(study / "best.yaml")
    assert config.settings == {"n": int(best[5]), "note": "a  b"}
    assert (config.steps, config.seed) == (600, 0)
    assert f"--config {Path('study') / 'best.yaml'}" in err
    assert fl.load(study / best[6]).env == "CartPole-v1"


@pytest.mark.system
@pytest.mark.ray
def test_a_study_that_is_complete_shows_its_results_and_another_one_is_refused(
    killed, monkeypatch, capsys
):
    folder, _, _, (out, _) = killed
    monkeypatch.chdir(folder)
    assert main(["tune", "study"]) == 0
    assert capsys.readouterr().out == out
    assert ends(folder / "study") == dict.fromkeys(range(4), 1)
    assert main(["tune", "study", "--seed", "1"]) == 2
    assert "study is a study with seed 0, not 1; leave it out" in capsys.readouterr().err


SMALL = {
    "env": "gymnax:CartPole-v1",
    "settings": {
        "policy": fl.Policy(fl.networks.MLP, hidden=(8,)),
        "rollout_length": 32,
        "batch_size": 256,
        "epochs": 1,
    },
    "runtime": "xla",
    "steps": 600,
    "progress": False,
}


@pytest.mark.system
def test_trials_that_differ_in_numbers_are_one_program_and_one_with_nan_fails_alone(
    tmp_path, compilations
):
    search = {"lr": fl.Choice(1e-3, 3e-3, 1e30, 5e-3, 6e-3)}
    study = fl.tune(fl.ppo, search=search, trials=5, parallel=2, out=tmp_path / "study", **SMALL)
    states = {trial.settings["lr"]: trial.state for trial in study.trials}
    assert states == {
        **dict.fromkeys(("0.001", "0.003", "0.005", "0.006"), "done"),
        "1e+30": "failed",
    }
    (failed,) = [trial for trial in study.trials if trial.state == "failed"]
    assert "lr=1e+30" in failed.error
    # All batches are one program, whatever their numbers are, and the last one, which is smaller.
    assert Counter(compilations)["jit(chunk)"] == 1, Counter(compilations)
    # The value of each is that of a run of its own.
    with fl.run(study.config().build(), runtime="xla", steps=600) as run:
        assert [row["return_mean"] for row in run][-1] == pytest.approx(study.best.value, rel=1e-3)
    assert str(study).splitlines()[1].split()[0] == str(study.best.number)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"search": {}}, "search names no setting"),
        ({"search": {"lr": [1, 2]}}, "lr takes a space such as fl.LogUniform"),
        ({"search": {"lrr": fl.Uniform(0, 1)}}, "unknown setting 'lrr'; did you mean 'lr'"),
        (
            {"search": {"epochs": fl.Uniform(1, 4)}},
            r"search \(epochs=uniform\(.*\)\): .*a whole number, got 1\.0; randint\(1, 4\) gives",
        ),
        ({"settings": {"lr": 1}}, "lr is searched, so it can't be set as well"),
        ({"metric": "return"}, "unknown column 'return'; did you mean 'return_mean'"),
        ({"mode": "most"}, "mode must be 'max' or 'min'"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"grace_steps": 901}, "grace_steps must be at most steps, 900; got 901"),
        ({"reduction": 1}, "reduction must be a whole number of at least 2"),
        ({"runtime": "spark"}, "unknown runtime 'spark'"),
        (
            {"settings": {"learner.optimizer.lr": 1e-3}},
            "learner.optimizer.lr: it is set after the settings, so lr would not reach it",
        ),
        (
            {"search": {"lr": fl.Uniform(0, 1), "learner.optimizer.lr": fl.Uniform(0, 1)}},
            "search: lr would change nothing: learner.optimizer.lr, set after it, takes its effect",
        ),
        (
            {"settings": {"train.epochs": 3, "epochs": 4}},
            "train.epochs: it is set after the settings, so epochs would not reach it; leave out",
        ),
        ({"search": {"epochs": fl.RandInt(1, 3)}}, r"only 3 combinations .* \(--trials 3\)"),
    ],
    ids=str,
)
def test_what_a_study_can_not_take_is_refused_before_it_makes_anything(tmp_path, change, says):
    given = {"env": "CartPole-v1", "search": {"lr": fl.Uniform(0, 1)}, "steps": 900}
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.tune(fl.ppo, out=tmp_path / "study", progress=False, **{**given, **change})
    assert not (tmp_path / "study").exists()


def test_steps_are_refused_of_a_graph_that_takes_none(tmp_path):
    search = {"lr": fl.LogUniform(1e-4, 1e-2)}
    with pytest.raises(fl.errors.SettingError, match="samples environments, so it takes no steps"):
        fl.tune(fl.bc, search=search, steps=900, out=tmp_path / "study", progress=False)
    assert not (tmp_path / "study").exists()


def conditional(env="CartPole-v1", kind="a", beta=0.5, ignored=1.0):
    return fl.ppo(env, ent_coef=beta if kind == "b" else 0.0)


def test_a_setting_that_counts_only_beside_another_is_searched_and_one_without_effect_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("flowrl.tuning.study._run", lambda *_: None)
    search = {"kind": fl.Choice("a", "b"), "beta": fl.Uniform(0, 1)}
    given = {"steps": 900, "out": tmp_path / "study", "progress": False}
    # Texts keep all of their white space.
    text = {"ignored": {"m": "a  b\nc"}}
    assert fl.tune(conditional, search=search, settings=text, **given).trials == ()
    saved = json.loads((tmp_path / "study/study.json").read_text())["settings"]
    assert {name: parse_value(value) for name, value in saved.items()} == text
    with pytest.raises(fl.errors.SettingError, match="ignored would change nothing: the graph is"):
        fl.tune(conditional, search={"ignored": fl.Uniform(0, 1)}, **given)


def test_a_trial_that_was_stopped_is_the_best_only_where_none_took_all_steps():
    ends = [("stopped", 9.0), ("failed", None), ("done", -3.0), ("done", -1.0), ("stopped", None)]
    trials = [fl.Trial(i, {}, state, value) for i, (state, value) in enumerate(ends)]
    assert [trial.number for trial in ranked(trials, "max")] == [3, 2, 0]
    assert [trial.number for trial in ranked(trials, "min")] == [2, 3, 0]
    assert best(trials[:2], "max") is trials[0] and best(trials[4:], "max") is None


FIVE = Options(
    graph="ppo", env=None, settings={}, search={}, trials=5, steps=90, metric="return_mean",
    mode="max", seed=0, runtime="xla", grace_steps=10, reduction=3, tuned=False, imports=[],
)  # fmt: skip


@pytest.mark.parametrize(
    ("at_once", "batches"),
    [(1, [[0], [1], [2], [3], [4]]), (2, [[0, 1], [2, 3], [4]]), (9, [[0, 1, 2, 3, 4]])],
)
def test_a_program_has_as_many_runs_as_were_asked_for(tmp_path, monkeypatch, at_once, batches):
    found = []

    def train(runs, *_):
        found.append([trial.number for trial in runs])
        return [{"trial": trial.number, "state": "done", "value": 1.0} for trial in runs]

    monkeypatch.setattr("flowrl.tuning.program._train", train)
    search = {"lr": fl.Uniform(0, 1)}
    with Journal(tmp_path) as kept:
        assert run_program(Trials(kept, FIVE, search, lambda _: None), None, [], at_once)
    assert found == batches


def test_trials_that_need_more_memory_than_there_is_are_left_to_smaller_programs(
    tmp_path, monkeypatch
):
    def train(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr("flowrl.tuning.program._train", train)
    with Journal(tmp_path) as kept:
        trials = Trials(kept, FIVE, {"lr": fl.Uniform(0, 1)}, lambda _: None)
        with pytest.raises(fl.errors.RunError, match="more memory than there is.*parallel=2"):
            run_program(trials, None, [], 4)
        assert trials.left == 5


def test_a_number_that_no_end_of_the_search_shows_is_not_that_of_another_trial():
    def graph(settings):
        lr = settings["lr"]
        return fl.ppo("gymnax:CartPole-v1", lr=lr, gamma=0.9 if lr == 2e-3 else 0.99)

    ends = differing_numbers([graph({"lr": lr}) for lr in (1e-3, 3e-3)])
    trials = [SimpleNamespace(settings={"lr": lr}) for lr in (1e-3, 2e-3)]
    with pytest.raises(fl.errors.SettingError, match="makes another graph of some numbers"):
        _train(trials, SimpleNamespace(graph=graph), ends, 2)


@pytest.mark.parametrize("argument", ["graph", "env"])
def test_what_has_no_name_is_refused_with_the_way_out(argument, tmp_path):
    given = {"graph": fl.ppo, "env": "CartPole-v1"}
    given[argument] = partial(given[argument] if argument == "graph" else conditional)
    says = f"{argument} is a partial, which has no name.*write a function of a module"
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.tune(
            **given, search={"lr": fl.Uniform(0, 1)}, steps=9, out=tmp_path / "x", progress=False
        )
    assert not (tmp_path / "x").exists()


def test_the_command_line_names_what_is_lacking(capsys):
    assert main(["tune", "ppo", "--steps", "9"]) == 2
    assert "--search is needed: flowrl tune ppo --search" in capsys.readouterr().err


def test_asha_goes_on_with_what_trials_before_a_kill_reached():
    from flowrl.tuning.on_ray import scheduler

    options = Options(
        graph="ppo", env=None, settings={}, search={}, trials=9, steps=90, metric="return_mean",
        mode="max", seed=0, runtime="local", grace_steps=10, reduction=3, tuned=False, imports=[],
    )  # fmt: skip
    reached = [
        fl.Trial(i, {}, "done", 5.0, reports=((12, value),)) for i, value in enumerate((5.0, 6.0))
    ]
    cut_off = fl.Trial(2, {}, "running", 1.0, reports=((12, 1.0),))

    def decision(past):
        asha, new = scheduler(options, past), SimpleNamespace(trial_id="new")
        asha.on_trial_add(None, new)
        return asha.on_trial_result(None, new, {"env_steps": 11, "value": 3.0})

    assert decision([]) == decision([cut_off]) == "CONTINUE"
    assert decision([*reached, cut_off]) == "STOP"


def test_what_a_trial_ended_with_is_a_report_too():
    from flowrl.tuning.on_ray import Suggestions

    noted = []
    trials = SimpleNamespace(
        reported=lambda number, report: noted.append((number, report["value"])),
        ended=lambda endings: noted.append(endings[0]["state"]),
    )
    suggestions = Suggestions(trials, "max")
    suggestions.numbers = {"x": 3, "y": 4}
    suggestions.on_trial_complete("x", {"env_steps": 90, "value": 7.0, "seconds": 1.0})
    suggestions.on_trial_complete("y", {"env_steps": 0, "seconds": 1.0, "state": "failed"})
    assert noted == [(3, 7.0), "stopped", "failed"]


def test_a_trial_that_a_full_disk_ends_is_tried_again(tmp_path):
    from flowrl.tuning.on_ray import Suggestions

    full = "OSError: [Errno 28] No space left on device: 'rows.jsonl'"
    noted = []
    trials = SimpleNamespace(reported=lambda *_: None, ended=noted.append)
    suggestions = Suggestions(trials, "max")
    suggestions.check_disk()
    suggestions.numbers = {"x": 3}
    result = {"env_steps": 0, "seconds": 1.0, "state": "failed", "error": full}
    suggestions.on_trial_complete("x", result)
    assert not noted
    with pytest.raises(fl.errors.RunError, match=r"trial 3 found the disk full, .*No space left"):
        suggestions.check_disk()
    # A run whose disk was full only for a moment has noted that it failed.
    directory = tmp_path / "trials/003"
    directory.mkdir(parents=True)
    ended = {"ended": {"reason": "failed", "env_steps": 0, "seconds": 1.0}}
    trial = fl.Trial(3, {}, "running", directory="trials/003")
    for name, text in (("manifest.json", ""), ("run.json", json.dumps(ended))):
        (directory / name).write_text(text)
    for text, state in ((full, None), ("ValueError: two", "failed")):
        (directory / "failure.json").write_text(json.dumps({"text": text}))
        ending = ending_on_disk(tmp_path, trial, "return_mean")
        assert (ending and ending["state"]) == state


def test_a_programs_policy_is_not_that_of_the_best_trial(tmp_path):
    for name, file in (("000", "members.jsonl"), ("001", "rows.jsonl")):
        (tmp_path / "trials" / name).mkdir(parents=True)
        (tmp_path / "trials" / name / file).touch()
    assert "  policy  " not in _ending(tmp_path, "trials/000")
    assert f"policy   {tmp_path}/trials/001" in _ending(tmp_path, "trials/001")


def test_results_without_any_value_are_written_all_the_same(tmp_path):
    options = Options(
        graph="ppo", env=None, settings={}, search={"lr": "loguniform(1e-4, 1e-2)"}, trials=1,
        steps=90, metric="return_mean", mode="max", seed=0, runtime="local", grace_steps=10,
        reduction=3, tuned=False, imports=[],
    )  # fmt: skip
    results.write([fl.Trial(0, {"lr": 1e-3}, "failed", error="no")], options, tmp_path)
    assert "trial 0 failed: no" in (tmp_path / "results.txt").read_text()


def test_a_run_that_is_repeated_to_fill_a_program_is_one_of_its_curves():
    rates = (1e-3, 2e-3, 2e-3, 2e-3)
    members = Members.of(0, None, fl.Sweep.points([{"lr": rate} for rate in rates]))
    made = MemberRows("ppo", 0.0, members, ["learner"])
    for rows, rate in zip(made.rows, rates, strict=True):
        rows.append(Row({"env_steps": 8, "updates": 1, "return_mean": rate}))
    curves = made.curves()
    assert curves.labels == ("lr=0.001, seed 0", "lr=0.002, seed 0")
    assert [rows[-1]["return_mean"] for rows in curves.rows] == [1e-3, 2e-3]


def test_a_sweep_of_points_has_a_run_for_each_of_them():
    points = [{"lr": 1e-3, "gamma": 0.9}, {"lr": 3e-4, "gamma": 0.99}]
    sweep = fl.Sweep.points(points)
    assert sweep.runs() == points
    assert fl.Sweep(lr=[1, 2], gamma=[3, 4]).runs()[1] == {"lr": 1.0, "gamma": 4.0}
    assert repr(sweep) == f"Sweep.points({points})"
    for wrong in ([], [{}], [{"lr": 1.0}, {"gamma": 1.0}]):
        with pytest.raises(fl.errors.SettingError, match="takes the same settings in each"):
            fl.Sweep.points(wrong)
