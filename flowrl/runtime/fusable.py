"""Whether a graph can be one XLA program: what can't be traced, and how it repeats itself."""

from __future__ import annotations

from bdb import BdbQuit
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.core.events import OperatorRan, Stream, Tap
from flowrl.core.texts import plural
from flowrl.errors import CheckError, FlowrlError, line_of, raised
from flowrl.graph.plan import Plan
from flowrl.graph.stages import Schedule, loops_of
from flowrl.runtime.inline import InlineSite, ProgramPlace
from flowrl.runtime.members import swept_numbers
from flowrl.runtime.periodicity import UNROLLED, UNROLLED_UPDATES, Periodicity, periodicity

NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""The errors of JAX that say that code needs values where there are only tracers."""


def too_long(found: Periodicity) -> str:
    """Return why a program would take too long to compile, and the way out; empty if it would not.

    Args:
        found: how its graph repeats itself.
    """
    if found.rounds > UNROLLED:
        return (
            f"it repeats itself only after {found.period} rounds, of which {found.rounds} differ, "
            f"and its programs unroll {UNROLLED} at most; let its rates divide one another"
        )
    if found.updates <= UNROLLED_UPDATES:
        return ""
    most = f"its programs unroll {UNROLLED_UPDATES} at most, each compiled for a second or two"
    rounds = "a round has" if found.period == 1 else f"{found.period} rounds have"
    return (
        f"{rounds} {found.updates:,} updates that differ, and {most}; sample fewer steps at once, "
        "train less often on them, or let its rates divide one another"
    )


def refused(plan: Plan) -> list[tuple[str, str]]:
    """Find what of a graph can't be part of a program. Nothing is compiled.

    Returns:
        Pairs of a node or resource, and why it can't be traced and what to do.
    """
    graph = plan.graph
    problems: list[tuple[str, str]] = []
    nodes_that_ran: set[str] = set()
    stream = Stream([Tap(lambda event: nodes_that_ran.add(event.node), OperatorRan)])
    place = ProgramPlace(graph.name, graph.resources, 0, InlineSite, plan.found.totals, stream)
    place.threads = plan.threads

    # Called in place of raising, so that the problems of several nodes are found at once.
    def failed(node: str, error: Exception) -> None:
        if isinstance(error, FlowrlError):
            problems.append((node, f"{error.message}{line_of(error)}"))
        else:
            problems.append((node, described(error)))

    def trace(seed: Any, swept: dict[str, Any]) -> None:
        place.begin(seed, swept)
        make = partial(loops_of, graph, place.handles, place.site_of, place.ledger, failed=failed)
        schedule = Schedule(graph, make)
        with place.computing(), place.traced():
            for _ in range(UNROLLED):
                # Nodes after a queue, or every n-th item, may run only in a later round.
                if problems or len(nodes_that_ran) == len(graph.nodes):
                    return
                schedule.round()

    try:
        jax.eval_shape(
            trace, jnp.uint32(0), dict.fromkeys(swept_numbers(graph).values(), jnp.float32(0))
        )
    except BdbQuit:
        raise
    except Exception as error:  # noqa: BLE001 - it is returned as a problem
        failed(place.ledger.at.node or place.opening, error)
    return problems


def refuse(plan: Plan) -> None:
    """Raise what `refused` finds.

    Raises:
        CheckError: a part of the graph can't be traced.
    """
    if problems := refused(plan):
        raise CheckError(
            plan.graph.name, [f"{plan.graph.name}.{node}: {text}" for node, text in problems]
        )


def described(error: Exception) -> str:
    """Return an error of a user's code as a message, with the way out where it met a tracer."""
    if not isinstance(error, NOT_TRACEABLE):
        return raised(error)
    # JAX's own texts are long: only their first line is kept, and the line of the user's code.
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return (
        f"{text}{line_of(error)}; in a program it sees no values: compute with jax.numpy, and "
        "choose by jnp.where or jax.lax.cond"
    )


def fusable(plan: Plan) -> Periodicity:
    """Return how a graph repeats itself, or refuse one of which this makes no program.

    Raises:
        CheckError: it does not, or not soon enough.
    """
    name = plan.graph.name
    found = periodicity(plan.graph, plan.found)
    # The usual cause of a missing period comes first, since it names the node.
    if found is None and plan.found.restless:
        raise CheckError(
            name,
            [
                f"{name}.{node}: its state{text} is a number that never repeats itself; "
                "a number that grows for ever is an array: begin with jnp.float32(0) or "
                "jnp.int32(0)"
                for node, text in plan.found.restless.items()
            ],
        )
    if found is None:
        text = (
            "no steady period was found, of which a program is made; choose rates that divide one "
            "another, such as a Report(every) that is a multiple of the updates after one sample"
        )
        raise CheckError(name, [f"{name}: {text}"])
    if text := too_long(found):
        raise CheckError(name, [f"{name}: {text}"])
    return found


def program_report(plan: Plan) -> tuple[bool, str]:
    """Report whether a plan can be one program.

    Returns:
        Whether it can, and a text: what can't and why; or how many rounds are unrolled, and how
        many come before.
    """
    if problems := refused(plan):
        return False, _refusal(plan, problems)
    try:
        found = fusable(plan)
    except CheckError as error:
        # Each problem begins with the graph's name or a node's address, which is left out here.
        reasons = [problem.partition(": ")[2] for problem in error.problems]
        return False, f"xla: no program: {'; '.join(reasons)}\n"
    before = f", after {found.warmup} that come before" if found.warmup else ""
    of_all = f"{found.rounds} of " if found.period > found.rounds else ""
    rounds = f"{of_all}{found.period} {plural(found.period, 'round')}"
    operators = len(plan.graph.nodes)
    updates = f" with {found.updates} updates" if found.updates > found.rounds else ""
    program = f"xla: one program of all {operators} operators; it unrolls {rounds}{updates}{before}"
    return True, f"{program}\n"


def _refusal(plan: Plan, problems: list[tuple[str, str]]) -> str:
    """Return a text of all problems, and of the nodes that have none."""
    width = max(len(node) for node, _ in problems)
    nodes_with_problems = {node for node, _ in problems}
    fine = [node.name for node in plan.graph.nodes if node.name not in nodes_with_problems]
    lines = [
        "xla: no program",
        *(f"  {node:<{width}}  {text}" for node, text in problems),
        f"  nothing else was found in {', '.join(fine)}",
    ]
    return "\n".join(lines) + "\n"
