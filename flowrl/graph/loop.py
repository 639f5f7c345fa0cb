"""The stage loop: the one way in which every runtime and the abstract trace drive a graph.

The loop calls the operators' steps as plain functions, depth first.
"""

from __future__ import annotations

import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flowrl.core.clock import here
from flowrl.core.events import Dropped, QueueLevel, Took
from flowrl.core.items import Tally, steps_of
from flowrl.core.ledger import Ledger
from flowrl.errors import ContractError, FlowrlError, GraphError, a, unknown
from flowrl.graph.graph import Node
from flowrl.graph.protocols import Handle, Operator, Site
from flowrl.graph.refs import resource_and_part

if TYPE_CHECKING:
    from flowrl.graph.stages import Channel


class NodeContext:
    """Context that the step of one node gets: the `Context` of the protocols, made from a site.

    Args:
        name: the name of the node.
        root: whether the node is a start of the graph.
        handles: the handles of all resources, by name.
        site: what runs functions for the node's stage.
    """

    def __init__(self, name: str, root: bool, handles: Mapping[str, Handle], site: Site) -> None:
        self.name, self.root = name, root
        self.source: str | None = None
        self.dropped = False
        self.run = site.run
        self.call = site.call
        self.test = site.test
        self.seconds = site.seconds
        self.planned = site.planned
        self.metric = partial(site.metrics.add, by=name)
        self.repeat: Callable[[int, Callable[[], Any]], Iterator[Any]] = one_by_one
        self._when = site.when
        self._handles = handles

    def when(self, due: Any, ref: Any, verb: str, *args: Any) -> None:
        """Call a verb of a resource if it is due.

        Args:
            due: whether to call it; a tracer within a program.
            ref: the name of the resource.
            verb: the name of the verb, which returns nothing.
            *args: the arguments of the verb.
        """
        self._when(due, self[ref], partial(getattr(self[ref], verb), *args))

    def drop(self) -> None:
        """Count the item that was taken from a queue as dropped; it goes no further."""
        self.dropped = True

    def __getitem__(self, ref: Any) -> Any:
        name, part = resource_and_part(ref)
        if name not in self._handles:
            raise GraphError(
                f"{unknown('resource', ref, self._handles)}; name it in a field of the operator: "
                f'`{ref}: Ref[...] = "{ref}"`'
            )
        handle = self._handles[name]
        return handle.part(part) if part else handle


def one_by_one(times: int, make: Callable[[], Any]) -> Iterator[Any]:
    """Yield what a function returns, so many times, one after another; None is left out."""
    for _ in range(times):
        if (item := make()) is not None:
            yield item


def unchangeable(state: Any) -> bool:
    """Return whether no step could change a state, or anything in it, in place."""
    if is_dataclass(state):
        frozen = bool(state.__dataclass_params__.frozen)  # type: ignore[union-attr]
        return frozen and all(unchangeable(getattr(state, f.name)) for f in fields(state))
    if isinstance(state, tuple):
        return all(map(unchangeable, state))
    return state is None or isinstance(
        state, frozenset | str | bytes | int | float | complex | np.generic | jax.Array
    )


class Unit:
    """A node at work: its state, its context, and the units and channels that take its outputs."""

    __slots__ = ("ctx", "downstream", "name", "op", "outlets", "state", "step")

    def __init__(self, node: Node, ctx: NodeContext) -> None:
        self.name = node.name
        self.op = node.op
        self.step = node.op.step
        self.state = node.op.init()
        # A step changes its state in place, so a state that can't be changed never would be.
        if self.state is not None and unchangeable(self.state):
            raise ContractError(
                f"its init returned {a(self.state)}, {self.state!r}, which a step can't change in "
                "place, so that its state would be lost; return a dict or a list, such as "
                "{'count': np.int32(0)}, or None for no state"
            )
        self.ctx = ctx
        self.downstream: list[tuple[tuple[str, str], Unit]] = []
        self.outlets: list[tuple[tuple[str, str], Channel]] = []


