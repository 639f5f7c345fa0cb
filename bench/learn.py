"""`make learn`: train the stock graphs to their gates, over seeds. Writes docs/learning.md.

The exit status is 1 if a gate was missed.

The graphs of several agents (vdn, qmix, multi_ppo) have gates of their own, in learn_agents.py.

Names of graphs or environments as arguments (`make learn GRAPHS='dqn Hopper-v5'`) train those
only; the lines of the others stay as they are.
"""

from __future__ import annotations

import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import flowrl as fl
from flowrl.algos.named import build, find

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import action_mask  # noqa: E402 - an example is no package
import recurrent_policy  # noqa: E402

import learn_envs  # noqa: E402 - beside this script


@dataclass(frozen=True)
class Gate:
    """A return that the policy which a run saves must play, as a mean of episodes.

    The run ends where the mean return of its last 100 training episodes reaches `until`, within
    `steps`; or after all of them, if not `early`.
    """

    graph: str
    env: str
    goal: float
    steps: int
    seeds: int
    until: float
    """Above the goal: training draws its actions, and the mean is that of earlier policies."""
    runtime: str = "local"
    early: bool = True
    judged: tuple[str, ...] = ("greedy", "sampled")
    """How the saved policy plays: both ways, or the one in which it is meant to be used."""
    episodes: int = 50
    """How many episodes the policy plays in each way."""
    after: int = 0
    """How many policies, one every 10,000 steps from there on.

    At most a tenth of them may play below 0.8 of it, rounded to hundreds.
    """

    def __str__(self) -> str:
        how = " and ".join(self.judged)
        ends = f"from a mean of {self.until:g} on, within" if self.early else "at"
        when = f"{how} {self.goal:g}, {ends} {self.steps:,}"
        more = f"; {self.after} policies after it" if self.after else ""
        return f"| {self.graph} | {self.env} | {self.runtime} | {when}{more} |"


