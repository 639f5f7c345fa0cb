"""The progress line, on a terminal and where there is none."""

import io
import math
import time

import pytest
from rich.console import Console

from flowrl.core.events import Ended, Restarted, RowClosed, Started, Warned
from flowrl.core.items import Row
from flowrl.core.profile import Profile
from flowrl.observe.progress import Progress, duration, left, result

ROW = Row(
    {
        "row": 2,
        "env_steps": 5_000,
        "return_mean": 123.45,
        "length_mean": 20.0,
        "episodes": 250,
        "updates": 5,
        "steps_per_second": 2_500.0,
        "seconds": 2.0,
        "lag_mean": 1.5,
    }
)
FIRST = Row({**ROW, "row": 1})


def shown(events, *, terminal, steps=None):
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=terminal, width=120), steps)
    for event in events:
        progress(event)
    return out.getvalue()


def test_plain_lines_report_steps_return_speed_time_and_what_is_left():
    text = shown(
        [Started(None, Profile), RowClosed(FIRST), RowClosed(ROW), Ended("steps")],
        terminal=False,
        steps=20_000,
    )
    assert shown([RowClosed(ROW), Ended("steps")], terminal=False).count("steps/s") == 1, (
        "one row is one line"
    )
    lines = text.splitlines()
    line = "     5,000 of 20,000 steps  return    123.5      2,500 steps/s       2 s  "
    # The first row, which holds compiling also where a run was resumed, and the last at the end.
    assert lines == [f"{line}- left", f"{line}6 s left"]
    resumed = [Started(None, Profile), RowClosed(ROW), Ended("steps")]
    assert shown(resumed, terminal=False, steps=20_000).splitlines() == [f"{line}- left"]


def test_where_no_row_closes_for_long_a_line_says_that_the_run_goes_on(monkeypatch):
    monkeypatch.setattr("flowrl.observe.progress.QUIET_SECONDS", 0.05)
    counts = {}
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=False, width=120))

    def says(text):
        deadline = time.monotonic() + 20
        while text not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in out.getvalue()

    assert says("starting, 0 s")
    # However long it takes to begin.
    progress.began -= 7_200
    assert says("starting, 2:00:0")
    progress(Started(None, lambda: Profile(counts={("sample", "runners"): counts})))
    counts["sampled_steps"] = 3200
    assert says("3,200 steps sampled, ")
    progress(Ended("closed"))
    time.sleep(0.2)
    length = len(out.getvalue())
    time.sleep(0.3)
    assert len(out.getvalue()) == length, "it ends with the run"


def test_a_terminal_shows_a_live_table():
    text = shown(
        [Started(None, Profile), RowClosed(FIRST), RowClosed(ROW), Ended("until")],
        terminal=True,
        steps=20_000,
    )
    for word in ("steps", "return", "123.5", "5,000 of 20,000", "left", "6 s"):
        assert word in text


def test_without_a_number_of_steps_nothing_is_left():
    assert "left" not in shown([RowClosed(ROW), Ended("until")], terminal=False)


def test_warnings_are_shown_as_they_are():
    assert (
        shown([Warned("odd [things] happen")], terminal=False) == "warning: odd [things] happen\n"
    )


def test_a_restart_is_shown_at_once_and_of_many_the_first():
    events = [Restarted("runners", i, "it [died].\nmore", 1_280) for i in range(3)]
    said = "warning: runners, 0 was restarted, 1,280 steps lost: it [died]\n"
    assert shown(events, terminal=False) == said


def test_the_last_line_has_whole_steps_and_small_returns_their_digits():
    means = Row({**ROW, "env_steps": 195_056.625, "return_mean": 0.9123})
    said = "interrupted after 195,057 steps in 2 s, return 0.912"
    assert result("interrupted", None, means) == said


def test_the_last_line_says_why_there_is_no_return():
    row = Row({**ROW, "episodes": 0, "return_mean": math.nan})
    assert "return - (no episode has ended: " in result("steps", None, row)
    assert "no episode" not in result("steps", None, Row({**ROW, "episodes": 1}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1:00"), (3_599, "59:59"), (3_600, "1:00:00")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_time_left_is_by_the_newest_speed():
    assert left(ROW, 10_000) == "2 s"
    assert left(Row({**ROW, "row": 1}), 10_000) == "-"
    assert left(ROW, 5_000) == "0 s"
    assert left(ROW, 10_000, first=ROW["row"]) == "-"  # the first one after it was resumed
