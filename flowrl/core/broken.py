"""`Broken`: what an environment of several agents did wrong, found where its arrays are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from flowrl.errors import EnvError

NOT_FINITE, LATE, LEFT, NOBODY = range(4)
"""What an environment can do wrong."""
TEXTS = {
    NOT_FINITE: "gave an observation or a reward that is not finite, an observation that is none "
    "of its space's choices, or a mask that allows no action",
    LATE: "gave a reward to this agent, whose episode is over",
    LEFT: "left this agent without an end of its episode: nobody acts next, and it neither "
    "terminated nor was truncated",
    NOBODY: "has no agent that acts after its reset",
}
"""What is said of each, after the environment and the agent."""
NONE = -(2**30)
"""The number that stands for no environment: sums of it and others stay below 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Broken:
    """The first environment of several agents that did something wrong.

    Args:
        found: ``int32[5]``: what it did, its number over all runners, the index of the agent, the
            number of its runner, and the rows that the agent had by then; `NONE` if none did.
        agents: the names of the agents.
    """

    found: Any
    agents: tuple[str, ...] = field(metadata={"static": True})

    def check(self, graph: str, row: int) -> None:
        """Raise if an environment did something wrong.

        Args:
            graph: the graph's name.
            row: the number of the row of results that is being made.

        Raises:
            EnvError: with the environment and the agent.
        """
        what, env, agent, runner, step = (int(x) for x in self.found)
        if what < 0:
            return
        of_agent = "" if what == NOBODY else f", for agent {self.agents[agent]} at its row {step:,}"
        raise EnvError(
            f"environment {env}, counted over all runners, which is one of runner {runner}"
            f"{of_agent}, {TEXTS[what]}, before row {row}; fix the environment",
            graph,
            env=env,
            runner=runner,
            agent=self.agents[agent],
            row=step - 1,
        )
