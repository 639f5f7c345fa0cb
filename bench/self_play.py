"""Train by self-play on tic-tac-toe, with a league and with a search; judge the saved policies.

`make learn` calls it. It writes docs/learning_self_play.md; the exit status is 1 if a gate was
missed.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import flowrl as fl

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import alphazero  # noqa: E402 - an example is no package

example: Any = importlib.import_module("self_play")
"""The example, which has the name of this script."""

TARGET = ROOT / "docs/learning_self_play.md"
SEEDS = 3
STEPS = 800_000
"""Steps of the environments, which are turns of both players."""
GAMES = 1_000
"""Games against a random player, half of them from each seat, of which none may be lost."""
NOT_LOST = 0.95
"""The least share of games that are not lost against each of the first frozen versions."""


SEARCHED = 200_000
"""Steps with a search."""


def sampled(policy: fl.TrainedPolicy, obs: Any, rng: np.random.Generator) -> Any:
    """Return an action that a policy samples, as it does in training."""
    return policy.act(obs, greedy=False, seed=int(rng.integers(2**31)))


def reach(seed: int) -> str:
    """Train, save, load and play; return a line of the table."""
    start = time.perf_counter()
    graph = example.graph()
    every, first = graph.nodes[-2].op.every, graph.resources["league"].keep_first
    with tempfile.TemporaryDirectory() as folder:
        with fl.run(graph, steps=STEPS, seed=seed, out=f"{folder}/run") as run:
            # Those that the league froze first: before any update, and then at regular intervals.
            frozen = [run.policy]
            for row in run:
                if row["updates"] % every == 0 and len(frozen) < first:
                    frozen.append(run.policy)
        seconds = time.perf_counter() - start
        policy = fl.load(f"{folder}/run")
    against = fl.match({"it": policy, "random": fl.Scripted()}, episodes=GAMES, seed=seed)
    won, drawn, lost = against.results("it")
    last, kept = run.rows[-1], []
    for number, each in enumerate(frozen):
        assert last[f"league/version/{number}"] == number * every
        found = fl.match({"it": policy, "frozen": partial(sampled, each)}, episodes=400, seed=seed)
        kept.append(1 - found.results("it")[2] / len(found))
    good = lost == 0 and min(kept) >= NOT_LOST
    line = (
        f"| {seed}{'' if good else ' **missed**'} | {last['agent_steps/learner']:,.0f} | {won} | "
        f"{drawn} | {lost} | {', '.join(f'{x:.1%}' for x in kept)} | {last['league/elo']:.0f} | "
        f"{last['league/elo/0']:.0f} | {seconds:.0f} |"
    )
    print(line, flush=True)
    return line


class Alone:
    """The network of a policy that searches, without its search."""

    def __init__(self, policy: fl.TrainedPolicy) -> None:
        self.policy = policy

    def act(self, board: Any) -> int:
        """Return the move that the network takes for the best."""
        (logits, _), _ = self.policy.network.call("prior", self.policy.weights, board[None])
        return int(np.argmax(logits[0]))


def search(seed: int) -> str:
    """Train by searches, save, load and play; return a line of the table."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "runtime": "xla",
            "steps": SEARCHED,
            "seed": seed,
            "out": f"{folder}/run",
        }
        with fl.run(alphazero.graph(), **settings) as run:
            first = run.policy
            for _ in run:
                pass
        seconds = time.perf_counter() - start
        policy = fl.load(f"{folder}/run", allow=["alphazero"])
    lost = {}
    for name, player in {"it": policy, "alone": Alone(policy), "before": first}.items():
        ends = alphazero.against_every_reply(player)
        lost[name] = f"{ends['lost']} of {sum(ends.values())}"
    good = lost["it"].startswith("0 ")
    line = (
        f"| {seed}{'' if good else ' **missed**'} | {lost['it']} | {lost['alone']} | "
        f"{lost['before']} | {seconds:.0f} |"
    )
    print(line, flush=True)
    return line


PAGE = f"""# Learning by self-play

Written by `make learn`: [examples/self_play.py](../examples/self_play.py) trains a policy on
tic-tac-toe for {STEPS:,} steps of the environments. The policy that the run saved then plays
greedily, half of the games from each seat: {GAMES:,} games against a random player, of which it may
lose none, and 400 against each of the first versions that its league froze, which sample their
moves; of these it may lose 5 %. Elo is that of the league at the end.

| seed | turns | won | drawn | lost | not lost to the first versions | Elo | first Elo | seconds |
|---|---:|---:|---:|---:|---|---:|---:|---:|
"""


SEARCH_PAGE = f"""
## With a search

[examples/alphazero.py](../examples/alphazero.py) trains a network by the searches that it guides,
for {SEARCHED:,} steps as one XLA program. The saved policy then plays against every reply to its
moves, from both seats, and may lose no game; for comparison, its network without the search, and
the search with the network as it was before training. The game is so small that the trained network
needs no search.

| seed | lost | by the network alone | by the search before training | seconds |
|---|---:|---:|---:|---:|
"""


def main() -> int:
    # Games of tic-tac-toe are often copies of others, which is no news.
    logging.getLogger("flowrl").setLevel(logging.ERROR)
    # Every seed is trained, also after one that missed.
    lines = [reach(seed) for seed in range(SEEDS)]
    searched = [search(seed) for seed in range(SEEDS)]
    page = PAGE + "\n".join(lines) + "\n" + SEARCH_PAGE + "\n".join(searched) + "\n"
    TARGET.write_text(page, encoding="utf-8")
    return int(any("missed" in line for line in [*lines, *searched]))


if __name__ == "__main__":
    sys.exit(main())
