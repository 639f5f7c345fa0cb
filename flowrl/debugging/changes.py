"""Settings that change while a run is at work: what can be swapped in it, and what needs a new one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from flowrl.errors import SettingError
from flowrl.graph import values
from flowrl.graph.graph import Graph, Node
from flowrl.graph.plan import Plan
from flowrl.learner.core import core_of
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.rl.losses import as_loss
from flowrl.runtime.base import Session


def settings(graph: Graph) -> dict[str, Any]:
    """All the settings of a graph by the address that `Graph.set` takes, those inside others behind these."""

    def within(where: str, value: Any) -> Iterator[tuple[str, Any]]:
        for name, inner in values.settings(value).items():
            yield f"{where}.{name}", inner
            yield from within(f"{where}.{name}", inner)

    owners = {**{n.name: n.op for n in graph.nodes}, **graph.resources}
    return {
        address: value for name, owner in owners.items() for address, value in within(name, owner)
    }


def plan_of(graph: Graph) -> Plan:
    """The plan of a graph. A `breakpoint` in an operator is for a run: it is passed over where the operator is only given shapes.

    Raises:
        CheckError: the graph is faulty.
    """
    hook, sys.breakpointhook = sys.breakpointhook, lambda *_, **__: None
    try:
        return graph.compile()
    finally:
        sys.breakpointhook = hook


def change(session: Session, plan: Plan, address: str, value: Any) -> Plan:
    """Change a setting of a graph at work, and return the plan of the changed graph.

    A node goes on with the state that it has; a learner with its weights, and with the state of its optimiser.

    Raises:
        SettingError: there is no such setting, it can't take the value, or it needs a new run.
        CheckError: the graph would be faulty with it.
    """
    graph = plan.graph.set(address, value)
    new = plan_of(graph)

    def refuse(why: str) -> NoReturn:
        way = f"flowrl debug GRAPH --set {shlex.quote(f'{address}={value}')}"
        raise SettingError(f"{why}, so a change needs a new run: {way}", f"{graph.name}.{address}")

    for old, now in zip(plan.graph.nodes, graph.nodes, strict=True):
        if now.op is not old.op:
            if told(plan) != told(new):
                refuse("resources are told of this before the first pass")
            _swap_node(session, now, refuse)
    for name, resource in graph.resources.items():
        if resource is not plan.graph.resources[name]:
            _swap_resource(session, name, plan.graph.resources[name], resource, refuse)
    session.place.planned = new.found.totals
    return new


def _swap_node(session: Session, node: Node, refuse: Callable[[str], NoReturn]) -> None:
    unit = next(loop.units[node.name] for loop in session.turns.loops if node.name in loop.units)
    if _form(unit.op.init()) != _form(node.op.init()):
        refuse("what the node holds would have another form")
    if (bounds := node.op.queue) is not None:
        channel = session.turns.channels[node.name]
        channel.capacity, channel.full, channel.order = bounds.capacity, bounds.full, bounds.order
    unit.op, unit.step = node.op, node.op.step


def _swap_resource(
    session: Session, name: str, old: Any, new: Any, refuse: Callable[[str], NoReturn]
) -> None:
    handle = session.place.handles[name]
    if not isinstance(new, Learner) or not isinstance(handle, LearnerHandle):
        refuse(f"{name} is made when a run begins")
    if (new.policy, new.runners) != (old.policy, old.runners):
        refuse("weights are made when a run begins")
    core = core_of(new.policy, handle.core.spaces, as_loss(new.loss), new.optimizer)
    key = jax.random.key(0)
    if _form(jax.eval_shape(handle.core.init, key)) != _form(jax.eval_shape(core.init, key)):
        refuse("what the learner holds would have another form")
    if jax.tree.leaves(handle.core.loss.init()) != jax.tree.leaves(core.loss.init()):
        refuse("the loss has numbers that adapt and would begin elsewhere")
    handle.core = core


def _form(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in leaves]


class _Note:
    """In the place of a resource: notes what it is told."""

    def __init__(self, name: str, said: list[Any]) -> None:
        self._name, self._said = name, said

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *args, **named: self._said.append((self._name, verb, args, named))


class _Beforehand:
    """In the place of a node's context before the first pass."""

    def __init__(self, node: Node, plan: Plan, said: list[Any]) -> None:
        self.name, self.root, self._plan, self._said = node.name, not node.after, plan, said

    def __getitem__(self, ref: Any) -> _Note:
        return _Note(str(ref), self._said)

    def planned(self, resource: Any, counter: str) -> int:
        """What the plan says."""
        return self._plan.found.totals[resource, counter]


def told(plan: Plan) -> list[Any]:
    """What the nodes of a graph tell its resources before the first pass: (resource, verb, arguments)."""
    said: list[Any] = []
    for node in plan.graph.nodes:
        node.op.prepare(_Beforehand(node, plan, said))  # type: ignore[arg-type]
    return said
