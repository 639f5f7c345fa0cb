"""`Local`: operators that run where rollouts are sampled, with the behaviour policy's weights.

They are the same operators as those after the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from flowrl.core.events import Stream
from flowrl.core.items import Batch, Gradients, MultiBatch, check_columns
from flowrl.core.ledger import Ledger
from flowrl.core.trees import names_of
from flowrl.errors import ContractError, a
from flowrl.graph.graph import Chain, Node
from flowrl.graph.loop import Loop
from flowrl.graph.protocols import Handle, Site
from flowrl.graph.refs import refs
from flowrl.graph.stages import Channel
from flowrl.rl.averaging import average
from flowrl.rl.policies import Network, Weights


def sequence_columns(batch: Batch) -> dict[str, Any]:
    """Return the columns that a network needs beside the rows to compute over whole columns.

    They are the observations after the last rows, and the carry before the first.
    """
    return {
        name: values
        for name, values in batch.columns.items()
        if name.startswith(("bootstrap_obs", "carry"))
    }


def values_of(site: Site, net: Network, weights: Weights, batch: Batch) -> Any:
    """Return the values ``[B]`` of the observations after the last rows of a batch.

    Args:
        site: the site that runs the network.
        net: the policy.
        weights: its weights.
        batch: ``[T, B]``.

    Raises:
        ContractError: the batch has lost the column bootstrap_obs.
    """
    check_columns(batch, "bootstrap_obs")
    data = _seen(batch) if net.recurrent else {}
    return site.run(net.values, weights, data, sequence_columns(batch))


def action_values_of(site: Site, net: Network, weights: Weights, batch: Batch) -> Any:
    """Return the action values ``[T + 1, B, n]`` at the rows of a batch and after the last.

    Args:
        site: the site that runs the network.
        net: the policy.
        weights: its weights.
        batch: ``[T, B]``.

    Raises:
        ContractError: the batch has lost the column bootstrap_obs, or the policy has no action
            values.
    """
    check_columns(batch, "bootstrap_obs")
    if net.head.kind != "categorical":
        raise ContractError(
            f"needs action values, which {net.name} has not: its actions are no choice of one of "
            "n; take a policy such as QNetwork"
        )
    return site.run(net.action_values, weights, _seen(batch), sequence_columns(batch))


def _seen(batch: Batch) -> dict[str, Any]:
    """Return the observations of a batch, and where these are final ones."""
    return {name: batch.data[name] for name in (*names_of("obs", batch.data), "valid")}


class Acting(Handle):
    """Handle that a chain at the sampler has in place of a learner's: the behaviour policy.

    `state` holds the weights that the rollout was sampled with.

    Args:
        net: the policy.
        site: the site that runs it.
    """

    # It lasts no longer than a call.
    lasting = ()
    remade = ("network", "site", "state")

    def __init__(self, net: Network, site: Site) -> None:
        self.network, self.site = net, site
        self.state: Weights | None = None

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def values(self, batch: Batch) -> Any:
        """Return the behaviour policy's values ``[B]`` after the last rows of a batch."""
        return values_of(self.site, self.network, cast("Weights", self.state), batch)

    def action_values(self, batch: Batch) -> Any:
        """Return the behaviour policy's action values ``[T + 1, B, n]``, as `action_values_of`."""
        return action_values_of(self.site, self.network, cast("Weights", self.state), batch)

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)
        raise ContractError(
            f"calls {verb}, but at the sampler there are only values and action_values, by the "
            "behaviour policy; move it after ParallelSample"
        )


class Local:
    """Runs a chain of operators at the sampler, which turns each rollout into one item.

    Args:
        chain: the operators by name.
        net: the behaviour policy.
        site: the site that runs them.
    """

    def __init__(self, chain: Chain, net: Network, site: Site) -> None:
        # The chain is one stage between two channels: its first node takes each rollout out of the
        # first, and what its last node yields goes into the other, whose name is no node's.
        names = list(chain)
        self.acting, self.metrics = Acting(net, site), site.metrics
        self._input = Channel(names[0], (), 1, "block", "fifo")
        self._output = Channel("", (names[-1],), 1, "block", "fifo")
        nodes = [
            Node(name, op, (before,) if before else ())
            for before, name, op in zip(["", *names], names, chain.values(), strict=False)
        ]
        # Every resource that the operators refer to is the behaviour policy here.
        handles: dict[str, Handle] = {}
        for op in chain.values():
            for target, _ in refs(op).values():
                handles[target] = self.acting
        channels = {names[0]: self._input, "": self._output}
        self._loop = Loop("local", nodes, handles, site, Ledger(), None, channels)
        # Its events would pass for those of the graph's own nodes, whose names may be the same.
        self._loop.stream = Stream()

    def __call__(self, weights: Weights | None, batch: Batch) -> Any:
        """Return the item that the operators make of a rollout.

        Args:
            weights: those that it was sampled with.
            batch: the rollout.

        Raises:
            ContractError: the operators give anything but one item.
        """
        self.acting.state = weights
        self._input.put("", batch)
        self._loop.run_pass()
        given = [item for _, item in self._output.items]
        self._output.items.clear()
        if len(given) != 1 or given[0] is None:
            got = f"{len(given)} items" if len(given) != 1 else "None"
            raise ContractError(
                f"local gave {got} for a rollout; it must give one item for each, so move the "
                "rest after ParallelSample"
            )
        return given[0]


def of_policies(items: dict[str, Any]) -> MultiBatch:
    """Return the batches of several policies as one item.

    Args:
        items: by policy.

    Raises:
        ContractError: the operators at the sampler made something else of them.
    """
    for name, item in items.items():
        if not isinstance(item, Batch):
            raise ContractError(
                f"local made {a(item)} of the rollouts of {name}; of several policies it must give "
                "batches, so move the rest after Select"
            )
    return MultiBatch(items)


def joined(items: Sequence[Any], run: Callable[..., Any]) -> Any:
    """Return what runners gave in one round as one item.

    Batches are joined side by side, and gradients averaged.

    Args:
        items: what each runner gave.
        run: what runs pure functions.

    Raises:
        ContractError: there are several of another kind.
    """
    if all(isinstance(item, Batch) for item in items):
        return Batch.join(items)
    if all(isinstance(item, Gradients) for item in items):
        return average(items, run)
    if len(items) == 1:
        return items[0]
    raise ContractError(
        f"can't join what local gave in a round, {a(items[0])} of each runner: only batches and "
        "gradients can be joined; take mode='async', which yields each by itself"
    )
