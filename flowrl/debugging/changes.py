"""Changes of settings during a run: which of them can be made, and which need a new run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from flowrl.core.remote import is_array
from flowrl.errors import SettingError
from flowrl.graph import values
from flowrl.graph.graph import Graph, Node
from flowrl.graph.plan import Plan
from flowrl.graph.refs import resource_and_part
from flowrl.learner.core import core_of
from flowrl.learner.learner import Learner, LearnerHandle
from flowrl.rl.function_loss import as_loss
from flowrl.runtime.base import Session


def settings(graph: Graph) -> dict[str, Any]:
    """Return all settings of a graph by the addresses that `Graph.set` takes.

    The settings inside another one come right after it.
    """

    def within(where: str, value: Any) -> Iterator[tuple[str, Any]]:
        for name, inner in values.settings(value).items():
            yield f"{where}.{name}", inner
            yield from within(f"{where}.{name}", inner)

    owners = {**{n.name: n.op for n in graph.nodes}, **graph.resources}
    return {
        address: value for name, owner in owners.items() for address, value in within(name, owner)
    }


def plan_of(graph: Graph) -> Plan:
    """Return the plan of a graph, without stopping at a `breakpoint` in an operator.

    Such a breakpoint is meant for the run. The plan only passes shapes to the operator.

    Raises:
        CheckError: the graph is faulty.
    """
    # The trace that a plan is made from calls the operator, too.
    hook = sys.breakpointhook
    sys.breakpointhook = lambda *_, **__: None
    try:
        return graph.compile()
    finally:
        sys.breakpointhook = hook


def change(session: Session, plan: Plan, address: str, value: Any) -> Plan:
    """Change a setting of a running graph, and return the plan of the changed graph.

    A node keeps its state; a learner keeps its weights and the state of its optimiser.

    Args:
        session: the run.
        plan: the plan of its graph as it is now.
        address: the setting, as `Graph.set` takes it.
        value: its new value.

    Raises:
        SettingError: there is no such setting, it can't take the value, or it needs a new run.
        CheckError: the graph would be faulty with it.
    """
    graph = plan.graph.set(address, value)
    new_plan = plan_of(graph)

    def refuse(why: str) -> NoReturn:
        command = f"flowrl debug GRAPH --set {shlex.quote(f'{address}={value}')}"
        raise SettingError(
            f"{why}, so a change needs a new run: {command}", f"{graph.name}.{address}"
        )

    for old, new in zip(plan.graph.nodes, graph.nodes, strict=True):
        if new.op is not old.op:
            # Resources act on these calls when a run begins, and can't take them back.
            if prepared(plan) != prepared(new_plan):
                refuse("resources are prepared for this before the first pass")
            _swap_node(session, new, refuse)
    for name, resource in graph.resources.items():
        if resource is not plan.graph.resources[name]:
            if isinstance(resource, Learner) and prepared(plan) != prepared(new_plan):
                refuse("runners get this before the first pass")
            _swap_resource(session, name, plan.graph.resources[name], resource, refuse)
    session.place.planned = new_plan.found.totals
    return new_plan


def _swap_node(session: Session, node: Node, refuse: Callable[[str], NoReturn]) -> None:
    """Put the changed operator in place of the running one, which hands over its state."""
    unit = next(loop.units[node.name] for loop in session.turns.loops if node.name in loop.units)
    if _structure(unit.op.init()) != _structure(node.op.init()):
        refuse("the state of the node would have another structure")
    # The runtime holds the bounds of a queue apart from its operator.
    if (bounds := node.op.queue) is not None:
        channel = session.turns.channels[node.name]
        channel.capacity, channel.full, channel.order = bounds.capacity, bounds.full, bounds.order
    unit.op, unit.step = node.op, node.op.step


def _swap_resource(
    session: Session, name: str, old: Any, new: Any, refuse: Callable[[str], NoReturn]
) -> None:
    """Put the changed learner in place of the running one; refuse any other resource."""
    handle = session.place.handles[name]
    if not isinstance(new, Learner) or not isinstance(handle, LearnerHandle):
        refuse(f"{name} is made when a run begins")
    if (new.policy, new.runners) != (old.policy, old.runners):
        refuse("weights are made when a run begins")
    core = core_of(new.policy, handle.core.spaces, as_loss(new.loss), new.optimizer)
    # The compiled update goes on with the arrays that there are, so they must fit.
    key = jax.random.key(0)
    old_state, new_state = jax.eval_shape(handle.core.init, key), jax.eval_shape(core.init, key)
    if _structure(old_state) != _structure(new_state):
        refuse("the state of the learner would have another structure")
    if jax.tree.leaves(handle.core.loss.init()) != jax.tree.leaves(core.loss.init()):
        refuse("the loss has adaptive numbers, which would begin with other values")
    handle.core = core


def _structure(tree: Any) -> tuple[Any, list[Any]]:
    """Return the structure of a tree, and the shape and type of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) if is_array(x) else type(x) for x in leaves]


class _CallLog:
    """Stand-in for a resource that records the calls it gets.

    That of a learner has its functions, as far as gradients depend on them, for any spaces.
    """

    def __init__(self, name: str, calls: list[Any], resource: Any) -> None:
        self._name, self._calls = name, calls
        if isinstance(resource, Learner):
            spaces: Any = None
            self.core = core_of(resource.policy, spaces, as_loss(resource.loss), None)

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *args, **named: self._calls.append((self._name, verb, args, named))


class _PrepareContext:
    """Stand-in for the context of a node before the first pass."""

    def __init__(self, node: Node, plan: Plan, calls: list[Any]) -> None:
        self.name, self.root, self._plan, self._calls = node.name, not node.after, plan, calls

    def __getitem__(self, ref: Any) -> _CallLog:
        name, _ = resource_and_part(str(ref))
        return _CallLog(str(ref), self._calls, self._plan.graph.resources.get(name))

    def planned(self, resource: Any, counter: str) -> int:
        """Return the number that the plan has."""
        return self._plan.found.totals[resource, counter]


def prepared(plan: Plan) -> list[Any]:
    """Return the calls by which nodes prepare resources before the first pass.

    Each is a tuple of the resource, the method and its arguments.
    """
    calls: list[Any] = []
    for node in plan.graph.nodes:
        node.op.prepare(_PrepareContext(node, plan, calls))  # type: ignore[arg-type]
    return calls
