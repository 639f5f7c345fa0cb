"""Faults: what a run does where a signal, a sink, the clock or a process fails.

docs/faults.md has a row for each of them; bench/faults.py measures what its figures are.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

import flowrl as fl
from conftest import same
from flowrl.core import clock, compile_cache, events
from flowrl.core.events import Ended, RowClosed, Started, Warned
from flowrl.observe import checkpoints
from flowrl.runtime import sessions
from flowrl.runtime.driver import context
from flowrl.runtime.host import Host

TINY = fl.Policy(fl.networks.MLP, hidden=(4,))
PPO = fl.ppo(
    "CartPole-v1",
    fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=8,
        batch_size=16,
        epochs=1,
        minibatch_size=None,
        policy=TINY,
    ),
)


# -- sinks


class Notes:
    """An observer that keeps what it takes."""

    kinds = (Started, RowClosed, Warned, Ended)

    def __init__(self):
        self.got = []

    def __call__(self, event):
        self.got.append(event)

    def of(self, kind):
        return [event for event in self.got if isinstance(event, kind)]


class Blocked(Notes):
    """Blocks in its first row until it is let go, as a service does that does not answer."""

    kinds = (RowClosed, Ended)

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def __call__(self, event):
        self.go_on.wait()
        super().__call__(event)


def test_a_sink_that_blocks_holds_up_neither_training_nor_other_sinks_and_gets_its_rows_in_order(
    tmp_path,
):
    blocked, notes = Blocked(), Notes()
    with fl.run(PPO, observers=[blocked, notes, fl.Csv(tmp_path / "rows.csv")]) as run:
        rows = [next(run) for _ in range(20)]
        deadline = time.monotonic() + 60
        while len(notes.of(RowClosed)) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(notes.of(RowClosed)) == 20 and blocked.got == []
        assert (tmp_path / "rows.csv").read_text().count("\n") >= 20
        blocked.go_on.set()
    assert [event.row for event in blocked.of(RowClosed)] == rows
    assert [type(event) for event in blocked.got[-1:]] == [Ended]
    assert notes.of(Warned) == []


def test_what_a_sink_that_blocks_lacks_in_the_end_is_counted_in_a_warning(monkeypatch):
    monkeypatch.setattr(events, "CLOSING_SECONDS", 0.2)
    blocked, notes = Blocked(), Notes()
    with fl.run(PPO, observers=[blocked, notes]) as run:
        for _ in range(5):
            next(run)
    assert [event.text for event in notes.of(Warned)] == [
        "observer Blocked did not take 6 events within 0.2 s of the end of the run, 5 rows among "
        "them, so it lacks these"
    ]
    blocked.go_on.set()


def test_a_sink_that_raises_is_switched_off_and_the_others_get_all(tmp_path):
    class Raises(Notes):
        kinds = (RowClosed,)

        def __call__(self, event):
            super().__call__(event)
            raise OSError("no network")

    raises, notes = Raises(), Notes()
    with fl.run(PPO, observers=[raises, notes], out=tmp_path / "run") as run:
        rows = [next(run) for _ in range(5)]
    assert len(raises.got) == 1
    assert [event.row for event in notes.of(RowClosed)] == rows
    assert [event.text for event in notes.of(Warned)] == [
        "observer Raises failed and is switched off: OSError: no network"
    ]
    assert (tmp_path / "run/rows.jsonl").read_text().count("\n") == 5


# -- the machine's clock


@pytest.fixture
def set_clock(monkeypatch):
    """A function that sets the machine's clock by so many hours."""
    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    return lambda hours: ahead.__setitem__(0, 3_600.0 * hours)


