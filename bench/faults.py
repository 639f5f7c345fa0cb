"""Perform faults for real, and print what each of them costs, for docs/faults.md.

``python bench/faults.py sigterm stopped`` performs only these; without names all, which takes about
ten minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import flowrl as fl
from flowrl.core.events import Ended, Restarted, RowClosed, Tap, Warned

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from environments import Clockwork  # noqa: E402 - the tests' own
from test_faults import hosts, wide  # noqa: E402

UPDATES = 10_000
"""The updates of a long run in this process; on Ray a fifth of them."""


def sigterm() -> None:
    """End `flowrl run` by SIGTERM, in each runtime, and go on."""
    small = ["--set", "report_every=1"]
    kinds = {
        "local": ["ppo"],
        "xla": ["ppo", "--env", "gymnax:CartPole-v1", "--runtime", "xla"],
        "ray": ["impala", "--runtime", "ray", *small],
        "--seeds 2": ["ppo", "--seeds", "2"],
    }
    for name, words in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            process = started(["run", *words, "--out", f"{folder}/run"])
            wait(partial(saved_rows, folder), 120)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait()
            seconds = time.monotonic() - began
            runs = [path.parent for path in Path(folder).rglob("rows.jsonl")]
            lost = sum(steps_lost(run) for run in runs)
            say("SIGTERM", name, f"{seconds:.1f} s", f"{lost} steps lost")


def saved_rows(folder: str) -> list[Path]:
    return list(Path(folder).rglob("row-*.json"))


def steps_lost(run: Path) -> int:
    """Return the steps of a run that no snapshot holds."""
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    newest = max(int(path.stem[4:]) for path in (run / "snapshots").glob("row-*.json"))
    return int(rows[-1]["env_steps"] - rows[newest - 1]["env_steps"])


class Blocks:
    """A sink that blocks for a minute in its third row."""

    kinds = (RowClosed, Ended)
    patience = 90.0

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, event: Any) -> None:
        if isinstance(event, RowClosed):
            self.rows.append(int(event.row["row"]))
            if len(self.rows) == 3:
                time.sleep(60)


def sink() -> None:
    """Train beside a sink that blocks for 60 s."""
    speeds: dict[str, float] = {}
    for name, sinks in {"without": [], "blocked": [Blocks()]}.items():
        with fl.run(fl.ppo("CartPole-v1"), observers=sinks) as run:
            next(run)
            began, first = time.monotonic(), run.rows[-1]["env_steps"]
            while time.monotonic() - began < 20:
                next(run)
            speeds[name] = (run.rows[-1]["env_steps"] - first) / 20
        for each in sinks:
            assert each.rows == list(range(1, len(run.rows) + 1)), "rows are lost"
    text = " and ".join(f"{speed:,.0f} steps/s {name}" for name, speed in speeds.items())
    say("a sink that blocks for 60 s", "local", text, "no row lost, in order")


def stopped() -> None:
    """Stop a process of runners for 90 s, without and with a time-out."""
    for timeout in (None, 20.0):
        with fl.run(wide().set("runners.timeout", timeout), runtime=two_processes()) as run:
            rows = [next(run) for _ in range(20)]
            process = hosts()[0]
            process.suspend()
            began = time.monotonic()
            back = gone = None
            while time.monotonic() - began < 90:
                row = next(run)
                seconds = time.monotonic() - began
                if back is None and row.get("restarts", 0) > rows[-1].get("restarts", 0):
                    back = seconds
                if gone is None and not process.is_running():
                    gone = seconds
            updates = row["updates"] - rows[-1]["updates"]
            if gone is None:
                process.resume()
            more = [next(run) for _ in range(50)]
        assert run.audit().closed
        say(
            "a runner's process is stopped for 90 s",
            f"ray, timeout={timeout}",
            f"replaced after {back and round(back, 1)} s, killed after {gone and round(gone, 1)} s",
            f"{updates:,.0f} updates meanwhile, {more[-1].get('lost_steps', 0):g} steps lost",
        )


class Hog(Clockwork):
    """Takes 50 MB more in each step from its 300th on, unless another did so before."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark, self.life, self.mine = Path(mark), 0, False
        self.held: list[Any] = []

    def step(self, action: Any) -> Any:
        """Take a step, and memory."""
        self.life += 1
        if self.life == 300 and not self.mark.exists():
            self.mark.touch()
            self.mine = True
        # 3 GB at most, whatever happens.
        if self.mine and len(self.held) < 60:
            self.held.append(np.ones(50_000_000 // 8))
            time.sleep(0.02)
        return super().step(action)


def hog() -> None:
    """Let an environment take memory without end, where Ray may use 1.5 GB more than now."""
    memory = psutil.virtual_memory()
    most = 1 - (memory.available - 1.5e9) / memory.total
    limits = {"memory_usage_threshold": most, "memory_monitor_refresh_ms": 100}
    seen: list[tuple[float, Any]] = []

    class Notes:
        kinds = (Restarted,)

        def __call__(self, event: Any) -> None:
            seen.append((time.monotonic(), event))

    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        settings = fl.IMPALASettings(num_runners=2, envs_per_runner=1, rollout_length=20)
        graph = fl.impala(Hog, settings).set("runners.env_settings", {"mark": str(mark)})
        runtime = fl.RayRuntime(init={"_system_config": limits})
        with fl.run(graph, runtime=runtime, observers=[Notes()]) as run:
            while not seen:
                next(run)
            seconds = time.monotonic() - (time.time() - mark.stat().st_mtime)
            steps = run.rows[-1]["env_steps"]
            while next(run)["env_steps"] < steps + 1_000:
                pass
            row = run.rows[-1]
            text = f"killed after {seen[0][0] - seconds:.1f} s of growing"
            lost = f"{row['lost_steps']:g} steps lost; {seen[0][1].because[:120]} ..."
        say("an environment takes all memory", "ray", text, lost)


def driver() -> None:
    """Kill the driver of a run on Ray, and look what is left."""
    folders = set(Path("/tmp/ray").glob("session_2*"))
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "impala", "--runtime", "ray", "--out", f"{folder}/run"]
        process = started(words)
        wait(partial(saved_rows, folder), 120)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        began = time.monotonic()
        ended: list[float] = []
        while left := [child for child in children if alive(child)]:
            ended += [time.monotonic() - began] * (len(children) - len(left) - len(ended))
            time.sleep(0.1)
        ended += [time.monotonic() - began] * (len(children) - len(ended))
        mine = set(Path("/tmp/ray").glob("session_2*")) - folders
        files = set(os.listdir("/dev/shm")) - shared
        subprocess.run(words_of(["resume", f"{folder}/run", "--steps", "1"]), check=False, **quiet)
    say(
        "the driver is killed",
        "ray",
        f"its {len(ended)} processes are gone after {', '.join(f'{s:.1f}' for s in ended)} s",
        f"{len(files)} files in /dev/shm, {len(mine)} folders of sessions, of which "
        f"{sum(path.exists() for path in mine)} are left at the next start",
    )


def seeds() -> None:
    """Kill the driver of `--seeds`, and look how long its processes live."""
    with tempfile.TemporaryDirectory() as folder:
        process = started(["run", "ppo", "--seeds", "2", "--out", f"{folder}/run"])
        wait(lambda: len(saved_rows(folder)) >= 2, 120)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        began = time.monotonic()
        wait(lambda: not [child for child in children if alive(child)], 120)
        seconds = time.monotonic() - began
        saved = len(list(Path(folder).glob("run/seed-*/manifest.json")))
    say("the driver is killed", "--seeds 2", f"{seconds:.1f} s", f"{saved} of 2 seeds are saved")


def learner() -> None:
    """Kill the process of a placed learner, then stop it, where a snapshot is made each second."""
    lose_learner("the learner's actor", fl.Actor(), lambda remote: remote.actor)


def group() -> None:
    """Do the same to the second process of a learner that has two."""
    second = "the second actor of a learner"
    lose_learner(second, fl.Actor(count=2), lambda remote: remote.members[1].actor)


def lose_learner(what: str, actor: fl.Actor, of: Callable[[Any], Any]) -> None:
    """Kill and stop a process of a placed learner.

    Args:
        what: the process in words.
        actor: the placement.
        of: finds Ray's actor of the process in what was placed.
    """
    import ray

    runtime = fl.RayRuntime(place={"learner": actor})
    for name, fault in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        warned: list[str] = []
        tap = Tap(partial(note, warned), Warned)
        with tempfile.TemporaryDirectory() as folder:
            how: dict[str, Any] = {
                "out": f"{folder}/run",
                "snapshots": fl.Snapshots(every=1),
                "observers": [tap],
            }
            with fl.run(fl.impala("CartPole-v1"), runtime=runtime, **how) as run:
                row = [next(run) for _ in range(8)][-1]
                place: Any = run._session.place
                remote = place.sites["learner"].homes[0].remote
                os.kill(ray.get(of(remote).__ray_call__.remote(own_pid)), fault)
                began = time.monotonic()
                # Rows that were closed already come first.
                while not warned:
                    last, row = row, next(run)
                seconds = time.monotonic() - began
                lost = last["env_steps"] - run.rows[-2]["env_steps"]
            assert run.audit().closed
        say(
            f"{what} is {name}",
            "ray, a snapshot a second",
            f"the next row {seconds:.1f} s later",
            f"{lost:,.0f} steps in rows that are made again",
        )


def note(texts: list[str], event: Warned) -> None:
    texts.append(event.text)


def own_pid(_: Any) -> int:
    return os.getpid()


def node() -> None:
    """Kill a node of a cluster of two, with one of two processes of runners."""
    warnings.simplefilter("ignore")  # of Ray's own test cluster
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        runtime = fl.RayRuntime(address=cluster.address, processes=2)
        with fl.run(fl.impala("CartPole-v1", num_runners=4), runtime=runtime) as run:
            rows = [next(run) for _ in range(5)]
            cluster.remove_node(second, allow_graceful=False)
            began, waits = time.monotonic(), []
            while rows[-1].get("restarts", 0) < 2:
                before = time.monotonic()
                rows.append(next(run))
                waits.append(time.monotonic() - before)
            seconds = time.monotonic() - began
        assert run.audit().closed
    finally:
        cluster.shutdown()
    say(
        "a node with half of the runners is killed",
        "ray",
        f"its runners are replaced after {seconds:.1f} s; no row took longer than "
        f"{max(waits):.1f} s",
        f"{rows[-1]['lost_steps']:,.0f} steps lost",
    )


def long() -> None:
    """Count files, threads and memory over many updates, in this process and on Ray."""
    for name, runtime, updates in (
        ("local", "local", UPDATES),
        ("ray", one_process(), UPDATES // 5),
    ):
        with fl.run(wide(), runtime=runtime) as run:
            for _ in range(updates // 10):
                next(run)
            processes = [psutil.Process(), *hosts()]
            before = [facts(process) for process in processes]
            for _ in range(updates):
                next(run)
            after = [facts(process) for process in processes]
        grown = [1_000 * (b[2] - a[2]) / updates for a, b in zip(before, after, strict=True)]
        text = "; ".join(
            f"files {a[0]} to {b[0]}, threads {a[1]} to {b[1]}, {each / 1e6:+.2f} MB per 1,000"
            for a, b, each in zip(before, after, grown, strict=True)
        )
        say("a long run", name, f"{updates:,} updates", text)


def facts(process: psutil.Process) -> tuple[int, int, int]:
    return process.num_fds(), process.num_threads(), process.memory_info().rss


quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def words_of(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "flowrl", *words]


def started(words: list[str]) -> subprocess.Popen[bytes]:
    if words[0] == "run":
        words = [*words, "--snapshot-every", "1"]
    return subprocess.Popen(words_of(words), **quiet)


def wait(done: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def one_process() -> fl.RayRuntime:
    return fl.RayRuntime(processes=1)


def two_processes() -> fl.RayRuntime:
    return fl.RayRuntime(processes=2)


def say(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


FAULTS = {
    each.__name__: each
    for each in (sigterm, sink, stopped, hog, driver, seeds, learner, group, node, long)
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or FAULTS:
        FAULTS[chosen]()
