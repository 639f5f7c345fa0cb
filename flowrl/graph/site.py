"""`HereSite`: resources and functions in this very process. The local runtime's site, and the base of the others."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import jax

from flowrl.clock import UPDATE
from flowrl.errors import ContractError, GraphError, a, raised, unknown
from flowrl.graph.loop import Ledger
from flowrl.graph.protocols import Handle, Resource, Workers


class Done:
    """A future that is done."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        """The value."""
        return self.value


class Failed:
    """A future whose call raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self) -> Any:
        """Raise it."""
        raise self.error


class HereWorkers:
    """Workers as plain objects in this process; a call runs at once."""

    def __init__(self, count: int, make: Callable[[int, int], Any], pick: Callable[[int], int] | None = None) -> None:
        self.make = make
        self.pick = pick
        self.objects = [make(i, 0) for i in range(count)]

    def __len__(self) -> int:
        return len(self.objects)

    def put(self, value: Any) -> Any:
        """The value itself."""
        return value

    def submit(self, index: int, method: str, *args: Any) -> Done | Failed:
        """Call the method now."""
        try:
            return Done(getattr(self.objects[index], method)(*args))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for, as everywhere
            return Failed(error)

    def current(self, future: Any) -> bool:
        """Always."""
        return True

    def restart(self, index: int, incarnation: int, because: Any = None) -> None:
        """Close the worker, as far as it can be, and make it anew."""
        with suppress(Exception):
            self.objects[index].close()
        self.objects[index] = self.make(index, incarnation)

    def ready(self, value: Any) -> bool:
        """Always, so that what a seed leads to does not depend on the machine."""
        return True

    def clocks(self) -> dict[str, Mapping[str, float]]:
        """None: they work by the clock of this thread."""
        return {}

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> int | None:
        """All are done: the first one, or one drawn by lot."""
        return None if not futures else self.pick(len(futures)) if self.pick else 0

    def close(self) -> None:
        """Close every worker."""
        with ExitStack() as each:
            for worker in self.objects:
                each.callback(worker.close)


class Place:
    """Where the resources of one run are opened, in the order in which they ask for one another."""

    def __init__(
        self,
        graph: str,
        resources: Mapping[str, Resource],
        seed: int,
        kind: type[HereSite],
        planned: Mapping[tuple[str, str], int] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self.graph = graph
        self.resources = resources
        self.planned = planned
        """By resource and counter: what the plan says that all nodes count in its steady period."""
        self.ledger = Ledger()
        self.handles: dict[str, Handle] = {}
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

    def site_of(self, names: Sequence[str]) -> HereSite:
        """Where a resource is opened, or where the nodes of a stage run functions."""
        return self.site

    def clocks(self) -> dict[str, Mapping[str, float]]:
        """By process that works for this run: its seconds by kind of work."""
        return {name: seconds for handle in self.handles.values() for name, seconds in handle.clocks().items()}

    def close(self) -> None:
        """Close every handle that was opened, the last one first, also where one fails to."""
        if self.handles:
            try:
                self.handles.popitem()[1].close()
            finally:
                self.close()


@lru_cache(maxsize=512)
def jitted(fn: Callable[..., Any], donate: tuple[int, ...], *static: tuple[str, Any]) -> Any:
    """The compiled form of a function with its static settings: one and the same for equal ones."""
    check_pure(fn)
    return jax.jit(partial(fn, **dict(static)), donate_argnums=donate)


def check_pure(fn: Callable[..., Any]) -> None:
    """Refuse a method of an object that may change: what is compiled holds its fields as they are now.

    Raises:
        ContractError: with the way out.
    """
    owner = getattr(fn, "__self__", None)
    kind = type(owner)
    if (
        owner is None
        or isinstance(owner, type | ModuleType)
        or kind.__module__.startswith("flowrl.")
        or "__eq__" in {name for base in kind.__mro__[:-1] for name in vars(base)}
    ):
        return
    raise ContractError(
        f"{getattr(fn, '__name__', 'it')} is a method of {a(owner)}, whose fields may change after it is compiled; make {kind.__name__} a frozen "
        "dataclass, or give a plain function all that it reads as arguments"
    )


def told(error: Exception) -> str:
    """An error of a user's own code, and the way out where it met a shape."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "a function for ctx.run computes with jax.numpy, not numpy (np.clip becomes jnp.clip): it is compiled, and so sees no values"
    hints = {
        "ShapeDtypeStruct": "while a graph is checked a step sees shapes: put maths on arrays into ctx.run(function, ...)",
        "read-only": "other nodes may have the same item: change a copy of the array, and give batch.with_(name=copy)",
    }
    return "; ".join([raised(error), *(hint for sign, hint in hints.items() if sign in str(error))])


class HereSite:
    """Runs functions by `jax.jit` and keeps workers in this process."""

    elsewhere: ClassVar[bool] = False

    def __init__(self, place: Place, name: str, seed: int, pick: Callable[[int], int] | None = None) -> None:
        self.place = place
        self.name = name
        self.seed = seed
        self.pick = pick

    def named(self, name: str) -> HereSite:
        """The same site for another resource."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, name=name)
        return new

    def key(self, *folds: int | str) -> Any:
        """The run's seed with this resource's name and `folds` folded in."""
        key = jax.random.key(self.seed)
        for fold in (self.name, *folds):
            key = jax.random.fold_in(key, zlib.crc32(fold.encode()) if isinstance(fold, str) else fold)
        return key

    def run(self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any) -> Any:
        """Run a pure function, compiled once per function and static settings in the life of this process."""
        with UPDATE:
            return jitted(fn, donate, *static.items())(*args)

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

    def workers(self, count: int, make: Callable[[int, int], Any], twin: Callable[[int, int], Any], near: bool = False) -> Workers:
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
