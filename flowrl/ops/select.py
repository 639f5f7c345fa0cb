"""`Select`: take the batch of one policy out of those of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.core.items import Batch, MultiBatch
from flowrl.errors import ContractError, a
from flowrl.graph.protocols import Context, Stateless


@dataclass(frozen=True)
class Select(Stateless):
    """Yield the batch of one policy, whose columns are the agents that it acts for.

    Everything downstream of it works as with a single agent.

    Args:
        policy: the name of the policy in the `Team` of the runners.

    Raises:
        ContractError: the item is no `MultiBatch`, or has no such policy.
    """

    policy: str

    @property
    def takes_part(self) -> str:
        """The policy."""
        return self.policy

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Batch]:
        """Yield the batch of the policy."""
        if not isinstance(item, MultiBatch):
            raise ContractError(
                f"needs a MultiBatch, got {a(item)}; put it after a ParallelSample whose runners "
                "have an fl.Team of policies"
            )
        yield item[self.policy]
