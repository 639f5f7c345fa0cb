"""The list of several runs, their rows, and how their graphs differ, as the server returns them."""

import json
import math
import shutil

import pytest
from test_server import ask, cookie_of

import flowrl as fl
from flowrl.page.serving import serve_saved
from flowrl.page.source import LiveRun
from small_runs import small, two_runs


@pytest.fixture
def saved(tmp_path):
    """A folder with two runs."""
    return two_runs(tmp_path / "runs").parent


def get(page, cookie, path):
    status, _, body = ask(page, path=path, Cookie=cookie)
    assert status == 200, body
    return json.loads(body)


def test_the_list_is_read_again_when_it_is_asked_for(saved):
    page = serve_saved([saved])
    cookie = cookie_of(page)
    runs = get(page, cookie, "/runs")
    assert [(run["id"], run["graph"], run["goal"]) for run in runs] == [
        ("1", "ppo", "400 steps"),
        ("2", "ppo", "400 steps"),
    ]
    shutil.copytree(saved / "first", saved / "third")
    shutil.rmtree(saved / "second")
    assert [run["name"] for run in get(page, cookie, "/runs")] == [
        str(saved / "first"),
        str(saved / "third"),
    ]
    assert ask(page, path="/runs/2/rows", Cookie=cookie)[0] == 404
    assert len(get(page, cookie, "/runs/3/rows")) == len(get(page, cookie, "/runs/1/rows"))
    page.close()


def test_a_run_of_this_process_is_compared_with_saved_ones(saved):
    with fl.run(small().set("learner.loss.clip_ratio", 0.1), steps=400) as run:
        rows = [dict(row) for row in run]
    page = serve_saved([saved])
    page.show(run)
    cookie = cookie_of(page)
    assert [line["id"] for line in get(page, cookie, "/runs")] == ["1", "2", "run"]
    live = get(page, cookie, "/runs/run/rows")
    assert [row["env_steps"] for row in live] == [row["env_steps"] for row in rows]
    found = get(page, cookie, "/runs/run/diff/1")
    assert found["settings"] == [
        {"address": "learner.loss.clip_ratio", "one": "0.1", "other": "0.2"}
    ]
    assert get(page, cookie, "/runs/1/diff/2") == {"nodes": [], "settings": [], "edges": []}
    for path in ("/runs/1/diff/9", "/runs/9/diff/1", "/runs/9/rows", "/runs/1/diff/..%2f2"):
        assert ask(page, path=path, Cookie=cookie)[0] == 404, path
    page.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os\nos.remove('x')", "is no graph"),
        ('Graph("g", a=load("os.path.join"))', "os"),
        ("# This text can't be read back: it holds a lambda\nGraph(", "it holds a lambda"),
    ],
    ids=["no graph", "code of others", "unreadable"],
)
def test_a_graph_that_can_not_be_read_back_is_not_executed_and_says_why(saved, text, why):
    (saved / "second/graph.txt").write_text(text)
    page = serve_saved([saved])
    found = get(page, cookie_of(page), "/runs/1/diff/2")
    assert [*found] == ["error"] and why in found["error"]
    page.close()


def test_a_line_about_a_live_run_has_its_goal_and_no_numbers_before_its_first_row():
    rows = []
    source = LiveRun(small().compile(), lambda: rows, lambda: None, goal="5 steps", started=3.0)
    line = {"name": "ppo", "state": "running", "graph": "ppo", "goal": "5 steps", "started": 3.0}
    assert source.summary() == {**line, "env_steps": None, "return_mean": None}
    rows.append({"env_steps": 64.0, "return_mean": math.nan})
    assert source.summary() == {**line, "env_steps": 64.0, "return_mean": None}


def test_a_run_knows_its_goal_as_text_and_when_it_was_started():
    def enough(row):
        return row["env_steps"] >= 1

    with fl.run(small(), until=enough, steps=4_000) as run:
        next(run)
    assert run.goal == "a function of a row or 4,000 steps" and run.started > 1e9
    with fl.run(small()) as run:
        next(run)
    assert run.goal == ""