def test_a_clock_that_is_set_changes_neither_rows_nor_snapshots_nor_trace(tmp_path, set_clock):
    began = time.perf_counter()
    with fl.run(
        PPO,
        out=tmp_path / "run",
        trace=tmp_path / "trace.json",
        observers=[fl.Csv(tmp_path / "rows.csv"), fl.TensorBoard(tmp_path / "board")],
        snapshots=fl.Snapshots(every=3_600),
    ) as run:
        rows = []
        for hours in (0, 2, -3, 24, -24, 5, 0, -1, 8, 2):
            set_clock(hours)
            rows.append(next(run))
    took = time.perf_counter() - began
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[0] > 0 and seconds[-1] <= took
    assert all(row["steps_per_second"] > 0 for row in rows)
    profile = run.profile()
    assert 0 < profile.seconds <= took
    assert all(0 <= s <= took for spent in profile.processes.values() for s in spent.values())
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    times = [span["ts"] for span in spans if span["ph"] == "X"]
    assert max(times) - min(times) <= took * 1e6
    # Only the one at the end: an hour has not passed.
    (kept,) = (tmp_path / "run/snapshots").glob("*.json")
    assert kept.name == "row-0000000010.json"
    with fl.resume(tmp_path / "run", steps=12 * 16) as resumed:
        assert next(resumed)["seconds"] >= seconds[-1]


def test_weights_are_saved_though_the_clock_is_set_while_orbax_writes_them(tmp_path, monkeypatch):
    with fl.run(PPO) as run:
        next(run)
    path, weights, write = tmp_path / "weights", run.policy.weights, checkpoints._write
    attempts = []

    def too_late_at_first(arrays, where):
        attempts.append(where)
        write(arrays, where)
        if len(attempts) == 1:
            raise TimeoutError("Timed out after 86400.0 seconds.")  # as orbax raises it then

    monkeypatch.setattr(checkpoints, "_write", too_late_at_first)
    checkpoints.write_weights(weights, path)
    assert len(attempts) == 2
    assert same(checkpoints.read_weights(path, run.policy.network), weights)
    assert [each.name for each in tmp_path.iterdir()] == ["weights"]


class Idle:
    """A worker whose calls take no time."""

    def call(self):
        return "done"

    def close(self):
        pass


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_worker_waits_no_longer_for_a_transfer_than_it_is_idle_whatever_its_clock_says(hours):
    host = Host(pickle.dumps(idle), context([]), [0], {})
    for _ in range(2):
        assert host.call(0, 0, time.time() - 3_600 * hours, "call") == "done"
    spent = clock.by_kind(host.spent()[0].spent)
    assert all(seconds >= -1e-6 for seconds in spent.values())
    assert sum(spent.values()) < 600


def idle(index, restart_count):
    return Idle()


def test_processes_of_one_machine_agree_on_the_time_however_its_clock_was_set(monkeypatch):
    monkeypatch.setattr(clock, "AHEAD", clock.AHEAD - 3_600)  # of one that starts later
    assert clock.ahead() == clock.AHEAD
    of_driver = f"{clock._boot()} {clock.AHEAD + 3_600!r}"
    monkeypatch.setenv(clock.OF_DRIVER, of_driver)
    assert clock.ahead() == clock.AHEAD + 3_600
    monkeypatch.setenv(clock.OF_DRIVER, f"another-machine {of_driver}")
    assert clock.ahead() == clock.AHEAD


def test_the_compile_cache_is_looked_at_though_the_clock_was_set_back(tmp_path):
    (tmp_path / "old").write_bytes(bytes(100))
    (tmp_path / compile_cache.STAMP).touch()
    later = time.time() + 86_400
    os.utime(tmp_path / compile_cache.STAMP, (later, later))
    compile_cache.prune(tmp_path, most=50, kept=10)
    assert not (tmp_path / "old").exists()


# -- leftovers


def test_only_sessions_of_flowrls_own_drivers_that_are_gone_are_removed(tmp_path):
    def session(name):
        (tmp_path / f"session_{name}/logs").mkdir(parents=True)
        return tmp_path / f"session_{name}"

    foreign = session("of another program")
    ends = {name: sessions.begun({"session_dir": str(session(name))}, list) for name in "ab"}
    killed = session("killed")
    code = (
        "import os, signal, sys; from flowrl.runtime.sessions import begun; "
        "kept = begun({'session_dir': sys.argv[1]}, list); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(killed)], check=False)
    assert (killed / sessions.MARK).exists()
    ends["a"]()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "session_a",
        "session_b",
        "session_killed",
        "session_of another program",
    ]
    sessions.begun({"session_dir": str(session("c"))}, list)()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "session_b",
        "session_c",
        "session_of another program",
    ]
    assert foreign.is_dir()
    ends["b"]()
