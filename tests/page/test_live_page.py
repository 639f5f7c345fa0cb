"""What a page gets of a run, and what a browser shows of it."""

import re
import signal
import socket
import threading
from itertools import pairwise

import pytest

import flowrl as fl
from flowrl.cli.main import main
from flowrl.core.events import Ended, Restarted, Warned
from flowrl.observe import history
from flowrl.page.source import Cursor, LiveRun, thinned
from small_runs import small


def test_a_page_gets_each_row_and_event_once():
    with fl.run(small()) as run:
        source = LiveRun(run.plan, lambda: run.rows, run.profile)
        run.observe(source)
        next(run)
        cursor, first = source.since(Cursor())
        assert first["again"] and first["fresh"] and len(first["rows"]) == 1
        next(run), next(run)
        cursor, second = source.since(cursor)
        assert not second["again"] and second["rows"] == [dict(x) for x in run.rows[1:]]
        run.warn("odd")
    for _ in range(100):
        cursor, news = source.since(cursor)
        if news["state"] != "running":
            break
        threading.Event().wait(0.05)
    assert news["state"] == "closed" and source.since(cursor)[1]["events"] == []
    _, whole = source.since(Cursor())
    assert [e["kind"] for e in whole["events"]] == ["warned", "ended"]
    assert len(whole["rows"]) == 3 and whole["events"][0]["text"] == "ppo: odd"


def test_rows_that_a_run_makes_again_come_again():
    rows = [{"env_steps": float(i)} for i in range(5)]
    source = LiveRun(small().compile(), lambda: rows, lambda: None)
    source._moment = dict
    cursor, _ = source.since(Cursor())
    del rows[2:]
    cursor, news = source.since(cursor)
    assert news["again"] and len(news["rows"]) == 2 and cursor.rows == 2


def test_events_are_texts():
    source = LiveRun(small().compile(), list, lambda: None)
    source._moment = dict
    for event in (
        Restarted("runners", 1, "it died", 64),
        Warned("odd"),
        Ended("failed", OSError("x")),
    ):
        source(event)
    _, news = source.since(Cursor())
    assert [event["text"] for event in news["events"]] == [
        "runners, runner 1 was restarted: it died; 64 steps were lost",
        "odd",
        "the run ended: x",
    ]
    assert news["state"] == "failed"


def test_long_runs_are_thinned_and_keep_their_last_row():
    rows = [{"env_steps": i} for i in range(12_345)]
    found = thinned(rows, 1_000)
    assert 500 <= len(found) <= 1_000 and found[-1] == rows[-1]
    steps = {b["env_steps"] - a["env_steps"] for a, b in pairwise(found)}
    assert len(steps) == 1 and thinned(rows[:7], 1_000) == rows[:7] and thinned([], 5) == []


def test_a_page_remembers_a_run_from_the_moment_that_it_is_served(monkeypatch, tmp_path):
    monkeypatch.setattr(history, "FIRST_INTERVAL", 0.01)
    for out in (None, tmp_path / "run"):
        with fl.run(small(), out=out) as run:
            for _ in range(5):
                next(run)
            page = fl.serve(run)
            source = page.runs["run"]
            while len(source.past()) < 4:
                next(run)
            _, news = source.since(Cursor())
            assert news["past"] >= 4
            first, second = source.past()[:2]
            assert first["rows"] > (5 if out is None else 0)
            found = source.past_moment(1)
            assert found["row"] == dict(run.rows[second["rows"] - 1])
            assert found["now"]["env_steps"] == second["env_steps"] - first["env_steps"]
            assert {*found["now"]} == {*news["now"]}
            assert source.past_moment(-1) is None and source.past_moment(10**6) is None
        page.close()
    ended = fl.serve(run)
    assert ended.runs["run"].past()[-1]["rows"] == len(run.rows)
    ended.close()


def test_a_run_that_is_paused_can_be_interrupted():
    with pytest.raises(KeyboardInterrupt), fl.run(small()) as run:
        next(run)
        run.controls.pause()
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        next(run)
    assert run.reason == "interrupted" and len(run.rows) == 1


def test_a_snapshot_that_is_asked_for_is_kept_after_the_next_row(tmp_path):
    seldom, folder = fl.Snapshots(every=3600), tmp_path / "run/snapshots"
    with fl.run(small(), out=tmp_path / "run", snapshots=seldom) as run:
        next(run)
        assert [*folder.glob("row-*")] == []
        run.controls.snapshot()
        next(run)
        next(run)
        assert [path.name for path in folder.glob("row-*")] == ["row-0000000002.json"]


def test_the_command_line_prints_the_link_of_the_page(tmp_path, capsys):
    words = ["run", "ppo", "--steps", "2_000", "--ui", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert re.search(
        r"live page: http://127.0.0.1:\d+/\?token=[\w-]{32}\n", capsys.readouterr().err
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main([*words[:-1], str(tmp_path / "other"), "--ui", port]) == 2
    assert f"can't serve a page at 127.0.0.1:{port}" in capsys.readouterr().err
    assert main([*words, "--seeds", "2"]) == 2
    assert "--ui is of one run" in capsys.readouterr().err
