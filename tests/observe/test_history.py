"""The history of a run: bounded, evenly spread, and the same on disk, also of runs that go on."""

import json
import shutil
import types
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.core.profile import Profile
from flowrl.errors import LostError, SaveError
from flowrl.observe import history
from flowrl.observe.history import FILE, MOST, MOST_BYTES, History, entries_of, part
from flowrl.observe.manifest import verify
from small_runs import small


class Simulated:
    """A run with a virtual clock, whose rows close when the test says so."""

    def __init__(self, patch, workers=1):
        self.now = self.began = 1_000.0
        self.rows, self.workers = 0, workers
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        patch.setattr(history, "time", clock)

    def profile(self):
        seconds = self.now - self.began
        names = [f"runners, {i}" for i in range(self.workers)]
        return Profile(
            seconds=seconds,
            rows=self.rows,
            env_steps=64 * self.rows,
            processes={name: {("", "step"): seconds} for name in names},
            edges={("sample", "batch"): (self.rows, 64 * self.rows)},
            busy=self.now,
        )

    def row(self, seen, seconds):
        self.now += seconds
        self.rows += 1
        seen(None)


def check(entries, most_gap):
    """What holds of every history."""
    assert len(entries) < MOST
    assert sum(len(entry.text) for entry in entries) <= MOST_BYTES
    gaps = [after.seconds - before.seconds for before, after in pairwise(entries)]
    if gaps:
        # So the longest is about twice as long as the shortest, or as a row takes.
        assert min(gaps) > 0 and max(gaps) <= 2 * min(gaps) + 2 * most_gap + 1e-3
    parts = [part(entries, number) for number in range(len(entries))]
    for name in ("seconds", "rows", "env_steps"):
        total = sum(getattr(each, name) for each in parts)
        assert total == pytest.approx(getattr(entries[-1], name) if entries else 0, abs=0.01)
    assert all(each.edges["sample", "batch"][0] == each.rows for each in parts)


@settings(deadline=None, max_examples=40)
@example(gaps=[3.0], rows=960)
@given(gaps=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=20), rows=st.integers(1, 3_000))
def test_a_history_is_bounded_evenly_spread_and_leaves_no_time_out(gaps, rows):
    with pytest.MonkeyPatch.context() as patch:
        run, seen = Simulated(patch), History()
        seen.open(run.profile)
        for number in range(rows):
            run.row(seen, gaps[number % len(gaps)])
        check(seen.entries(), max(gaps))
        assert bool(seen.entries()) == (run.now - run.began >= 1.0)


def test_the_file_holds_what_is_remembered_of_a_run_of_any_length(monkeypatch, tmp_path):
    run, seen = Simulated(monkeypatch), History()
    seen.open(run.profile, tmp_path)
    for number in range(1, 4_001):
        run.row(seen, 0.9)
        if number % 200 == 0:
            assert entries_of(tmp_path) == seen.entries()
    # The rows of 0.9 seconds were 1.8 apart, and the history was full four times.
    assert seen.interval == pytest.approx(16 * 1.8, rel=0.02)
    assert MOST / 2 - 1 <= len(seen.entries()) < MOST
    check(seen.entries(), 0.9)
    seen.close(run.profile())
    # It goes on at the same interval in another process.
    again = History()
    run.began = run.now
    again.open(run.profile, tmp_path, rows=run.rows)
    assert again.interval == pytest.approx(seen.interval, rel=0.02)
    for _ in range(1_000):
        run.row(again, 0.9)
    assert entries_of(tmp_path) == again.entries()
    assert {entry.opening for entry in again.entries()} == {0, 1}
    check(again.entries(), 0.9)


def test_every_second_moment_is_dropped_and_the_newest_stays(monkeypatch):
    run, seen = Simulated(monkeypatch), History()
    seen.open(run.profile)
    for _ in range(MOST):
        run.row(seen, 1.0)
    assert [entry.rows for entry in seen.entries()] == [*range(2, MOST + 1, 2)]


