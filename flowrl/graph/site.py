"""`HereSite`: the site that opens resources and runs functions in this process.

It is the local runtime's site, and the base of the others.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar

import jax

from flowrl.core.clock import COMPUTING, Reading
from flowrl.core.compiled import check_count, jitted
from flowrl.core.events import Stream
from flowrl.core.keeping import Keeping
from flowrl.core.ledger import Ledger
from flowrl.core.metrics import Metered
from flowrl.core.workers import HereWorkers
from flowrl.core.xla_threads import computing
from flowrl.errors import GraphError, SaveError, unknown
from flowrl.graph.protocols import Handle, Resource, Workers
from flowrl.graph.refs import resource_and_part


class Place(Keeping):
    """Place where the resources of one run are opened, each before those that ask for it.

    Args:
        graph: the name of the graph.
        resources: the resources by name.
        seed: the seed of the run.
        kind: the class of the sites.
        planned: what all nodes count in the plan's steady period, by resource and counter.
        stream: what brings the events of the run to its observers; None for a stream of its own.
        **settings: further arguments of `kind`.
    """

    lasting = ("handles", "ledger", "metrics")
    remade: ClassVar[tuple[str, ...]] = (
        "graph", "resources", "planned", "stream", "earlier", "compiled", "opening", "site",
        "threads", "ahead",
    )  # fmt: skip

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
        """By resource and counter: what all nodes count in the plan's steady period."""
        self.stream = stream or Stream()
        self.ledger = Ledger()
        self.metrics = Metered()
        self.handles: dict[str, Handle] = {}
        self.earlier = 0.0
        """What is added to the clock of this process: of a run that is resumed, time goes on from
        where it was."""
        self.compiled: dict[Any, Any] = {}
        """The compiled functions of this run, kept while it lasts."""
        self.opening = ""
        """The resource that is being opened, or whose opening failed; else empty."""
        self.threads: int | None = None
        """The threads of XLA that the run's functions are computed with; None: as JAX has them."""
        self.ahead = False
        """Whether this thread goes on while they compute."""
        self.site = kind(self, "", seed, **settings)

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread computes with the run's number of threads."""
        return computing(self.threads, self.ahead)

    def open(self) -> dict[str, Handle]:
        """Open every resource, and return the handles by name."""
        for name in self.resources:
            self.handle(name)
        return self.handles

    def handle(self, name: str) -> Handle:
        """Return the handle of one resource, which is opened if it is not open yet.

        Raises:
            GraphError: there is no such resource.
        """
        if name not in self.handles:
            if name not in self.resources:
                raise GraphError(unknown("resource", name, self.resources), self.graph)
            # Opening a resource may open others that it asks for.
            outer, self.opening = self.opening, name
            self.handles[name] = self.resources[name].open(self.site_of([name]).named(name))
            self.opening = outer
        return self.handles[name]

    def jitted(
        self, fn: Callable[..., Any], donate: tuple[int, ...], *static: tuple[str, Any]
    ) -> Any:
        """Return a function compiled with its static settings.

        Args:
            fn: the function.
            donate: the indices of the arguments whose buffers it may reuse.
            *static: its settings, as pairs of name and value.

        Raises:
            ContractError: it is another function, or one with other settings, time and again.
        """
        # Types too, since 0, 0.0 and False are equal and mean different things to a function.
        key = (fn, donate, *static, *(type(value) for _, value in static))
        if (found := self.compiled.get(key)) is None:
            check_count(len(self.compiled), fn)
            found = self.compiled[key] = jitted(fn, donate, *static)
        return found

    def site_of(self, names: Sequence[str]) -> HereSite:
        """Return the site of a resource, or of the nodes of a stage.

        Here it is one site for all; a runtime that places stages gives each its own.
        """
        return self.site

    def keep(self) -> Any:
        """Return what lasts of all resources, what was counted, and the time."""
        handles = {name: handle.keep() for name, handle in self.handles.items()}
        return {**super().keep(), "handles": handles, "clock": self.seconds()}

    def take(self, state: Any) -> None:
        """Go on from what was kept of a place with the same resources, which are open.

        Raises:
            SaveError: they are others, or have other settings.
        """
        if set(state["handles"]) != set(self.handles):
            raise SaveError("it holds other resources than this graph")
        self.earlier += state["clock"] - self.seconds()
        for name, handle in self.handles.items():
            handle.take(state["handles"][name])
        self.ledger.take(state["ledger"])
        self.metrics.take(state["metrics"])

    def seconds(self) -> float:
        """Return the time of `time.perf_counter`, which goes on when the run is resumed."""
        return time.perf_counter() + self.earlier

    def clocks(self) -> dict[str, Reading]:
        """Return the seconds by kind of work of each process that works for this run."""
        readings: dict[str, Reading] = {}
        for handle in self.handles.values():
            readings.update(handle.clocks())
        return readings

    def close(self) -> None:
        """Close every open handle, the last one first, even if closing one of them fails."""
        if self.handles:
            try:
                self.handles.popitem()[1].close()
            finally:
                self.close()


