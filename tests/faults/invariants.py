"""What holds in every run, whatever happens to its workers: one function for each invariant.

Each takes a `Simulation` whose session is between two passes, and returns what is wrong, or None.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np

from flowrl.core.items import Batch
from flowrl.core.workers import Done


def batches_in(tree: Any) -> list[Batch]:
    """Return the batches in the state of an operator or in what a queue holds."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Batch))
    return [x for x in leaves if isinstance(x, Batch)]


def held_batches(sim: Any) -> list[Batch]:
    """Return the batches that operators and queues hold."""
    turns = sim.session.turns
    states = [state for loop in turns.loops for state in loop.states.values()]
    queued = [[item for _, item in channel.items] for channel in turns.channels.values()]
    return batches_in((states, queued))


def rollouts_of(batches: list[Batch]) -> Counter[int]:
    """Return how often each rollout is in some batches."""
    found: Counter[int] = Counter()
    for batch in batches:
        found.update(set(batch.columns["rollout"].tolist()))
    return found


def sampled_is_trained_dropped_or_in_flight(sim: Any) -> str | None:
    """Every rollout that was taken is trained on once, or dropped and counted, or held."""
    if sim.case.replays:
        return replayed_is_trained_or_in_flight(sim)
    held = rollouts_of(held_batches(sim))
    twice = [each for each, number in (sim.trained + held).items() if number > 1]
    if twice:
        return f"rollouts {twice} are trained on, or held, more than once"
    if unknown := set(sim.trained + held) - set(sim.accepted):
        return f"rollouts {sorted(unknown)} came from nowhere"
    gone = set(sim.accepted) - set(sim.trained) - set(held)
    steps = len(gone) * sim.case.rollout_steps
    dropped = sum(sim.session.place.ledger.dropped_steps.values())
    if steps != dropped:
        return f"{steps} steps are neither trained on nor held, {dropped} are counted as dropped"
    return None


def replayed_is_trained_or_in_flight(sim: Any) -> str | None:
    """Every batch that was sampled from the replay is trained on, or in the queue."""
    counts = sim.counts
    held = len(held_batches(sim))
    if counts["draws"] != sim.updates + held:
        return f"{counts['draws']} batches were sampled, {sim.updates} trained on, {held} held"
    added = len(sim.accepted) * sim.case.rollout_steps
    if counts["added_steps"] != added:
        return f"{added} steps came, {counts['added_steps']} are counted as added"
    return None


def the_audit_closes(sim: Any) -> str | None:
    """The audit of the session closes, and the replay's stock is all that was ever added."""
    audit = sim.session.audit()
    if not audit.closed:
        return str(audit)
    for name, stock in audit.stocks.items():
        added = len(sim.accepted) * sim.case.rollout_steps
        if stock.added != added:
            return f"{added} steps came to {name}, of which it knows {stock.added}"
    return None


def queues_keep_their_capacity(sim: Any) -> str | None:
    """No queue holds more than its capacity."""
    for name, channel in sim.session.turns.channels.items():
        if len(channel) > sim.case.graph_capacity:
            return f"{name} holds {len(channel)} items, its capacity is {sim.case.graph_capacity}"
    return None


def requests_keep_their_bound(sim: Any) -> str | None:
    """No runner has more calls in flight than `in_flight`."""
    for runner, going in enumerate(sim.runners.requests.going):
        if len(going) > sim.case.in_flight:
            return f"runner {runner} has {len(going)} calls in flight of {sim.case.in_flight}"
    return None


def every_request_is_accounted_for(sim: Any) -> str | None:
    """Every request had a result, was counted as lost, or is in flight."""
    requests, counts = sim.runners.requests, sim.counts
    had = sum(sim.results)
    lost, going = counts["lost_requests"], len(requests)
    if requests.issued != had + lost + going + sim.left_out:
        return (
            f"{requests.issued} requests were made: {had} had results, {lost} are counted as "
            f"lost, {going} are in flight, {sim.left_out} were left out of a snapshot"
        )
    return None