def test_large_profiles_are_fewer(monkeypatch, tmp_path):
    run, seen = Simulated(monkeypatch, workers=400), History()
    seen.open(run.profile, tmp_path)
    for _ in range(500):
        run.row(seen, 1.0)
    check(seen.entries(), 1.0)
    assert 10 < len(seen.entries()) < MOST / 2
    assert (tmp_path / FILE).stat().st_size <= MOST_BYTES


def test_a_run_that_was_opened_again_is_counted_from_there(monkeypatch):
    run, seen = Simulated(monkeypatch), History()
    seen.open(run.profile)
    for _ in range(10):
        run.row(seen, 1.0)
    seen.cut(rows=6)
    # Between the two there is no session that could be asked.
    run.row(seen, 5.0)
    assert [entry.rows for entry in seen.entries()] == [1, 2, 3, 4, 5, 6]
    run.rows, run.began = 6, run.now
    seen.go_on()
    for _ in range(3):
        run.row(seen, 1.0)
    entries = seen.entries()
    assert [entry.rows for entry in entries] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [entry.seconds for entry in entries] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [part(entries, i).env_steps for i in range(9)] == [64] * 9
    check(entries, 1.0)


def test_the_end_of_a_run_is_remembered_and_no_part_is_very_short(monkeypatch, tmp_path):
    run, seen = Simulated(monkeypatch), History()
    seen.open(run.profile, tmp_path)
    run.row(seen, 0.5)
    assert seen.entries() == []
    seen.close(run.profile())
    assert [entry.rows for entry in seen.entries()] == [1]
    seen = History()
    seen.open(run.profile, tmp_path / "none")
    for seconds in (1.0, 1.0, 0.2):
        run.row(seen, seconds)
    seen.close(run.profile())
    assert [entry.rows for entry in seen.entries()] == [2, 4]
    run.row(seen, 5.0)
    assert len(seen.entries()) == 2


def test_a_profile_that_comes_after_the_end_is_not_remembered(monkeypatch):
    run, seen = Simulated(monkeypatch), History()

    def slow():
        if run.rows == 2:
            seen.close(None)
        return run.profile()

    seen.open(slow)
    run.row(seen, 1.0)
    run.row(seen, 1.0)
    assert [entry.rows for entry in seen.entries()] == [1]


def test_a_full_disk_costs_no_moment(monkeypatch, tmp_path):
    run, seen = Simulated(monkeypatch), History()
    seen.open(run.profile, tmp_path)
    run.row(seen, 1.0)
    (tmp_path / FILE).rename(tmp_path / "kept")
    (tmp_path / FILE).mkdir()
    run.row(seen, 1.0)
    run.row(seen, 1.0)
    (tmp_path / FILE).rmdir()
    run.row(seen, 1.0)
    assert entries_of(tmp_path) == seen.entries() and len(seen.entries()) == 4


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", '{"opening": 0, "seconds": null, "env_steps": 1, "rows": 1, "profile": {}}', "x"],
)
def test_a_damaged_file_is_an_error_for_readers_and_none_for_a_run(line, monkeypatch, tmp_path):
    (tmp_path / FILE).write_text(f"{line}\n")
    with pytest.raises(SaveError, match=f"{FILE}, line 1 is damaged"):
        entries_of(tmp_path)
    run, seen = Simulated(monkeypatch), History()
    run.rows = 5
    seen.open(run.profile, tmp_path, rows=5)
    run.row(seen, 1.0)
    assert entries_of(tmp_path) == seen.entries() and len(seen.entries()) == 1


# -- real runs


@pytest.fixture
def often(monkeypatch):
    """Moments a hundred times as often."""
    monkeypatch.setattr(history, "FIRST_INTERVAL", 0.01)


def moments_in(folder, least, run):
    """Let a run go on until its file holds so many moments."""
    while not (folder / FILE).is_file() or len(entries_of(folder)) < least:
        next(run)


