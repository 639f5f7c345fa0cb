"""`make bench`: what the live page costs a run, in speed and in memory.

Writes docs/benchmarks/page.md.
"""

from __future__ import annotations

import http.client
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
import psutil
from gymnasium.envs.classic_control import CartPoleEnv

import flowrl as fl
from flowrl.algos.tuned import tuned

ROOT = Path(__file__).parents[1]
TOKEN = "a token of the benchmark"
TURNS, SECONDS, SETTLING = 16, 3.0, 0.5
"""Turns of all numbers of pages, the seconds that each is measured, and those before it."""
PAGES = (0, 1, 5)
CHOSEN = 10
"""So many more stands for one page on which a node is chosen, whose items are asked for."""


def main() -> None:
    """Measure, and write the page."""
    if sys.argv[1:2] == ["read"]:
        read(sys.argv[2])
        return
    about = (
        "Written by `make bench` ([bench/page.py](../../bench/page.py)): "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"jax {jax.__version__}.\n\n"
        "One run on CartPole-v1 with tuned settings. Pages are opened and closed again in turns of "
        f"{SECONDS:g} s, in a new random order each time, by a process that reads what a browser "
        "would read, and draws nothing. Ratios of steps per second to the turn without pages "
        f"beside it: the median of {TURNS}, and its 95 % bootstrap interval.\n\n"
        f"In slow environments a step waits for {1e3 * Slow.WAIT:g} ms, so that the run leaves the "
        "processor free. What its processes spend there is as steady as the run itself, and shows "
        "what pages cost: their CPU time beside that of the turn without pages, as a share of all "
        "cores."
    )
    lines = [
        "# What the live page costs",
        "",
        about,
        "",
        "| | one page | five pages | one page, a node chosen | memory, five pages |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, runtime, env in (
        ("ppo", "local", ""),
        ("impala", "ray", ""),
        ("impala", "ray", Slow),
    ):
        turns, megabytes = measured(name, runtime, env or "CartPole-v1")
        title = f"{name}, {runtime}{', slow environments' if env else ''}"
        cells = [interval(turns[n, 0] / turns[0, 0], ".3f") for n in (1, 5, CHOSEN)]
        lines.append(f"| {title} | {' | '.join(cells)} | {megabytes:+.0f} MB |")
        if env:
            shares = {n: 100 * (turns[n, 1] - turns[0, 1]) / os.cpu_count() for n in (1, 5, CHOSEN)}
            cells = [interval(shares[n], ".2f") + " %" for n in (1, 5, CHOSEN)]
            lines.append(f"| {title}, CPU time | {' | '.join(cells)} | |")
        print(*lines[6:], sep="\n", flush=True)
    (ROOT / "docs/benchmarks/page.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


class Slow(CartPoleEnv):
    """CartPole whose steps wait."""

    WAIT = 1e-3
    """The seconds that a step waits."""

    def step(self, action: Any) -> Any:
        """Wait, then take a step."""
        time.sleep(self.WAIT)
        return super().step(action)


def measured(name: str, runtime: str, env: Any) -> tuple[dict[tuple[int, int], np.ndarray], float]:
    """Return what `speed` measured in each turn, and the megabytes that pages take.

    The numbers of all turns come by the number of pages, and which of both it is.
    """
    # A row for each update of impala: a turn is measured from one row to another.
    often = {"report_every": 1} if name == "impala" else {}
    graph = getattr(fl, name)(env, **tuned(name, "CartPole-v1"), **often)
    found: list[dict[int, tuple[float, float]]] = []
    with fl.run(graph, runtime=runtime) as run, rows_of(run):
        while len(run.rows) < 3:
            time.sleep(0.1)
        first = len(run.rows)
        before = psutil.Process().memory_info().rss
        page = fl.serve(run, token=TOKEN)
        with reader(page.link) as (read_by, reading):
            for _ in range(TURNS):
                found.append({})
                for pages in random.sample([*PAGES, CHOSEN], 4):
                    read_by(pages)
                    found[-1][pages] = speed(run, reading)
            read_by(5)
            time.sleep(10 * SECONDS)
            after = psutil.Process().memory_info().rss
        # What the rows themselves take in the meantime is no cost of the page.
        kept = sum(sys.getsizeof(row) for row in run.rows[first:])
        page.close()
    turns = {
        (pages, which): np.array([turn[pages][which] for turn in found])
        for pages in (*PAGES, CHOSEN)
        for which in (0, 1)
    }
    return turns, (after - before - kept) / 1e6


@contextmanager
def rows_of(run: fl.Run) -> Iterator[None]:
    """Let a run go on in a thread of its own."""
    thread = threading.Thread(target=lambda: list(run))
    thread.start()
    try:
        yield
    finally:
        run.controls.stop()
        thread.join()


def speed(run: fl.Run, reader: int) -> tuple[float, float]:
    """Return the steps per second from now on for some seconds, and the CPU seconds per second.

    Args:
        run: the run.
        reader: the id of the process that reads, which is not part of the run.
    """
    time.sleep(SETTLING)
    began, spent_before = next_row(run), spent(reader)
    time.sleep(SECONDS)
    ended, spent_after = next_row(run), spent(reader)
    seconds = ended["seconds"] - began["seconds"]
    steps = ended["env_steps"] - began["env_steps"]
    return steps / seconds, (spent_after - spent_before) / seconds


def next_row(run: fl.Run) -> fl.Row:
    """Return the next row that a run closes."""
    rows = len(run.rows)
    while len(run.rows) == rows:
        time.sleep(0.005)
    return run.rows[-1]


def spent(reader: int) -> float:
    """Return the seconds of CPU time that all processes of this run have spent."""
    mine = psutil.Process()
    times = [
        each.cpu_times() for each in (mine, *mine.children(recursive=True)) if each.pid != reader
    ]
    return float(sum(each.user + each.system for each in times))


def interval(numbers: np.ndarray, digits: str) -> str:
    """Return the median of numbers, and its bootstrap interval."""
    draws = np.random.default_rng(0).choice(numbers, (10_000, len(numbers)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return f"**{statistics.median(numbers):{digits}}** ({low:{digits}} to {high:{digits}})"


# -- the process that reads


@contextmanager
def reader(link: str) -> Iterator[tuple[Callable[[int], None], int]]:
    """Start the process that reads pages; yield a function that sets how many it reads."""
    words = [sys.executable, __file__, "read", link]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as process:
        said = process.stdin
        assert said is not None

        def read_by(pages: int) -> None:
            said.write(f"{pages}\n")
            said.flush()

        yield read_by, process.pid
        said.close()


def read(link: str) -> None:
    """Read as many pages as each line of standard input says."""
    place = urlsplit(link)
    asked = connection(place.netloc, f"{place.path}?{place.query}", "")
    cookie = asked.getheader("set-cookie", "").partition(";")[0]
    reading = threading.Event()
    for line in sys.stdin:
        pages = int(line)
        reading.set()
        reading = threading.Event()
        for _ in range(1 if pages == CHOSEN else pages):
            stop = reading
            threading.Thread(target=follow, args=(place.netloc, cookie, stop)).start()
        if pages == CHOSEN:
            threading.Thread(target=look, args=(place.netloc, cookie, reading)).start()
    reading.set()


def connection(host: str, path: str, cookie: str) -> http.client.HTTPResponse:
    """Ask for a path."""
    asking = http.client.HTTPConnection(host, timeout=30)
    asking.request("GET", path, headers={"Cookie": cookie} if cookie else {})
    return asking.getresponse()


def follow(host: str, cookie: str, stop: threading.Event) -> None:
    """Read the stream of a run until it is to stop."""
    with connection(host, "/runs/run/stream", cookie) as stream:
        while not stop.is_set():
            stream.readline()


def look(host: str, cookie: str, stop: threading.Event) -> None:
    """Ask for the newest item of a node once a second."""
    while not stop.wait(1.0):
        connection(host, "/runs/run/items/sample", cookie).read()


if __name__ == "__main__":
    main()
