"""The one stage loop. Every runtime, and the abstract trace, drives a graph through it: plain calls, depth first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
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

if TYPE_CHECKING:
    from flowrl.graph.stages import Channel

_END: Any = object()


class NodeContext:
    """The context of one node."""

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
        self._when = site.when
        self._handles = handles

    def when(self, due: Any, ref: Any, verb: str, *args: Any) -> None:
        """Call a verb if it is due."""
        self._when(due, self[ref], partial(getattr(self[ref], verb), *args))

    def drop(self) -> None:
        """The item that was taken from a queue goes no further: it counts as dropped."""
        self.dropped = True

    def __getitem__(self, ref: Any) -> Any:
        if ref not in self._handles:
            raise GraphError(
                f'{unknown("resource", ref, self._handles)}; name it in a field of the operator: `{ref}: Ref[...] = "{ref}"`'
            )
        return self._handles[ref]


def unchangeable(state: Any) -> bool:
    """Return whether no step could change a state, or anything in it, in place."""
    if is_dataclass(state):
        frozen = bool(state.__dataclass_params__.frozen)  # type: ignore[union-attr]
        return frozen and all(map(unchangeable, vars(state).values()))
    if isinstance(state, tuple):
        return all(map(unchangeable, state))
    return state is None or isinstance(
        state, frozenset | str | bytes | int | float | complex | np.generic | jax.Array
    )


class Unit:
    """A node at work: its state, its context, the units behind it, and the channels that it puts into."""

    __slots__ = ("behind", "ctx", "name", "op", "outlets", "state", "step")

    def __init__(self, node: Node, ctx: NodeContext) -> None:
        self.name = node.name
        self.op = node.op
        self.step = node.op.step
        self.state = node.op.init()
        if self.state is not None and unchangeable(self.state):
            raise ContractError(
                f"its init returned {a(self.state)}, {self.state!r}, which a step can't change in place, so that its state would be lost; "
                "return a dict or a list, such as {'count': np.int32(0)}, or None for no state"
            )
        self.ctx = ctx
        self.behind: list[tuple[tuple[str, str], Unit]] = []
        self.outlets: list[tuple[tuple[str, str], Channel]] = []


class Loop:
    """One stage: a pass gives each of its roots a turn and drains everything that comes of it."""

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
            graph: its name.
            nodes: those of this stage.
            handles: of the resources, by name.
            site: what runs functions.
            ledger: where everything is counted.
            failed: told of a node's error in place of raising it; the node then yields nothing.
            channels: by queue of the whole graph, what stands there.
        """
        self.graph = graph
        self.first = nodes[0].name
        """The node by which the stage is called."""
        self.ledger = ledger
        self.stream = site.stream
        self.settle = site.settle
        self.metrics = site.metrics
        self._enter = self.enter if failed is None else self._try_push(failed)
        self.units: dict[str, Unit] = {}
        with self._addressed():
            for node in nodes:
                ledger.at.node = node.name
                self.units[node.name] = Unit(
                    node, NodeContext(node.name, not node.after, handles, site)
                )
        self.roots = [
            (self.units[n.name], channels.get(n.name))
            for n in nodes
            if not n.after or n.name in channels
        ]
        for node in nodes:
            for before in node.after if node.name not in channels else ():
                self.units[before].behind.append(((before, node.name), self.units[node.name]))
        for name, channel in channels.items():
            for before in channel.after:
                if before in self.units:
                    self.units[before].outlets.append(((before, name), channel))
        self.capacities = {root.name: list(self._capacities(root)) for root, _ in self.roots}
        """By root: nodes and whether they have room for what comes of it."""
        with self._addressed():
            for unit in self.units.values():
                ledger.at.node = unit.name
                unit.op.prepare(unit.ctx)
        ledger.at.node = ""

    @property
    def states(self) -> dict[str, Any]:
        """Every operator's state, by node."""
        return {name: unit.state for name, unit in self.units.items()}

    @states.setter
    def states(self, states: Mapping[str, Any]) -> None:
        for name, unit in self.units.items():
            unit.state = states[name]

    def _capacities(self, unit: Unit) -> Iterator[tuple[str, Callable[[], bool]]]:
        for (_, name), channel in unit.outlets:
            yield name, lambda channel=channel: channel.has_capacity  # type: ignore[misc]
        for (before, name), behind in unit.behind:
            if type(behind.op).has_capacity is not Operator.has_capacity:
                yield name, partial(self._has_capacity, behind, before)
            yield from self._capacities(behind)

    def _has_capacity(self, unit: Unit, source: str) -> bool:
        self.ledger.at.node, unit.ctx.source = unit.name, source
        return unit.op.has_capacity(unit.state, unit.ctx)

    def ready(self) -> bool:
        """Whether a pass would do anything."""
        return any(not self._waits(*start) for start in self.roots)

    def blocked(self) -> bool:
        """Whether there is something to do, but no room for what comes of it."""
        return any(self._waits(*start).startswith("capacity") for start in self.roots)

    def waits(self) -> Iterator[str]:
        """What each root waits for."""
        yield from (
            f"{root.name} waits for {self._waits(root, channel)}" for root, channel in self.roots
        )

    def _waits(self, root: Unit, channel: Channel | None) -> str:
        """What a root waits for: something to do, or room for what comes of it; nothing if it may fire."""
        self.ledger.at.node = root.name
        if not (root.op.ready(root.state, root.ctx) if channel is None else len(channel)):
            return "something to do"
        return next(
            (
                f"capacity at {name}"
                for name, has_capacity in self.capacities[root.name]
                if not has_capacity()
            ),
            "",
        )

    def run_pass(self) -> list[Tally]:
        """One turn of every root that may fire, gone through to its end; one at a queue takes an item.

        What the clock closed meanwhile is returned.

        Raises:
            FlowrlError: with its node's address; any other error carries the address as a note.
        """
        rows: list[Tally] = []
        with self._addressed():
            for root, channel in self.roots:
                if self._waits(root, channel):
                    continue
                if channel is None:
                    self._enter(root, None, None, rows)
                elif (taken := channel.take()) is not None:
                    here().mark("taken", channel.name, taken[1])
                    if self.stream.levels:
                        self.stream.emit(QueueLevel(channel.name, len(channel), channel.capacity))
                    self._take(root, *taken, rows)
        return rows

    @contextmanager
    def _addressed(self) -> Iterator[None]:
        """Give errors the address of the node at work."""
        try:
            yield
        except FlowrlError as error:
            error.at(f"{self.graph}.{self.ledger.at.node}")
            raise
        except Exception as error:
            error.add_note(f"in {self.graph}.{self.ledger.at.node}")
            raise
        finally:
            here().at("")

    def _take(self, unit: Unit, source: str, item: Any, rows: list[Tally]) -> None:
        self._enter(unit, item, source, rows)
        ledger, edge = self.ledger, (source, unit.name)
        items, steps = (
            (ledger.dropped, ledger.dropped_steps)
            if unit.ctx.dropped
            else (ledger.got, ledger.got_steps)
        )
        if unit.ctx.dropped:
            self.stream.emit(Dropped(unit.name, steps_of(item)))
        unit.ctx.dropped = False
        items[edge] += 1
        steps[edge] += steps_of(item)

    def _try_push(
        self, failed: Callable[[str, Exception], None]
    ) -> Callable[[Unit, Any, str | None, list[Tally]], None]:
        def enter(unit: Unit, item: Any, source: str | None, rows: list[Tally]) -> None:
            try:
                self.enter(unit, item, source, rows)
            except Exception as error:  # noqa: BLE001 - told on, not swallowed
                failed(
                    unit.name,
                    error
                    if source is None or item is not None
                    else ContractError(f"{source} gives it None: {error}"),
                )

        return enter

    def enter(self, unit: Unit, item: Any, source: str | None, rows: list[Tally]) -> None:
        """Give an item to a node and go through all that comes of it; what the clock closes is added to `rows`."""
        ledger, name, stream, clock = self.ledger, unit.name, self.stream, here()
        unit.ctx.source = source
        ledger.at.node = name
        clock.at(name)
        if stream.took:
            stream.emit(Took(name, source, item))
        items = unit.step(unit.state, item, unit.ctx)
        if not isinstance(items, Iterator):
            got = "None" if items is None else a(items)
            raise ContractError(
                f"its step returned {got}; a step yields its items (write `yield item`, or `yield from ()` for none)"
            )
        started = time.perf_counter() if stream.ran else 0.0
        while (out := next(items, _END)) is not _END:
            if stream.ran:
                stream.advanced(name, time.perf_counter() - started, out)
            if isinstance(out, Tally):
                rows.append(replace(out, metrics=self.metrics.drain()))
            steps = steps_of(out)
            for edge, behind in unit.behind:
                ledger.put[edge] += 1
                ledger.put_steps[edge] += steps
                self._enter(behind, out, name, rows)
                ledger.got[edge] += 1
                ledger.got_steps[edge] += steps
            for edge, channel in unit.outlets:
                ledger.put[edge] += 1
                ledger.put_steps[edge] += steps
                settled = self.settle(out)
                clock.mark("put", edge[1], settled)
                if (gone := channel.put(name, settled)) is not None:
                    ledger.dropped[gone[0], edge[1]] += 1
                    ledger.dropped_steps[gone[0], edge[1]] += steps_of(gone[1])
                    stream.emit(Dropped(edge[1], steps_of(gone[1])))
                if stream.levels:
                    stream.emit(QueueLevel(edge[1], len(channel), channel.capacity))
            ledger.at.node = name
            clock.at(name)
            if stream.ran:
                started = time.perf_counter()
        if stream.ran:
            stream.advanced(name, time.perf_counter() - started, None)
