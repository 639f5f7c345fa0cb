"""The page of a debugged run: what it shows, and commands from there and from the prompt."""

import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import flowrl as fl
from flowrl.debugging.requests import MOST, SIGNAL, Asked, Requests
from small_runs import SMALL, small

PLAN = small().compile()


class Browser:
    """What a browser does with a page: it opens its link, listens, and posts."""

    def __init__(self, link):
        self.base = link.partition("/?")[0]
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        self.opener.open(link).close()
        self.lines = self.opener.open(f"{self.base}/runs/run/stream")
        self.ended = []
        """How the run ended, as often as the page was shown that."""

    def facts(self):
        with self.opener.open(f"{self.base}/runs/run") as answer:
            return json.load(answer)

    def news(self, wanted):
        """What the page shows once something is true of it."""
        for line in filter(bytes.strip, self.lines):
            news = json.loads(line.removeprefix(b"data: "))
            self.ended += [e["text"] for e in news["events"] if e["kind"] == "ended"]
            if wanted(news):
                return news
        return None

    def stands(self, at):
        """What the page shows once the run stands at a place."""
        return self.news(lambda news: news["state"] == f"stopped: {at}")

    def post(self, what):
        """The status of the answer to a command."""
        request = urllib.request.Request(
            f"{self.base}/runs/run/{what}", b"", {"Origin": self.base}, method="POST"
        )
        try:
            with self.opener.open(request) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code


def session(graph, act):
    """Debug a graph in this thread, and let another one act: the run, and what was written.

    What acts gets a browser and a function that types a line at the prompt. In the end it quits.
    """
    reader, writer = os.pipe()
    out, errors = io.StringIO(), []

    def typed(line):
        os.write(writer, f"{line}\n".encode())

    def acts():
        try:
            for _ in range(600):
                if (found := re.search(r"live page: (\S+)", out.getvalue())) and "(row" in (
                    out.getvalue()
                ):
                    break
                time.sleep(0.1)
            browser = Browser(found[1])
            with browser.lines:
                act(browser, typed)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - raised below
            errors.append(error)
        finally:
            os.close(writer)

    thread = threading.Thread(target=acts)
    thread.start()
    with os.fdopen(reader) as stdin:
        run = fl.debug(graph, stdin=stdin, stdout=out, ui=0)
    thread.join()
    if errors:
        raise errors[0]
    return run, out.getvalue()


def test_a_page_and_the_prompt_give_commands_by_turns():
    def act(browser, typed):
        first = browser.stands("row 1, at sample")
        assert first["debugger"]["stands"] == {
            "at": "row 1, at sample",
            "node": "sample",
            "item": "",
        }
        assert browser.post("next") == 200
        item = browser.stands("row 1, at batch")["debugger"]["stands"]["item"]
        assert item.startswith("a Batch [16, 2], 32 steps\n  field") and "float32" in item
        typed("next")
        browser.stands("row 1, at adv")
        assert browser.post("until/train") == browser.post("break/train") == 200
        typed("break sync when lag_max==0")
        news = browser.news(lambda news: len(news["debugger"]["breaks"]) == 2)
        assert news["debugger"]["breaks"] == [
            {"number": 1, "node": "train", "text": "train"},
            {"number": 2, "node": "sync", "text": "sync when lag_max==0"},
        ]
        assert browser.post("continue") == 200
        browser.stands("row 1, at sync")
        assert browser.post("clear/sync") == 200 and browser.post("row") == 200
        browser.stands("row 1 closed")
        typed("c")
        browser.stands("row 2, at train")

    before = signal.getsignal(SIGNAL)
    run, text = session(PLAN, act)
    assert "(row 1, at sample) next   (from the page)\nsample -> batch: a Batch" in text
    assert "(row 1, at batch) next\nbatch -> adv: " in text
    assert "(row 1, at adv) until train   (from the page)\n" in text
    assert "break train   (from the page)\nbreak 1: train\n" in text
    assert "clear sync   (from the page)\nremoved break 2: sync when lag_max==0\n" in text
    assert run.reason == "closed" and len(run.rows) == 1
    assert signal.getsignal(SIGNAL) is before


def test_a_page_gives_no_other_commands():
    refused = ["quit", "pdb", "set", "back", "show", "until", "break", "until%20row"]
    refused += ["until/row", "until/trian", "break/train%20when%20loss%3E1", "break/learner"]
    refused += ["next/train", "set/train", "clear/1", "ask/train", "next%0Aquit"]

    def act(browser, typed):
        assert [what for what in refused if browser.post(what) != 404] == []
        assert browser.facts()["verbs"] == ["next", "row", "continue"]
        assert browser.facts()["node_verbs"] == ["until", "break", "clear"]

    _, text = session(PLAN, act)
    assert "from the page" not in text and text.endswith("(row 1, at sample) \n")