class HereSite:
    """Site that runs functions by `jax.jit` and keeps workers in this process.

    Args:
        place: where the resources of the run are opened.
        name: the resource that the site is for.
        seed: the seed of the run.
        pick: picks one of so many finished calls of workers; None takes the first.
    """

    remote: ClassVar[bool] = False
    """Whether workers are in other processes."""

    def __init__(
        self, place: Place, name: str, seed: int, pick: Callable[[int], int] | None = None
    ) -> None:
        self.place = place
        self.name = name
        self.seed = seed
        self.pick = pick

    def named(self, name: str) -> HereSite:
        """Return the same site for another resource."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, name=name)
        return new

    @property
    def stream(self) -> Stream:
        """The stream that brings the events of the run to its observers."""
        return self.place.stream

    @property
    def metrics(self) -> Metered:
        """What was measured since the last Row."""
        return self.place.metrics

    @property
    def devices(self) -> int:
        """The number of devices of this process."""
        return jax.local_device_count()

    def key(self, *folds: int | str) -> Any:
        """Return a random key: the seed with this resource's name and `folds` folded in."""
        key = jax.random.key(self.seed)
        for fold in (self.name, *folds):
            # Not `hash`, which differs from one process to the next.
            number = zlib.crc32(fold.encode()) if isinstance(fold, str) else fold
            key = jax.random.fold_in(key, number)
        return key

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a pure function, compiled once a run per function and static settings."""
        with COMPUTING:
            return self.place.jitted(fn, donate, *static.items())(*args)

    def when(self, due: Any, handle: Handle, call: Callable[[], None]) -> None:
        """Call it at once if it is due."""
        if due:
            call()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function of items, and return what it returns."""
        return fn(*args)

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Call a predicate of items, and return whether it holds."""
        return bool(fn(*args))

    def known(self, value: Any, planned: Any) -> Any:
        """Return a value; where none is computed, what a plan takes it for."""
        return value

    def settle(self, item: Any) -> Any:
        """Return the item as it is: its arrays are computed already, or being computed."""
        return item

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Make workers in this process."""
        return HereWorkers(count, make, self.pick)

    def seconds(self) -> float:
        """Return the time of `time.perf_counter`, which goes on when the run is resumed."""
        return self.place.seconds()

    def resource(self, name: Any) -> Any:
        """Return the handle of another resource of this run, or of a part of one."""
        resource, part = resource_and_part(name)
        handle = self.place.handle(resource)
        return handle.part(part) if part else handle

    def planned(self, resource: Any, counter: str) -> int:
        """Return what all nodes count in the plan's steady period; 0 where there is no plan."""
        return self.place.planned.get((resource, counter), 0)

    def count(self, **numbers: int) -> None:
        """Add to the counters of the node at work."""
        self.place.ledger.count(self.name, numbers)


def alone(name: str, resource: Resource, seed: int = 0) -> HereSite:
    """Return a site in this process for one resource that works without a graph."""
    return Place(name, {name: resource}, seed, HereSite).site.named(name)
