"""Train by self-play on tic-tac-toe, and judge what the saved policy plays.

    python bench/self_play.py [SEEDS]

The exit status is 1 if a gate was missed. Three seeds by default.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pettingzoo.classic import tictactoe_v3

import flowrl as fl

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import self_play  # noqa: E402 - an example is no package

STEPS = 800_000
"""Steps of the environments, which are turns of both players."""
GAMES = 1_000
"""Games against a random player, half of them from each seat."""
NOT_LOST = 0.95
"""The share of games that are not lost against each of the first frozen versions."""
Player = Callable[[dict[str, Any]], Any]
"""A function that returns moves ``[N]`` for observations ``[N, ...]``."""


def random_player(seed: int) -> Player:
    """Return a player that takes any legal move."""
    random = np.random.default_rng(seed)

    def move(obs: dict[str, Any]) -> Any:
        mask = obs["action_mask"]
        return np.argmax(random.random(mask.shape) * mask, axis=1)

    return move


def play(first: Player, second: Player, games: int) -> np.ndarray[Any, Any]:
    """Play games side by side, and return what the first player gets of each: 1, 0 or -1."""
    envs = [tictactoe_v3.env() for _ in range(games)]
    results = np.zeros(games)
    for env in envs:
        env.reset()
    going = list(range(games))
    for player in (first, second) * 5:
        seen = [envs[i].observe(envs[i].agent_selection) for i in going]
        obs = {name: np.stack([each[name] for each in seen]) for name in seen[0]}
        for i, move in zip(going, player(obs), strict=True):
            envs[i].step(int(move))
            if any(envs[i].terminations.values()):
                results[i] = envs[i].rewards["player_1"]
        going = [i for i in going if not any(envs[i].terminations.values())]
        if not going:
            break
    return results


def both_seats(one: Player, other: Player, games: int) -> np.ndarray[Any, Any]:
    """Return what one player gets of so many games, half of them from each seat."""
    return np.concatenate([play(one, other, games // 2), -play(other, one, games - games // 2)])


def reach(seed: int) -> bool:
    """Train, save, load and play; return whether both gates are reached."""
    start = time.perf_counter()
    graph = self_play.graph()
    every, first = graph.nodes[-2].op.every, graph.resources["league"].keep_first
    with tempfile.TemporaryDirectory() as folder:
        with fl.run(graph, steps=STEPS, seed=seed, out=f"{folder}/run") as run:
            # Those that the league froze first: before any update, and then at regular intervals.
            frozen = [run.policy]
            for row in run:
                if row["row"] % every == 0 and len(frozen) < first:
                    frozen.append(run.policy)
        seconds = time.perf_counter() - start
        policy = fl.load(f"{folder}/run")
    against = both_seats(policy.act, random_player(seed), GAMES)
    last, kept = run.rows[-1], []
    for number, each in enumerate(frozen):
        sampled = lambda obs, each=each: each.act(obs, greedy=False)  # noqa: E731
        kept.append(1 - (both_seats(policy.act, sampled, 400) < 0).mean())
        assert last[f"league/version/{number}"] == number * every
    good = not (against < 0).any() and min(kept) >= NOT_LOST
    counts = [int((against == x).sum()) for x in (1, 0, -1)]
    print(
        f"seed {seed}: {'passed' if good else 'MISSED'} in {seconds:.0f} s, "
        f"{last['agent_steps/learner']:,.0f} turns of the learner; {GAMES} games against a random "
        f"player: {counts[0]} won, {counts[1]} drawn, {counts[2]} lost; not lost against the first "
        f"frozen versions: {', '.join(f'{x:.1%}' for x in kept)}; Elo {last['league/elo']:.0f}, "
        f"of the first {last['league/elo/0']:.0f}",
        flush=True,
    )
    return good


def main(seeds: int) -> int:
    # Every seed is trained, also after one that missed.
    passed = [reach(seed) for seed in range(seeds)]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