def test_a_page_sets_another_goal_while_the_run_goes_on():
    def act(browser, typed):
        assert browser.post("continue") == 200
        browser.news(lambda news: news["state"] == "running" and news["rows"])
        assert browser.post("until/adv") == 200
        news = browser.news(lambda news: news["debugger"]["stands"])
        assert news["state"].endswith(", at adv") and news["debugger"]["breaks"] == []
        typed("c")
        browser.news(lambda news: news["state"] == "running" and news["rows"])
        assert browser.post("break/train") == 200
        assert browser.news(lambda news: news["debugger"]["stands"])["state"].endswith("at train")

    _, text = session(PLAN, act)
    assert "until adv   (from the page)\n" in text and "break 1: train\n" in text


def test_rows_that_are_made_again_and_settings_that_are_changed_reach_the_page():
    def act(browser, typed):
        typed("until row 3")
        assert browser.stands("row 3 closed")["count"] == 3
        typed("set train.epochs 3")
        news = browser.news(lambda news: news["debugger"]["edition"] == 1)
        assert not news["again"]
        [train] = [x for x in browser.facts()["graph"]["nodes"] if x["name"] == "train"]
        assert train["settings"]["epochs"] == "3"
        typed("back\nuntil row 4")
        news = browser.news(lambda news: news["again"])
        assert len(news["rows"]) == news["count"] <= 4
        browser.stands("row 4 closed")
        assert browser.ended == []

    run, text = session(PLAN, act)
    assert "set train.epochs 3 came later, and is undone\nrunning 2 rows again" in text
    assert np.diff([row["gradient_steps"] for row in run.rows]).tolist() == [20, 20, 20]


class Silent:
    """An item that can't be shown."""

    def __init__(self, batch):
        self.batch = batch

    def __repr__(self):
        raise ValueError("no text")


def fails(silent):
    if isinstance(silent.batch["reward"], np.ndarray):
        raise ZeroDivisionError("by hand")
    return silent.batch


def test_a_failed_run_and_an_item_without_a_text_are_shown():
    def act(browser, typed):
        typed("until opened")
        news = browser.stands("row 1, at opened")
        assert news["debugger"]["stands"]["item"] == "ValueError: no text"
        assert browser.post("row") == 200
        news = browser.stands("row 1, failed at opened")
        assert news["debugger"]["failed"] and news["debugger"]["stands"]["node"] == "opened"
        assert [text.endswith("by hand") for text in browser.ended] == [True]
        assert browser.post("next") == 200

    _, text = session(
        small().insert(after="batch", closed=fl.Map(Silent), opened=fl.Map(fails)), act
    )
    assert "next   (from the page)\nthe run is over: it failed; " in text


def test_the_time_at_the_prompt_is_the_work_of_no_node():
    waited = []

    def act(browser, typed):
        typed("until train")
        browser.stands("row 1, at train")
        began = time.perf_counter()
        time.sleep(0.5)
        waited.append(time.perf_counter() - began)

    run, _ = session(PLAN, act)
    [spent] = run.profile().processes.values()
    assert spent["", "paused"] >= waited[0]


def test_a_page_needs_the_main_thread_and_a_free_port():
    errors = []

    def debug():
        try:
            fl.debug(PLAN, stdin=io.StringIO("n\n"), stdout=io.StringIO(), ui=0)
        except fl.errors.SettingError as error:
            errors.append(str(error))

    thread = threading.Thread(target=debug)
    thread.start()
    thread.join()
    assert "which only the main thread gets" in errors[0]
    before = signal.getsignal(SIGNAL)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(fl.errors.SettingError, match="can't serve a page at"):
            fl.debug(PLAN, stdin=io.StringIO(), stdout=io.StringIO(), ui=taken.getsockname()[1])
    assert signal.getsignal(SIGNAL) is before


def test_only_so_many_requests_wait():
    requests = Requests()
    assert all(requests.ask(f"break {number}") for number in range(MOST))
    assert not requests.ask("next")
    lines = requests.lines()
    assert next(lines) == "break 0" and requests.ask("next")
    assert [*lines] == [*(f"break {number}" for number in range(1, MOST)), "next"]


