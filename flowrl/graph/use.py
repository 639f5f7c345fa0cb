"""`Use`: how a graph uses one resource, for the rules of that resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.graph.protocols import Resource


SAMPLED = ("sampled_steps", "most_sampled_steps")
"""The counters of steps that runners sample; of whole episodes only the most is known."""

REPLAYED = ("replayed_steps",)
"""The counter of steps that are sampled from a replay."""


@dataclass(frozen=True)
class Use:
    """How a graph uses one resource, as far as the resource's rules may look at it."""

    name: str
    """The resource."""
    resources: Mapping[str, Resource]
    """All of the graph's resources."""
    traced: bool
    """Whether the abstract trace closed a Row and found no problem.

    If not, `counts` and `lags` can't be relied on.
    """
    exact: bool
    """Whether the trace found a steady period, so that what is not counted never happens."""
    counts: Mapping[str, Mapping[str, Mapping[str, int]]]
    """By resource, by node: the counters of its verbs in the steady period."""
    users: Sequence[str]
    """The nodes that refer to this resource."""
    ever: Mapping[tuple[str, str, str], int]
    """By node, resource and counter: those from the start to the end of the steady period."""
    lags: Mapping[str, float]
    """By node that calls this resource and yields updates, its own or passed on: the largest policy
    lag, NaN where it can't be known."""
    gradient_data_lags: Mapping[str, float]
    """By node that yields gradients of this resource: by how many updates their data was older, at
    most, than the weights that they are of; NaN where it can't be known."""
    idle: Sequence[str]
    """Where no Row ever closes: the nodes that refer to this resource and never yield anything."""
    queues: Mapping[str, str]
    """By node that refers to this resource and is downstream of a queue: that queue."""
    replays: Mapping[str, Sequence[str]]
    """By node that refers to this resource: the replays that nodes upstream of it sample from."""
    strangers: Mapping[str, Sequence[str]]
    """By node that refers to this resource: the runners that are sampled upstream of it, and that
    this resource does not name and no such node sends weights to."""

    def total(self, counter: str, resource: str | None = None) -> int:
        """Return a counter of a resource (this one by default), summed over the nodes."""
        return sum(c.get(counter, 0) for c in self.counts.get(resource or self.name, {}).values())

    def did(self, counter: str) -> bool:
        """Return whether any node ever counted it for this resource, also before that period."""
        keys = ((of, what) for (_, of, what), number in self.ever.items() if number)
        return (self.name, counter) in keys

    def never(self, counter: str) -> bool:
        """Return whether no node counts it for this resource, and none is left that may do so."""
        began = (self.ever.get((node, "", "calls")) for node in self.users)
        return not self.did(counter) and (self.exact or (self.traced and all(began)))
