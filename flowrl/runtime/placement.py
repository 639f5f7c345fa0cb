"""Functions that run in processes of their own, in which what they give stays. Here there are references with static metadata.

This works because an operator never touches array values: it moves items and calls verbs, which run functions of arrays.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import jax
import numpy as np

from flowrl.core.clock import TRANSFER, UPDATE, Reading
from flowrl.core.compiled import check_count, jitted
from flowrl.core.remote import Joining, RemoteArray, near
from flowrl.errors import SettingError, unknown
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Handle, Workers, refs
from flowrl.graph.site import HereSite, Place
from flowrl.runtime.driver import for_worker
from flowrl.runtime.keeper import At, Hole, Joint

IN_FLIGHT = 2
"""Functions that are asked for before the first of them is done."""


@dataclass(frozen=True)
class Actor:
    """A process of its own for a resource, or for the functions of a stage.

    Args:
        count: of processes that a stage takes in turn, one after another.
        gpus: of each; None for one, if it is for a resource and the cluster has any.
        options: more options of the Ray actor, such as ``{"resources": {"big": 1}}``. What the nodes that are up do not have is an error: a
            cluster that grows on demand must have grown before.

    Raises:
        SettingError: a count below 1 or a negative share of GPUs.
    """

    count: int = 1
    gpus: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1 or (self.gpus is not None and self.gpus < 0):
            raise SettingError(f"count must be at least 1 and gpus not negative, got {self}")


def asked_of(
    actor: Actor, resource: bool, nodes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """By Ray's name of it: how much each process of a placement asks for. That of a resource has a GPU, if it does not say and there is one."""
    gpus = actor.gpus
    if gpus is None:
        gpus = float(resource and any(node.get("GPU", 0) >= 1 for node in nodes))
    options = actor.options
    amounts = {
        "CPU": options.get("num_cpus"),
        "GPU": options.get("num_gpus", gpus),
        "memory": options.get("memory"),
        **options.get("resources", {}),
    }
    return {kind: float(amount) for kind, amount in amounts.items() if amount}


