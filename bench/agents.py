"""What a second policy costs: PPO on two CartPoles as two agents, with one policy and with two.

Both have the same columns, networks and updates in number and size. Each is run `TIMES` times, in
turn; the median of the ratios is printed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import gymnasium as gym

import flowrl as fl

NAMES = ("red", "blue")
ENVS, STEPS, TIMES, ROWS = 8, 128, 5, 40
POLICY = fl.Policy(fl.networks.MLP, hidden=(64, 64))


class TwoCartPoles:
    """Two CartPoles; an agent whose pole fell comes back a step later."""

    possible_agents = NAMES

    def __init__(self) -> None:
        self.poles = {name: gym.make("CartPole-v1") for name in NAMES}
        self.agents = list(NAMES)

    def observation_space(self, agent: str) -> Any:
        return self.poles[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self.poles[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents = list(NAMES)
        return {name: pole.reset(seed=seed)[0] for name, pole in self.poles.items()}, {}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        obs, reward = {}, dict.fromkeys(NAMES, 0.0)
        terminated, truncated = dict.fromkeys(NAMES, False), dict.fromkeys(NAMES, False)
        for name, pole in self.poles.items():
            if name in actions:
                obs[name], reward[name], terminated[name], truncated[name], _ = pole.step(
                    actions[name]
                )
            else:
                obs[name] = pole.reset()[0]
        self.agents = [name for name in NAMES if not (terminated[name] or truncated[name])]
        return obs, reward, terminated, truncated, {}

    def close(self) -> None:
        for pole in self.poles.values():
            pole.close()


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
        "train": fl.TrainOneStep(epochs=4, minibatch_size=size, learner=learner),
        "sync": fl.SyncWeights(learner=learner, runners=runners),
    }


def shared() -> fl.Graph:
    """One policy acts for both agents."""
    runners = fl.Runners(TwoCartPoles, POLICY, envs_per_runner=ENVS, rollout_length=STEPS)
    graph = fl.Graph("shared", runners=runners, learner=learner("runners"))
    return graph.then(
        sample=fl.ParallelSample(), **trained("learner", "runners", 256), report=fl.Report()
    )


def separate() -> fl.Graph:
    """Each agent has a policy and a learner of its own, with minibatches of half the size."""
    team = fl.Team(red=POLICY, blue=POLICY)
    runners = fl.Runners(TwoCartPoles, team, envs_per_runner=ENVS, rollout_length=STEPS)
    learners = {name: learner(f"runners.{name}") for name in NAMES}
    graph = fl.Graph("separate", runners=runners, **learners).then(sample=fl.ParallelSample())
    for name in NAMES:
        operators = trained(name, f"runners.{name}", 128)
        nodes = {f"{key}_{name}": op for key, op in operators.items()}
        graph = graph.then(after="sample", **{f"select_{name}": fl.Select(name), **nodes})
    ends = tuple(f"sync_{name}" for name in NAMES)
    return graph.then(after=ends, both=fl.Merge(), report=fl.Report(every=2))


def rate(graph: fl.Graph, seed: int) -> float:
    """Return agent steps per second, once everything is compiled."""
    with fl.run(graph, seed=seed) as run:
        for _ in range(5):
            first = next(run)
        began = time.perf_counter()
        for _ in range(ROWS):
            last = next(run)
        seconds = time.perf_counter() - began
    return (last["agent_steps"] - first["agent_steps"]) / seconds


def main() -> None:
    """Measure in turn, and print each pair and the median ratio."""
    ratios = []
    for seed in range(TIMES):
        one, two = rate(shared(), seed), rate(separate(), seed)
        ratios.append(one / two)
        print(f"one policy {one:9,.0f}  two {two:9,.0f} agent steps/s  cost {one / two:.2f}")
    print(f"two policies cost {statistics.median(ratios):.2f} times one (median of {TIMES})")


if __name__ == "__main__":
    main()