@pytest.mark.usefixtures("often")
def test_a_saved_run_holds_its_history_and_its_manifest_covers_it(tmp_path):
    out = tmp_path / "run"
    with fl.run(small(), out=out) as run:
        moments_in(out, 4, run)
    entries = entries_of(out)
    assert entries == run.history.entries() and len(entries) >= 4
    assert (entries[-1].rows, entries[-1].env_steps) == (len(run.rows), run.rows[-1]["env_steps"])
    assert entries[-1].profile.ops == run.profile().ops
    verify(out)
    (out / FILE).write_text("")
    with pytest.raises(SaveError, match=FILE):
        verify(out)


def test_a_short_run_has_a_moment_and_one_without_a_row_none(tmp_path):
    with fl.run(small(), steps=32, out=tmp_path / "short") as run:
        list(run)
    assert entries_of(tmp_path / "short")[-1].rows == len(run.rows)
    with pytest.raises(KeyError), fl.run(small(), out=tmp_path / "none"):
        raise KeyError
    assert not (tmp_path / "none" / FILE).exists()
    with fl.run(small(), steps=32) as run:
        assert run.history is None


@pytest.mark.usefixtures("often")
def test_a_killed_run_that_is_resumed_goes_on_with_its_history(tmp_path):
    out, left = tmp_path / "run", tmp_path / "left"
    with fl.run(small(), out=out, snapshots=fl.Snapshots(every=3600)) as run:
        moments_in(out, 4, run)
        run.controls.snapshot()
        next(run)
        row = len(run.rows)
        moments_in(out, len(entries_of(out)) + 3, run)
        shutil.copytree(out, left)
    with (left / FILE).open("a") as file:
        file.write('{"opening": 0, "sec')
    before = [entry for entry in entries_of(left) if entry.rows <= row]
    with fl.resume(left, until=lambda found: found["row"] >= row + 3) as run:
        list(run)
    entries = entries_of(left)
    # What came after the snapshot happens again.
    assert len(before) >= 3 and [e for e in entries if e.opening == 0] == before
    assert entries[-1].rows == row + 3 and entries[-1].opening == 1
    steps = run.rows[-1]["env_steps"] - run.rows[row - 1]["env_steps"]
    resumed = [i for i, entry in enumerate(entries) if entry.opening == 1]
    assert sum(part(entries, i).env_steps for i in resumed) == steps
    # What is counted in all is of the whole run, not of what came after it was resumed.
    assert entries[-1].whole.total("updates") == run.rows[-1]["updates"]
    assert entries[-1].profile.total("updates") == 3
    assert all(b.seconds > a.seconds for a, b in pairwise(entries))
    verify(left)


@pytest.mark.usefixtures("often")
def test_a_run_that_lost_a_process_goes_on_with_its_history(tmp_path):
    out, lost = tmp_path / "run", []

    class Losing(fl.LocalRuntime):
        def open(self, plan, seed, stream=None):
            session = super().open(plan, seed, stream)
            original = session.turns.round

            def round_(rows):
                if session.rows.totals["row"] == 40 and not lost:
                    lost.append(True)
                    raise LostError("learner's process ended")
                return original(rows)

            session.turns.round = round_
            return session

    every = fl.Snapshots(every=3600)
    until = {"until": lambda row: row["row"] >= 60 and lost}
    with fl.run(small(), runtime=Losing(), out=out, snapshots=every, **until) as run:
        for _ in range(20):
            next(run)
        run.controls.snapshot()
        list(run)
    entries = entries_of(out)
    assert [entry.rows for entry in entries] == sorted(entry.rows for entry in entries)
    assert entries[-1].opening == 1 and entries[-1].rows == 60
    resumed = [i for i, entry in enumerate(entries) if entry.opening == 1]
    steps = run.rows[-1]["env_steps"] - run.rows[20]["env_steps"]
    assert sum(part(entries, i).env_steps for i in resumed) == steps


def test_a_profile_is_read_back_as_it_was(monkeypatch):
    run, seen = Simulated(monkeypatch), History()
    seen.open(run.profile)
    run.row(seen, 1.5)
    (entry,) = seen.entries()
    assert entry.profile == replace(run.profile(), busy=1.5)
    assert json.loads(entry.text)["rows"] == 1
