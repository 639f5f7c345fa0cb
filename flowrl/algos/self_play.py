"""`self_play`: the edit that turns a graph for one policy into one that plays against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowrl.envs.seats import SwapSeats
from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.graph.protocols import Operator, Resource
from flowrl.graph.refs import refs
from flowrl.learner.league import League
from flowrl.observe.learned import learner_of
from flowrl.ops.league import AddOpponent, ChooseOpponents
from flowrl.ops.select import Select
from flowrl.ops.weights import SyncWeights
from flowrl.rl.team import Team
from flowrl.rollout.runners import Runners


def self_play(
    graph: Graph,
    league: League | None = None,
    choose: ChooseOpponents | None = None,
    freeze: AddOpponent | None = None,
) -> Graph:
    """Return a graph whose policy trains against frozen versions of itself.

    In a game of two agents with the same spaces, the policy then acts for the agent ``learner``,
    and frozen versions of it for the agent ``opponent``; who has which seat is drawn at each reset
    (`SwapSeats`). The learner trains on its own turns alone.

    Args:
        graph: a graph with one learner and one policy for all agents, such as
            ``fl.ppo("pettingzoo:classic.tictactoe_v3")``.
        league: the frozen versions; None: those of ``League()``. Its `learner` and `runners` are
            set to those of the graph (default None).
        choose: how opponents are chosen; None: ``ChooseOpponents()`` (default None).
        freeze: when a version is frozen; None: ``AddOpponent()`` (default None).

    Raises:
        GraphError: the graph has several learners or policies, or publishes no weights, or not at
            one place alone.

    >>> import flowrl as fl
    >>> graph = fl.self_play(fl.ppo("pettingzoo:classic.tictactoe_v3"))
    >>> [node.name for node in graph.nodes][:4]
    ['sample', 'choose', 'select', 'batch']
    """
    name, learner = learner_of(graph, "self_play")
    runners = str(learner.runners)
    spec = graph.resources.get(runners)
    if not isinstance(spec, Runners) or isinstance(spec.policy, Team):
        raise GraphError(
            f"{runners} must be Runners with one policy for all agents; self_play gives them a team"
        )
    team = Team(learner=spec.policy, opponent=spec.policy)
    resources: dict[str, Resource] = {
        **{key: _moved(x, runners) for key, x in graph.resources.items()},
        runners: replace(spec, policy=team, wrappers=(*spec.wrappers, SwapSeats())),
        "league": replace(league or League(), learner=name, runners=f"{runners}.opponent"),
    }
    found = Graph(graph.name, **resources)
    for node in graph.nodes:
        # What samples, reports or evaluates is about both policies.
        op = _moved(node.op, runners) if isinstance(node.op, SyncWeights) else node.op
        found = found.then(after=node.after, **{node.name: op})
    sample = _only(graph, runners, "sample", lambda op: op.source)
    sync = _only(graph, runners, "publish weights to", lambda op: isinstance(op, SyncWeights))
    found = found.insert(after=sync, freeze=freeze or AddOpponent())
    return found.insert(after=sample, choose=choose or ChooseOpponents(), select=Select("learner"))


def _moved(value: Any, runners: str) -> Any:
    """Return an operator or a resource that refers to the learner's part of the runners."""
    fields = [field for field, (target, _) in refs(value).items() if target == runners]
    return replace(value, **dict.fromkeys(fields, f"{runners}.learner"))


def _only(graph: Graph, runners: str, what: str, which: Any) -> str:
    """Return the name of the only node of a kind that refers to the runners."""

    def refers(op: Operator) -> bool:
        return any(target == runners for target, _ in refs(op).values())

    names = [node.name for node in graph.nodes if which(node.op) and refers(node.op)]
    if len(names) != 1:
        raise GraphError(
            f"self_play needs one node to {what} {runners}, got {', '.join(names) or 'none'}",
            graph.name,
        )
    return names[0]
