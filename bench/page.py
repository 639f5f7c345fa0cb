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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import jax
import numpy as np
import psutil

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
        f"beside it: the median of {TURNS}, and its 95 % bootstrap interval."
    )
    lines = [
        "# What the live page costs",
        "",
        about,
        "",
        "| | one page | five pages | one page, a node chosen | memory, five pages |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, runtime in (("ppo", "local"), ("impala", "ray")):
        ratios, megabytes = measured(name, runtime)
        cells = [interval(ratios[pages]) for pages in (1, 5, CHOSEN)]
        lines.append(f"| {name}, {runtime} | {' | '.join(cells)} | {megabytes:+.0f} MB |")
        print(lines[-1])
    (ROOT / "docs/benchmarks/page.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(name: str, runtime: str) -> tuple[dict[int, list[float]], float]:
    """Return the ratios of speeds by number of pages, and the megabytes that pages take."""
    settings = {"ppo": fl.PPOSettings, "impala": fl.IMPALASettings}[name]
    graph = getattr(fl, name)("CartPole-v1", settings(**tuned(name, "CartPole-v1")))
    ratios: dict[int, list[float]] = {1: [], 5: [], CHOSEN: []}
    with fl.run(graph, runtime=runtime) as run, rows_of(run):
        while len(run.rows) < 20:
            time.sleep(0.1)
        before = psutil.Process().memory_info().rss
        page = fl.serve(run, token=TOKEN)
        with reader(page.link) as read_by:
            for _ in range(TURNS):
                speeds = {}
                for pages in random.sample([*PAGES, CHOSEN], 4):
                    read_by(pages)
                    speeds[pages] = speed(run)
                for pages, found in ratios.items():
                    found.append(speeds[pages] / speeds[0])
            read_by(5)
            time.sleep(10 * SECONDS)
            after = psutil.Process().memory_info().rss
        # What the rows themselves take in the meantime is no cost of the page.
        kept = sum(sys.getsizeof(row) for row in run.rows[20:])
        page.close()
    return ratios, (after - before - kept) / 1e6


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


def speed(run: fl.Run) -> float:
    """Return the steps per second from now on, for some seconds."""
    time.sleep(SETTLING)
    first = len(run.rows)
    while len(run.rows) == first:
        time.sleep(0.01)
    began = run.rows[-1]
    time.sleep(SECONDS)
    ended = run.rows[-1]
    return (ended["env_steps"] - began["env_steps"]) / (ended["seconds"] - began["seconds"])


def interval(ratios: list[float]) -> str:
    """Return the median of ratios, and its bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return f"**{statistics.median(ratios):.3f}** ({low:.3f} to {high:.3f})"


# -- the process that reads


@contextmanager
def reader(link: str) -> Iterator:
    """Start the process that reads pages; yield a function that sets how many it reads."""
    words = [sys.executable, __file__, "read", link]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None

        def read_by(pages: int) -> None:
            process.stdin.write(f"{pages}\n")
            process.stdin.flush()

        yield read_by
        process.stdin.close()


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
