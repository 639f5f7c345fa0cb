"""Train graphs of several agents to their gates, over seeds. Writes docs/learning_agents.md.

The exit status is 1 if a gate was missed. Names of gates as arguments train those only; the lines
of the others stay as they are.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

import flowrl as fl

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs/learning_agents.md"
sys.path.insert(0, str(ROOT / "examples"))
import ppo_dqn  # noqa: E402 - an example is no package

import team_envs  # noqa: E402 - beside this script

SPREAD = "pettingzoo:mpe2.simple_spread_v3"


@dataclass(frozen=True)
class Gate:
    """What each policy that a run trains must play, greedily, as a mean of episodes."""

    name: str
    env: str
    graph: Callable[[], fl.Graph]
    steps: int
    goal: str
    passed: Callable[[float], bool] | None = None
    """Whether a mean return is good enough; None where gates are compared with each other."""
    until: float | None = None
    """The mean return of all policies' training episodes that ends a run early."""
    episodes: int = 20
    seeds: int = 3


def cart_poles() -> fl.Graph:
    return fl.multi_ppo(
        team_envs.TwoCartPoles,
        policies="separate",
        minibatch_size=64,
        lr=1e-3,
        gamma=0.98,
        gae_lambda=0.8,
    )


def two_steps(name: str) -> fl.Graph:
    # The agents act at random throughout, as in the paper, so that each action is tried as often.
    # Errors count by their squares, as there: by Huber's loss an additive value may give the best
    # joint action of 2B anything from 5 to 7, for the sum of the errors is the same.
    graph: fl.Graph = getattr(fl, name)(team_envs.TwoSteps, epsilon=1.0, learning_starts=200)
    return graph.set("learner.loss.huber", None)


def spread_ppo(**settings: Any) -> fl.Graph:
    return fl.multi_ppo(SPREAD, **{**fl.tuned("multi_ppo", SPREAD), **settings})


def at_least(goal: float) -> Callable[[float], bool]:
    return lambda mean: mean >= goal


CENTRAL = Gate(
    "multi_ppo, shared, central critic",
    "simple_spread",
    spread_ppo,
    60_000,
    "better than separate",
    episodes=100,
    seeds=8,
)
SEPARATE = Gate(
    "multi_ppo, separate",
    "simple_spread",
    # As many minibatches, of each agent's own turns: a third as large.
    lambda: spread_ppo(
        policies="separate", central_critic=False, batch_size=400, minibatch_size=100
    ),
    60_000,
    "to compare",
    episodes=100,
    seeds=8,
)
GATES = (
    Gate(
        "multi_ppo, separate", "two CartPoles", cart_poles, 300_000, "400 each", at_least(400), 475
    ),
    Gate("ppo and dqn", "four CartPoles", ppo_dqn.graph, 100_000, "150 each", at_least(150)),
    Gate(
        "vdn", "two-step game", lambda: two_steps("vdn"), 8_000, "no better than 7",
        lambda mean: mean == 7,
    ),
    Gate("qmix", "two-step game", lambda: two_steps("qmix"), 8_000, "8", lambda mean: mean == 8),
    CENTRAL,
    SEPARATE,
)  # fmt: skip
BETTER = ((CENTRAL, SEPARATE),)
"""Pairs of gates, of which the first must play better."""


