"""Faults: what a run does where a signal, a sink, the clock or a process fails.

docs/faults.md has a row for each of them; bench/faults.py measures what its figures are.
"""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest

import flowrl as fl
from conftest import RAY, same
from flowrl.core import clock, compile_cache, events
from flowrl.core.events import Ended, OperatorRan, QueueLevel, RowClosed, Started, Took, Warned
from flowrl.core.items import bytes_of
from flowrl.observe import checkpoints
from flowrl.rollout import gym_runners, requests
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
        (
            "observer Blocked did not take 6 events within 0.2 s of the end of the run, 5 rows "
            "among them, so it lacks these"
        )
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
    (tmp_path / "old-cache").write_bytes(bytes(100))
    (tmp_path / compile_cache.STAMP).touch()
    later = time.time() + 86_400
    os.utime(tmp_path / compile_cache.STAMP, (later, later))
    compile_cache.prune(tmp_path, most=50, kept=10)
    assert not (tmp_path / "old-cache").exists()


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


# -- long runs


class Wide(gym.Env):
    """Observes 2,000 numbers, the first two of which are its own number and that of the step."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2_000,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.number, self.life = float(np.random.default_rng().integers(1 << 24)), 0

    def _obs(self):
        self.life += 1
        return np.array([self.number, self.life] + [0.0] * 1_998, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        obs = self._obs()
        return obs, 1.0, self.life % 50 == 0, False, {}


ROLLOUT_BYTES = 8 * 2_000 * 4
"""The observations in a rollout."""


def wide(**settings):
    """An IMPALA with a queue, whose rollouts are large and whose updates are quick."""
    given = {"num_runners": 2, "envs_per_runner": 1, "rollout_length": 8, "batch_size": 16}
    given |= {"report_every": 1, "policy": fl.Policy(fl.networks.MLP, hidden=(1,))}
    return fl.impala(Wide, fl.IMPALASettings(**{**given, **settings}))


def held(processes):
    """What processes hold: open files and threads, and bytes of memory."""
    # An observer opens a file for a moment, in a thread of its own: what is held is there always.
    moments = []
    for _ in range(10):
        moments.append([(process.num_fds(), process.num_threads()) for process in processes])
        time.sleep(0.02)
    files = [tuple(map(min, zip(*counts, strict=True))) for counts in zip(*moments, strict=True)]
    return files, sum(process.memory_info().rss for process in processes)


def grows(run, updates, workers=list):
    """What the process of a run and its workers' hold after half of the updates and after all, and
    by how many bytes of memory they grew per update."""
    count = updates // 2
    for _ in range(count):
        next(run)
    processes = [psutil.Process(), *workers()]
    gc.collect()
    files, memory = held(processes)
    for _ in range(updates - count):
        next(run)
    gc.collect()
    files_later, memory_later = held(processes)
    return files, files_later, (memory_later - memory) / (updates - count)


@pytest.mark.system
def test_files_threads_and_memory_are_flat_over_a_long_run(tmp_path):
    sinks = [fl.Csv(tmp_path / "rows.csv"), fl.TensorBoard(tmp_path / "board"), Notes()]
    with fl.run(wide(), observers=sinks, out=tmp_path / "run") as run:
        files, files_later, per_update = grows(run, 400)
    assert files_later == files
    # A Row of a run, and what an observer here keeps of it, take 4 KB.
    assert per_update < ROLLOUT_BYTES / 4


# -- Ray


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_on_ray_they_are_flat_too_and_runners_are_the_first_to_go_where_memory_runs_out():
    with fl.run(wide(), runtime=RAY) as run:
        files, files_later, per_update = grows(run, 320, hosts)
        assert [first_to_go(process) for process in hosts()] == [1_000]
        assert first_to_go(psutil.Process()) < 1_000
    # Ray opens connections when it likes, and never one per update.
    for (before, threads), (after, threads_later) in zip(files, files_later, strict=True):
        assert after <= before + 10 and threads_later <= threads + 10
    assert per_update < ROLLOUT_BYTES / 2


def first_to_go(process):
    """How readily the kernel kills a process where memory runs out: 1,000 is most readily."""
    return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())


def hosts():
    """The processes of runners, without those that have ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ray::Host" in " ".join(process.cmdline()):
                found.append(process)
    return found


class InFlight:
    """A slow learner: notes what waits in the queue and with the runners whenever it goes on."""

    live = True
    kinds = (QueueLevel, Took, OperatorRan)

    def __init__(self):
        self.levels, self.bytes, self.requests, self.taken = [], set(), [], []
        self.runners = None
        self.seconds = 0.02

    def __call__(self, event):
        match event:
            case QueueLevel(level=level):
                self.levels.append(level)
            case OperatorRan(node="batch", bytes=size, item=item) if item is not None:
                self.bytes.add(size)
            case Took(node="train", item=batch):
                time.sleep(self.seconds)
                self.requests.append(len(self.runners.requests))
                obs = np.asarray(batch.data["obs"])[np.asarray(batch.data["valid"]) > 0]
                self.taken += [tuple(numbers) for numbers in obs[:, :2].tolist()]


