"""What a run does now: shares of nodes, flow on edges, workers, and the bottleneck."""

from __future__ import annotations

import math
from typing import Any

from flowrl.core.profile import Profile, idle
from flowrl.observe.breakdown import Share, shares
from flowrl.observe.explain import explain, plain
from flowrl.observe.what_if import Slider, sliders

IDLE = 0.01
"""A node that is busy for less than this share of its time, and waits for nothing, is idle."""
LOW, HIGH = 0.1, 0.5
"""From these shares of its time on, a node that waits for capacity downstream has low or high
back-pressure, as Flink calls it."""


def moment(p: Profile, whole: Profile | None = None) -> dict[str, Any]:
    """Return a part of a run as plain data, which the page shows in the graph.

    Args:
        p: the profile of that part: the last seconds of a run that goes on, or all of one.
        whole: the profile of the run from its beginning to the end of this part; None: `p`.

    Returns:
        ``nodes`` by name: the shares of time in which each is busy, starved and blocked, its
        ``state`` and its seconds by kind of work; ``edges``: items and environment steps per
        second, and the level and capacity of a queue; ``workers`` by resource; ``resources``: what
        was counted of each, in all and per second; ``facts`` by resource; ``findings``;
        ``sliders``: what several values of a number would bring; and what
        `flowrl.observe.explain.plain` returns.
    """
    explanation = plain(explain(p))
    slow = (
        explanation["bottleneck"]["where"].partition(", ")[0] if explanation["bottleneck"] else ""
    )
    return {
        "seconds": p.seconds,
        "rows": p.rows,
        "env_steps": p.env_steps,
        "nodes": {share.node: _node(p, share, slow) for share in shares(p) if share.node in p.ops},
        "edges": [_edge(p, edge) for edge in p.edges],
        "workers": {name: found for name in p.facts if (found := _workers(p, name))},
        "resources": _resources(p, whole or p),
        "facts": {name: dict(facts) for name, facts in p.facts.items()},
        "findings": list(p.findings),
        # In a short part of a run there may be no rollout, by which they are predicted.
        "sliders": [*map(_slider, sliders(p))] or [*map(_slider, sliders(whole or p))],
        **explanation,
    }


def _node(p: Profile, share: Share, slow: str) -> dict[str, Any]:
    state = "busy"
    if share.node == slow:
        state = "bottleneck"
    elif share.blocked >= max(LOW, share.busy, share.starved):
        state = "blocked"
    elif share.starved > share.busy:
        state = "starved"
    elif share.busy < IDLE:
        state = "idle"
    pressure = "high" if share.blocked > HIGH else "low" if share.blocked > LOW else "none"
    return {
        "busy": share.busy,
        "starved": share.starved,
        "blocked": share.blocked,
        "state": state,
        "pressure": pressure,
        "kinds": _kinds(p, share.node),
    }


def _kinds(p: Profile, node: str) -> dict[str, float]:
    """Return the share of its time that a node gives to each kind of work."""
    thread = next(thread for thread, names in p.stages.items() if node in names)
    work, wall = p.work(thread), p.uptime(thread)
    return {kind: x / wall for (name, kind), x in work.items() if name == node and x > 0}


def _edge(p: Profile, edge: tuple[str, str]) -> dict[str, Any]:
    items, steps = p.edges[edge]
    found = {
        "from": edge[0],
        "to": edge[1],
        "items": items / p.going,
        "steps": steps / p.going,
    }
    if edge[1] in p.queues:
        found["level"], found["capacity"] = p.queues[edge[1]]
    return found


def _resources(p: Profile, whole: Profile) -> dict[str, dict[str, tuple[int, float]]]:
    """Return, by resource, what was counted of it: in all, and per second of this part."""
    found: dict[str, dict[str, tuple[int, float]]] = {}
    for (node, resource), numbers in whole.counts.items():
        lately, of_resource = p.counts.get((node, resource), {}), found.setdefault(resource, {})
        for name, number in numbers.items():
            total, rate = of_resource.get(name, (0, 0.0))
            of_resource[name] = total + number, rate + lately.get(name, 0) / p.going
    return found


def _slider(slider: Slider) -> dict[str, Any]:
    predictions = [
        {"change": w.change, "steps_per_second": w.steps_per_second, "because": w.because}
        for w in slider.predictions
    ]
    return {"name": slider.name, "values": slider.values, "predictions": predictions}


def _workers(p: Profile, resource: str) -> list[dict[str, Any]]:
    """Return what each worker of a resource does, in their order."""
    found = []
    for name, spent in p.workers(resource).items():
        wall = max(sum(spent.values()), 1e-9)
        kinds = {kind: x for kind, x in spent.items() if x > 0}
        found.append({"name": name, "busy": 1 - idle(spent) / wall, "kinds": kinds})
    return found


def without_nan(value: Any) -> Any:
    """Return plain data with None in place of numbers that are not finite, as JSON wants it."""
    match value:
        case dict():
            return {str(k): without_nan(x) for k, x in value.items()}
        case list() | tuple():
            return [without_nan(x) for x in value]
        case float() if not math.isfinite(value):
            return None
    return value
