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
from flowrl.core import growing_lines
from flowrl.page.export import MOST_MOMENTS, exported
from flowrl.page.past import past_moment, past_of
from flowrl.page.saved import SavedRun, SavedRuns, saved_runs
from flowrl.page.serving import serve_saved
from flowrl.page.source import MOST_EVENTS, MOST_ROWS, Cursor
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
    last = past_moment(source.entries(), news["past"] - 1, source.row)
    assert {name: last[name] for name in ("seconds", "env_steps", "rows")} == past_of(
        source.entries()
    )[-1]
    assert last["row"] == rows[-1] and last["rows"] == len(rows)
    assert {*last["now"]} == {*news["now"]} and past_moment(
        source.entries(), news["past"], source.row
    ) is None


def test_a_run_of_an_older_flowrl_and_a_damaged_history_have_no_past(saved, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(saved, old)
    source = SavedRun(old)
    assert past_of(source.entries())
    (old / "profiles.jsonl").write_text("{}\n")
    assert past_of(source.entries()) == [] and source.since(Cursor())[1]["past"] == 0
    (old / "profiles.jsonl").unlink()
    assert past_of(source.entries()) == [] and past_moment(source.entries(), 0, source.row) is None
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
def test_a_run_of_another_process_is_running_until_it_is_killed(tmp_path, opened):
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
        while not past_of(source.entries()):
            process.stdout.readline()
        page = serve_saved([tmp_path / "run"])
        tab = opened(page)
        tab.wait_for_selector("#state:text-is('running')")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert source.since(cursor)[1]["state"] == "killed"
    moments = past_of(source.entries())
    assert moments and past_moment(source.entries(), len(moments) - 1, source.row)["now"]["nodes"]
    assert '"past":[{' in exported(tmp_path / "run")
    tab.wait_for_selector("#state:text-is('killed')")
    tab.wait_for_selector("#curve canvas")
    assert tab.query_selector("#controls button") is None
    page.close()


def long_run(saved, folder, rows, events):
    """Make the log of a run as long as this out of a saved one; return its directory."""
    shutil.copytree(saved, folder)
    row = json.loads((saved / "rows.jsonl").read_text().splitlines()[-1])
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(rows):
            file.write(json.dumps({**row, "env_steps": 4096 * (i + 1), "seconds": i}) + "\n")
    with (folder / "events.jsonl").open("w") as file:
        for i in range(events):
            when = f"2026-01-0{1 + i // 3600}T{i // 60 % 24:02}:{i % 60:02}:00+00:00"
            file.write(json.dumps({"time": when, "event": "warned", "text": f"odd {i}"}) + "\n")
    return folder


@pytest.fixture
def parsed(monkeypatch):
    """Counts the lines that are parsed."""
    lines = []
    whole = growing_lines._object
    monkeypatch.setattr(growing_lines, "_object", lambda line: lines.append(line) or whole(line))
    return lines


def test_of_a_run_of_24_hours_only_what_is_shown_is_parsed(saved, tmp_path, parsed):
    source = SavedRun(long_run(saved, tmp_path / "day", 86_400, 5_000))
    cursor, news = source.since(Cursor())
    assert len(parsed) <= MOST_ROWS + MOST_EVENTS + 2
    assert news["count"] == 86_400 and MOST_ROWS / 2 <= len(news["rows"]) <= MOST_ROWS
    assert news["rows"][-1]["env_steps"] == 4096 * 86_400
    assert [event["number"] for event in news["events"]] == [*range(4_501, 5_001)]
    assert news["events"][-1]["text"] == "odd 4999"
    # Nothing but where lines end is held: 8 bytes of each row.
    assert len(source._rows._ends) * source._rows._ends.itemsize <= 8 * 86_400
    parsed.clear()
    with (source.path / "rows.jsonl").open("a") as file:
        file.write('{"env_steps": 1}\n{"env_st')
    cursor, news = source.since(cursor)
    assert news["rows"] == [{"env_steps": 1}] and news["count"] == 86_401 and len(parsed) <= 3
    parsed.clear()
    assert SavedRun(source.path).summary()["env_steps"] == 1 and len(parsed) <= 2


def test_the_page_of_an_hours_run_is_small_and_shows_its_end(saved, tmp_path):
    long = long_run(saved, tmp_path / "long", 3_600 * 5, 10)
    line = (saved / "profiles.jsonl").read_text().splitlines()[-1]
    with (long / "profiles.jsonl").open("w") as file:
        for number in range(1, 240):
            done = {"seconds": 16.0 * number, "rows": 75 * number, "env_steps": 307_200 * number}
            file.write(json.dumps({**json.loads(line), **done}) + "\n")
    html = exported(long)
    assert len(html.encode()) <= 2_000_000
    assert f'"env_steps":{4096 * 3_600 * 5}' in html
    past = json.loads(re.search(r'id="saved">(.*?)</script>', html)[1])["past"]
    assert 50 <= len(past) <= MOST_MOMENTS
    assert past[-1]["env_steps"] == 307_200 * 239 and past[-1]["row"]["env_steps"] == 4096 * 17_925
    assert len({after["rows"] - before["rows"] for before, after in pairwise(past)}) == 1


def test_rows_of_a_run_that_was_resumed_come_again_even_if_there_are_more_by_then(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    source, file = SavedRun(tmp_path / "run"), tmp_path / "run/rows.jsonl"
    cursor, news = source.since(Cursor())
    lines = file.read_text().splitlines(keepends=True)
    again = [json.dumps({**json.loads(line), "seconds": 99.5}) + "\n" for line in lines]
    file.write_text("".join([*lines[:2], *again[2:], *again]))
    cursor, news = source.since(cursor)
    assert news["again"] and not news["fresh"] and news["count"] == 2 * len(lines)
    assert len(news["rows"]) == news["count"] and news["rows"][2]["seconds"] == 99.5
    assert not source.since(cursor)[1]["again"]


def test_runs_come_into_a_folder_and_go_and_keep_their_ids(saved, tmp_path):
    folder, runs = tmp_path / "runs", {}
    shutil.copytree(saved, folder / "b")
    found = SavedRuns([folder])
    found.look(runs)
    assert {name: run.path.name for name, run in runs.items()} == {"1": "b"}
    b = runs["1"]
    shutil.copytree(saved, folder / "a")
    # One that has only begun has no picture yet.
    (folder / "c").mkdir()
    (folder / "c/rows.jsonl").touch()
    found.look(runs)
    assert {name: run.path.name for name, run in runs.items()} == {"1": "b", "2": "a"}
    (folder / "b").rename(tmp_path / "away")
    found.look(runs)
    assert [*runs] == ["2"]
    (tmp_path / "away").rename(folder / "b")
    found.look(runs)
    assert runs["1"] is b and len(runs) == 2


def test_a_line_about_a_run_says_what_it_was_and_where_it_ended(saved, tmp_path):
    line = SavedRun(saved).summary()
    rows = [json.loads(line) for line in (saved / "rows.jsonl").read_text().splitlines()]
    assert line.pop("started") == pytest.approx(time.time(), abs=3600)
    assert line == {
        "name": str(saved), "state": "steps", "graph": "ppo", "goal": "400 steps",
        "env_steps": rows[-1]["env_steps"], "return_mean": rows[-1]["return_mean"],
    }  # fmt: skip
    shutil.copytree(saved, tmp_path / "odd")
    (tmp_path / "odd/run.json").write_text('{"started": "soon"}')
    (tmp_path / "odd/rows.jsonl").write_text('{"return_mean": null}\n')
    line = SavedRun(tmp_path / "odd").summary()
    assert [line[x] for x in ("state", "graph", "goal", "env_steps", "return_mean", "started")] == [
        "killed", None, "", None, None, None,
    ]  # fmt: skip


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
