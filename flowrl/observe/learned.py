"""The policy that the one learner of a graph trains."""

from __future__ import annotations

from flowrl.errors import GraphError
from flowrl.graph.graph import Graph
from flowrl.graph.refs import resource_and_part
from flowrl.learner.core import Core
from flowrl.learner.learner import Learner
from flowrl.observe.trained import TrainedPolicy
from flowrl.rl.policies import Weights
from flowrl.rollout.runners import Runners


def learner_of(graph: Graph, wanted: str = "run.policy") -> tuple[str, Learner]:
    """Return the name and the settings of the one learner of a graph.

    Args:
        graph: the graph.
        wanted: what needs exactly one, for the error (default ``run.policy``).

    Raises:
        GraphError: there is none, or there are several.
    """
    learners = [(n, r) for n, r in graph.resources.items() if isinstance(r, Learner)]
    if len(learners) != 1:
        several = f"; take run.policies['{learners[0][0]}']" if learners else ""
        raise GraphError(
            f"{graph.name} has {len(learners)} learners; {wanted} needs exactly one{several}"
        )
    return learners[0]


def policy_of(
    graph: Graph, core: Core, weights: Weights, learner: Learner | None = None
) -> TrainedPolicy:
    """Return the policy that a graph trains, with these weights.

    Args:
        graph: the graph.
        core: that of its learner.
        weights: arrays of the host.
        learner: the settings of its learner; None for the only one (default None).
    """
    learner = learner or learner_of(graph)[1]
    name, part = resource_and_part(str(learner.runners))
    runners = graph.resources[name]
    # Another resource in their place need not have these fields.
    env, wrappers, settings, agents = (
        (runners.env, runners.wrappers, runners.env_settings, runners.agents.get(part, ()))
        if isinstance(runners, Runners)
        else (None, (), {}, ())
    )
    spaces, loss = core.spaces, core.loss
    facts = (env, wrappers, settings, loss.values, agents, loss.deterministic)
    return TrainedPolicy(learner.policy, spaces, weights, *facts)
