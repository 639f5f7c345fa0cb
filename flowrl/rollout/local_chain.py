"""What is done with a fragment where it is sampled: the same operators as behind it, over the weights that acted."""

from __future__ import annotations

from typing import Any, cast

from flowrl.core.items import Batch
from flowrl.core.ledger import Ledger
from flowrl.errors import ContractError, a
from flowrl.graph.graph import Chain, Node
from flowrl.graph.loop import Loop
from flowrl.graph.protocols import Handle, Site, refs
from flowrl.graph.stages import Channel
from flowrl.rl.policies import Network, Weights


def sequence_columns(batch: Batch) -> dict[str, Any]:
    """The columns that belong to the maths of a sequence: what comes behind it, and the carry before it."""
    return {k: v for k, v in batch.columns.items() if k == "bootstrap_obs" or k.startswith("carry")}


def values_of(site: Site, net: Network, weights: Weights, batch: Batch) -> Any:
    """The values ``[B]`` of what comes behind the last rows of a batch.

    Raises:
        ContractError: the batch has lost the column bootstrap_obs.
    """
    _whole(batch)
    data = {k: batch.data[k] for k in ("obs", "valid")} if net.recurrent else {}
    return site.run(net.values, weights, data, sequence_columns(batch))


def action_values_of(site: Site, net: Network, weights: Weights, batch: Batch) -> Any:
    """The action values ``[T + 1, B, n]`` at the rows of a batch and at what comes behind.

    Raises:
        ContractError: the batch has lost the column bootstrap_obs, or the policy has none.
    """
    _whole(batch)
    if net.head.kind != "categorical":
        raise ContractError(
            f"needs action values, which {net.name} has not: its actions are no choice of one of n; take a policy such as QNetwork"
        )
    return site.run(
        net.action_values,
        weights,
        {k: batch.data[k] for k in ("obs", "valid")},
        sequence_columns(batch),
    )


def _whole(batch: Batch) -> None:
    if "bootstrap_obs" not in batch.columns:
        raise ContractError(
            "needs the column bootstrap_obs, but the batch has lost it; change batches by batch.with_(...), which keeps the columns"
        )


class Acting(Handle):
    """What a chain at the sampler has in the place of a learner: the weights that acted."""

    def __init__(self, net: Network, site: Site) -> None:
        self.network, self.site = net, site
        self.state: Weights | None = None

    def close(self) -> None:
        """Nothing to let go of."""

    def values(self, batch: Batch) -> Any:
        """The values ``[B]`` of what comes behind the last rows of a batch, by the weights that acted."""
        return values_of(self.site, self.network, cast("Weights", self.state), batch)

    def action_values(self, batch: Batch) -> Any:
        """The action values ``[T + 1, B, n]`` at the rows of a batch and at what comes behind, by the weights that acted."""
        return action_values_of(self.site, self.network, cast("Weights", self.state), batch)

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)
        raise ContractError(
            f"calls {verb}, but at the sampler there are only values and action_values, by the weights that acted; move it behind ParallelSample"
        )


class Local:
    """A chain of operators at the sampler: one fragment in, the one that is sent out."""

    def __init__(self, chain: Chain, net: Network, site: Site) -> None:
        names = list(chain)
        self.into, self.out = (
            Channel(names[0], (), 1, "block", "fifo"),
            Channel("", (names[-1],), 1, "block", "fifo"),
        )
        nodes = [
            Node(name, op, (before,) if before else ())
            for before, name, op in zip(["", *names], names, chain.values(), strict=False)
        ]
        self.acting, self.metrics = Acting(net, site), site.metrics
        handles = {target: self.acting for op in chain.values() for target, _ in refs(op).values()}
        self.loop = Loop(
            "local", nodes, handles, site, Ledger(), None, {names[0]: self.into, "": self.out}
        )

    def __call__(self, weights: Weights | None, batch: Batch) -> Batch:
        """What comes of a fragment."""
        self.acting.state = weights
        self.into.put("", batch)
        self.loop.run_pass()
        given = [item for _, item in self.out.items]
        self.out.items.clear()
        if len(given) != 1 or not isinstance(given[0], Batch):
            got = f"{len(given)} items" if len(given) != 1 else a(given[0])
            raise ContractError(
                f"local gave {got} for a fragment; it must give one batch for each, so move the rest behind ParallelSample"
            )
        return given[0]