CONTROL: dict[str, Any] = {"early": False, "judged": ("greedy",), "episodes": 20}
"""For continuous control, as peers judge it."""
VALUES: dict[str, Any] = {"early": False, "judged": ("greedy",)}
"""For what learns off-policy: it explores in another way than it is meant to act."""
GATES = (
    Gate("ppo", "CartPole-v1", 475, 150_000, 5, 475),
    Gate("ppo", "Pendulum-v1", -250, 300_000, 3, -200),
    Gate("ppo", "Acrobot-v1", -100, 500_000, 3, -90),
    Gate("a2c", "CartPole-v1", 450, 500_000, 3, 475),
    Gate("a3c", "CartPole-v1", 450, 500_000, 3, 475),
    Gate("a3c", "CartPole-v1", 450, 500_000, 3, 475, "ray"),
    Gate("pg", "CartPole-v1", 450, 500_000, 3, 475),
    Gate("impala", "CartPole-v1", 450, 1_000_000, 3, 490),
    Gate("impala", "CartPole-v1", 450, 1_000_000, 3, 490, "ray"),
    Gate("appo", "CartPole-v1", 450, 1_000_000, 5, 475),
    Gate("appo", "CartPole-v1", 450, 1_000_000, 5, 475, "ray"),
    Gate("appo", "CartPole-v1", 450, 1_500_000, 5, 450, after=25),
    Gate("impala", "CartPole-v1", 450, 1_000_000, 3, 490, "ray, a runner killed every 5 s"),
    Gate("ppo", "gymnax:CartPole-v1", 475, 500_000, 3, 475, "xla"),
    Gate("ppo", "gymnax:Acrobot-v1", -100, 500_000, 3, -90, "xla"),
    Gate("ppo", "gymnax:Pendulum-v1", -200, 500_000, 3, -160, "xla", early=False),
    Gate(
        "ppo", "gymnax:Breakout-MinAtar", 28, 10_000_000, 3, 35, "xla", judged=("sampled",)
    ),  # two starts: greedy episodes are two samples
    Gate("dqn", "CartPole-v1", 450, 100_000, 3, 450, **VALUES),
    Gate("dqn", "Acrobot-v1", -100, 150_000, 3, -100, **VALUES),
    Gate("dqn", "gymnax:CartPole-v1", 450, 100_000, 3, 450, "xla", **VALUES),
    Gate("rainbow", "CartPole-v1", 475, 50_000, 3, 475, **VALUES),
    Gate("apex", "CartPole-v1", 450, 200_000, 3, 450, "ray", **VALUES),
    Gate("sac", "Pendulum-v1", -200, 20_000, 3, -200, **VALUES),
    Gate("td3", "Pendulum-v1", -200, 20_000, 3, -200, **VALUES),
    Gate("ddpg", "Pendulum-v1", -200, 20_000, 3, -200, **VALUES),
    Gate("es", "CartPole-v1", 475, 1_000_000, 3, 475, judged=("greedy",)),
    Gate("es", "CartPole-v1", 475, 1_000_000, 1, 475, "ray", judged=("greedy",)),
    Gate("es", "gymnax:CartPole-v1", 475, 1_000_000, 3, 475, "xla", judged=("greedy",)),
    Gate("ars", "CartPole-v1", 475, 1_000_000, 3, 475, judged=("greedy",)),
    Gate("ars", "CartPole-v1", 475, 1_000_000, 1, 475, "ray", judged=("greedy",)),
    Gate("impala, LSTM", "CartPole-v1, no velocities", 350, 600_000, 3, 400, early=False),
    Gate("r2d2", "CartPole-v1, no velocities", 400, 480_000, 3, 400, **VALUES),
    Gate("ppo", "CartPole that overheats, masked", 475, 150_000, 3, 475),
    Gate("dqn", "CartPole that overheats, masked", 450, 100_000, 3, 450, **VALUES),
    Gate("ppo", "Taxi-v4, masked", 7, 500_000, 3, 7, early=False),
    Gate("dqn", "Taxi-v4, masked", 7, 200_000, 3, 7, **VALUES),
    Gate("ppo", "CartPole in parts, Dict", 475, 200_000, 3, 475),
    Gate("dqn", "CartPole in parts, Dict", 450, 150_000, 3, 450, **VALUES),
    Gate("ppo", "LunarLander-v3", 220, 1_000_000, 3, 240, **CONTROL),
    Gate("ppo", "InvertedPendulum-v5", 950, 200_000, 3, 950, **CONTROL),
    Gate("ppo", "Hopper-v5", 2_300, 1_000_000, 3, 2_300, **CONTROL),
    Gate("ppo", "HalfCheetah-v5", 2_000, 1_000_000, 3, 2_000, **CONTROL),
    Gate("sac", "InvertedPendulum-v5", 950, 30_000, 3, 950, **CONTROL),
    Gate("td3", "InvertedPendulum-v5", 950, 30_000, 3, 950, **CONTROL),
)
OWN = {
    "CartPole that overheats, masked": (action_mask.Overheating, "CartPole-v1"),
    "Taxi-v4, masked": (learn_envs.StrictTaxi, "Taxi-v4"),
    "CartPole-v1, no velocities": (learn_envs.HiddenVelocities, "CartPole-v1"),
    "CartPole in parts, Dict": (learn_envs.PartedCartPole, "CartPole-v1"),
}
"""Environments that have no id, and the one whose tuned settings they take."""


