"""Pages of saved runs, served and as one file."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import flowrl as fl
from flowrl.page.export import exported
from flowrl.page.saved import SavedRun, saved_runs
from flowrl.page.source import Cursor
from small_runs import two_runs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run that has ended, in a folder with another one."""
    return two_runs(tmp_path_factory.mktemp("runs"))


def test_a_saved_run_gives_what_a_live_one_does(saved):
    source = SavedRun(saved)
    cursor, news = source.since(Cursor())
    rows = [json.loads(line) for line in (saved / "rows.jsonl").read_text().splitlines()]
    assert news["rows"] == rows and news["state"] == "steps" and news["fresh"]
    assert [e["kind"] for e in news["events"]] == ["started", "warned", "ended"]
    assert news["events"][1]["text"] == "ppo: odd"
    assert {*news["now"]["nodes"]} == {n["name"] for n in source.facts()["graph"]["nodes"]}
    cursor, later = source.since(cursor)
    assert later["rows"] == [] and later["events"] == [] and not later["again"]


def test_a_folder_shows_all_its_runs_and_what_holds_none_is_an_error(saved, tmp_path):
    assert [run.path.name for run in saved_runs(saved.parent)] == ["first", "second"]
    with pytest.raises(fl.errors.SaveError, match="there is no directory"):
        saved_runs(tmp_path / "none")
    with pytest.raises(fl.errors.SaveError, match="has no runs in it"):
        saved_runs(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(fl.errors.SaveError, match="has no graph.json.*an older flowrl"):
        saved_runs(tmp_path)


@pytest.mark.system
def test_a_run_of_another_process_is_running_until_it_is_killed(tmp_path):
    words = ["run", "ppo", "--env", "CartPole-v1", "--out", str(tmp_path / "run"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        process.stdout.readline()
        source = SavedRun(tmp_path / "run")
        cursor, news = source.since(Cursor())
        assert news["state"] == "running" and len(news["rows"]) >= 1
        for _ in range(20):
            process.stdout.readline()
        cursor, news = source.since(cursor)
        assert news["rows"] and not news["again"]
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert source.since(cursor)[1]["state"] == "killed"


def test_the_page_of_an_hours_run_is_small_and_shows_its_end(saved, tmp_path):
    long = tmp_path / "long"
    long.mkdir()
    for name in ("graph.json", "plan.txt", "run.json", "events.jsonl", "profile.json"):
        (long / name).write_bytes((saved / name).read_bytes())
    row = json.loads((saved / "rows.jsonl").read_text().splitlines()[-1])
    lines = [json.dumps({**row, "env_steps": 4096 * (i + 1)}) for i in range(3_600 * 5)]
    (long / "rows.jsonl").write_text("\n".join(lines) + "\n")
    began = time.perf_counter()
    html = exported(long)
    assert len(html.encode()) <= 2_000_000
    assert f'"env_steps":{4096 * 3_600 * 5}' in html and time.perf_counter() - began < 60


def test_what_a_text_says_can_not_end_the_script(saved, tmp_path):
    odd = tmp_path / "odd"
    odd.mkdir()
    for file in saved.iterdir():
        if file.is_file():
            (odd / file.name).write_bytes(file.read_bytes())
    graph = json.loads((odd / "graph.json").read_text())
    graph["nodes"][0]["doc"] = "</script><script>alert(1)</script><!--"
    (odd / "graph.json").write_text(json.dumps(graph))
    html = exported(odd)
    assert "alert(1)</script>" not in html and "\\u003c/script>" in html
