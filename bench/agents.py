"""`make bench`: PPO on two CartPoles as two agents. Writes docs/benchmarks/agents.md.

One policy for both agents and one for each have the same columns, networks and updates in number
and size. RLlib trains two policies of these sizes in an environment of its own, which `make bench`
makes.
Each is run in turn, and ratios are those of runs beside each other.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flowrl as fl
from falling_poles import BATCH, ENVS, EPOCHS, MINIBATCH, NAMES, FallingPoles

ROOT = Path(__file__).parents[1]
RLLIB = ROOT / ".venv-rllib/bin/python"
TIMES, SKIPPED, ROWS = 5, 5, 40
"""Rounds; the updates before those that are timed, and these: the policies improve, and longer
episodes take less time a step, so that all are timed over the same updates."""
POLICY = fl.Policy(fl.networks.MLP, hidden=(64, 64))


def learner(runners: str) -> fl.Learner:
    """PPO's learner, for the runners of this name or for a policy of theirs."""
    return fl.Learner(
        POLICY, fl.losses.PPOLoss(), fl.Adam(1e-3, max_grad_norm=0.5), runners=runners
    )


def trained(learner: str, runners: str, size: int) -> dict[str, Any]:
    """Return the operators that train one learner."""
    return {
        "adv": fl.Advantages(gamma=0.98, gae_lambda=0.8, learner=learner),
        "norm": fl.Standardize(),
        "train": fl.TrainOneStep(epochs=EPOCHS, minibatch_size=size, learner=learner),
        "sync": fl.SyncWeights(learner=learner, runners=runners),
    }


def runners_of(policy: Any, envs: int) -> fl.Runners:
    """Return one runner over so many environments, whose rollouts make up a batch."""
    return fl.Runners(FallingPoles, policy, envs_per_runner=envs, rollout_length=BATCH // envs)


def shared(envs: int) -> fl.Graph:
    """One policy acts for both agents."""
    runners = runners_of(POLICY, envs)
    graph = fl.Graph("shared", runners=runners, learner=learner("runners"))
    return graph.then(
        sample=fl.ParallelSample(),
        **trained("learner", "runners", 2 * MINIBATCH),
        report=fl.Report(),
    )


def separate(envs: int) -> fl.Graph:
    """Each agent has a policy and a learner of its own, with minibatches of half the size."""
    runners = runners_of(fl.Team(red=POLICY, blue=POLICY), envs)
    learners = {name: learner(f"runners.{name}") for name in NAMES}
    graph = fl.Graph("separate", runners=runners, **learners).then(sample=fl.ParallelSample())
    for name in NAMES:
        operators = trained(name, f"runners.{name}", MINIBATCH)
        nodes = {f"{key}_{name}": op for key, op in operators.items()}
        graph = graph.then(after="sample", **{f"select_{name}": fl.Select(name), **nodes})
    ends = tuple(f"sync_{name}" for name in NAMES)
    return graph.then(after=ends, both=fl.Merge(), report=fl.Report(every=2))


def rate(graph: fl.Graph, seed: int) -> float:
    """Return agent steps per second, once everything is compiled."""
    with fl.run(graph, seed=seed) as run:
        for _ in range(SKIPPED):
            first = next(run)
        began = time.perf_counter()
        for _ in range(ROWS):
            last = next(run)
        seconds = time.perf_counter() - began
    return (last["agent_steps"] - first["agent_steps"]) / seconds


def rllib(envs: int) -> float:
    """Return the agent steps per second of RLlib, over the same updates."""
    numbers = map(str, (envs, SKIPPED, ROWS))
    printed = subprocess.run(
        [RLLIB, Path(__file__).with_name("rllib_agents.py"), *numbers],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1"},
    ).stdout
    found: float = json.loads(printed.splitlines()[-1])["agent steps/s"]
    return found


def spread(xs: Sequence[float], form: str) -> str:
    """Return the median of some numbers, and their range."""
    low, middle, high = (format(x, form) for x in (min(xs), statistics.median(xs), max(xs)))
    return f"{middle} ({low} to {high})"


PAGE = """# Several agents

Written by `make bench` ([agents.py](../../bench/agents.py)). PPO on two CartPoles as two agents,
each of which waits for the other where its pole fell: {sizes} environments side by side, batches
of {batch:,} turns of each agent, {epochs} epochs, networks of 64 and 64. One policy acts for both
agents, or each has one with a learner of its own; minibatches have {minibatch} turns a policy.
RLlib 2.60 (its new API stack, PyTorch on the CPU) trains two policies of the same sizes on the same
batches from as many environments, in one process as the others do. Updates {first} to {last} are
timed. Each was run {times} times, in turn, on {machine} with {cores} cores: medians, and ranges.
Ratios are those of runs beside each other.

| environments | one policy for both | two policies | RLlib, two policies \
| one policy / two policies | two policies / RLlib's two policies |
|---:|---:|---:|---:|---:|---:|
{lines}

The first three columns are agent steps/s; the fourth is what two policies cost.
"""


def line(envs: int, found: list[tuple[float, float, float]]) -> str:
    """Return the line of the table for so many environments."""
    one, two, peer = zip(*found, strict=True)
    cost = [a / b for a, b in zip(one, two, strict=True)]
    faster = [a / b for a, b in zip(two, peer, strict=True)]
    rates = [spread(x, ",.0f") for x in (one, two, peer)]
    return f"| {envs} | {' | '.join([*rates, spread(cost, '.2f'), spread(faster, '.1f')])} |"


def main() -> None:
    """Measure in turn, and write the page."""
    found: dict[int, list[tuple[float, float, float]]] = {envs: [] for envs in ENVS}
    for seed in range(TIMES):
        for envs in ENVS:
            each = (rate(shared(envs), seed), rate(separate(envs), seed), rllib(envs))
            found[envs].append(each)
            one, two, peer = each
            print(f"{envs:3} envs: one policy {one:9,.0f}  two {two:9,.0f}  RLlib {peer:9,.0f}")
    page = PAGE.format(
        sizes=" or ".join(map(str, ENVS)), batch=BATCH, epochs=EPOCHS, minibatch=MINIBATCH,
        times=TIMES, first=SKIPPED + 1, last=SKIPPED + ROWS, machine=platform.machine(),
        cores=os.cpu_count(), lines="\n".join(line(envs, x) for envs, x in found.items()),
    )  # fmt: skip
    (ROOT / "docs/benchmarks/agents.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
