"""`RayRuntime`: workers as Ray actors. The only file of the runtimes that imports ray."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import jax
import numpy as np
import ray

from flowrl.core.clock import Reading, traced
from flowrl.core.events import Stream, Warned
from flowrl.core.remote import RemoteArray
from flowrl.core.workers import INLINE_BYTES, PROCESSES_PER_CORE, Done
from flowrl.errors import RunError, SettingError
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Workers
from flowrl.graph.site import Place
from flowrl.runtime import joining, sessions
from flowrl.runtime.base import Session, check_positive
from flowrl.runtime.driver import compilation_cache, context, for_worker
from flowrl.runtime.homes import homes_of
from flowrl.runtime.host import Host
from flowrl.runtime.placement import (
    Actor,
    NearSite,
    Placed,
    check_amounts,
    check_place,
    saved_place,
)
from flowrl.runtime.ray_calls import Pending, PendingPacked, Pickled, cause_of
from flowrl.runtime.ray_keepers import (
    CLOSING_SECONDS,
    node_amounts,
    node_of,
    nodes_by_core,
    on_node,
    started,
)
from flowrl.runtime.threads import Threads


class RayWorkers:
    """Workers as threads of a few actors; each actor is a process with one XLA thread."""

    def __init__(
        self,
        name: str,
        count: int,
        make: Callable[[int, int], Any],
        processes: int | None,
        apart: bool,
        imports: Sequence[str],
        warn: Callable[[str], None],
    ) -> None:
        """Start the processes. The workers are made with their first calls.

        Args:
            name: of the resource.
            count: how many workers to make.
            make: makes a worker by its index and restart count.
            processes: how many processes share them; None for a number by the cluster's cores.
            apart: whether large arrays, such as rollouts, stay in the object store.
            imports: modules that every process imports first.
            warn: function that is called with a text where a worker gives nothing for long.

        Raises:
            SettingError: `make` can't be pickled, or a file of `imports` can't be read.
        """
        processes = min(count, processes or PROCESSES_PER_CORE * len(nodes_by_core()))
        self.name = name
        self.apart = apart
        self.warn = warn
        self.make = ray.put(for_worker(make, f"{name} (its env, wrappers, settings or policy)"))
        self.context = ray.put(context(imports))
        self.restart_counts = [0] * count
        self.actors: list[Any] = [None] * processes
        """By process: its actor."""
        self.calls: list[Any] = [None] * count
        """By worker: its actor, and the actor's method that calls it."""
        for process in range(processes):
            self._start(process)
        for index in range(count):
            self._reach(index)

    def _start(self, process: int) -> None:
        """Start a process, which may take the place of one that ended."""
        mine = [i for i in range(len(self.calls)) if self._process_of(i) == process]
        options: dict[str, Any] = {
            # Any number of runners can be placed, on any number of nodes, whatever else runs there.
            "num_cpus": 0,
            "scheduling_strategy": on_node(node_of(process, len(self.actors))),
            "concurrency_groups": {str(index): 1 for index in mine},  # calls stay in order
        }
        kind: Any = ray.remote(**options)(Host)
        self.actors[process] = kind.remote(
            self.make,
            self.context,
            mine,
            {"NPROC": 1, "JAX_PLATFORMS": "cpu", **traced(), **compilation_cache()},
        )

    def _process_of(self, index: int) -> int:
        """Return the process of a worker; neighbours share one."""
        return index * len(self.actors) // len(self.calls)

    def _reach(self, index: int) -> None:
        """Let a worker's calls go to the process that is at work now."""
        actor, group = self.actors[self._process_of(index)], str(index)
        call = (
            actor.call_packed.options(concurrency_group=group, num_returns=2)
            if self.apart
            else actor.call.options(concurrency_group=group)
        )
        self.calls[index] = (actor, call)

    def __len__(self) -> int:
        return len(self.calls)

    def put(self, value: Any) -> Any:
        """Return a value as calls may have it for an argument, which is made once for all of them.

        A small one goes with the call itself: what lies in Ray's object store has to be looked up
        for each call, which takes longer. What another process holds goes from there to the store.
        """
        if (home := next(homes_of(value), None)) is not None:
            return home.make(value).ref
        value = jax.device_get(value)
        small = sum(np.asarray(x).nbytes for x in jax.tree.leaves(value)) <= INLINE_BYTES
        return Pickled(value) if small else ray.put(value)

    def submit(self, index: int, method: str, *args: Any) -> Pending:
        """Call a method of one worker, and return its pending result."""
        actor, call = self.calls[index]
        ref = call.remote(index, self.restart_counts[index], time.time(), method, *args)
        kind = PendingPacked if self.apart else Pending
        return kind(ref, f"{self.name}, worker {index}", actor, self.warn)

    def current(self, future: Any) -> bool:
        """Return whether the process that was called is still the one at work."""
        return future.actor in self.actors

    def restart(self, index: int, restart_count: int, because: Any = None) -> None:
        """Restart a worker with its next call.

        Args:
            index: of the worker.
            restart_count: its new restart count.
            because: the future that failed. Its process, which is dead or hangs, is restarted too,
                unless that was done already.
        """
        self.restart_counts[index] = restart_count
        if because is not None and because.actor in self.actors:
            ray.kill(because.actor)
            self._start(self.actors.index(because.actor))
        self._reach(index)

    def end(self, future: Any) -> None:
        """End the process that got a call; its workers are restarted once their calls fail."""
        ray.kill(future.actor)

    def ready(self, value: Any) -> bool:
        """Return whether the device is done with a value."""
        leaves: list[Any] = jax.tree.leaves(value)
        arrays = [x for x in leaves if isinstance(x, (jax.Array, RemoteArray))]
        return all(x.is_ready() for x in cast("list[Any]", arrays))

    def wait(self, futures: Sequence[Pending], timeout: float | None = None) -> int | None:
        """Return the index of the future that is done first; None after `timeout` seconds."""
        # Results of a run that was resumed are there already.
        if Done in (kinds := list(map(type, futures))):
            return kinds.index(Done)
        refs = [future.ref for future in futures]
        done, _ = ray.wait(refs, timeout=timeout)
        return refs.index(done[0]) if done else None

    def clocks(self) -> dict[str, Reading]:
        """Return the seconds by kind of work of the workers whose processes answer in time."""
        if not self.actors:
            return {}
        replies = [actor.spent.remote() for actor in self.actors]
        done, _ = ray.wait(replies, num_returns=len(replies), timeout=CLOSING_SECONDS)
        found: dict[int, Reading] = {}
        for ref in done:
            with suppress(ray.exceptions.RayError):
                found |= ray.get(ref)
        return {f"{self.name}, {index}": found[index] for index in sorted(found)}

    def close(self) -> None:
        """Close what the workers hold, then end their processes."""
        try:
            closing = [
                actor.close.options(concurrency_group=str(i)).remote(i)
                for i, (actor, _) in enumerate(self.calls)
            ]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSING_SECONDS)
        finally:
            for actor in self.actors:
                ray.kill(actor)
            self.actors, self.calls = [], []


