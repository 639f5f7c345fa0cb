"""Keepers' processes as Ray actors, and the nodes on which they start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowrl.core.clock import Reading, traced
from flowrl.core.workers import SILENT_SECONDS
from flowrl.errors import LostError
from flowrl.runtime.driver import context
from flowrl.runtime.group import Member, needed
from flowrl.runtime.homes import Remote
from flowrl.runtime.keeper import Keeper
from flowrl.runtime.placement import Actor, process_options, requested_amounts
from flowrl.runtime.ray_calls import PendingKept

CLOSING_SECONDS = 5.0
"""How long an actor may take to close its environments before it is ended."""


def node_amounts() -> list[Mapping[str, float]]:
    """Return what each node of the cluster has, by Ray's names such as ``CPU``."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def nodes_by_core() -> list[str]:
    """Return the cluster's nodes, each as often as it has cores, one node after the other.

    Raises:
        LostError: there is no node left.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = sorted((node["NodeID"], int(node["Resources"].get("CPU", 0))) for node in alive)
    found = [name for name, cpus in nodes for _ in range(cpus)] or [name for name, _ in nodes]
    if not found:
        raise LostError("Ray has no node left")
    return found


def node_of(process: int, processes: int) -> str:
    """Return the node of a process: its neighbours by number are on the same one.

    So what is joined from the rollouts of a group's node in order is a share of the whole.

    Args:
        process: its number.
        processes: how many there are.
    """
    nodes = nodes_by_core()
    return nodes[process * len(nodes) // processes]


def on_node(name: str) -> NodeAffinitySchedulingStrategy:
    """Return how Ray starts a process on a node."""
    return NodeAffinitySchedulingStrategy(name, soft=False)


def threads_of(index: int, count: int) -> int:
    """Return how many threads of XLA a member of a group has: its share of its node's cores.

    Args:
        index: of the member.
        count: of the members.
    """
    mine = node_of(index, count)
    members = sum(node_of(other, count) == mine for other in range(count))
    return max(nodes_by_core().count(mine) // members, 1)


class RayMember(Member):
    """A member of a group in a Ray actor."""

    def address(self) -> str:
        """Return an address of its node, ``HOST:PORT``, at which the group can meet."""
        return f"{ray.util.get_node_ip_address()}:{self.free_port()}"


class RayActor:
    """The process of a keeper."""

    def __init__(
        self,
        name: str,
        wanted: Actor,
        resource: bool,
        index: int = 0,
        imports: Sequence[str] = (),
        threads: int = 1,
        kind: type[Keeper] = Keeper,
        *,
        warn: Callable[[str], None],
    ) -> None:
        """Start the process.

        Args:
            name: what to call it.
            wanted: the placement.
            resource: whether it is for a resource, not for a stage.
            index: its number among the processes of the placement.
            imports: modules that it imports first.
            threads: of XLA; 0: one a core, of a group's members its share.
            kind: the class of its keeper.
            warn: function that is called with a text where the process does not start for long.
        """
        # Variables come by a runtime_env, for JAX must not be imported before they are set.
        amounts = requested_amounts(wanted, resource, node_amounts())
        gpus = amounts.get("GPU", 0)
        variables = {"JAX_PLATFORMS": "" if gpus else "cpu", **traced()}
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "concurrency_groups": {"aside": 1},  # reads the clock while a function runs
        }
        # Several processes that ask for nothing are spread over the nodes; Ray places the others.
        spread = not amounts and (wanted.count > 1 or not resource)
        if spread:
            options["scheduling_strategy"] = on_node(node_of(index, wanted.count))
        if not threads and spread:
            threads = threads_of(index, wanted.count)
        if threads:
            variables["NPROC"] = str(threads)
        remote: Any = ray.remote(**process_options(wanted, variables, **options))(kind)
        self.name = name
        self.actor = remote.remote(context(imports))
        self.answered = False
        """Whether it has answered a call: until then Ray may wait for what it asks for."""
        self.amounts = amounts
        self.warn = warn
        self.begun, self.reported = time.monotonic(), 0.0
        """When Ray was asked to start it, and how long that was ago when it was reported last."""

    def submit(self, method: str, *args: Any, sent: Sequence[Any] = ()) -> PendingKept:
        """Call a method of the keeper, and return its pending result."""
        return PendingKept({getattr(self.actor, method).remote(*args, *sent): self}, self.name)

    def clocks(self) -> dict[str, Reading]:
        """Return its seconds by kind of work, or an empty reading if it does not answer in time."""
        with suppress(ray.exceptions.RayError):
            reply = self.actor.spent.options(concurrency_group="aside").remote()
            spent: Reading = ray.get(reply, timeout=CLOSING_SECONDS)
            return {self.name: spent}
        return {self.name: Reading()}

    def report_waiting(self) -> None:
        """Warn where the process has not answered once for long, and where that has doubled."""
        seconds = time.monotonic() - self.begun
        if seconds < max(SILENT_SECONDS, 2 * self.reported):
            return
        self.reported = seconds
        asked = " and ".join(f"{amount:g} {kind}" for kind, amount in self.amounts.items())
        why = f"Ray may wait until {asked} is free on a node: " if asked else ""
        self.warn(
            f"{self.name}'s process has not answered in the {seconds:.0f} s since it was asked to "
            f"start; {why}`ray status` shows what the cluster has and what is in use"
        )

    def end(self) -> None:
        """End the process."""
        ray.kill(self.actor)


class RayGroup:
    """The processes of a group, as one: all of them do what is asked, and the first answers."""

    def __init__(
        self,
        name: str,
        wanted: Actor,
        imports: Sequence[str] = (),
        threads: int = 0,
        *,
        warn: Callable[[str], None],
    ) -> None:
        """Start the processes, and let them meet.

        Args:
            name: what to call it.
            wanted: the placement.
            imports: modules that each process imports first.
            threads: as of `RayActor`.
            warn: as of `RayActor`.

        Raises:
            LostError: a process ended before all had met.
        """
        self.name = name
        self.lock = threading.Lock()
        """Held while something is asked of all, so that they do all things in the same order."""
        self.members: list[RayActor] = []
        try:
            for index in range(wanted.count):
                label = f"{name}, {index}"
                actor = RayActor(label, wanted, True, index, imports, threads, RayMember, warn=warn)
                self.members.append(actor)
            address = self.members[0].submit("address").result()
            joins = [(address, wanted.count, index) for index in range(wanted.count)]
            self.devices = int(self._all("join", joins).result())
        except BaseException:
            self.end()
            raise

    def submit(self, method: str, *args: Any, sent: Sequence[Any] = ()) -> PendingKept:
        """Call a method of all keepers, and return the pending result of the first.

        Each gets those of the arrays that it needs.
        """
        count = len(self.members)
        calls = []
        for index in range(count):
            own = needed(args, index, count, self.devices)
            calls.append((*args, *(ref if i in own else None for i, ref in enumerate(sent))))
        return self._all(method, calls)

    def _all(self, method: str, calls: Sequence[tuple[Any, ...]]) -> PendingKept:
        """Call a method of each keeper with its arguments."""
        with self.lock:
            refs = {}
            for index, (member, args) in enumerate(zip(self.members, calls, strict=True)):
                # Only the first makes what leaves the group.
                own = "gather" if method == "make" and index else method
                refs[getattr(member.actor, own).remote(*args)] = member
            return PendingKept(refs, self.name)

    def clocks(self) -> dict[str, Reading]:
        """Return the seconds of each process by kind of work."""
        found: dict[str, Reading] = {}
        for member in self.members:
            found |= member.clocks()
        return found

    def end(self) -> None:
        """End the processes."""
        for member in self.members:
            member.end()


def started(
    name: str,
    wanted: Actor,
    index: int | None,
    imports: Sequence[str] = (),
    threads: int = 0,
    *,
    warn: Callable[[str], None],
) -> Remote:
    """Start the process of a placement, or the group of a resource that has several.

    Args:
        name: what to call it.
        wanted: the placement.
        index: of the process among those of a stage, which have one thread each; None for a
            resource.
        imports: modules that it imports first.
        threads: of XLA for a resource; 0: one a core.
        warn: as of `RayActor`.
    """
    if index is not None:
        return RayActor(name, wanted, False, index, imports, warn=warn)
    if wanted.count > 1:
        return RayGroup(name, wanted, imports, threads, warn=warn)
    return RayActor(name, wanted, True, 0, imports, threads, warn=warn)
