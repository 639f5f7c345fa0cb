"""How long the page of a run of 24 hours takes to open, and how much memory it holds.

It makes the log of such a run: a row a second, as wide as those of PPO, and 5,000 events. It prints
figures and writes no file of the documentation.
"""

from __future__ import annotations

import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import which
from typing import Any

import flowrl as fl
from flowrl.core.saved_rows import json_lines
from flowrl.page.past import evenly
from flowrl.page.saved import SavedRun, _shown
from flowrl.page.serving import serve_saved
from flowrl.page.source import MOST_EVENTS, MOST_ROWS, Cursor

ROWS, EVENTS = 86_400, 5_000


def main() -> None:
    """Make the log, and print what opening it takes, by reading all of it and as the page does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with fl.run(fl.ppo("CartPole-v1"), steps=8_192, out=path) as run:
            list(run)
        lengthen(path)
        size = (path / "rows.jsonl").stat().st_size
        print(f"{ROWS:,} rows of {size / ROWS:.0f} bytes, {EVENTS:,} events")
        seconds, held = measured(lambda: slow(path))
        print(f"all lines parsed:       {seconds:6.2f} s, {held / 1e6:6.1f} MB held")
        seconds, held = measured(lambda: opened(path))
        print(f"SavedRun.since:         {seconds:6.2f} s, {held / 1e6:6.1f} MB held")
        source, cursor = opened(path)[:2]
        with (path / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"env_steps": 1}) + "\n")
        seconds, _ = measured(lambda: source.since(cursor))
        print(f"after one more row:     {seconds:6.4f} s")
        seconds, _ = measured(SavedRun(path).summary)
        print(f"its line in the list:   {seconds:6.4f} s")
        print(f"until a browser drew it:{in_browser(path):6.2f} s")


def opened(path: Path) -> tuple[SavedRun, Cursor, Any]:
    """Open a run as the page does; return its source, too, which lasts as long as the page."""
    source = SavedRun(path)
    return source, *source.since(Cursor())


def in_browser(path: Path) -> float:
    """Return the seconds from the link of a page until Chromium shows its curve and its state."""
    from playwright.sync_api import sync_playwright

    with closing(serve_saved([path])) as page, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        began = time.perf_counter()
        tab.goto(page.link)
        tab.wait_for_selector("#curve canvas")
        tab.wait_for_selector("#state:has-text('ended')")
        seconds = time.perf_counter() - began
        browser.close()
    return seconds


def lengthen(path: Path) -> None:
    """Give a saved run as many rows and events as it would have after a day."""
    row = json.loads((path / "rows.jsonl").read_text().splitlines()[-1])
    row |= {f"eval/metric_{i}": 1 / (i + 3) for i in range(7)}
    with (path / "rows.jsonl").open("w") as file:
        for i in range(1, ROWS + 1):
            file.write(json.dumps({**row, "row": i, "env_steps": 4096 * i, "seconds": i}) + "\n")
    began = datetime.now(UTC)
    with (path / "events.jsonl").open("w") as file:
        for i in range(EVENTS):
            when = (began + timedelta(seconds=17 * i)).isoformat(timespec="milliseconds")
            file.write(json.dumps({"time": when, "event": "warned", "text": f"odd {i}"}) + "\n")


def slow(path: Path) -> Any:
    """Read a run as the page did before: all rows and events are parsed, and held."""
    rows = list(json_lines(path / "rows.jsonl"))
    graph = json.loads((path / "graph.json").read_text(encoding="utf-8"))
    lines = enumerate(json_lines(path / "events.jsonl"))
    events = [_shown(i, line, graph) for i, line in lines]
    return rows, events, evenly(rows, MOST_ROWS), events[-MOST_EVENTS:]


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds that a piece of work takes, and the bytes of what it leaves."""
    began = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - began
    del found
    tracemalloc.start()
    found = work()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del found
    return seconds, held


if __name__ == "__main__":
    main()