class RaySite(NearSite):
    """Runs functions in this process, and workers in actors."""

    remote: ClassVar[bool] = True

    def __init__(
        self,
        place: Place,
        name: str,
        seed: int,
        processes: int | None,
        apart: bool,
        imports: Sequence[str],
    ) -> None:
        super().__init__(place, name, seed)
        self.processes = processes
        self.apart = apart
        self.imports = imports

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Start the actors of workers; keep those that have to be `near` in this process."""
        if near:
            return super().workers(count, make, stub)
        return RayWorkers(
            self.name, count, make, self.processes, self.apart, self.imports, self._warn
        )

    def _warn(self, text: str) -> None:
        """Report to the observers of the run that something is odd."""
        self.stream.emit(Warned(text))


def start(
    address: str | None, init: Mapping[str, Any], graph: str = "", apart: bool = False
) -> Callable[[], None]:
    """Start or join Ray, unless this process is in one already.

    Args:
        address: of a running Ray; None for the environment variable ``RAY_ADDRESS``, or a new one.
        init: more keyword arguments for `ray.init`.
        graph: the graph's name, for errors.
        apart: whether large arrays of results stay in the object store, as in `RayWorkers`.

    Returns:
        A function that ends what this one started.

    Raises:
        RunError: Ray can't start or can't be joined.
        SettingError: ``RAY_ADDRESS`` or ``RAY_AUTH_MODE`` is none.
    """
    if ray.is_initialized():
        if (address is not None or init) and (address, init) not in joining.STARTED:
            raise RunError(joining.JOINED, graph)
        return lambda: None
    where = joining.place_to_join(address, os.environ, graph)
    for name, value in joining.VARIABLES.items():
        os.environ.setdefault(name, value)
    settings = {"logging_level": "error", "log_to_driver": True, **init}
    if where == "local":
        settings.setdefault("include_dashboard", False)
        if not apart:  # rollouts up to 1 MiB then come with the reply
            settings.setdefault("_system_config", {"max_direct_call_object_size": 2**20})
    try:
        # JAX warns of any fork, but Ray's children call exec at once.
        with warnings.catch_warnings(), joining.sigterm_kept():
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            if where not in ("local", "auto"):
                _ask_head(where)
            joined: Any = ray.init(address=where, **settings)
    except Exception as error:
        tried = "started" if where == "local" else f"joined at {where}"
        raise RunError(
            f"Ray could not be {tried}: {joining.with_way_out(cause_of(error))}", graph
        ) from error
    return sessions.begun(joined.address_info, ray.shutdown) if where == "local" else ray.shutdown


def _ask_head(where: str) -> None:
    """Ask a head what `ray.init` asks it for 20 seconds, though a wrong token stays wrong."""
    try:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
    except ImportError:  # they are no part of Ray's interface, so a later one may lack them
        return
    tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)
    GcsClient(address=where)


@dataclass(frozen=True)
class RayRuntime:
    """Runners in Ray actors, several to a process; the learner and the loop in this process.

    Args:
        address: ``HOST:PORT`` of the head of a running Ray to join, or ``auto`` for the one on this
            machine; None for that of the environment variable ``RAY_ADDRESS``, and where that is
            unset, one that is started here, its dashboard off, and ended afterwards (default None).
        place: by the name of a resource, or of the first node of a stage: the `Actor` that it has
            of its own (default none). A stage that updates such a resource runs its functions
            there. Rollouts and batches then go from process to process by reference, never through
            this one. With the learner on a GPU, this process needs none: start it with
            ``JAX_PLATFORMS=cpu``.
        processes: number of processes that share the runners of a resource, which are threads
            there; None: twice as many as there are cores (default None). More of them only cost
            memory, start-up and changes of context; fewer share one interpreter, whose Python code
            runs one thread at a time.
        init: more keyword arguments for `ray.init`. ``{"runtime_env": {"working_dir": "."}}``
            copies this folder to every node, where modules of your own in it are imported from then
            (default none).
        imports: modules by name, or files by path (``envs.py``), that every process imports before
            anything else (default none). Environments that are registered in this process are known
            to all of them anyway.
        threads: as of `LocalRuntime`, also of a learner that is placed, which computes on its GPU
            all the same if it has one; runners have one thread each (default None).

    Raises:
        SettingError: `address` is none, `processes` or `threads` is no whole number from 1 on,
            `place` holds something else than `Actor`, or `imports` is a single text.
    """

    address: str | None = None
    place: Mapping[str, Actor] = field(default_factory=dict, metadata={"saved": saved_place})
    processes: int | None = None
    init: Mapping[str, Any] = field(default_factory=dict, metadata={"saved": joining.saved_init})
    imports: Sequence[str] = ()
    threads: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.imports, str):
            raise SettingError(
                f"imports must be a list of modules, got {self.imports!r}; write "
                f"imports=[{self.imports!r}]"
            )
        if self.address is not None:
            joining.check_address(self.address)
        check_positive("processes", self.processes)
        check_positive("threads", self.threads)
        check_place(self.place)

    def open(self, plan: Plan, seed: int, stream: Stream | None = None) -> Session:
        """Start or join Ray and open the graph's resources.

        Raises:
            RunError: Ray can't start or can't be joined.
            SettingError: `place` names something else than resources and the first nodes of stages,
                or asks for more than there is.
        """
        # Which node a process is on is not known here, so 0 stands for one thread a core of it.
        threads = self.threads or plan.threads or 0
        events = stream or Stream()
        act = partial(
            started,
            imports=self.imports,
            threads=threads,
            warn=lambda text: events.emit(Warned(text)),
        )
        more = {"processes": self.processes, "apart": bool(self.place), "imports": self.imports}
        place = Placed(plan, seed, act, self.place, RaySite, stream=events, **more)
        return Session(plan, place, Threads, partial(self._start, plan), threads=self.threads)

    def _start(self, plan: Plan) -> Callable[[], None]:
        """Start or join Ray, and check that it has what is asked for."""
        stop = start(self.address, self.init, plan.graph.name, bool(self.place))
        try:
            check_amounts(self.place, plan.graph.resources, node_amounts())
        except BaseException as error:
            stop()
            if isinstance(error, SettingError):
                error.at(plan.graph.name)
            raise
        return stop
