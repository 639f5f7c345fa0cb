"""The graphs that are simulated, with settings that make them small."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from fake_workers import TIMEOUT, canned

import flowrl as fl
from flowrl.graph.plan import Plan

POLICY = fl.Policy(fl.networks.MLP, hidden=(4,))
SMALL = {"num_runners": 3, "envs_per_runner": 1, "rollout_length": 2, "policy": POLICY}
CARE = {"timeout": TIMEOUT, "on_error": "restart"}
"""How the runners of every simulated run are watched."""


@dataclass(frozen=True)
class Case:
    """A graph that is simulated, and what its invariants need to know.

    Args:
        name: what the table calls it: ``GRAPH`` or ``GRAPH, variant``.
        graph: the graph.
        rows: after so many a schedule ends.
        lag_bound: the largest policy lag of a batch that is trained on.
        fifo: whether what leaves the queue leaves it in the order in which it came.
    """

    name: str
    graph: fl.Graph
    rows: int = 4
    lag_bound: float = float("inf")
    fifo: bool = False

    @cached_property
    def plan(self) -> Plan:
        return self.graph.compile()

    @cached_property
    def ops(self) -> dict[str, Any]:
        return {node.name: node.op for node in self.graph.nodes}

    @cached_property
    def canned(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return canned(self.graph.resources["runners"], self.chain)

    @property
    def data(self) -> dict[str, Any]:
        return self.canned[0]

    @property
    def columns(self) -> dict[str, Any]:
        return self.canned[1]

    @property
    def chain(self) -> Any:
        return self.ops["sample"].local

    @property
    def replays(self) -> bool:
        return "replay" in self.graph.resources

    @property
    def ratio(self) -> Any:
        """Batches for each step that is added to the replay; None without a replay."""
        return self.ops["batch"].ratio if self.replays else None

    @property
    def learning_starts(self) -> int:
        return self.ops["batch"].learning_starts

    @property
    def is_async(self) -> bool:
        return self.ops["sample"].mode == "async"

    @property
    def is_paced(self) -> bool:
        return "queue" in self.ops and self.ops["queue"].on_stale == "pace"

    @property
    def evaluates(self) -> bool:
        return "play" in self.ops

    @property
    def in_flight(self) -> int:
        return self.ops["sample"].in_flight if self.is_async else 1

    @property
    def graph_capacity(self) -> int:
        return self.ops["queue"].capacity

    @cached_property
    def rollout_steps(self) -> int:
        runners = self.graph.resources["runners"]
        return runners.envs_per_runner * runners.rollout_length

    @cached_property
    def first(self) -> str:
        """The node that takes the rollouts."""
        return "add" if self.replays else "batch"


def with_care(graph: fl.Graph) -> fl.Graph:
    """Return a graph whose runners are watched."""
    for name, value in CARE.items():
        graph = graph.set(f"runners.{name}", value)
    return graph


@cache
def cases() -> dict[str, tuple[Case, ...]]:
    """Return by graph the cases that its seeds take in turn."""
    ppo = with_care(fl.ppo("CartPole-v1", **SMALL, batch_size=6, minibatch_size=6, epochs=1))
    impala = with_care(
        fl.impala("CartPole-v1", **SMALL, batch_size=4, report_every=2, max_lag=2, queue_capacity=2)
    )
    apex = with_care(
        fl.apex(
            "CartPole-v1", **SMALL, batch_size=4, buffer_size=60, learning_starts=12, n_step=1,
            updates_per_step=0.25, queue_capacity=2, sync_every=2, report_every=2,
        )
    )  # fmt: skip
    paced = impala.set("queue.on_stale", "pace").set("queue.max_lag", 1)
    newest = impala.set("queue.full", "drop_oldest").set("queue.order", "lifo")
    newest = newest.set("queue.max_lag", None).set("sync.wait", False)
    played = ppo.insert(after="sync", play=fl.Evaluate(every=2, episodes=2))
    return {
        "ppo": (
            Case("ppo", ppo, lag_bound=0),
            Case("ppo, with evaluations", played, lag_bound=0),
        ),
        "impala": (
            Case("impala", impala, lag_bound=2, fifo=True),
            Case("impala, paced", paced, lag_bound=1, fifo=True),
            Case("impala, newest first", newest),
        ),
        "apex": (
            Case("apex", apex),
            Case("apex, one shard", apex.set("replay.shards", 1).set("sample.in_flight", 1)),
        ),
    }
