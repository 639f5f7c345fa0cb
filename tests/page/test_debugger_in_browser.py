"""What a real browser shows of a run under the debugger."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flowrl as fl


def test_a_browser_steps_through_a_run_under_the_debugger(tmp_path, opened):
    (tmp_path / "mine.py").write_text("from small_runs import small\n")
    folders = [str(Path(fl.__file__).parents[1]), str(Path(__file__).parents[1])]
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "flowrl", "debug", "mine.py:small", "--ui"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = iter(process.stdout.readline, "")
        link = next(line.split()[-1] for line in lines if line.startswith("live page: "))
        tab = opened(SimpleNamespace(link=link))
        here = "g.node.here[data-name={}][aria-label*='the run stands here']"
        tab.wait_for_selector(here.format("sample"))
        tab.click("[data-verb=next]")
        tab.wait_for_selector(here.format("batch"))
        assert tab.inner_text("#state") == "stopped: row 1, at batch"
        assert tab.inner_text("#item").startswith("a Batch [16, 2], 32 steps")
        assert len(tab.query_selector_all("g.node.here")) == 1
        # A break by the page, and one by the prompt.
        assert tab.is_disabled("#until") and tab.is_disabled("#toggle")
        tab.click("g.node[data-name=train]")
        tab.click("#toggle:text-is('stop here')")
        tab.wait_for_selector(
            "g.node.stops[data-name=train][aria-label*='break train'] circle.stop"
        )
        tab.wait_for_selector("#toggle:text-is('no stop here')")
        print("break sync when lag_max==0", file=process.stdin, flush=True)
        tab.wait_for_selector("g.node.stops[data-name=sync]")
        assert tab.inner_text("#breaks").split("\n") == [
            "break 1: train",
            "break 2: sync when lag_max==0",
        ]
        tab.click("[data-verb=continue]")
        tab.wait_for_selector(here.format("train"))
        tab.click("#toggle:text-is('no stop here')")
        tab.wait_for_selector("#toggle:text-is('stop here')")
        # A command of the prompt moves the mark, too, and a setting changes in the panel.
        print("next", file=process.stdin, flush=True)
        tab.wait_for_selector(here.format("sync"))
        print("set train.epochs 3", file=process.stdin, flush=True)
        tab.wait_for_selector("#chosen tr:has-text('epochs') td.number:text-is('3')")
        tab.click("g.node[data-name=adv]")
        tab.click("#until")
        tab.wait_for_selector(here.format("adv"))
        tab.click("[data-verb=row]")
        tab.wait_for_selector("#state:text-is('stopped: row 2, at sync')")
        print("quit", file=process.stdin, flush=True)
        rest = "".join(lines)
        assert process.wait(60) == 0
    assert "(row 1, at batch) break train   (from the page)\nbreak 1: train\n" in rest
    assert "until adv   (from the page)\n" in rest
    tab.wait_for_selector("#state:has-text('ended: ')")
