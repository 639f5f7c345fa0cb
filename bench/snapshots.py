"""What snapshots cost: of a large replay the first one and later ones, and of a run its speed.

Prints a table.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import flowrl as fl
from flowrl.core.blocks import Packer
from flowrl.core.encoding import encoded
from flowrl.core.items import Batch
from flowrl.observe.snapshots import SnapshotWriter, newest_snapshot
from flowrl.replay.ring import Ring
from flowrl.running import Run

SIZE, ENVS, TURNS = 1_000_000, 8, 3
SECONDS = 65
SHARE = 0.01
"""The share of the rows that changes between two snapshots."""


class Counted:
    """Takes blocks, and counts their bytes and the time that hashing them takes."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def put(self, data: bytes) -> str:
        began = time.perf_counter()
        name = hashlib.sha256(data).hexdigest()
        self.seconds += time.perf_counter() - began
        self.bytes += len(data)
        return name


def rollout(first: int, steps: int, random: np.random.Generator) -> Batch:
    """Experience of 4 numbers in each observation."""
    ends = random.random((2, steps, ENVS)) < 0.01
    data = {
        "obs": random.normal(size=(steps, ENVS, 4)).astype(np.float32),
        "action": random.integers(2, size=(steps, ENVS), dtype=np.int32),
        "reward": random.normal(size=(steps, ENVS)).astype(np.float32),
        "terminated": ends[0],
        "truncated": ends[1],
        "valid": np.ones((steps, ENVS), np.float32),
    }
    columns = {
        "bootstrap_obs": random.normal(size=(ENVS, 4)).astype(np.float32),
        "version": np.full(ENVS, first, np.int32),
        "env": np.arange(ENVS, dtype=np.int32),
        "first": np.full(ENVS, first, np.int32),
    }
    return Batch(data, columns)


def measured(prioritized: bool) -> list[tuple[str, float, int, float, int]]:
    """By snapshot: its seconds, bytes written, seconds of hashing, and bytes in all."""
    random = np.random.default_rng(0)
    ring = Ring(fl.Replay(SIZE, prioritized=prioritized), SIZE // ENVS, ENVS, 0, 0)
    steps = int(SIZE * SHARE) // ENVS
    for turn in range(round(1 / SHARE)):
        ring.add(rollout(turn * steps, steps, random))
    found = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        writer = SnapshotWriter(fl.Snapshots(keep=9), Path(folder), "", "")
        for row, name in enumerate(("first", "1 % of the rows changed", "nothing changed"), 1):
            if row == 2:
                ring.add(rollout(SIZE // ENVS, steps, random))
            before = size(writer.folder)
            began = time.perf_counter()
            writer.write(row, 0, lambda: nullcontext(ring.keep()))
            seconds = time.perf_counter() - began
            counted = Counted()
            packer = Packer(counted)  # type: ignore[arg-type]
            encoded(ring.keep(), packer.put)
            packer.end()
            written = size(writer.folder) - before
            found.append((name, seconds, written, counted.seconds, counted.bytes))
        began = time.perf_counter()
        assert newest_snapshot(Path(folder), (), print) is not None
        found.append(("read back", time.perf_counter() - began, 0, 0.0, counted.bytes))
    return found


def size(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def speed(name: str, snapshots: bool) -> tuple[float, float]:
    """Steps per second of a run of a bit more than a minute, and the share that keeping took."""
    spent, graph = [0.0], getattr(fl, name)("CartPole-v1")
    original = {method: getattr(Run, method) for method in ("_keep", "_consider")}

    def timed(method: str) -> Callable[..., None]:
        def call(*args: Any, **settings: Any) -> None:
            began = time.perf_counter()
            original[method](*args, **settings)
            spent[0] += time.perf_counter() - began

        return call

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, ExitStack() as last:
        for method in original:
            last.enter_context(patch.object(Run, method, timed(method)))
        with fl.run(graph, out=Path(folder) / "run", snapshots=snapshots) as run:
            first = next(run)
            for row in run:
                if row["seconds"] - first["seconds"] > SECONDS:
                    break
        seconds = row["seconds"] - first["seconds"]
        return (row["env_steps"] - first["env_steps"]) / seconds, spent[0] / seconds


def shares() -> None:
    """Print what the default snapshots take of the speed of ppo and impala."""
    print(f"Runs of {SECONDS} s on CartPole-v1 in one process, with default snapshots and without")
    print("| graph | steps/s with | without | with / without | share of the time, measured |")
    print("|---|---:|---:|---:|---:|")
    for name in ("ppo", "impala"):
        pairs = [(speed(name, True), speed(name, False)) for _ in range(TURNS)]
        ratio = statistics.median(kept[0] / plain[0] for kept, plain in pairs)
        kept, plain = (statistics.median(each[i][0] for each in pairs) for i in (0, 1))
        share = statistics.median(kept[1] for kept, _ in pairs)
        print(
            f"| {name} | {kept:,.0f} | {plain:,.0f} | {ratio:.3f} | **{share:.2%}** |", flush=True
        )


def main() -> None:
    """Print the tables."""
    shares()
    print(f"\nA replay of {SIZE:,} rows of 4 numbers, {ENVS} environments, {os.cpu_count()} cores")
    print("| replay | snapshot | seconds | MB written | of them hashing | MB in all |")
    print("|---|---|---:|---:|---:|---:|")
    for kind in ("uniform", "prioritized"):
        turns = [measured(kind == "prioritized") for _ in range(TURNS)]
        for same in zip(*turns, strict=True):
            seconds, hashing = (statistics.median(one[i] for one in same) for i in (1, 3))
            name, _, written, _, whole = same[0]
            print(
                f"| {kind} | {name} | **{seconds:.2f}** | {written / 1e6:.2f} | {hashing:.2f} s | "
                f"{whole / 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