def test_a_request_from_before_the_prompt_reads_is_not_missed():
    requests = Requests()
    requests.allow()
    requests.forbid()
    requests.ask("next")
    with pytest.raises(Asked):
        requests.allow()
    # The signal comes again until the line is taken; then it must interrupt nothing.
    with requests.listening(lambda: None):
        signal.raise_signal(SIGNAL)
        assert [*requests.lines()] == ["next"]
        requests.allow()
        signal.raise_signal(SIGNAL)


# -- in a terminal

TINY = f"""
import flowrl as fl

def tiny():
    policy = fl.Policy(fl.networks.MLP, hidden=(8,))
    graph = fl.ppo("CartPole-v1", policy=policy, **{SMALL})
    return graph.insert(after="batch", look=fl.Map(look))

def look(batch):
    breakpoint()
    return batch
"""


class Terminal:
    """A terminal in which `flowrl debug` runs with a page."""

    def __init__(self, folder):
        (folder / "mine.py").write_text(TINY)
        self.keys, far = os.openpty()
        command = [sys.executable, "-W", "error", "-m", "flowrl", "debug", "mine.py:tiny", "--ui"]
        # A process that leads a session and opens a terminal gets Ctrl-C from it.
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" <"$TTY" >"$TTY" 2>&1', "sh", *command],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k != "PYTHONBREAKPOINT"}
            | {
                "PYTHONPATH": str(Path(fl.__file__).parents[1]),
                "TERM": "xterm",
                "TTY": os.ttyname(far),
            },
            start_new_session=True,
        )
        self.text, self.far = "", far

    def type(self, keys):
        os.write(self.keys, keys.encode())

    def sees(self, pattern, seconds=120, needed=True):
        """Wait until the terminal shows something after what it showed before."""
        ends = time.monotonic() + seconds
        while (found := re.search(pattern, self.text)) is None:
            left = max(0.0, ends - time.monotonic())
            if not select.select([self.keys], [], [], left)[0]:
                assert not needed, f"there is no {pattern!r} in {self.text!r}"
                return None
            self.text += os.read(self.keys, 4096).decode()
        self.text = self.text[found.end() :]
        return found

    def interrupt(self, pattern):
        """Press Ctrl-C until the terminal shows something.

        One that comes just before readline waits for a key wakes nobody: any prompt of Python has
        that.
        """
        for _ in range(40):
            self.type("\x03")
            if self.sees(pattern, 3, needed=False):
                return
        self.sees(pattern, 0)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.keys)
        os.close(self.far)


@pytest.fixture
def terminal(tmp_path):
    made = Terminal(tmp_path)
    yield made
    made.close()


@pytest.mark.system
def test_in_a_terminal_a_page_leaves_the_line_that_is_being_typed(terminal):
    link = terminal.sees(r"live page: (\S+)")[1]
    terminal.sees(r"\(row 1, at sample\) ")
    browser = Browser(link)
    with browser.lines:
        assert browser.post("next") == 200
        terminal.sees(r"next   \(from the page\)\r\n.*\r\n\(row 1, at batch\) ")
        # A line that is half typed is there again, and Tab completes it.
        terminal.type("until no")
        terminal.sees("until no")
        assert browser.post("break/train") == 200
        terminal.sees(r"\r\n\(row 1, at batch\) break train   \(from the page\)\r\n")
        terminal.sees(r"break 1: train\r\n\(row 1, at batch\) until no")
        terminal.type("\t\n")
        # The operator of the user's own has a breakpoint: pdb reads what is typed, as always.
        terminal.sees(r"rm\r\n(?s:.*)\(Pdb\) ")
        terminal.type("p batch.st")
        terminal.sees("batch.st")
        assert browser.post("break/sync") == 200
        terminal.type("eps\n")
        terminal.sees(r"\r\n32\r\n\(Pdb\) ")
        terminal.type("c\n")
        terminal.sees(r"break sync   \(from the page\)(?s:.*)\(row 1, at norm\) ")
        # Ctrl-C leaves the line, as always; the arrow goes back in what was typed.
        terminal.type("abc")
        terminal.sees("abc")
        terminal.interrupt(r"quit \(q\) leaves\r\n\(row 1, at norm\) ")
        terminal.type("\x1b[A\x1b[A")
        terminal.sees("p batch.steps")
        assert browser.post("continue") == 200
        terminal.sees(r"continue   \(from the page\)(?s:.*)\(row 1, at train\) p batch.steps")
        browser.stands("row 1, at train")
        terminal.type("\x15q\n")
        assert terminal.process.wait(60) == 0