@contextmanager
def killing(every: float | None) -> Iterator[None]:
    """Kill the process of one runner after the other, the longest-lived first, at intervals."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(every):
            with suppress(psutil.Error, ValueError):
                mine = [
                    p
                    for p in psutil.Process().children(recursive=True)
                    if "ray::Host" in " ".join(p.cmdline())
                ]
                min(mine, key=lambda p: p.create_time()).kill()

    thread = threading.Thread(target=kill, daemon=True)
    if every is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()


def reach(gate: Gate, seed: int) -> str:
    """Train, save, load and play: a line of the table."""
    start = time.perf_counter()
    own = recurrent_policy.graph() if "LSTM" in gate.graph else None
    env, like = OWN.get(gate.env, (gate.env, gate.env))
    graph = own or build(find(gate.graph), env, fl.tuned(gate.graph, like), [])
    name = f"{gate.graph} {gate.env} {gate.runtime} seed {seed}"
    runtime, _, faults = gate.runtime.partition(", ")

    def reached(row: fl.Row) -> bool:
        return gate.early and row["episodes"] >= 100 and row["return_mean"] >= gate.until

    with tempfile.TemporaryDirectory() as folder:
        until = None if gate.after else reached
        with (
            fl.run(
                graph,
                runtime=runtime,
                seed=seed,
                steps=gate.steps,
                until=until,
                out=f"{folder}/run",
            ) as run,
            killing(5.0 if faults else None),
        ):
            later = afterwards(gate, run, reached, name)
        seconds = time.perf_counter() - start
        policy = fl.load(f"{folder}/run", allow=("recurrent_policy", "action_mask", "learn_envs"))
    played = {
        how: policy.evaluate(gate.episodes, seed=10_000, greedy=how == "greedy")
        for how in ("greedy", "sampled")
    }
    first = next(filter(reached, run.rows), None)  # a program goes on to the end of its chunk
    low = sum(x < round(0.8 * gate.goal, -2) for x in later)
    good = (
        all(played[how].mean() >= gate.goal for how in gate.judged)
        and (first is not None or not gate.early)
        and low <= 0.1 * gate.after
    )
    row = first or run.rows[-1]
    verdict = (
        f"{row['env_steps']:,}"
        if first is not None or not gate.early
        else f"return {row['return_mean']:.1f} at the end"
    )
    verdict += (
        f", {low} of {len(later)} policies below {round(0.8 * gate.goal, -2):g}"
        if gate.after
        else ""
    )
    verdict += (
        f", {row['restarts']:.0f} restarts, {row['lost_steps']:,.0f} steps lost"
        if "restarts" in row
        else ""
    )
    print(
        f", {'passed' if good else 'MISSED'} in {seconds:.0f} s, "
        f"{', '.join(f'{how} {x.mean():.1f}' for how, x in played.items())}",
        flush=True,
    )
    plays = " | ".join(f"{x.mean():.1f} +- {x.std():.1f}" for x in played.values())
    return (
        f"{gate} {seed} | {verdict if good else f'**missed**: {verdict}'} | {plays} | "
        f"{seconds:.0f} |"
    )


def afterwards(
    gate: Gate, run: fl.Run, reached: Callable[[fl.Row], bool], name: str
) -> list[float]:
    """Go through the rows of a run, and play with its policies from the gate on.

    That is greedily, five episodes every 10,000 steps: their mean returns.
    """
    found: list[float] = []
    due = math.inf
    for row in run:
        print(
            f"\r  {name}: {row['env_steps']:>9,} steps, return {row['return_mean']:8.1f}",
            end="",
            flush=True,
        )
        if gate.after and due == math.inf and reached(row):
            due = row["env_steps"]
        if row["env_steps"] >= due:
            found.append(run.policy.evaluate(5, seed=10_000).mean())
            due += 10_000
        if gate.after and len(found) == gate.after:
            break
    return found


def main(graphs: list[str]) -> int:
    target = ROOT / "docs/learning.md"
    lines = target.read_text(encoding="utf-8").splitlines()
    found = {
        (gate, seed): line
        for gate in GATES
        for seed in range(gate.seeds)
        for line in lines
        if line.startswith(f"{gate} {seed} |")
    }
    for gate in GATES:
        for seed in range(gate.seeds):
            if not graphs or gate.graph in graphs or gate.env in graphs:
                found[gate, seed] = reach(gate, seed)
                write(
                    target,
                    [
                        found[key]
                        for key in sorted(found, key=lambda key: (GATES.index(key[0]), key[1]))
                    ],
                )
    return int(any("**missed**" in line for line in found.values()))


def write(target: Path, lines: list[str]) -> None:
    """Write the table: after each run, so that a later one that fails loses nothing."""
    head = """# Learning

Written by `make learn`: every stock graph with its tuned settings
([algos/tuned.py](../flowrl/algos/tuned.py)), and what the policy that its run saved then plays.
Most runs end, "within" a number of steps, as soon as the mean return of their last 100 training
episodes reaches the mean that the gate names, which is that of policies a while ago; the others end
"at" a number of steps. Then the saved policy is loaded and plays 50 episodes greedily and 50 with
sampled actions (from action values: epsilon-greedily, with 0.05; those of deterministic policies
with noise of 0.1), in continuous control and LunarLander 20: means and deviations of the returns (a
dash where they did not play), of which the gate names those that must reach the goal.
gymnax's Breakout starts in two ways only, so 50 greedy episodes are two, and its gate is the
sampled return. "Policies after it" are one every 10,000 further steps, each of which plays five
episodes greedily. The recurrent graph is
[examples/recurrent_policy.py](../examples/recurrent_policy.py). The masked CartPole is
[examples/action_mask.py](../examples/action_mask.py); it and the masked Taxi raise at an action
that the mask rules out. The observations of the CartPole in parts are a Dict, and one of them says
which way the actions push ([learn_envs.py](../bench/learn_envs.py), which has the CartPole without
velocities of `r2d2`, too). `vdn`, `qmix` and `multi_ppo`
learn with several agents: [their table](learning_agents.md) is another. `bc`, `marwil`, `iql` and
`cql` learn from datasets ([their table](learning_offline.md)). Rainbow stands
[beside DQN](learning_rainbow.md) on Breakout.

| graph | environment | runtime | gate | seed | after steps | greedy | sampled | seconds |
|---|---|---|---|---:|---:|---:|---:|---:|
"""
    target.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
