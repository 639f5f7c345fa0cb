"""Several policies in place of one: a stock graph's steps, once for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from flowrl.envs.gym_envs import Make, env_name, probe
from flowrl.errors import SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.values import settings
from flowrl.ops.flow import Merge
from flowrl.ops.select import Select
from flowrl.rl.team import Team


def policy_names(
    env: Make, policies: str | Mapping[str, str] | Callable[[str], str]
) -> tuple[str, ...]:
    """Return the names of the policies of several agents; none where all share one.

    Args:
        env: environment of several agents. One is made to read their names, unless these are not
            needed.
        policies: ``shared``, ``separate``, or whose policy is which, as `Team` takes it.

    Raises:
        SettingError: `policies` is nothing of these, or the environment has but one agent.
    """
    if policies == "shared":
        return ()
    if isinstance(policies, Mapping):
        return tuple(dict.fromkeys(policies.values()))
    if policies != "separate" and not callable(policies):
        raise SettingError(
            "policies must be 'shared', 'separate', a mapping from agents to policies, or a "
            f"function, got {policies!r}"
        )
    agents = probe(env, (), {}).agents
    if agents is None:
        raise SettingError(f"{env_name(env)} has but one agent, which has one policy: fl.ppo(env)")
    return tuple(agents if isinstance(policies, str) else dict.fromkeys(map(policies, agents)))


def separated(graph: Graph, names: Sequence[str], of: Any) -> Graph:
    """Return a graph in which each of several policies has a learner and steps of its own.

    Args:
        graph: a chain from ``sample`` to ``report``, with one learner.
        names: the names of the policies, which are like that of the graph's runners at first.
        of: the policy of each agent, as `Team` takes it.
    """
    runners, learner = (cast("Any", graph.resources[name]) for name in ("runners", "learner"))
    operators: dict[str, Any] = {node.name: node.op for node in graph.nodes}
    sample, report = operators.pop("sample"), operators.pop("report")
    last = list(operators)[-1]
    team = Team(of=of, **dict.fromkeys(names, runners.policy))
    learners = {name: replace(learner, runners=f"runners.{name}") for name in names}
    separate = Graph(graph.name, runners=replace(runners, policy=team), **learners)
    separate = separate.then(sample=sample)
    for name in names:
        own = {"learner": name, "runners": f"runners.{name}"}
        branch: dict[str, Any] = {f"select_{name}": Select(name)}
        for node, operator in operators.items():
            changed = {key: own[key] for key in settings(operator) if key in own}
            branch[f"{node}_{name}"] = replace(operator, **changed)
        separate = separate.then(after="sample", **branch)
    ends = tuple(f"{last}_{name}" for name in names)
    # A row is over when each policy was trained as often as the only one of the graph was.
    every = report.every * len(names)
    return separate.then(after=ends, merge=Merge(), report=replace(report, every=every))