def pending_versions_are_those_of_the_requests(sim: Any) -> str | None:
    """The runners' handle knows which policy version every request in flight carries."""
    handle = sim.runners
    for runner, going in enumerate(handle.requests.going):
        versions = [int(version) for version in handle._pending_versions[runner]]
        if len(versions) != len(going):
            return f"runner {runner} has {len(going)} requests and {len(versions)} versions"
        for version, request in zip(versions, going, strict=True):
            sample = _sample_in(request.future)
            came = version if sample is None else int(sample.batch.columns["version"][0])
            if came != version:
                return f"a request to runner {runner} carries version {came}, not {version}"
    return None


def _sample_in(future: Any) -> Any:
    """Return the sample that came of a call, None if there is none yet."""
    if isinstance(future, Done):
        return future.value
    return future.value if future.done and future.error is None else None


def versions_only_rise(sim: Any) -> str | None:
    """The learner's version counts updates, and each runner gets newer weights up to the newest."""
    version = int(sim.session.place.handles["learner"].state["version"])
    if version != sim.updates:
        return f"the learner has version {version} after {sim.updates} updates"
    weights = sim.runners._weights
    for runner, selected in enumerate(weights._selected):
        now = -1 if selected is None else int(selected.version)
        if now < sim.selected[runner]:
            return f"runner {runner} had version {sim.selected[runner]}, and has {now} now"
        sim.selected[runner] = now
        to_come = [now, *(int(each.version) for each in weights._newer[runner])]
        if to_come != sorted(set(to_come)) or to_come[-1] != int(weights.newest.version):
            return (
                f"runner {runner} gets versions {to_come}, the newest is {weights.newest.version}"
            )
    return None


def replay_is_never_ahead(sim: Any) -> str | None:
    """No more batches were sampled from a replay than its ratio allows."""
    if not sim.case.replays:
        return None
    counts = sim.counts
    # The rollout that reaches the first mark is the first that calls for batches.
    steps = counts["added_steps"] - sim.case.learning_starts + sim.case.rollout_steps
    if counts["draws"] > max(0, sim.case.ratio * steps):
        return f"{counts['draws']} batches were sampled for {counts['added_steps']} steps"
    return None


PASS = (
    sampled_is_trained_dropped_or_in_flight,
    queues_keep_their_capacity,
    requests_keep_their_bound,
    every_request_is_accounted_for,
    pending_versions_are_those_of_the_requests,
    versions_only_rise,
    replay_is_never_ahead,
)
"""Checked after every pass."""
ROW = (the_audit_closes,)
"""Checked after every row, for it waits until a replay's shards have all that was sent to them."""


# -- what is checked where it happens: each takes the simulation and reports what it finds


def rollouts_are_taken_in_order(sim: Any, batch: Batch) -> None:
    """A rollout is taken once; those of one runner have versions that never go back."""
    names = ("rollout", "producer", "version", "first")
    for rollout, runner, version, first in zip(
        *(batch.columns[name].tolist() for name in names), strict=True
    ):
        if rollout in sim.accepted:
            sim.found("rollouts_are_taken_in_order", f"rollout {rollout} was taken twice")
        if version < sim.accepted_versions[runner]:
            text = f"runner {runner} gave version {sim.accepted_versions[runner]}, then {version}"
            sim.found("rollouts_are_taken_in_order", text)
        sim.accepted.setdefault(rollout, len(sim.accepted))
        sim.accepted_versions[runner] = version
        sim.results[runner] += 1
        sim.turns[runner] = first + sim.case.graph.resources["runners"].rollout_length


def lag_keeps_its_bound(sim: Any, batch: Batch) -> None:
    """No batch that is trained on is older than the graph allows, or of the future."""
    version = int(sim.session.place.handles["learner"].state["version"])
    lags = version - np.asarray(batch.columns["version"])
    if lags.max() > sim.case.lag_bound or lags.min() < 0:
        text = f"lags {lags.tolist()} where {sim.case.lag_bound} is the largest"
        sim.found("lag_keeps_its_bound", text)


def the_queue_keeps_its_order(sim: Any, batch: Batch) -> None:
    """What comes out of a queue that is first in, first out came in that order."""
    if not sim.case.fifo:
        return
    place = min(sim.accepted[rollout] for rollout in batch.columns["rollout"].tolist())
    if place <= sim.last_out:
        sim.found("the_queue_keeps_its_order", f"item {place} after item {sim.last_out}")
    sim.last_out = place
