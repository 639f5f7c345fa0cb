"""What a page gets of a run, and what a browser shows of it."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from itertools import pairwise

import pytest

import flowrl as fl
from flowrl.cli.main import main
from flowrl.core.events import Ended, Restarted, Warned
from flowrl.core.profile import Profile
from flowrl.observe import history
from flowrl.observe.drawn import drawn
from flowrl.observe.sinks import plain_event
from flowrl.page import items
from flowrl.page.moment import moment
from flowrl.page.past import evenly, past_moment, past_of
from flowrl.page.source import Cursor, LiveRun, event_of
from small_runs import Fan, small


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


def test_all_rows_of_a_run_that_begins_again_come_again():
    rows = [{"env_steps": float(i)} for i in range(5)]
    source = LiveRun(small().compile(), lambda: rows, lambda: None)
    source._moment = dict
    source(Ended("closed", None))
    cursor, _ = source.since(Cursor())
    source.begin_again()
    rows.append({"env_steps": 5.0})
    cursor, news = source.since(cursor)
    assert news["again"] and len(news["rows"]) == 6 and news["state"] == "running"
    assert not source.since(cursor)[1]["again"]


def test_a_row_that_closes_while_a_page_looks_comes_with_the_next_look():
    rows = [{"env_steps": 0.0}]
    source = LiveRun(small().compile(), lambda: rows, lambda: None)
    source._moment = lambda: rows.append({"env_steps": 1.0})
    cursor, news = source.since(Cursor())
    assert news["count"] == len(news["rows"]) == 1
    assert source.since(cursor)[1]["rows"] == [{"env_steps": 1.0}]


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
        "the run ended: OSError: x",
    ]
    assert news["state"] == "failed"


@pytest.mark.parametrize(
    ("event", "part"),
    [
        (Restarted("runners", 1, "it died", 64), "runners"),
        (Warned("runners: 3 cores are idle"), "runners"),
        (Warned("ppo.train: slow"), "train"),
        (Warned("ppo: odd"), ""),
        (Warned("nothing of this graph: odd"), ""),
        (Ended("failed", fl.errors.NotFiniteError("NaN", "ppo.learner")), "learner"),
        (Ended("closed"), ""),
    ],
)
def test_events_name_the_node_or_the_resource_that_they_are_about(event, part):
    plan = small().compile()
    assert event_of(plain_event(event), drawn(plan))["part"] == part


@pytest.mark.parametrize("values", [1.0, float("nan")])
def test_a_run_that_fails_names_the_node_or_the_learner(values):
    def odd(batch):
        if values == 1.0:
            raise ZeroDivisionError("odd")
        return batch.with_(reward=batch["reward"] * values)

    with (
        pytest.raises((ZeroDivisionError, fl.errors.NotFiniteError)),
        fl.run(small().insert(after="batch", odd=fl.Map(Late(odd)))) as run,
    ):
        source = LiveRun(run.plan, lambda: run.rows, run.profile)
        run.observe(source)
        list(run)
    events = source.since(Cursor())[1]["events"]
    assert [e["part"] for e in events] == ["odd" if values == 1.0 else "learner"]


class Late:
    """A function that does what it should from the third call on; the first is that of the plan."""

    def __init__(self, fn):
        self.fn, self.calls = fn, 0

    def __call__(self, batch):
        self.calls += 1
        return batch if self.calls < 4 else self.fn(batch)


def test_the_newest_item_of_a_node_is_kept_only_while_somebody_looks(monkeypatch):
    with fl.run(small()) as run:
        source = LiveRun(run.plan, list, run.profile, observe=run.observe)
        next(run)
        assert not run._stream.ran, "nobody looked"
        assert source.item("sample") == {} and run._stream.ran
        next(run)
        item = source.item("sample")
        assert item["brief"] == "a Batch [16, 2], 32 steps"
        fields = {name: (shape, missing) for name, shape, _, *_, missing in item["fields"]}
        assert fields["obs"] == ("[16, 2, 4]", "0")
        assert source.item("train") == {} and source.item("nothing") is None
        next(run)
        assert source.item("train")["numbers"]["loss"] == pytest.approx(run.rows[-1]["loss"])
        monkeypatch.setattr(items, "LOOKING", 0.0)
        next(run)
        assert not run._stream.ran and source._items._items == {}
    assert source.item("sample") == {}


def test_a_paused_run_does_nothing_and_a_run_with_slow_rows_is_shown_all_the_same(monkeypatch):
    with fl.run(small()) as run:
        source = LiveRun(run.plan, lambda: run.rows, run.profile, run.controls)

        def now():
            # Each look is a measurement, and a second long.
            source._now = {}
            return source.since(Cursor())[1]["now"]

        next(run), next(run)
        assert now()["env_steps"] > 0
        next(run)
        clock = [100.0]
        monkeypatch.setattr("flowrl.page.source.time.monotonic", lambda: clock[0])
        source._profiles = []
        now()
        next(run)
        for _ in range(5):
            clock[0] += 1.0
            assert now()["env_steps"] == run.rows[-1]["env_steps"] - run.rows[-2]["env_steps"]
        assert len(source._profiles) <= 4
        assert now()["bottleneck"] is not None
        next(run)
        clock[0] += 3.0
        assert now()["env_steps"] == run.rows[-1]["env_steps"] - run.rows[-2]["env_steps"]
        run.controls.pause()
        found = [now() for _ in range(2)][-1]
        assert found["env_steps"] == 0 == found["steps_per_second"] and found["bottleneck"] is None
        assert {edge["items"] for edge in found["edges"]} == {0.0}
        run.controls.go_on()


def test_a_moment_counts_in_all_and_lately():
    with fl.run(small()) as run:
        next(run)
        first = run.profile()
        next(run), next(run)
        whole = run.profile()
    found = moment(whole - first, whole)["resources"]["learner"]
    total, rate = found["updates"]
    assert total == 3 and rate == pytest.approx(2 / (whole - first).going)


def test_what_a_profile_says_of_the_cores_is_of_this_run():
    with fl.run(small()) as run:
        next(run)
        profile = run.profile()
    # A hundredth of a second is the smallest that the system counts.
    assert 0 <= profile.busy <= profile.cores * (profile.seconds + 0.1)


def test_a_plan_says_what_nodes_yield_and_which_node_reports_a_metric():
    graph = small().insert(after="batch", odd=fl.Map(lambda batch: batch))
    found = drawn(graph.insert(after="odd", fan=Fan()).compile())
    nodes = {node["name"]: node for node in found["nodes"]}
    assert nodes["sample"]["yields"]["brief"] == "a Batch [16, 2], 32 steps"
    assert ("obs", "[16, 2, 4]", "float32") in nodes["sample"]["yields"]["fields"]
    assert found["metrics"]["fan"] == "fan"


def test_a_run_serves_its_page_if_it_is_asked_to(capsys, tmp_path):
    with fl.run(small(), steps=400, out=tmp_path / "run", ui=True) as run:
        assert run.page.link in capsys.readouterr().err
        list(run)
    run.page.close()
    with fl.resume(tmp_path / "run", steps=800, ui=0) as again:
        assert len(again.rows) == len(run.rows) and again.page.port != 0
    again.page.close()
    for odd in (1.5, "nowhere", "70000", None):
        with pytest.raises(fl.errors.SettingError, match="ui must be|HOST:PORT"):
            fl.run(small(), ui=odd)
    with pytest.raises(fl.errors.SettingError, match="FLOWRL_UI_TOKEN"):
        fl.run(small(), ui="0.0.0.0:0")


def test_long_runs_are_thinned_and_keep_their_last_row():
    rows = [{"env_steps": i} for i in range(12_345)]
    found = evenly(rows, 1_000)
    assert 500 <= len(found) <= 1_000 and found[-1] == rows[-1]
    steps = {b["env_steps"] - a["env_steps"] for a, b in pairwise(found)}
    assert len(steps) == 1 and evenly(rows[:7], 1_000) == rows[:7] and evenly([], 5) == []


def test_a_page_remembers_a_run_from_the_moment_that_it_is_served(monkeypatch, tmp_path):
    monkeypatch.setattr(history, "FIRST_INTERVAL", 0.01)
    for out in (None, tmp_path / "run"):
        with fl.run(small(), out=out) as run:
            for _ in range(5):
                next(run)
            page = fl.serve(run)
            source = page.runs["run"]
            while len(past_of(source.entries())) < 4:
                next(run)
            _, news = source.since(Cursor())
            assert news["past"] >= 4
            first, second = past_of(source.entries())[:2]
            assert first["rows"] > (5 if out is None else 0)
            found = past_moment(source.entries(), 1, source.row)
            assert found["row"] == dict(run.rows[second["rows"] - 1])
            assert found["now"]["env_steps"] == second["env_steps"] - first["env_steps"]
            assert {*found["now"]} == {*news["now"]}
            assert (
                past_moment(source.entries(), -1, source.row) is None
                and past_moment(source.entries(), 10**6, source.row) is None
            )
        page.close()
    ended = fl.serve(run)
    assert past_of(ended.runs["run"].entries())[-1]["rows"] == len(run.rows)
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


@pytest.mark.system
def test_whoever_looks_sees_the_end_of_a_run_whose_process_ends(tmp_path):
    words = [sys.executable, "-m", "flowrl", "run", "ppo", "--until", "row>=30", "--ui", "0"]
    words += ["--out", str(tmp_path / "run")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        link = next(line for line in process.stderr if "live page: " in line).split()[-1]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(link).close()
        base = link.partition("/?")[0]
        while not json.load(opener.open(f"{base}/runs")):
            time.sleep(0.05)
        with opener.open(f"{base}/runs/run/stream") as stream:
            states = [json.loads(line[6:])["state"] for line in stream if line.strip()]
        process.stderr.read()
    assert states[0] == "running" and states[-1] == "until" and process.returncode == 0


def test_the_end_of_a_run_is_sent_before_its_page_closes():
    with fl.run(small()) as run:
        page = fl.serve(run)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(page.link).close()
        stream = opener.open(f"http://127.0.0.1:{page.port}/runs/run/stream")
        next(run)
        assert json.loads(stream.readline()[6:])["state"] == "running"
    page.close()
    states = [json.loads(line[6:])["state"] for line in stream if line.strip()]
    stream.close()
    assert states[-1] == "closed"


def test_a_run_that_its_caller_holds_between_two_rows_shows_what_it_did():
    with fl.run(small()) as run:
        next(run)
        page = fl.serve(run)
        source = page.runs["run"]
        for _ in range(3):
            source._profiles = [(at - 10.0, profile) for at, profile in source._profiles]
            now = source.since(Cursor())[1]["now"]
            assert now["rows"] == 1 and now["bottleneck"]
        next(run)
        for _ in range(2):
            source._profiles = [(at - 10.0, profile) for at, profile in source._profiles]
            now = source.since(Cursor())[1]["now"]
            assert now["rows"] == 1 and now["bottleneck"], "now is the second row alone"
    page.close()


def test_a_run_without_environment_steps_shows_what_it_did_lately():
    found = [Profile(seconds=100.0, rows=5)]
    source = LiveRun(fl.bc(data="unread").compile(), list, lambda: found[-1])
    source.since(Cursor())
    source._profiles = [(at - 10.0, profile) for at, profile in source._profiles]
    source._now = {}
    found.append(Profile(seconds=110.0, rows=25))
    now = source.since(Cursor())[1]["now"]
    assert now["rows"] == 20 and now["seconds"] == 10.0


def test_a_run_that_begins_its_clocks_again_and_one_that_ends_are_measured_afresh():
    plan, found = small().compile(), [Profile(seconds=100.0, rows=5, env_steps=500)]
    source = LiveRun(plan, list, lambda: found[-1])
    source.since(Cursor())
    for seconds in (1.0, 2.0):
        found.append(Profile(seconds=seconds, rows=6, env_steps=600))
        source._now = {}
        now = source.since(Cursor())[1]["now"]
        assert now["seconds"] >= 0 and (now["steps_per_second"] or 0) >= 0
    found.append(Profile(seconds=3_600.0, rows=90, env_steps=9_000))
    source(Ended("closed"))
    assert source.since(Cursor())[1]["now"]["env_steps"] == 9_000
    found.append(Profile(seconds=9_999.0, rows=99, env_steps=9_999))
    assert source.since(Cursor())[1]["now"]["env_steps"] == 9_000


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
    assert main([*words[:-1], str(tmp_path / "other"), "--seeds", "2"]) == 2
    assert "--ui is of one run" in capsys.readouterr().err
