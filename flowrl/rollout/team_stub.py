"""`TeamStub`: the shape-only stub of a runner of several agents, for the abstract trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Site
from flowrl.rollout.evaluation import Evaluation
from flowrl.rollout.runner_stub import RunnerStub
from flowrl.rollout.team_runner import TeamEvaluation, TeamSample

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


class PartStub(RunnerStub):
    """Shape-only stub of one policy of a runner."""

    def _columns(self) -> dict[str, Any]:
        """Return the columns of a policy beside others: its versions by their values."""
        columns = super()._columns()
        cut = jax.ShapeDtypeStruct((self.spec.envs_per_runner,), np.dtype(bool))
        return {**columns, "last_version": columns["version"], "cut": cut}


class TeamStub:
    """Shape-only stub of a runner of several agents: a stub of a runner for each policy.

    Args:
        spec: the settings of the runners.
        site: the site of the abstract trace.
        index: the number of this runner.
        restart_count: how often it was restarted.
    """

    def __init__(self, spec: Runners, site: Site, index: int, restart_count: int = 0) -> None:
        self.parts = {
            policy: PartStub(each, site, index, restart_count)
            for policy, each in spec.by_policy.items()
        }

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout through these operators."""
        for part in self.parts.values():
            part.localize(chain)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def sample(self, *published: Any) -> TeamSample:
        """Return a rollout of shapes of each policy."""
        parts = zip(self.parts.items(), published, strict=True)
        return TeamSample({policy: part.sample(weights) for (policy, part), weights in parts}, 0)

    def evaluate(self, how: tuple[int, int, int], *published: Any) -> TeamEvaluation:
        """Return episodes without a step."""
        parts = zip(self.parts.items(), published, strict=True)
        by_policy = {policy: part.evaluate(how, weights) for (policy, part), weights in parts}
        return TeamEvaluation(Evaluation.empty(how[0], how[2]), by_policy)
