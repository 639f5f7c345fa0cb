"""What to know of a graph before it runs: nothing that is wrong, but what may not be meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Resource
from flowrl.graph.refs import refs, resource_and_part
from flowrl.graph.use import SAMPLED
from flowrl.learner.learner import Learner
from flowrl.replay.replay import Replay
from flowrl.rl.sequence_losses import R2D2Loss
from flowrl.rollout.runners import Runners


def advice(plan: Plan) -> Iterator[str]:
    """Yield what to know of a graph, each time with the name of the node or resource.

    Args:
        plan: the compiled graph.
    """
    yield from _of_steps(plan)
    resources = plan.graph.resources
    for name, resource in resources.items():
        if isinstance(resource, Runners):
            if text := resource.advice():
                yield f"{name}: {text}"
            if not any(isinstance(x, Learner) or x.feeds for x in resources.values()):
                yield (
                    f"{name}: they act with their first, random weights, for the graph has no "
                    "learner; a saved policy acts with teacher=fl.Frozen(DIR) among its resources"
                )
        if isinstance(resource, Replay) and resource.sequence_length is not None:
            runners = resources[resource_and_part(str(resource.runners))[0]]
            if isinstance(runners, Runners):
                yield from (
                    f"{name}: {text}" for text in _of_sequences(resource, runners, resources)
                )


def _of_steps(plan: Plan) -> Iterator[str]:
    """Yield which runners sample steps and episodes that no row counts."""
    counted = plan.found.ever.items()
    sampled = {runners for (_, runners, what), n in counted if n and what in SAMPLED}
    for node in (n for n in plan.graph.nodes if n.op.reports):
        reported = [name for name, _ in refs(node.op).values()]
        # One of the user's own may take its episodes from wherever it likes.
        for name in sorted(sampled.difference(reported)) if reported else ():
            yield (
                f"{node.name}: the steps and episodes of {name} are in no row, for it reports "
                f"{', '.join(reported)} alone, whose steps env_steps and steps=... count"
            )


def _of_sequences(
    replay: Replay, runners: Runners, resources: Mapping[str, Resource]
) -> Iterator[str]:
    """Yield what to know of a replay of sequences, each of which begins with a rollout."""
    if runners.skips:
        yield (
            "the vector of environments does not reset in Gymnasium's NEXT_STEP mode, so steps are "
            "skipped where episodes end; sequences are cut there, and the rows after that are "
            "trained on less often or never. Make the vector with "
            "autoreset_mode=AutoresetMode.NEXT_STEP, or give a function that makes one environment"
        )
    losses = [x.loss for x in resources.values() if isinstance(x, Learner)]
    burn_in = max((loss.burn_in for loss in losses if isinstance(loss, R2D2Loss)), default=0)
    trained = (replay.sequence_length or 0) - burn_in
    if runners.rollout_length > trained > 0:
        # Of several agents a sequence is at most as long as a rollout.
        way = "" if runners.agents else f"set rollout_length to at most {trained}, or "
        yield (
            f"{runners.rollout_length - trained} of the {runners.rollout_length} rows of each "
            f"rollout are never trained on: a sequence begins with a rollout, and trains on the "
            f"{trained} rows after a burn-in of {burn_in}; {way}take a shorter burn_in"
        )
