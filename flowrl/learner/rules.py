"""What is wrong with how a graph trains a learner."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from inspect import isabstract
from itertools import chain

from flowrl.core.items import Batch
from flowrl.core.texts import plural
from flowrl.graph.refs import resource_and_part
from flowrl.graph.use import Use
from flowrl.rl import deterministic_losses, losses, value_losses
from flowrl.rl.explore import Explore
from flowrl.rl.function_loss import FunctionLoss
from flowrl.rl.losses import Loss
from flowrl.rollout.runners import Runners


def misfit_of(loss: Loss, explore: Explore) -> str:
    """Return why a loss can't learn from actions picked by this exploration; empty if it can."""
    kind, how = type(loss).__name__, type(explore).__name__
    if loss.deterministic and explore.last.samples:
        return (
            "act by a stochastic policy, but the actions of a policy that "
            f"{kind} trains have no distribution; give runners explore=fl.GaussianNoise(...)"
        )
    if loss.values and explore.last.samples:
        return (
            "act by a stochastic policy, which prefers high action values but samples; "
            f"{kind} does not train them for that; give runners explore=fl.EpsilonGreedy(...)"
        )
    if loss.sampled and not explore.samples:
        # An exploration of the user's own may sample from the policy, and lack only the mark.
        own = ""
        if how not in ("EpsilonGreedy", "GaussianNoise", "RandomStart"):
            own = f"; if {how} does sample them so, set samples = True in it"
        return (
            f"act by {how}, for which {kind} does not correct: "
            "it learns from actions sampled from the policy's own distribution; "
            "leave explore out, which samples them so (fl.Sampled()), "
            f"and encourage exploration by the loss's entropy bonus{own}"
        )
    return ""


def losses_content_with(fields: Collection[str]) -> list[str]:
    """Return the names of the losses of this package that need no more than these fields."""
    found = set()
    for module in (losses, value_losses, deterministic_losses):
        for kind in vars(module).values():
            if not isinstance(kind, type) or not issubclass(kind, Loss):
                continue
            # Base classes have no needs of their own, nor has the loss that is a function.
            named = kind is not FunctionLoss and not isabstract(kind)
            if named and set(kind.needs) <= set(fields):
                found.add(kind.__name__)
    return sorted(found)


ONE_A_ROW = ("advantage", "logp", "return", "reward", "target", "terminated", "truncated", "valid")
"""The fields of a batch that have one number a row: others would be broadcast in a loss."""


def lacking(loss: Loss, batch: Batch, added: Mapping[str, str]) -> str:
    """Return which fields a batch lacks that a loss needs, and the way out; empty if none.

    A field that has more than one number a row is no better than none.

    Args:
        loss: the loss.
        batch: what is to be trained on.
        added: by field, the operator that adds it.
    """
    missing = [name for name in loss.needs if not batch.has(name)]
    if not missing:
        return _misshapen(loss, batch)
    # Transitions have no order in time, which operators that work on rollouts need.
    has_order = not batch.has("next_obs")
    operators = {added[name] for name in missing if name in added and has_order}
    ways = [f"put {operator}(...) before it" for operator in sorted(operators)]
    if others := losses_content_with(batch.data):
        ways.append(f"take a loss that needs no more than that ({', '.join(others)})")
    fields = f"the {plural(len(missing), 'field')} {', '.join(missing)}"
    return (
        f"{type(loss).__name__} needs {fields}, but the batch has {', '.join(batch.data)}; "
        f"{', or '.join(ways) or 'add them before it'}"
    )


def _misshapen(loss: Loss, batch: Batch) -> str:
    """Return which field of a loss has more than one number a row; empty if none.

    What losses of the user's own do with fields is not known.
    """
    if isinstance(loss, FunctionLoss) or not type(loss).__module__.startswith("flowrl."):
        return ""
    rows, read = batch.shape, {"valid", *loss.needs}
    found = [name for name in ONE_A_ROW if name in read and name in batch.data]
    for name in (name for name in found if batch.data[name].shape != rows):
        shape = list(batch.data[name].shape)
        return f"{name} is {shape}, but it has one number a row, which is {list(rows)}"
    return ""


def runners_of(use: Use, name: str) -> Runners | None:
    """Return the settings of a learner's runners, or of the part of them that it trains for."""
    resource, part = resource_and_part(name)
    runners = use.resources.get(resource)
    if not isinstance(runners, Runners):
        return None
    if not part:
        return runners
    # What is known of parts comes from the environment, which was made if the trace ran.
    return runners.by_policy.get(part) if use.traced else None


def stale_data(use: Use, kind: str, runners: str) -> Iterator[tuple[str, str]]:
    """Report where an on-policy loss gets data of other than the newest weights.

    Args:
        use: how the graph uses the learner.
        kind: the name of the loss's class.
        runners: the name of the learner's runners.
    """
    updates = {n for (n, of, what), number in use.ever.items() if number and what == "updates"}
    trains = {n for n in use.users if n in updates or n in use.gradient_data_lags}
    if replays := list(chain(*(of for node, of in use.replays.items() if node in trains))):
        problem = f"{kind} is on-policy, but {replays[0]} gives data of any age"
        yield use.name, f"{problem}; take a loss such as DQNLoss, or train on fresh samples"
        return
    # Where a queue is empty for ever, nothing is known of what comes after it.
    after = use.queues if not use.ever else {n: of for n, of in use.queues.items() if n in trains}
    for queue in dict.fromkeys(after.values()):
        old = "what comes out of a queue may be any number of updates old"
        way = "remove the queue, or take a loss that corrects for age"
        yield queue, f"{kind} is on-policy, but {old}; {way}"
    resource, _ = resource_and_part(runners)
    for node, others in use.strangers.items():
        if others and node in trains:
            problem = f"it trains {use.name}, the policy of {runners}, on data of {others[0]}"
            way = f"train it on data of {runners}, or set {use.name}'s runners={others[0]!r}"
            yield node, f"{kind} is on-policy, but {problem}; {way}"
    # The runners themselves report that they never get weights.
    never = use.total("requests", resource) and not use.total("publishes", resource)
    for node, lag in {**data_lags(use), **use.gradient_data_lags}.items():
        if math.isnan(lag):
            unknown = "the age of its data can't be known"
            why = "the column `version` was computed again on the way"
            way = "change batches by batch.with_(...), which keeps the columns"
            yield node, f"{kind} is on-policy, but {unknown}: {why}; {way}"
        elif lag > 0 and not never:
            old = f"it trains on data up to {lag:.0f} {plural(lag, 'update')} old"
            way = "put SyncWeights() after every update and before the next sample"
            yield node, f"{kind} is on-policy, but {old}; {way}, and make one batch of each round"


def data_lags(use: Use) -> dict[str, float]:
    """Return the policy lags of the updates that compute their gradients themselves.

    Gradients that are applied later are of data of the right age if it was so when they were
    computed. Other updates may come in between (Mnih et al. 2016).
    """
    counts = use.counts.get(use.name, {})
    applies = {node for node, counted in counts.items() if counted.get("applied_gradients")}
    # A node that passes the results of such a step on repeats its policy lag.
    return {
        node: lag
        for node, lag in use.lags.items()
        if not applies or (node not in applies and counts[node].get("updates"))
    }
