"""`make bench`: replays, DQN and SAC beside those of others and loops written by hand.

Writes docs/benchmarks/replay.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import flowrl as fl
import handwritten_dqn as h
from flowrl.replay.ring import Ring
from peers import ENVS, FORMS, observations, rate

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers/bin/python"
STEPS, LONG, RUNS = 4, 32, 3


def ours(form: str, prioritized: bool) -> dict[str, float]:
    """Our ring: rollouts of some steps in, transitions out.

    Of a prioritized one each draw counts with new priorities after it.
    """
    return {**one(form, prioritized, LONG, draws=False), **one(form, prioritized, STEPS)}


def one(form: str, prioritized: bool, steps: int, draws: bool = True) -> dict[str, float]:
    """The same with rollouts of so many steps."""
    obs = observations(form)
    size = FORMS[form][2]
    ring = Ring(fl.Replay(size, prioritized=prioritized), size // ENVS, ENVS, 0, 0)
    flags = {name: np.zeros((steps, ENVS), bool) for name in ("terminated", "truncated")}
    data = {
        "obs": np.stack([obs] * steps),
        "action": np.zeros((steps, ENVS), np.int32),
        "reward": np.ones((steps, ENVS), np.float32),
        **flags,
    }
    data["valid"] = ~flags["terminated"]
    columns = {
        "bootstrap_obs": obs,
        "version": np.zeros(ENVS, np.int32),
        "env": np.arange(ENVS, dtype=np.int32),
    }
    turn = iter(range(0, 10**9, steps))

    def add() -> None:
        ring.add(fl.extend.Batch(data, {**columns, "first": np.full(ENVS, next(turn), np.int32)}))

    def draw(n: int, priorities: Any) -> None:
        columns = ring.sample(n, 0.4).columns
        if prioritized:
            ring.prioritize(columns["slot"], columns["stamp"], priorities)

    for _ in range(size // ENVS // steps + 1):
        add()
    found = {}
    for n in (32, 512) if draws else ():
        priorities = np.random.default_rng(0).random(n)
        found[f"sample {n}"] = rate(lambda n=n, p=priorities: draw(n, p), n)  # type: ignore[misc]
    return {"add" if draws else f"add, {steps} steps": rate(add, steps * ENVS), **found}


def theirs(what: str, argument: str) -> dict[str, float]:
    """What `peers.py` says."""
    printed = subprocess.run(
        [PEERS, ROOT / "bench/peers.py", what, argument], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def dqn_graph(env: str, hidden: int) -> fl.Graph:
    """DQN by the rounds of the loop by hand."""
    n = h.ENVS * h.STEPS
    settings = fl.DQNSettings(
        envs_per_runner=h.ENVS, rollout_length=h.STEPS, buffer_size=h.CAPACITY,
        batch_size=h.UPDATES * h.BATCH, minibatch_size=h.BATCH, learning_starts=h.START,
        updates_per_step=1 / n,
        target_update_every=1, lr=h.LR, double=False, epsilon=h.EPSILON, epsilon_steps=1,
        policy=fl.Policy(fl.networks.QNetwork, hidden=(hidden, hidden)),
        report_every=1,
    )  # fmt: skip
    return fl.dqn(env, settings)


def dqn_seconds(seed: int, rounds: int, hidden: int) -> list[float]:
    """The seconds of each round in the local runtime."""
    with fl.run(dqn_graph("CartPole-v1", hidden), seed=seed) as run:
        return seconds_of(run, rounds)


def seconds_of(run: Any, rows: int) -> list[float]:
    """The seconds of each row."""
    found, last = [], time.perf_counter()
    for _ in range(rows):
        next(run)
        found.append(-last + (last := time.perf_counter()))
    return found


def pairs(
    one: Callable[[int], float], other: Callable[[int], float], name: str
) -> tuple[list[float], list[float]]:
    """Two measures in turn."""
    found: tuple[list[float], list[float]] = ([], [])
    for i in range(RUNS):
        found[0].append(one(i))
        found[1].append(other(i))
        print(
            f"  {name}, pair {i + 1} of {RUNS}: {found[0][-1]:,.0f} and {found[1][-1]:,.0f}, "
            f"ratio {found[0][-1] / found[1][-1]:.3f}",
            flush=True,
        )
    return found


def local(hidden: int, rounds: int = 60, skip: int = 10) -> tuple[list[float], list[float]]:
    """Steps a second in the local runtime, and of the loop by hand: by the median round."""
    n = h.ENVS * h.STEPS
    return pairs(
        lambda seed: n / statistics.median(dqn_seconds(seed, rounds, hidden)[skip:]),
        lambda seed: n / statistics.median(h.train(seed, rounds, hidden)[skip:]),
        f"dqn, {hidden}, by hand",
    )


def program(hidden: int, rounds: int = 100) -> tuple[list[float], list[float]]:
    """Steps a second in the XLA runtime, and of the scan by hand, both compiled."""
    n = rounds * h.ENVS * h.STEPS
    scan = jax.jit(h.make(rounds, hidden)).lower(0).compile()
    with fl.run(
        dqn_graph("gymnax:CartPole-v1", hidden), runtime=fl.XlaRuntime(chunk=rounds)
    ) as run:
        for _ in range(2):
            next(run)
            while run._session.pending_rows:
                next(run)

        def by_hand(seed: int) -> float:
            start = time.perf_counter()
            jax.device_get(scan(seed))
            return n / (time.perf_counter() - start)

        return pairs(
            lambda _: n / sum(seconds_of(run, rounds)), by_hand, f"dqn, {hidden}, one program"
        )


def sac_speed(hidden: int, envs: int, rounds: int = 60, skip: int = 20) -> float:
    """Steps a second of SAC with an update a step, `envs` of both at a time."""
    settings = fl.SACSettings(
        envs_per_runner=envs, rollout_length=8 // envs, batch_size=256 * 8, minibatch_size=256,
        updates_per_step=1 / 8, lr=1e-3, report_every=4,
        policy=fl.Policy(fl.networks.SACNetwork, hidden=(hidden, hidden)),
    )  # fmt: skip
    with fl.run(fl.sac("Pendulum-v1", settings)) as run:
        return 32 / statistics.median(seconds_of(run, rounds)[skip:])


def line(name: str, one: list[float], other: list[float]) -> str:
    """Of a table."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return (
        f"| {name} | {statistics.median(one):,.0f} | {statistics.median(other):,.0f} | "
        f"**{statistics.median(ratios):.2f}** "
        f"({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def buffers() -> list[str]:
    """Lines for all that a buffer does."""
    lines = []
    for form, text in (("floats", "1M of 4 floats"), ("images", "100k of 84 x 84 x 4 bytes")):
        for peer, prioritized in (("stable_baselines", False), ("cpprb", True)):
            found = [(ours(form, prioritized), theirs(peer, form)) for _ in range(3)]
            kind = "prioritized, cpprb" if prioritized else "uniform, Stable-Baselines3"
            for what in found[0][0]:
                lines.append(
                    line(
                        f"{text}, {kind}: {what}",
                        [a[what] for a, _ in found],
                        [b[what.partition(",")[0]] for _, b in found],
                    )
                )
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    held = buffers()
    by_hand = [line(f"DQN, {n}-{n}, local runtime and loop", *local(n)) for n in (64, 256)]
    by_hand += [line(f"DQN, {n}-{n}, XLA runtime and scan", *program(n)) for n in (64, 256)]
    peers = []
    for n in (64, 256):
        steps = h.ENVS * h.STEPS
        one, other = pairs(
            lambda seed, n=n, steps=steps: steps / statistics.median(dqn_seconds(seed, 40, n)[10:]),  # type: ignore[misc]
            lambda _, n=n: theirs("dqn", str(n))["steps"],  # type: ignore[misc]
            f"dqn, {n}, Stable-Baselines3",
        )
        peers.append(line(f"DQN on CartPole-v1, {n}-{n}", one, other))
    for n in (64, 256):
        one, other = pairs(
            lambda _, n=n: sac_speed(n, 8),  # type: ignore[misc]
            lambda _, n=n: theirs("sac", str(n))["steps"],  # type: ignore[misc]
            f"sac, {n}, Stable-Baselines3",
        )
        peers.append(line(f"SAC on Pendulum-v1, {n}-{n}", one, other))
    versions = json.loads(
        subprocess.run(
            [PEERS, "-c", (
                "import json, importlib.metadata as m; print(json.dumps([*map(m.version, "
                "('stable-baselines3', 'torch', 'cpprb'))]))"
            )],
            check=True, capture_output=True, text=True,
        ).stdout
    )  # fmt: skip
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax "
        f"{importlib.metadata.version('jax')}"
    )
    text = f"""# Replay, DQN and SAC

Written by `make bench` ([bench/replay.py](../../bench/replay.py)): {machine};
Stable-Baselines3 {versions[0]} on torch {versions[1]}, cpprb {versions[2]}.
All ratios are of runs in turn: the median, the lowest and the highest.

## Buffers

Transitions a second, full buffers, {ENVS} environments. Theirs are added a step of all environments
at a time, ours {STEPS}, or as many as it says; where priorities are kept, each draw counts with the
new ones after it. 3 pairs.

| | flowrl | peer | ratio |
|---|---:|---:|---:|
{chr(10).join(held)}

## Beside loops by hand

Steps a second of {h.ENVS} environments, {h.UPDATES} updates on {h.BATCH} transitions each after
every {h.ENVS * h.STEPS} steps; by hand: [bench/handwritten_dqn.py](../../bench/handwritten_dqn.py),
the same maths. {RUNS} pairs.

| | flowrl | by hand | ratio |
|---|---:|---:|---:|
{chr(10).join(by_hand)}

## Beside Stable-Baselines3

Steps a second at the same ratio of updates to steps and the same networks, in one process. DQN by
the settings of RL Baselines3 Zoo for CartPole-v1: 128 updates on 64 transitions after every 256
steps; SAC with an update on 256 transitions for each step. flowrl steps {h.ENVS} environments at a
time and makes {h.UPDATES} and 8 updates in one call; Stable-Baselines3 steps one environment, as it
does by default. {RUNS} pairs.

| | flowrl | Stable-Baselines3 | ratio |
|---|---:|---:|---:|
{chr(10).join(peers)}
"""
    target = ROOT / "docs/benchmarks/replay.md"
    target.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    if not PEERS.exists():
        sys.exit(
            "bench/replay.py measures beside others: `make bench` makes the environment that they "
            "are in"
        )
    main()
