"""Resources and stages in processes of their own, where the arrays that they compute stay.

The driver has references to these arrays with static metadata. This works because an operator never
touches array values: it moves items and calls verbs, which run functions of arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import jax

from flowrl.core.clock import TRANSFER, Reading
from flowrl.core.remote import RemoteArray, near
from flowrl.core.texts import in_bytes, plural
from flowrl.errors import SettingError, unknown
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Handle, Workers
from flowrl.graph.refs import refs, resource_and_part
from flowrl.graph.site import HereSite, Place
from flowrl.runtime.base import check_positive
from flowrl.runtime.homes import Home, Remote, Stored, homes_of


@dataclass(frozen=True)
class Actor:
    """A process of its own for a resource, or for the functions of a stage.

    Args:
        count: number of processes (default 1). Those of a stage take turns, one item after another.
            Those of a learner are a group: they share each minibatch of an update evenly, where
            their devices divide it, and have the same weights (Wijmans et al. 2020, DD-PPO).
        gpus: GPUs of each process, or a share of one; None: one, if it is for a resource and the
            cluster has any (default None).
        options: more options of the Ray actor, such as ``{"resources": {"big": 1}}`` (default
            none). An error is raised for what the nodes that are up do not have: a cluster that
            grows on demand must have grown before.

    Raises:
        SettingError: a count that is no whole number of at least 1, GPUs that are no number or a
            negative one, or options that are no mapping.
    """

    count: int = 1
    gpus: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive("count", self.count, or_none=False)
        if self.gpus is not None and not (isinstance(self.gpus, Real) and self.gpus >= 0):
            raise SettingError(f"gpus must be None or not negative, got {self.gpus!r}")
        if not isinstance(self.options, Mapping):
            raise SettingError(
                f"options must be a mapping, such as {{'num_cpus': 2}}, got {self.options!r}"
            )


def check_place(place: Any) -> None:
    """Refuse a `place` that is no mapping from names to `Actor`.

    Raises:
        SettingError: it is something else, or one of its values is.
    """
    if not isinstance(place, Mapping):
        raise SettingError(
            f"place must be a mapping from names to fl.Actor, got {place!r}; write "
            "place={'learner': fl.Actor()}"
        )
    for name, actor in place.items():
        if not isinstance(actor, Actor):
            raise SettingError(
                f"place must hold values of fl.Actor, got {name}={actor!r}; write "
                f"place={{'{name}': fl.Actor()}}"
            )


def saved_place(place: Mapping[str, Actor]) -> dict[str, Actor]:
    """Return placements without the environments of their processes, which may hold secrets."""
    found = {}
    for name, actor in place.items():
        options = {key: value for key, value in actor.options.items() if key != "runtime_env"}
        found[name] = replace(actor, options=options)
    return found


def requested_amounts(
    actor: Actor, resource: bool, nodes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return how much each process of a placement asks for, by Ray's names such as ``GPU``.

    Args:
        actor: the placement.
        resource: whether it is for a resource, which gets a GPU by default where there is one.
        nodes: what each node has, by Ray's names.
    """
    gpus = actor.gpus
    if gpus is None:
        some_gpu = any(node.get("GPU", 0) >= 1 for node in nodes)
        gpus = 1.0 if resource and some_gpu else 0.0
    options = actor.options
    # Options of the actor override `gpus`, as they do when Ray starts it.
    amounts = {
        "CPU": options.get("num_cpus"),
        "GPU": options.get("num_gpus", gpus),
        "memory": options.get("memory"),
        **options.get("resources", {}),
    }
    # Ray asks for a kind of accelerator by so little of a resource that many processes get it.
    if kind := options.get("accelerator_type"):
        amounts[f"accelerator_type:{kind}"] = 0.001
    return {kind: float(amount) for kind, amount in amounts.items() if amount}