def check_amounts(
    wanted: Mapping[str, Actor], resources: Collection[str], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Refuse what a cluster does not have, for which Ray would wait without an end.

    Args:
        wanted: the placements, by name.
        resources: the names that are a resource's, not a stage's.
        nodes: what each has, by Ray's name of it.

    Raises:
        SettingError: what was asked for, by which placements, and what there is.
    """
    total: Counter[str] = Counter()
    askers: dict[str, list[str]] = {}
    for name, actor in wanted.items():
        for kind, amount in asked_of(actor, name in resources, nodes).items():
            amounts = [node.get(kind, 0.0) for node in nodes]
            has = f"the cluster has {sum(amounts):g}, at most {max(amounts):g} on one of its {len(nodes)} node{'s' * (len(nodes) > 1)}"
            if amount > max(amounts):
                raise SettingError(
                    f"place: {name} asks for {amount:g} {kind} in one process, but {has}; {LESS}"
                )
            total[kind] += amount * actor.count  # type: ignore[assignment]  # a Counter adds any numbers up
            askers.setdefault(kind, []).append(
                f"{name} ({f'{actor.count} x ' * (actor.count > 1)}{amount:g})"
            )
            if total[kind] > sum(amounts):
                raise SettingError(
                    f"place: {' and '.join(askers[kind])} ask for {total[kind]:g} {kind} together, but {has}; {LESS}"
                )


LESS = (
    "ask for less in fl.Actor(gpus=, options=), or take a Ray that has more: "
    "fl.RayRuntime(init=) and `ray start` set num_cpus, num_gpus and resources where Ray does not find them itself"
)


class Remote(Protocol):
    """The process of a keeper, as the runtime reaches it."""

    name: str

    def submit(self, method: str, *args: Any) -> Any:
        """Call a method: a future with `result`, `wait`, `done` and its reference `ref`, which becomes its result where it is an argument."""

    def clock(self) -> Reading:
        """Its seconds by kind of work, if it answers in time."""

    def end(self) -> None:
        """End the process."""


class Stored:
    """Packed arrays that lie in the object store, or will."""

    def __init__(self, pending: Any) -> None:
        self.pending = pending

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Bring it here."""
        found: np.ndarray[Any, Any] = self.pending.result()[leaf]
        return found

    def wait(self) -> None:
        """Until they are there."""
        self.pending.wait()

    def done(self) -> bool:
        """Whether they are."""
        return bool(self.pending.done())


class Kept:
    """Arrays that a keeper has under a number, or will have."""

    def __init__(self, home: Home, number: int, pending: Any) -> None:
        self.home = home
        self.number = number
        self.pending = pending
        self.stored: dict[int, Stored] = {}

    def __del__(self) -> None:
        self.home.dropped.append(self.number)

    def store(self, leaf: int) -> Stored:
        """One of them, in the object store."""
        if leaf not in self.stored:
            self.stored[leaf] = Stored(self.home.make([At(self.number, leaf)]))
        return self.stored[leaf]

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Bring it here."""
        self.pending.result()
        return self.store(leaf).array(0)

    def wait(self) -> None:
        """Until they are computed."""
        self.pending.result()

    def done(self) -> bool:
        """Whether they are."""
        return bool(self.pending.done())


class Home:
    """A keeper's process, as it is seen from here."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.numbers = itertools.count()
        self.programs: dict[Any, tuple[int, Any]] = {}
        """By function, settings and form of its arguments: its number there, and its compiled form, by which shapes are found."""
        self.dropped: deque[int] = deque()
        """Numbers under which nothing need be kept any more."""
        self.asked: deque[Any] = deque()

    @cached_property
    def devices(self) -> int:
        """How many devices the process has."""
        return int(self.remote.submit("devices").result())

    def run(
        self,
        fn: Callable[..., Any],
        donate: tuple[int, ...],
        static: Mapping[str, Any],
        args: tuple[Any, ...],
    ) -> Any:
        """Run a function there."""
        leaves, form = jax.tree.flatten(args)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, RemoteArray) else x
            for x in leaves
        ]
        key, code = (
            (fn, donate, *static.items(), *(type(value) for value in static.values()), form),
            None,
        )
        if (known := self.programs.get(key)) is None:
            check_count(len(self.programs), fn)
            known = len(self.programs), jitted(fn, donate, *static.items())
            code = for_worker(
                (fn, donate, tuple(static.items()), jax.tree.unflatten(form, range(len(leaves)))),
                _name(fn),
            )
        number, function = known
        out, outs = jax.tree.flatten(function.eval_shape(*jax.tree.unflatten(form, shapes)))[::-1]
        self.programs[key] = known  # now that nothing can fail before the code is sent
        kept = self._ask("run", leaves, number, code)
        return jax.tree.unflatten(
            out, [RemoteArray(x.shape, x.dtype, kept, i) for i, x in enumerate(outs)]
        )

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function there, and wait for what is no array."""
        leaves, form = jax.tree.flatten(args)
        kept = self._ask(
            "call",
            leaves,
            for_worker((fn, jax.tree.unflatten(form, range(len(leaves)))), _name(fn)),
        )
        return fill(kept.pending.result(), kept)

    def _ask(self, method: str, leaves: Sequence[Any], *args: Any) -> Kept:
        while len(self.asked) >= IN_FLIGHT:
            self.asked.popleft().result()
        sent: list[Any] = []
        number, addresses = next(self.numbers), [self._address(x, sent) for x in leaves]
        pending = self.remote.submit(
            method, number, self._gone(), addresses, *args, *(x.ref for x in sent)
        )
        self.asked.append(pending)
        return Kept(self, number, pending)

    def make(self, tree: Any) -> Any:
        """A tree, whose far arrays become values there: a future whose reference can be an argument of any call."""
        sent: list[Any] = []
        tree = jax.tree.map(lambda x: self._address(x, sent), tree)
        return self.remote.submit("make", self._gone(), tree, *(x.ref for x in sent))

    def _gone(self) -> list[int]:
        return [self.dropped.popleft() for _ in range(len(self.dropped))]

    def _address(self, x: Any, sent: list[Any]) -> Any:
        """What stands for an array in a message; what is to come with the message is added to `sent`."""
        if not isinstance(x, RemoteArray):
            return x
        source, leaf = x.source, x.leaf
        if isinstance(source, Joining):
            return Joint(tuple(self._address(part, sent) for part in source.parts), source.axis)
        if isinstance(source, Kept):
            if source.home is self:
                return At(source.number, leaf)
            source, leaf = source.store(leaf), 0
        pending = cast("Stored", source).pending
        if pending not in sent:
            sent.append(pending)
        return At(~sent.index(pending), leaf)


def _name(fn: Any) -> str:
    """A function as its author knows it."""
    inner = getattr(fn, "func", getattr(fn, "fn", fn))
    return str(getattr(inner, "__name__", inner))


def fill(tree: Any, source: Any) -> Any:
    """A tree with far arrays in the place of its holes."""
    return jax.tree.map(
        lambda x: RemoteArray(x.shape, x.dtype, source, x.leaf) if isinstance(x, Hole) else x, tree
    )


def homes_of(tree: Any) -> Iterator[Home]:
    """Where the far arrays of a tree are kept."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, RemoteArray) and isinstance(x.source, Kept):
            yield x.source.home
        elif isinstance(x, RemoteArray) and isinstance(x.source, Joining):
            yield from homes_of(x.source.parts)