def judged(folder: str, gate: Gate) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return the returns of what a run saved, by policy; "" where there is but one."""
    policies = fl.load_policies(folder, allow=("team_envs", "ppo_dqn"))
    if len(policies) == 1:
        only = next(iter(policies.values()))
        return {"": np.array(only.evaluate(gate.episodes, seed=10_000))}
    found = fl.match(policies, episodes=gate.episodes, seed=10_000)
    return {name: np.array(found[name]) for name in policies}


def reach(gate: Gate, seed: int) -> str:
    """Train and play: a line of the table."""
    start = time.perf_counter()
    graph = gate.graph()

    def reached(row: fl.Row) -> bool:
        found = [row[name] for name in row if name.startswith("return_mean/")]
        if gate.until is None or row["episodes"] < 200:
            return False
        return min(found) >= gate.until

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        with fl.run(graph, seed=seed, steps=gate.steps, until=reached, out=out) as run:
            for row in run:
                print(f"\r  {gate.name} seed {seed}: {row['env_steps']:>9,} steps", end="")
        found = judged(out, gate)
    means = {name: float(x.mean()) for name, x in found.items()}
    good = gate.passed is None or all(map(gate.passed, means.values()))
    texts = (f"{name} {x.mean():.2f} +- {x.std():.2f}".strip() for name, x in found.items())
    seconds = time.perf_counter() - start
    steps = f"{run.rows[-1]['env_steps']:,}"
    line = f"{key(gate, seed)} {steps if good else f'**missed** at {steps}'} | {', '.join(texts)} |"
    print(f"\r{line} {seconds:.0f} |", flush=True)
    return f"{line} {seconds:.0f} |"


def key(gate: Gate, seed: int) -> str:
    """Return the beginning of a gate's line."""
    return f"| {gate.name} | {gate.env} | {gate.goal}, within {gate.steps:,} | {seed} |"


def compared(lines: Mapping[str, str]) -> list[str]:
    """Return a sentence for each pair of gates whose seeds are all there.

    The interval is Welch's, over the means of the seeds.
    """
    found = []
    for better, other in BETTER:
        each = []
        for gate in (better, other):
            own = [lines[k] for k in keys(gate) if k in lines]
            texts = [x.split("|")[6].replace(",", "").split() for x in own]
            # The numbers before "+-" are the means of a line's policies.
            means = [[float(t[i - 1]) for i, x in enumerate(t) if x == "+-"] for t in texts]
            each.append(np.array([np.mean(x) for x in means]))
        if any(len(x) < gate.seeds for x, gate in zip(each, (better, other), strict=True)):
            continue
        parts = [x.var(ddof=1) / len(x) for x in each]
        freedom = sum(parts) ** 2 / sum(
            x**2 / (len(means) - 1) for x, means in zip(parts, each, strict=True)
        )
        half = student.ppf(0.975, freedom) * sum(parts) ** 0.5
        gain = each[0].mean() - each[1].mean()
        verdict = "" if gain > half else "**missed**: "
        found.append(
            f"{verdict}{better.name} plays {gain:.2f} better than {other.name} on {better.env}, "
            f"95 % interval {gain - half:.2f} to {gain + half:.2f} (Welch, over the means of "
            f"{better.seeds} seeds)."
        )
    return found


def write(lines: Mapping[str, str]) -> list[str]:
    """Write the page: after each run, so that a later one that fails loses nothing."""
    head = """# Learning of several agents

Written by `make learn`: what the policies that a run saved play, greedily, in 20 episodes (on
simple_spread 100). Those of a team play together, and what each of them gains is the mean over its
agents. The environments are in [team_envs.py](../bench/team_envs.py); the
four CartPoles are those of [examples/ppo_dqn.py](../examples/ppo_dqn.py). The two-step game is that
of Rashid et al. (2018, section 5), whose best return is 8; an additive value leads to 7. A return
on simple_spread is that of one agent in an episode of 25 steps. There a shared policy with a
central critic learns faster; after 200,000 steps separate ones play as well on average, but their
seeds differ more: some find fixed roles, some do not.

| graph | environment | gate | seed | after steps | played | seconds |
|---|---|---|---:|---:|---:|---:|
"""
    known = [lines[k] for gate in GATES for k in keys(gate) if k in lines]
    sentences = compared(lines)
    text = head + "\n".join(known) + "\n" + "".join(f"\n{x}\n" for x in sentences)
    TARGET.write_text(text, encoding="utf-8")
    return [*known, *sentences]


def keys(gate: Gate) -> list[str]:
    return [key(gate, seed) for seed in range(gate.seeds)]


def main(names: list[str]) -> int:
    old = TARGET.read_text(encoding="utf-8").splitlines() if TARGET.exists() else []
    wanted = [k for gate in GATES for k in keys(gate)]
    found = {k: line for k in wanted for line in old if line.startswith(k)}
    for gate in GATES:
        for seed in range(gate.seeds):
            if not names or gate.name in names or gate.env in names:
                found[key(gate, seed)] = reach(gate, seed)
                write(found)
    return int(any("**missed**" in line for line in write(found)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