def process_options(actor: Actor, variables: Mapping[str, str], **ours: Any) -> dict[str, Any]:
    """Return the options of a placement's process as Ray takes them; the actor's own win.

    Args:
        actor: the placement.
        variables: environment variables of the process, which stay beside those of the actor.
        ours: other options.
    """
    runtime_env = dict(actor.options.get("runtime_env") or {})
    runtime_env["env_vars"] = {**variables, **(runtime_env.get("env_vars") or {})}
    return {**ours, **actor.options, "runtime_env": runtime_env}


LESS = (
    "ask for less in fl.Actor(gpus=, options=), or take a Ray that has more: "
    "fl.RayRuntime(init=) and `ray start` set num_cpus, num_gpus and resources where Ray does not "
    "find them itself"
)


def check_amounts(
    wanted: Mapping[str, Actor], resources: Collection[str], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Refuse placements that a cluster can't hold, for which Ray would wait without an end.

    Args:
        wanted: the placements, by name.
        resources: the names that are a resource's, not a stage's.
        nodes: what each node has, by Ray's names.

    Raises:
        SettingError: what was asked for, by which placements, and what there is.
    """
    total: dict[str, float] = {}
    requests: dict[str, list[str]] = {}
    for name, actor in wanted.items():
        for kind, amount in requested_amounts(actor, name in resources, nodes).items():
            available = [node.get(kind, 0.0) for node in nodes]
            has = (
                f"the cluster has {sum(available):g}, at most {max(available):g} on one of its "
                f"{len(nodes)} {plural(len(nodes), 'node')}"
            )
            if amount > max(available):
                raise SettingError(
                    f"place: {name} asks for {amount:g} {kind} in one process, but {has}; {LESS}"
                )
            # Each process may fit by itself, but not all of them together.
            total[kind] = total.get(kind, 0.0) + amount * actor.count
            of_each = f"{amount:g}" if actor.count == 1 else f"{actor.count} x {amount:g}"
            requests.setdefault(kind, []).append(f"{name} ({of_each})")
            # Sums of shares such as 0.1 are not exact: Ray counts in steps of 0.0001.
            if round(total[kind] * 1e4) > round(sum(available) * 1e4):
                raise SettingError(
                    f"place: {' and '.join(requests[kind])} ask for {total[kind]:g} {kind} "
                    f"together, but {has}; {LESS}"
                )
        _check_fit(name, actor, requested_amounts(actor, name in resources, nodes), nodes)


def _check_fit(
    name: str, actor: Actor, amounts: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Refuse a placement whose processes the nodes can't hold, though they have enough in all.

    A process is on one node, with everything that it asks for.
    """
    held = sum(_processes_on(node, amounts) for node in nodes) if amounts else actor.count
    if held >= actor.count:
        return
    asked = " and ".join(f"{amount:g} {kind}" for kind, amount in amounts.items())
    # Each kind of node once, however many of it there are.
    have = dict.fromkeys(_amounts_on(node, amounts) for node in nodes)
    where = "in one process" if actor.count == 1 else f"in each of {actor.count} processes"
    raise SettingError(
        f"place: {name} asks for {asked} {where}, but the nodes can hold {held} of them: "
        f"they have {'; '.join(have)}; {LESS}"
    )


def _amounts_on(node: Mapping[str, float], kinds: Collection[str]) -> str:
    """Return in words what a node has of some kinds."""
    return " and ".join(f"{node.get(kind, 0.0):g} {kind}" for kind in kinds)


def _processes_on(node: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    """Return how many processes that ask for such amounts a node can hold."""
    # Shares such as 0.1 are not exact: Ray counts in steps of 0.0001.
    return min(
        round(node.get(kind, 0.0) * 1e4) // max(round(amount * 1e4), 1)
        for kind, amount in amounts.items()
    )


def group_lines(plan: Plan, place: Mapping[str, Actor]) -> str:
    """Return what the processes of each group share, a line each, as a plan shows its resources.

    Args:
        plan: what is to run.
        place: the placements, by name.

    Raises:
        SettingError: a name can't be placed, or not in so many processes.
    """
    owners(plan.graph, place)
    lines = []
    for name, actor in place.items():
        if actor.count == 1 or name not in plan.graph.resources:
            continue
        rows, gradients = plan.found.shareable.get(name, (0, 0))
        traffic = plan.found.steady.values()
        of_learner = [x.counts[name] for x in traffic if name in x.counts]
        steps = sum(x["gradient_steps"] + x["most_gradient_steps"] for x in of_learner) / plan.rows
        if rows % actor.count:
            text = (
                f"{actor.count} processes, each of which does the whole of its minibatches of "
                f"{rows:,} rows; take a multiple of {actor.count}"
            )
        else:
            text = (
                f"{actor.count} processes, {rows // actor.count:,} of {rows:,} rows of a minibatch "
                f"each; {in_bytes(gradients)} all-reduced a gradient step, "
                f"{in_bytes(round(steps * gradients))} a row"
            )
        lines.append(f"  {name}  {text}\n")
    return "".join(lines)


class NearSite(HereSite):
    """Runs functions in this process, on arrays that are fetched into it first."""

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a compiled function in this process."""
        return super().run(fn, *near(args), donate=donate, **static)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call any function in this process."""
        return super().call(fn, *near(args))

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Call a predicate in this process."""
        return super().test(fn, *near(args))


class PlacedSite(HereSite):
    """Runs functions in processes of their own: several take turns, a group works as one."""

    def __init__(self, place: Place, name: str, seed: int, homes: Sequence[Home]) -> None:
        super().__init__(place, name, seed)
        self.homes = homes
        self.turn = itertools.cycle(homes)

    def _home(self, args: Any) -> Home:
        """Return the process that has an argument already, else the one whose turn it is."""
        # Functions go to their arguments, so that arrays need not travel.
        return next((home for home in homes_of(args) if home in self.homes), None) or next(
            self.turn
        )

    @property
    def devices(self) -> int:
        """How many devices one of the processes has, or all of a group together."""
        return self.homes[0].devices

    def key(self, *folds: int | str) -> Any:
        """Return a random key that is in one of the processes."""
        # A random key can't be sent, its numbers can: it becomes a key there.
        return self.run(jax.random.wrap_key_data, jax.random.key_data(super().key(*folds)))

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a compiled function in the process that has its arguments."""
        # The work is that of the other process, whose clock counts it; this one only waits for it.
        with TRANSFER:
            return self._home(args).run(fn, donate, static, args)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call any function in the process that has its arguments, which may be this one."""
        # Without remote arrays there is nothing to save by calling it in another process.
        if not any(isinstance(x, RemoteArray) for x in jax.tree.leaves(args)):
            return super().call(fn, *args)
        with TRANSFER:
            return self._home(args).call(fn, args)

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Call a predicate in the process that has its arguments."""
        return bool(self.call(fn, *args))

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Refuse workers.

        Raises:
            SettingError: always, with the way out.
        """
        if near:
            raise SettingError(f"{self.name} works in this process; leave it out of place")
        raise SettingError(
            f"{self.name} has processes of its own already; leave it out of place "
            "(RayRuntime(processes=) says how many)"
        )

    def settle(self, item: Any) -> Any:
        """Put an item's remote arrays into the object store; return the item that refers to it."""
        leaves, structure = jax.tree.flatten(item)
        remote = [x for x in leaves if isinstance(x, RemoteArray)]
        if not remote:
            return item
        # All of them are packed into one object.
        source, number = Stored(self._home(remote).make(remote)), itertools.count()
        return jax.tree.unflatten(
            structure,
            [
                RemoteArray(x.shape, x.dtype, source, next(number))
                if isinstance(x, RemoteArray)
                else x
                for x in leaves
            ],
        )


class Placed(Place):
    """The resources of a run, of which some, like some stages, have processes of their own."""

    remade = (*Place.remade, "start", "wanted", "owners", "remotes", "sites")

    def __init__(
        self,
        plan: Plan,
        seed: int,
        start: Callable[[str, Actor, int | None], Remote],
        wanted: Mapping[str, Actor],
        kind: type[HereSite],
        **more: Any,
    ) -> None:
        """Check the placements; `open` starts their processes.

        Args:
            plan: what is to run.
            seed: of the run.
            start: starts a process, or a resource's group of them, by its label, its placement and
                its index among those of a stage, which is None for a resource's.
            wanted: the placements, by name.
            kind: the site of all that has no process of its own.
            more: what `Place` and `kind` need besides.

        Raises:
            SettingError: a name of `wanted` can't be placed.
        """
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
            # A resource has one process, or one group of processes.
            indices = [None] if name in self.resources else [*range(actor.count)]
            for index in indices:
                label = name if len(indices) == 1 else f"{name}, {index}"
                # At once in the list, so that `close` ends them if a later one can't start.
                self.remotes.append(self.start(label, actor, index))
                homes.append(Home(self.remotes[-1]))
            self.sites[name] = PlacedSite(self, name, self.site.seed, homes)
        return super().open()

    def site_of(self, names: Sequence[str]) -> HereSite:
        """Return the site of a resource's or stage's own processes, else that of this process."""
        return self.sites.get(self.owners.get(names[0], ""), self.site)

    def clocks(self) -> dict[str, Reading]:
        """Return, by process, its seconds by kind of work: of handles and of placements."""
        readings: dict[str, Reading] = {}
        for remote in self.remotes:
            readings |= remote.clocks()
        return readings | super().clocks()

    def close(self) -> None:
        """Close the resources, then end the processes."""
        try:
            super().close()
        finally:
            self._end_processes()

    def _end_processes(self) -> None:
        """End every process, the last one first, even if ending one of them fails."""
        if self.remotes:
            try:
                self.remotes.pop().end()
            finally:
                self._end_processes()


def owners(graph: Graph, wanted: Mapping[str, Actor]) -> dict[str, str]:
    """Return, by resource and by first node of a stage, the placement in whose process it is.

    Raises:
        SettingError: a name of `wanted` is neither; or a stage would be in two places.
    """
    found = {name: name for name in wanted if name in graph.resources}
    for name in found:
        if wanted[name].count > 1 and not graph.resources[name].shares:
            raise SettingError(
                f"place: {name} can't be in {wanted[name].count} processes, which only a learner's "
                "updates can share; take count=1"
            )
    for stage in graph.stages():
        if owner := _owner_of_stage(graph, stage, wanted):
            found[stage[0]] = owner
    for name in wanted:
        _check_name(graph, name, found)
    return found


def _owner_of_stage(graph: Graph, stage: Sequence[str], wanted: Mapping[str, Actor]) -> str:
    """Return the placement of a stage: its own, or that of a resource it updates; "" for none."""
    ops = [node.op for node in graph.nodes if node.name in stage]
    # Each once, in the order of the nodes, as a message names them.
    updated = dict.fromkeys(
        resource_and_part(target)[0]
        for op in ops
        for field, (target, _) in refs(op).items()
        if field in op.writes
    )
    placed = [name for name in (stage[0], *updated) if name in wanted]
    if len(placed) > 1:
        raise SettingError(
            f"place: the stage of {stage[0]} runs where {placed[-1]} is, which it updates; leave "
            f"{placed[0]} out"
        )
    return placed[0] if placed else ""


def _check_name(graph: Graph, name: str, found: Mapping[str, str]) -> None:
    """Refuse a name that is neither a resource nor the first node of a stage."""
    stages = graph.stages()
    for stage in stages:
        if name in stage[1:]:
            raise SettingError(
                f"place: {name} is in the stage of {stage[0]}, which runs as one; write "
                f"'{stage[0]}' in its place"
            )
    if name not in found:
        names = [*graph.resources, *(stage[0] for stage in stages)]
        raise SettingError(f"place: {unknown('resource or first node of a stage', name, names)}")