class Loop:
    """One stage of a graph: a pass gives each of its roots a turn and drains all of its outputs."""

    def __init__(
        self,
        graph: str,
        nodes: Sequence[Node],
        handles: Mapping[str, Handle],
        site: Site,
        ledger: Ledger,
        failed: Callable[[str, Exception], None] | None = None,
        channels: Mapping[str, Channel] = MappingProxyType({}),
    ) -> None:
        """Make the nodes ready.

        Args:
            graph: the name of the graph.
            nodes: the nodes of this stage.
            handles: the handles of the resources, by name.
            site: what runs functions.
            ledger: where everything is counted.
            failed: what is called with a node's name and its error, in place of raising the error;
                the node then yields nothing. None raises errors.
            channels: what each queue of the whole graph holds, by the queue's name.

        Raises:
            ContractError: the state of an operator can't be changed in place.
        """
        self.graph = graph
        self.first = nodes[0].name
        """The first node, whose name stands for the stage."""
        self.ledger = ledger
        self.stream = site.stream
        self.settle = site.settle
        self.metrics = site.metrics
        self.rows: list[Tally] = []
        """What the reporting operator closed in this pass."""
        # Chosen once, so that a run without `failed` pays nothing for it per item.
        self._deliver: Callable[[Unit, Any, str | None], None] = (
            self.enter if failed is None else partial(self._enter_or_report, failed)
        )
        self.units = self._make_units(nodes, handles, site)
        self.roots = [
            (self.units[n.name], channels.get(n.name))
            for n in nodes
            if not n.after or n.name in channels
        ]
        self._connect(nodes, channels)
        self.capacities = {root.name: list(self._capacities(root)) for root, _ in self.roots}
        """By root: the nodes downstream that can be full, and whether each has capacity left."""
        self._prepare()

    def _make_units(
        self, nodes: Sequence[Node], handles: Mapping[str, Handle], site: Site
    ) -> dict[str, Unit]:
        """Return a unit for each node, with the operator's first state."""
        units: dict[str, Unit] = {}
        with self._addressed():
            for node in nodes:
                self.ledger.at.node = node.name
                context = NodeContext(node.name, not node.after, handles, site)
                units[node.name] = Unit(node, context)
        return units

    def _prepare(self) -> None:
        """Let every operator prepare resources for the run."""
        with self._addressed():
            for unit in self.units.values():
                self.ledger.at.node = unit.name
                unit.op.prepare(unit.ctx)
        self.ledger.at.node = ""

    def _connect(self, nodes: Sequence[Node], channels: Mapping[str, Channel]) -> None:
        """Give every unit the units and the channels that take what it yields."""
        for node in nodes:
            # A queue takes its items from its channel, not from the units before it.
            if node.name in channels:
                continue
            for before in node.after:
                edge = (before, node.name)
                self.units[before].downstream.append((edge, self.units[node.name]))
        for name, channel in channels.items():
            for before in channel.after:
                if before in self.units:
                    self.units[before].outlets.append(((before, name), channel))

    @property
    def states(self) -> dict[str, Any]:
        """Every operator's state, by node."""
        return {name: unit.state for name, unit in self.units.items()}

    @states.setter
    def states(self, states: Mapping[str, Any]) -> None:
        for name, unit in self.units.items():
            unit.state = states[name]

    # -- whether a root may fire

    def _capacities(self, unit: Unit) -> Iterator[tuple[str, Callable[[], bool]]]:
        """Yield all that a unit's outputs may reach and that can be full, with the test of each."""
        for (_, name), channel in unit.outlets:
            yield name, lambda channel=channel: channel.has_capacity  # type: ignore[misc]
        for (before, name), receiver in unit.downstream:
            # Most operators take any item: only those that override the test are asked at all.
            if type(receiver.op).has_capacity is not Operator.has_capacity:
                yield name, partial(self._has_capacity, receiver, before)
            yield from self._capacities(receiver)

    def _has_capacity(self, unit: Unit, source: str) -> bool:
        self.ledger.at.node, unit.ctx.source = unit.name, source
        return unit.op.has_capacity(unit.state, unit.ctx)

    def ready(self) -> bool:
        """Return whether a pass would do anything."""
        # No context manager: this is asked in every round.
        try:
            return any(not self._waits_for(*start) for start in self.roots)
        except Exception as error:
            self._locate(error)
            raise

    def blocked(self) -> bool:
        """Return whether there is something to do, but no capacity for its outputs."""
        return any(self._waits_for(*start).startswith("capacity") for start in self.roots)

    def waits(self) -> Iterator[str]:
        """Yield a text for each root that says what it waits for."""
        for root, channel in self.roots:
            yield f"{root.name} waits for {self._waits_for(root, channel)}"

    def _waits_for(self, root: Unit, channel: Channel | None) -> str:
        """Return what a root waits for, an empty text if it may fire.

        A root waits for something to do, or for capacity for its outputs.
        """
        self.ledger.at.node = root.name
        if not (root.op.ready(root.state, root.ctx) if channel is None else len(channel)):
            return "something to do"
        for name, has_capacity in self.capacities[root.name]:
            if not has_capacity():
                return f"capacity at {name}"
        return ""

    # -- passes

    def run_pass(self) -> list[Tally]:
        """Give every root that may fire one turn, and drain all of its outputs.

        A root at a queue takes one item from it.

        Returns:
            What the reporting operator closed meanwhile.

        Raises:
            FlowrlError: with its node's address; any other error carries the address as a note.
        """
        self.rows = []
        with self._addressed():
            for root, channel in self.roots:
                if self._waits_for(root, channel):
                    continue
                if channel is None:
                    self._deliver(root, None, None)
                # Never None here, for no other stage takes from it and it is not empty; for mypy.
                elif (taken := channel.take()) is not None:
                    here().mark("taken", channel.name, taken[1])
                    if self.stream.levels:
                        self.stream.emit(QueueLevel(channel.name, len(channel), channel.capacity))
                    self._take(root, *taken)
        return self.rows

    @contextmanager
    def _addressed(self) -> Iterator[None]:
        """Give errors the address of the node at work."""
        # A chain at the sampler is a loop within a node's step, whose seconds go on afterwards.
        outer = here().node
        try:
            yield
        except Exception as error:
            self._locate(error)
            raise
        finally:
            here().at(outer)

    def _locate(self, error: Exception) -> None:
        """Give an error the address of the node at work."""
        address = f"{self.graph}.{self.ledger.at.node}"
        if isinstance(error, FlowrlError):
            error.at(address)
        else:
            error.add_note(f"in {address}")

    def _take(self, unit: Unit, source: str, item: Any) -> None:
        """Give a queue's unit an item from its channel, and count the item as got or dropped."""
        self._deliver(unit, item, source)
        ledger, edge, steps = self.ledger, (source, unit.name), steps_of(item)
        if unit.ctx.dropped:
            unit.ctx.dropped = False
            self.stream.emit(Dropped(unit.name, steps))
            ledger.drop(edge, steps)
        else:
            ledger.got[edge] += 1
            ledger.got_steps[edge] += steps

    def _enter_or_report(
        self,
        failed: Callable[[str, Exception], None],
        unit: Unit,
        item: Any,
        source: str | None,
    ) -> None:
        """Enter a unit, and give its error to `failed` in place of raising it."""
        try:
            self.enter(unit, item, source)
        except BdbQuit:
            # It is no problem of the graph that the user left pdb.
            raise
        except Exception as error:  # noqa: BLE001 - reported, not swallowed
            # The error follows from the None, so the message names the node that yielded it.
            if source is not None and item is None:
                failed(unit.name, ContractError(f"{source} gives it None: {error}"))
            else:
                failed(unit.name, error)

    def enter(self, unit: Unit, item: Any, source: str | None) -> None:
        """Give an item to a node and drain all of its outputs, depth first.

        Args:
            unit: the node.
            item: what its step takes; None at a root.
            source: the node that the item came from; None at a root.

        Raises:
            ContractError: the step returns something in place of yielding.
        """
        ledger, name, stream, clock = self.ledger, unit.name, self.stream, here()
        unit.ctx.source = source
        ledger.at.node = name
        clock.at(name)
        if stream.took:
            stream.emit(Took(name, source, item))
        outputs = unit.step(unit.state, item, unit.ctx)
        if not isinstance(outputs, Iterator):
            raise ContractError(_not_yielding(outputs))
        started = time.perf_counter() if stream.ran else 0.0
        for output in outputs:
            if stream.ran:
                stream.advanced(name, time.perf_counter() - started, output)
            if isinstance(output, Tally):
                self.rows.append(replace(output, metrics=self.metrics.drain()))
            steps = steps_of(output)
            # Inline and not a function of its own: this is the hot path of every run.
            for edge, receiver in unit.downstream:
                ledger.put[edge] += 1
                ledger.put_steps[edge] += steps
                self._deliver(receiver, output, name)
                ledger.got[edge] += 1
                ledger.got_steps[edge] += steps
            if unit.outlets:
                self._put(unit, output, steps)
            # The nodes downstream left their own names there.
            ledger.at.node = name
            clock.at(name)
            # The nodes downstream ran meanwhile, whose seconds are their own.
            if stream.ran:
                started = time.perf_counter()
        if stream.ran:
            stream.advanced(name, time.perf_counter() - started, None)

    def _put(self, unit: Unit, output: Any, steps: int) -> None:
        """Put an output into the channels of a unit, and count what a full one drops for it."""
        ledger, stream, clock = self.ledger, self.stream, here()
        for edge, channel in unit.outlets:
            queue = edge[1]
            ledger.put[edge] += 1
            ledger.put_steps[edge] += steps
            settled = self.settle(output)
            clock.mark("put", queue, settled)
            dropped = channel.put(unit.name, settled)
            if dropped is not None:
                source, item = dropped
                ledger.drop((source, queue), steps_of(item))
                stream.emit(Dropped(queue, steps_of(item)))
            if stream.levels:
                stream.emit(QueueLevel(queue, len(channel), channel.capacity))


def _not_yielding(returned: Any) -> str:
    """Return what is wrong with a step that returned something in place of yielding."""
    got = "None" if returned is None else a(returned)
    return (
        f"its step returned {got}; a step yields its items "
        "(write `yield item`, or `yield from ()` for none)"
    )
