"""Pages of saved runs, served and as one file."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

import flowrl as fl
from flowrl.page.export import MOST_MOMENTS, exported
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
    last = source.past_moment(news["past"] - 1)
    assert {name: last[name] for name in ("seconds", "env_steps", "rows")} == source.past()[-1]
    assert last["row"] == rows[-1] and last["rows"] == len(rows)
    assert {*last["now"]} == {*news["now"]} and source.past_moment(news["past"]) is None


def test_a_run_of_an_older_flowrl_and_a_damaged_history_have_no_past(saved, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(saved, old)
    source = SavedRun(old)
    assert source.past()
    (old / "profiles.jsonl").write_text("{}\n")
    assert source.past() == [] and source.since(Cursor())[1]["past"] == 0
    (old / "profiles.jsonl").unlink()
    assert source.past() == [] and source.past_moment(0) is None
    assert '"past":[]' in exported(old)


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
        while not source.past():
            process.stdout.readline()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert source.since(cursor)[1]["state"] == "killed"
    moments = source.past()
    assert moments and source.past_moment(len(moments) - 1)["now"]["nodes"]
    assert '"past":[{' in exported(tmp_path / "run")


def test_the_page_of_an_hours_run_is_small_and_shows_its_end(saved, tmp_path):
    long = tmp_path / "long"
    long.mkdir()
    for name in ("graph.json", "plan.txt", "run.json", "events.jsonl", "profile.json"):
        (long / name).write_bytes((saved / name).read_bytes())
    row = json.loads((saved / "rows.jsonl").read_text().splitlines()[-1])
    lines = [json.dumps({**row, "env_steps": 4096 * (i + 1)}) for i in range(3_600 * 5)]
    (long / "rows.jsonl").write_text("\n".join(lines) + "\n")
    line = (saved / "profiles.jsonl").read_text().splitlines()[-1]
    with (long / "profiles.jsonl").open("w") as file:
        for number in range(1, 240):
            done = {"seconds": 16.0 * number, "rows": 75 * number, "env_steps": 307_200 * number}
            file.write(json.dumps({**json.loads(line), **done}) + "\n")
    began = time.perf_counter()
    html = exported(long)
    assert len(html.encode()) <= 2_000_000
    assert f'"env_steps":{4096 * 3_600 * 5}' in html and time.perf_counter() - began < 60
    past = json.loads(re.search(r'id="saved">(.*?)</script>', html)[1])["past"]
    assert 50 <= len(past) <= MOST_MOMENTS
    assert past[-1]["env_steps"] == 307_200 * 239 and past[-1]["row"]["env_steps"] == 4096 * 17_925
    assert len({after["rows"] - before["rows"] for before, after in pairwise(past)}) == 1


def test_a_history_of_very_many_runners_is_thinned_until_the_page_is_small(saved, tmp_path):
    wide = tmp_path / "wide"
    shutil.copytree(saved, wide)
    line = (saved / "profiles.jsonl").read_text().splitlines()[-1]
    found = json.loads(line)
    kinds = [["", kind, 1.0] for kind in ("step", "inference", "transfer", "waiting")]
    workers = {f"runners, {i}": kinds for i in range(300)}
    found["profile"]["processes"].update(workers)
    found["profile"]["facts"]["runners"] = {}
    lines = [json.dumps({**found, "seconds": i, "rows": 1 + i}) for i in range(40)]
    (wide / "profiles.jsonl").write_text("\n".join(lines) + "\n")
    past = json.loads(re.search(r'id="saved">(.*?)</script>', exported(wide))[1])["past"]
    assert 1 <= len(past) < 40 and past[-1]["rows"] == 40
    assert len(past[-1]["now"]["workers"]["runners"]) == 300


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
