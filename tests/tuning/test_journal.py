"""What a study leaves on disk, and how it goes on from it after its process was killed."""

import json
from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.tuning.journal import Journal, Options, make_directory, read_options, write_options
from flowrl.tuning.trials import Trials

OPTIONS = Options(
    graph="ppo", env="CartPole-v1", settings={}, search={"lr": "uniform(0.0, 1.0)"}, trials=5,
    steps=90, metric="return_mean", mode="max", seed=0, runtime="local", grace_steps=10,
    reduction=3, tuned=False, imports=[],
)  # fmt: skip
SEARCH = {"lr": fl.Uniform(0, 1)}


def trials(journal, seen=None):
    return Trials(journal, OPTIONS, SEARCH, (seen if seen is not None else []).append)


def run_two_by_two(work):
    """Run what is left as a study does, two at a time, without training."""
    while batch := [started for _ in range(2) for started in work.start()]:
        for trial in batch:
            work.reported(trial.number, {"env_steps": 10, "value": 0.5})
        for trial in batch:
            end = {"trial": trial.number, "state": "done", "value": 1.0, "env_steps": 90}
            work.ended([end])


def test_wherever_a_study_is_killed_it_goes_on_and_each_trial_ends_once(tmp_path):
    with Journal(tmp_path) as journal:
        seen = []
        run_two_by_two(trials(journal, seen))
        assert [trial.number for trial in seen] == [0, 1, 2, 3, 4]
        whole = (tmp_path / "journal.jsonl").read_bytes()
    suggested = [
        line["settings"] for line in map(json.loads, whole.splitlines()) if "trial" in line
    ]
    # After every line, and in the middle of it.
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for end in [0, *ends, *(end - 9 for end in ends)]:
        (tmp_path / "journal.jsonl").write_bytes(whole[:end])
        with Journal(tmp_path) as journal:
            kept = [trial.settings for trial in journal.trials]
            run_two_by_two(trials(journal))
            assert kept == suggested[: len(kept)]
            assert [trial.settings for trial in journal.trials[: len(kept)]] == kept
            assert [trial.state for trial in journal.trials] == ["done"] * 5
        lines = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
        over = [each["trial"] for line in lines for each in line.get("ended", ())]
        assert sorted(over) == [0, 1, 2, 3, 4]


def test_a_trial_that_was_cut_off_starts_again_in_another_directory(tmp_path):
    with Journal(tmp_path) as journal:
        (first,) = trials(journal).start()
        journal.report(0, 10, 0.5)
    with Journal(tmp_path) as journal:
        (again,) = trials(journal).start()
        assert (again.number, again.settings, again.attempt) == (0, first.settings, 2)
        assert (first.directory, again.directory) == ("trials/000", "trials/000-2")
        assert again.reports == ()


def sealed(folder, reason, rows, **files):
    folder.mkdir(parents=True)
    ended = {"reason": reason, "env_steps": 90, "seconds": 1.5}
    (folder / "run.json").write_text(json.dumps({"ended": ended}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("manifest.json", *files):
        (folder / name).write_text(files.get(name, ""))


ROWS = [{"return_mean": None}, {"return_mean": 3.0}, {"return_mean": 4.0}]


@pytest.mark.parametrize(
    ("reason", "rows", "state", "value", "text"),
    [
        ("steps", ROWS, "done", 4.0, "lost"),
        ("steps", ROWS[:1], "failed", None, "lost"),
        ("failed", ROWS, "failed", None, "lost"),
        # Its error could not be written: it starts again.
        ("failed", ROWS, "running", None, None),
        ("closed", ROWS, "running", None, "lost"),
    ],
)
def test_a_trial_whose_directory_says_that_it_ended_is_not_run_again(
    tmp_path, reason, rows, state, value, text
):
    with Journal(tmp_path) as journal:
        trials(journal).start()
        error = {} if text is None else {"failure.json": json.dumps({"text": text})}
        sealed(tmp_path / "trials/000", reason, rows, **error)
    with Journal(tmp_path) as journal:
        work = trials(journal)
        found = journal.trials[0]
        assert (found.state, found.value, work.left) == (state, value, 4 + (state == "running"))
        assert ("lost" in found.error) == (reason == "failed" and state == "failed")


def test_a_directory_without_a_manifest_is_half_a_run(tmp_path):
    with Journal(tmp_path) as journal:
        trials(journal).start()
        sealed(tmp_path / "trials/000", "steps", ROWS)
        (tmp_path / "trials/000/manifest.json").unlink()
    with Journal(tmp_path) as journal:
        assert trials(journal).left == 5


def test_two_processes_are_not_at_work_on_one_study(tmp_path):
    with (
        Journal(tmp_path),
        pytest.raises(fl.errors.SaveError, match="another process is at work on this study"),
    ):
        Journal(tmp_path)
    with Journal(tmp_path):
        pass


@pytest.mark.parametrize("line", ["{}", "x", '{"trial": 3, "settings": {}}', '{"start": 9}'])
def test_a_damaged_journal_is_reported(tmp_path, line):
    (tmp_path / "journal.jsonl").write_text(line + "\n")
    with pytest.raises(fl.errors.SaveError, match=r"journal\.jsonl is damaged"):
        Journal(tmp_path)


def test_options_are_kept_and_only_more_trials_go_on(tmp_path):
    write_options(tmp_path, OPTIONS)
    saved = read_options(tmp_path)
    assert saved == OPTIONS
    replace(OPTIONS, trials=9).check_same(saved, tmp_path)
    with pytest.raises(
        fl.errors.SettingError, match=r"a study of 5 trials, so .*only more can.*--out"
    ):
        replace(OPTIONS, trials=4).check_same(saved, tmp_path)
    other = replace(OPTIONS, search={"lr": "uniform(0.0, 2.0)"})
    with pytest.raises(fl.errors.SettingError, match=r"with search .*uniform\(0\.0, 1.* its own"):
        other.check_same(saved, tmp_path)
    (tmp_path / "study.json").write_text('{"graph": "ppo"}')
    with pytest.raises(fl.errors.SaveError, match=r"study\.json is damaged"):
        read_options(tmp_path)


def test_a_directory_that_holds_something_else_is_no_study(tmp_path):
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(fl.errors.SaveError, match="not empty and holds no study"):
        make_directory(tmp_path)