class NearSite(HereSite):
    """Functions in this process, of arrays that are brought here first."""

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a compiled function here."""
        return super().run(fn, *near(args), donate=donate, **static)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call it here."""
        return super().call(fn, *near(args))

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Call it here."""
        return super().test(fn, *near(args))


class PlacedSite(HereSite):
    """Functions in processes of their own, which take turns."""

    def __init__(self, place: Place, name: str, seed: int, homes: Sequence[Home]) -> None:
        super().__init__(place, name, seed)
        self.homes = homes
        self.turn = itertools.cycle(homes)

    def _home(self, args: Any) -> Home:
        return next((home for home in homes_of(args) if home in self.homes), None) or next(
            self.turn
        )

    @property
    def devices(self) -> int:
        """Those of one of the processes."""
        return self.homes[0].devices

    def key(self, *folds: int | str) -> Any:
        """A key, there."""
        return self.run(jax.random.wrap_key_data, jax.random.key_data(super().key(*folds)))

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a compiled function where its arguments are."""
        with TRANSFER:
            return self._home(args).run(fn, donate, static, args)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call it where its arguments are: here, if they are."""
        if not any(isinstance(x, RemoteArray) for x in jax.tree.leaves(args)):
            return super().call(fn, *args)
        with UPDATE:
            return self._home(args).call(fn, args)

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Call it where its arguments are."""
        return bool(self.call(fn, *args))

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Refuse them.

        Raises:
            SettingError: with the way out.
        """
        raise SettingError(
            f"{self.name} has processes of its own already; leave it out of place (RayRuntime(processes=) says how many)"
        )

    def settle(self, item: Any) -> Any:
        """Compute an item's arrays, and let them lie in the object store."""
        leaves, form = jax.tree.flatten(item)
        far = [x for x in leaves if isinstance(x, RemoteArray)]
        if not far:
            return item
        source, number = Stored(self._home(far).make(far)), itertools.count()
        return jax.tree.unflatten(
            form,
            [
                RemoteArray(x.shape, x.dtype, source, next(number))
                if isinstance(x, RemoteArray)
                else x
                for x in leaves
            ],
        )


class Placed(Place):
    """The resources of a run, and the processes that some of them and some stages have of their own."""

    def __init__(
        self,
        plan: Plan,
        seed: int,
        start: Callable[[str, Actor, int | None], Remote],
        wanted: Mapping[str, Actor],
        kind: type[HereSite],
        **more: Any,
    ) -> None:
        graph = plan.graph
        super().__init__(graph.name, graph.resources, seed, kind, plan.found.totals, **more)
        self.start = start
        self.wanted = wanted
        self.owners = owners(graph, wanted)
        self.remotes: list[Remote] = []
        self.sites: dict[str, PlacedSite] = {}

    def open(self) -> dict[str, Handle]:
        """Start the processes, and open every resource."""
        for name, actor in self.wanted.items():
            homes = []
            for index in range(actor.count):
                label = name if actor.count == 1 else f"{name}, {index}"
                self.remotes.append(
                    self.start(label, actor, None if name in self.resources else index)
                )
                homes.append(Home(self.remotes[-1]))
            self.sites[name] = PlacedSite(self, name, self.site.seed, homes)
        return super().open()

    def site_of(self, names: Sequence[str]) -> HereSite:
        """The site of their processes, if they have any."""
        return self.sites.get(self.owners.get(names[0], ""), self.site)

    def clocks(self) -> dict[str, Reading]:
        """Those of the processes too."""
        return {remote.name: remote.clock() for remote in self.remotes} | super().clocks()

    def close(self) -> None:
        """Close the resources, then the processes."""
        try:
            super().close()
        finally:
            while self.remotes:
                self.remotes.pop().end()


def owners(graph: Graph, wanted: Mapping[str, Actor]) -> dict[str, str]:
    """By resource and by first node of a stage: the name by which the process was asked for in which it is.

    Raises:
        SettingError: a name that was asked for is neither; or a stage would be in two places.
    """
    found = {name: name for name in wanted if name in graph.resources}
    for name in found:
        if wanted[name].count > 1:
            raise SettingError(
                f"place: {name} can't be in {wanted[name].count} processes; take count=1"
            )
    firsts = [stage[0] for stage in graph.stages()]
    for stage in graph.stages():
        ops = [node.op for node in graph.nodes if node.name in stage]
        updated = dict.fromkeys(refs(op)[name][0] for op in ops for name in op.writes)
        asked = [name for name in (stage[0], *updated) if name in wanted]
        if len(asked) > 1:
            raise SettingError(
                f"place: the stage of {stage[0]} runs where {asked[-1]} is, which it updates; leave {asked[0]} out"
            )
        if asked:
            found[stage[0]] = asked[0]
    for name in wanted:
        for stage in graph.stages():
            if name in stage[1:]:
                raise SettingError(
                    f"place: {name} is in the stage of {stage[0]}, which runs as one; write '{stage[0]}' in its place"
                )
        if name not in found:
            raise SettingError(
                f"place: {unknown('resource or first node of a stage', name, [*graph.resources, *firsts])}"
            )
    return found
