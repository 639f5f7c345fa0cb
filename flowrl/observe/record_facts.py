"""What a graph says about the learner whose update is recorded, as JSON can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.envs.gym_envs import env_name
from flowrl.errors import SaveError
from flowrl.graph import values
from flowrl.graph.graph import Graph
from flowrl.graph.refs import resource_and_part
from flowrl.learner.learner import Learner
from flowrl.rollout.runners import Runners

Restarts = Mapping[tuple[str, int], int]
"""By name of the runners and number of a runner: how often it was restarted."""


def facts_of(
    graph: Graph | None, learner: str, seed: int | None, restarts: Restarts
) -> dict[str, Any]:
    """Return the text of a learner, the nodes that train it, and what its runners are.

    Args:
        graph: the graph of the run; None if it is not known.
        learner: the name of the learner.
        seed: the run's.
        restarts: of all runners so far.
    """
    about: dict[str, Any] = {"text": None, "trainers": [], "seed": seed, "runners": None}
    spec = graph.resources.get(learner) if graph is not None else None
    if graph is None or not isinstance(spec, Learner):
        return about
    try:
        # Updates of a learner that has no text are recorded too, but can't be rerun.
        about["text"] = values.to_text(spec, defaults=True, strict=True)
    except SaveError as error:
        about["because"] = str(error)
    about["trainers"] = _trainers(graph, learner)
    resource, part = resource_and_part(str(spec.runners))
    runners = graph.resources.get(resource)
    if isinstance(runners, Runners):
        about["runners"] = _about_runners(resource, part, runners, restarts)
    return about


def _about_runners(name: str, part: str, runners: Runners, restarts: Restarts) -> dict[str, Any]:
    """Return what is known of runners, of which `part` is the policy that the learner trains.

    Columns are the environments, or of each environment the agents of this policy.
    """
    return {
        "name": name,
        "env": env_name(runners.env),
        "count": runners.num_runners,
        "envs": runners.envs_per_runner,
        "jax": runners.jax_env is not None,
        "agents": [*runners.agents.get(part, ())],
        "restarts": {
            worker: times for (resource, worker), times in restarts.items() if resource == name
        },
    }


def _trainers(graph: Graph, learner: str) -> list[str]:
    """Return the names of the nodes that train a learner, by the settings that such nodes have."""
    found = []
    for node in graph.nodes:
        settings = values.settings(node.op)
        trains = {"learner", "epochs", "minibatch_size", "shuffle"} <= settings.keys()
        if trains and str(settings["learner"]) == learner:
            found.append(node.name)
    return found
