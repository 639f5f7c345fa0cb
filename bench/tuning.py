"""`make bench`: a study of PPO on CartPole from a bad start, beside Ray Tune written by hand.

Also what is left of a study that is killed in the middle. Writes docs/benchmarks/tuning.md.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import flowrl as fl

ROOT = Path(__file__).parents[1]
TURNS = 3
TRIALS, STEPS = 16, 100_000
BAD: dict[str, Any] = {"lr": 1e-6, "gae_lambda": 0.5, "ent_coef": 0.1}
SEARCH = {
    "lr": "loguniform(1e-6, 1e-2)",
    "gae_lambda": "uniform(0.5, 1)",
    "ent_coef": "loguniform(1e-4, 0.1)",
}
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def command(out: str) -> list[str]:
    """The command of the study."""
    words = [sys.executable, "-m", "flowrl", "tune", "ppo", "--env", "CartPole-v1", "--untuned"]
    for name, space in SEARCH.items():
        words += ["--search", f"{name}={space}"]
    return [*words, "--trials", str(TRIALS), "--steps", str(STEPS), "--out", out]


def timed(words: list[str]) -> tuple[float, str]:
    """The seconds of a command, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr}")
    return time.perf_counter() - began, done.stdout


def lines(out: str) -> list[dict[str, Any]]:
    """The journal of a study, without a last line that is being written."""
    file = Path(out) / "journal.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def endings(out: str) -> collections.Counter[int]:
    """By trial: how often the journal says that it ended."""
    return collections.Counter(
        ended["trial"] for line in lines(out) for ended in line.get("ended", ())
    )


def steps_of(out: str) -> int:
    """The environment steps of all trials of a study."""
    return sum(ended["env_steps"] for line in lines(out) for ended in line.get("ended", ()))


def killed(out: str) -> tuple[int, float]:
    """Kill the study when a third of its trials ended, and go on.

    Returns:
        How many had ended, and the seconds of both parts together.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        command(out), env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as first:
        while sum(endings(out).values()) < TRIALS // 3:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    ended = sum(endings(out).values())
    timed(command(out))
    return ended, time.perf_counter() - began


def main() -> None:
    with fl.run(fl.ppo("CartPole-v1", **BAD), steps=STEPS) as run:
        start = [row["return_mean"] for row in run][-1]
    print(f"start: {start:.1f}", flush=True)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            out = f"{folder}/{turn}"
            seconds, _ = timed(command(out))
            ours.append((seconds, steps_of(out)))
            points = [line["settings"] for line in lines(out) if "settings" in line]
            script = str(ROOT / "bench/handwritten_tune.py")
            seconds, said = timed([sys.executable, script, json.dumps(points), str(STEPS)])
            theirs.append((seconds, json.loads(said.splitlines()[-1])["env_steps"]))
            print(ours[-1], theirs[-1], flush=True)
        before, again = killed(f"{folder}/killed")
        counts = endings(f"{folder}/killed")
        print(before, again, sorted(counts.items()), flush=True)
        best = Path(f"{folder}/0/results.txt").read_text(encoding="utf-8").splitlines()[1].split()
        number, reached = int(best[0]), float(best[1])
        policy = fl.load(f"{folder}/0/trials/{number:03}")
        greedy = float(policy.evaluate(100).returns.mean())
    once = set(counts) == set(range(TRIALS)) and set(counts.values()) == {1}
    medians = [statistics.median(seconds for seconds, _ in each) for each in (ours, theirs)]
    totals = [statistics.median(steps for _, steps in each) for each in (ours, theirs)]
    about = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    spaces = ", ".join(f"`{name}={space}`" for name, space in SEARCH.items())
    bad = ", ".join(f"{name}={value}" for name, value in BAD.items())
    text = f"""# Tuning

Written by `make bench` ([bench/tuning.py](../../bench/tuning.py)): {about},
jax {jax.__version__}.

`flowrl tune ppo --env CartPole-v1` with {TRIALS} trials of up to {STEPS:,} steps, searching
{spaces}.
Beside it: [Ray Tune around `fl.run`](../../bench/handwritten_tune.py), written by hand, with
the same points and the same ASHA. Whole processes in turn, medians of {TURNS}.

| | seconds | steps of all trials |
|---|---:|---:|
| `flowrl tune` | **{medians[0]:.0f}** | {totals[0]:,.0f} |
| Ray Tune by hand | {medians[1]:.0f} | {totals[1]:,.0f} |

| | return |
|---|---:|
| the start ({bad}), last row | {start:.1f} |
| best trial, last row | **{reached:.1f}** |
| its policy, greedy, 100 episodes | **{greedy:.1f}** |

Killed with SIGKILL after {before} of {TRIALS} trials had ended, and called again: {len(counts)}
trials ended, {"each of them once" if once else "NOT each of them once"}; {again:.0f} s in all.
"""
    (ROOT / "docs/benchmarks/tuning.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
