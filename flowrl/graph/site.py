"""`HereSite`: resources and functions in this very process. The local runtime's site, and the base of the others."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax

from flowrl.core.clock import UPDATE, Reading
from flowrl.core.compiled import check_count, jitted
from flowrl.core.events import Stream
from flowrl.core.ledger import Ledger
from flowrl.core.metrics import Metered
from flowrl.core.workers import HereWorkers
from flowrl.errors import GraphError, unknown
from flowrl.graph.protocols import Handle, Resource, Workers


class Place:
    """Where the resources of one run are opened, in the order in which they ask for one another."""

    def __init__(
        self,
        graph: str,
        resources: Mapping[str, Resource],
        seed: int,
        kind: type[HereSite],
        planned: Mapping[tuple[str, str], int] = MappingProxyType({}),
        stream: Stream | None = None,
        **settings: Any,
    ) -> None:
        self.graph = graph
        self.resources = resources
        self.planned = planned
        """By resource and counter: what the plan says that all nodes count in its steady period."""
        self.stream = stream or Stream()
        self.ledger = Ledger()
        self.metrics = Metered()
        self.handles: dict[str, Handle] = {}
        self.compiled: dict[Any, Any] = {}
        """The compiled functions of this run, which stay at hand while it lasts."""
        self.opening = ""
        """The resource that is, or was last, being opened."""
        self.site = kind(self, "", seed, **settings)

    def open(self) -> dict[str, Handle]:
        """Open every resource."""
        for name in self.resources:
            self.handle(name)
        return self.handles

    def handle(self, name: str) -> Handle:
        """The handle of one resource, opened if it is not open yet.

        Raises:
            GraphError: there is no such resource.
        """
        if name not in self.handles:
            if name not in self.resources:
                raise GraphError(unknown("resource", name, self.resources), self.graph)
            outer, self.opening = self.opening, name
            self.handles[name] = self.resources[name].open(self.site_of([name]).named(name))
            self.opening = outer
        return self.handles[name]

    def jitted(
        self, fn: Callable[..., Any], donate: tuple[int, ...], *static: tuple[str, Any]
    ) -> Any:
        """Return the compiled form of a function with its static settings.

        Raises:
            ContractError: it is another function, or one with other settings, time and again.
        """
        key = (fn, donate, *static, *(type(value) for _, value in static))
        if (found := self.compiled.get(key)) is None:
            check_count(len(self.compiled), fn)
            found = self.compiled[key] = jitted(fn, donate, *static)
        return found

    def site_of(self, names: Sequence[str]) -> HereSite:
        """Where a resource is opened, or where the nodes of a stage run functions."""
        return self.site

    def clocks(self) -> dict[str, Reading]:
        """By process that works for this run: its seconds by kind of work."""
        return {
            name: reading
            for handle in self.handles.values()
            for name, reading in handle.clocks().items()
        }

    def close(self) -> None:
        """Close every handle that was opened, the last one first, also where one fails to."""
        if self.handles:
            try:
                self.handles.popitem()[1].close()
            finally:
                self.close()


class HereSite:
    """Runs functions by `jax.jit` and keeps workers in this process."""

    remote: ClassVar[bool] = False

    def __init__(
        self, place: Place, name: str, seed: int, pick: Callable[[int], int] | None = None
    ) -> None:
        self.place = place
        self.name = name
        self.seed = seed
        self.pick = pick

    def named(self, name: str) -> HereSite:
        """The same site for another resource."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, name=name)
        return new

    @property
    def stream(self) -> Stream:
        """What brings the events of the run to its observers."""
        return self.place.stream

    @property
    def metrics(self) -> Metered:
        """What was measured since the last Row."""
        return self.place.metrics

    @property
    def devices(self) -> int:
        """All of this process."""
        return jax.local_device_count()

    def key(self, *folds: int | str) -> Any:
        """The run's seed with this resource's name and `folds` folded in."""
        key = jax.random.key(self.seed)
        for fold in (self.name, *folds):
            key = jax.random.fold_in(
                key, zlib.crc32(fold.encode()) if isinstance(fold, str) else fold
            )
        return key

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a pure function, compiled once per function and static settings in the life of this process."""
        with UPDATE:
            return self.place.jitted(fn, donate, *static.items())(*args)

    def when(self, due: Any, handle: Handle, call: Callable[[], None]) -> None:
        """An `if`."""
        if due:
            call()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call it."""
        return fn(*args)

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Call it."""
        return bool(fn(*args))

    def settle(self, item: Any) -> Any:
        """As it is: its arrays are computed already, or being computed."""
        return item

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Make the workers here."""
        return HereWorkers(count, make, self.pick)

    def seconds(self) -> float:
        """`time.perf_counter`."""
        return time.perf_counter()

    def resource(self, name: Any) -> Any:
        """The handle of another resource of this run."""
        return self.place.handle(name)

    def planned(self, resource: Any, counter: str) -> int:
        """What the plan says; 0 where there is none."""
        return self.place.planned.get((resource, counter), 0)

    def count(self, **numbers: int) -> None:
        """Add to the counters of the node at work."""
        self.place.ledger.count(self.name, numbers)


def alone(name: str, resource: Resource, seed: int = 0) -> HereSite:
    """A site for one resource that works without a graph, in this process."""
    return Place(name, {name: resource}, seed, HereSite).site.named(name)