@pytest.mark.ray
@pytest.mark.parametrize("runtime", ["local", "ray"], indirect=True)
def test_bytes_in_flight_never_exceed_what_the_plan_allows(runtime):
    graph = wide().set("queue.capacity", 3)
    plan, flight = graph.compile(), InFlight()
    with fl.run(plan, runtime=runtime, observers=[flight]) as run:
        flight.runners = run._session.place.handles["runners"]
        for _ in range(40):
            next(run)
        # The queue is full once the learner is the slower one, however busy the machine is. What
        # was requested is then 3 or 4, for a full queue holds up the next request.
        while runtime != "local" and (max(flight.levels) < 3 or max(flight.requests) < 3):
            flight.seconds = min(1.0, 1.1 * flight.seconds)
            next(run)
    per_batch, per_rollout = (
        bytes_of(plan.found.first_items[node]) for node in ("batch", "sample")
    )
    assert flight.bytes == {per_batch}
    most = 3 * per_batch + 2 * 2 * per_rollout
    waited = [level * per_batch for level in flight.levels]
    assert max(waited) + max(flight.requests) * per_rollout <= most


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
@pytest.mark.parametrize("timeout", [None, 2.0], ids=["comes back", "is replaced"])
def test_a_process_that_is_stopped_comes_back_or_is_replaced_and_nothing_is_trained_twice(timeout):
    flight = InFlight()
    with fl.run(wide(), runtime=fl.RayRuntime(processes=2), observers=[flight]) as run:
        flight.runners = handle = run._session.place.handles["runners"]
        next(run)
        # From here on, for a process may take longer than that to start.
        handle.spec = replace(handle.spec, timeout=timeout)
        stopped = hosts()[0]
        stopped.suspend()
        try:
            others = [next(run) for _ in range(10)]
            assert others[-1]["updates"] == others[0]["updates"] + 9, "the other goes on alone"
            if timeout is not None:
                while next(run).get("restarts", 0) < 1:
                    pass
        finally:
            # Where it was replaced and Ray has not killed it yet, it goes on with its old calls.
            with suppress(psutil.NoSuchProcess):
                stopped.resume()
        rows = [next(run) for _ in range(20)]
    assert timeout is None or rows[-1]["restarts"] >= 1
    assert timeout is not None or "restarts" not in rows[-1]
    assert run.audit().closed
    assert len(flight.taken) == len(set(flight.taken)) > 0


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_a_snapshot_does_not_wait_for_each_call_of_a_process_that_is_stopped(monkeypatch):
    for module in (requests, gym_runners):
        monkeypatch.setattr(module, "KEEP_SECONDS", 3.0)
    graph = wide(num_runners=4).set("sample.in_flight", 4)
    with fl.run(graph, runtime=RAY) as run:
        next(run)
        # A stage that waited for the process within a pass would hold the snapshot up.
        with run._session.turns.still():
            (stopped,) = hosts()
            stopped.suspend()
            try:
                # Each of the four runners has four calls, and one that asks for its state.
                began = time.monotonic()
                state = run._session.keep()
                took = time.monotonic() - began
            finally:
                stopped.resume()
        next(run)
    assert state["place"]["handles"]["runners"]["runners"] == [None] * 4
    assert took < 4 * 3.0


PRESSED = """
import glob, os, sys, time
import flowrl as fl
from flowrl.cli.training import save_when_ended
from test_faults import wide

save_when_ended()
graph = wide(num_runners=4, rollout_length=160, batch_size=160).set("sample.in_flight", 24)
runtime = fl.RayRuntime(processes=1, init={"object_store_memory": 80_000_000})
with fl.run(graph, runtime=runtime, out=sys.argv[1]) as run:
    next(run)
    while not glob.glob(f"/tmp/ray/session_*_{os.getpid()}/ray_spilled_objects*/*"):
        time.sleep(0.1)
    for row in run:
        print(int(row["row"]), flush=True)
"""
"""112 rollouts of 1.3 MB are in flight or in the queue at once, more than Ray's object store holds.
The learner waits until Ray has moved some of them to the disk."""


@pytest.mark.system
@pytest.mark.ray
def test_a_full_object_store_holds_no_run_up_and_sigterm_saves_it_on_ray_too(tmp_path):
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    process = subprocess.Popen(
        [sys.executable, "-c", PRESSED, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while (line := process.stdout.readline()) and int(line) < 30:
            pass
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    rows = int(([line, *rest.splitlines()])[-1])
    assert "KeyboardInterrupt" in errors, errors
    (kept,) = (tmp_path / "run/snapshots").glob("row-*.json")
    assert kept.name == f"row-{rows:010}.json"
    with fl.resume(
        tmp_path / "run", runtime="local", steps=1_000_000, allow=["test_faults"]
    ) as run:
        assert next(run)["row"] == rows + 1
    assert run.audit().closed
