"""`RayRuntime`: workers as Ray actors. The only file that imports ray."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, cast

import jax
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowrl.core.clock import Reading, traced
from flowrl.core.events import Stream
from flowrl.core.remote import RemoteArray
from flowrl.errors import FlowrlError, RuntimeFailed, SettingError
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Workers
from flowrl.graph.site import Place
from flowrl.runtime.base import Session
from flowrl.runtime.driver import context, for_worker, missing, way_out
from flowrl.runtime.host import Host
from flowrl.runtime.keeper import Keeper
from flowrl.runtime.placement import (
    Actor,
    NearSite,
    Placed,
    Stored,
    asked_of,
    check_amounts,
    fill,
    homes_of,
)
from flowrl.runtime.threads import Threads

PROCESSES_PER_CORE = 2
"""Of runners. Fewer wait for one another, for one thread of a process runs Python code at a time; more of them only take longer to be up."""
CLOSING_SECONDS = 5.0
"""How long an actor may take to close its environments before it is ended."""


class Pending:
    """The result of a call to a worker in an actor."""

    def __init__(self, ref: Any, label: str, actor: Any) -> None:
        self.ref = ref
        self.label = label
        self.actor = actor

    def result(self) -> Any:
        """Wait for it.

        Raises:
            RuntimeFailed: the actor's process ended.
        """
        try:
            return ray.get(self.ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if (lacking := _lacking(cause)) is not None:
                raise SettingError(f"{self.label}: {lacking}") from None
            if not isinstance(cause, FlowrlError):
                cause.add_note(f"in {self.label}:\n{error}")
            raise cause from None
        except ray.exceptions.RayActorError as error:
            if (lacking := _lacking(error)) is not None:
                raise SettingError(f"{self.label}: {lacking}") from None
            raise RuntimeFailed(f"{self.label}'s process ended: {_cause(error)}") from None
        except ray.exceptions.RayError as error:  # what it lies on was lost, with the node
            raise RuntimeFailed(f"{self.label} gave nothing: {_cause(error)}") from None

    def wait(self) -> None:
        """Until it is there, and leave it there."""
        ray.wait([self.ref], fetch_local=False)

    def done(self) -> bool:
        """Whether it is there."""
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])


class Apart(Pending):
    """A result whose large arrays stay in the object store."""

    def __init__(self, refs: Sequence[Any], label: str, actor: Any) -> None:
        super().__init__(refs[0], label, actor)
        self.arrays = Stored(Pending(refs[1], label, actor))

    def result(self) -> Any:
        """Wait for it, and take all but those."""
        return fill(super().result(), self.arrays)


def _cause(error: Exception) -> str:
    """The line of Ray's long texts that says what went wrong: the last one of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return lines[-1] if any(line.startswith("File ") for line in lines) else lines[0]


def _lacking(error: BaseException) -> str | None:
    """What a node lacks and the way out, if that is what an error from there says."""
    module = error.facts.get("module") if isinstance(error, FlowrlError) else missing(error)
    if (
        module is None
        and isinstance(error, ray.exceptions.RayError)
        and (found := re.search(r"No module named '([\w.]+)'", str(error)))
    ):
        module = found[
            1
        ]  # Ray itself could not read what it was sent: an argument, or the actor, which needs flowrl
    if module is None:
        return None
    text = error.message if isinstance(error, FlowrlError) else f"its node has no module '{module}'"
    return f"{text}; {way_out(module)}"


class RayWorkers:
    """Workers in actors, which are processes of one XLA thread: no more than `processes` of them, in which workers are threads."""

    def __init__(
        self,
        name: str,
        count: int,
        make: Callable[[int, int], Any],
        processes: int | None,
        apart: bool,
        imports: Sequence[str],
    ) -> None:
        processes = min(count, processes or PROCESSES_PER_CORE * len(_homes()))
        self.name = name
        self.apart = apart
        """Whether fragments stay in the object store."""
        self.make = ray.put(for_worker(make, f"{name} (its env, wrappers, settings or policy)"))
        self.context = ray.put(context(imports))
        self.restart_counts = [0] * count
        self.actors: list[Any] = [None] * processes
        """By process."""
        self.calls: list[Any] = [None] * count
        """By worker: what calls it."""
        for process in range(processes):
            self._start(process)
        for index in range(count):
            self._reach(index)

    def _start(self, process: int) -> None:
        """Start a process anew."""
        mine = range(len(self.calls))[process :: len(self.actors)]
        options: dict[str, Any] = {
            "num_cpus": 0,  # any number of runners can be placed, on any number of nodes, whatever else runs there
            "scheduling_strategy": _home(process),
            "concurrency_groups": {str(index): 1 for index in mine},
        }
        kind: Any = ray.remote(**options)(Host)
        self.actors[process] = kind.remote(
            self.make,
            self.context,
            list(mine),
            {"NPROC": 1, "JAX_PLATFORMS": "cpu", **traced(), **_sharing()},
        )

    def _reach(self, index: int) -> None:
        """Call a worker in the process that is at work now."""
        actor, group = self.actors[index % len(self.actors)], str(index)
        call = (
            actor.call_apart.options(concurrency_group=group, num_returns=2)
            if self.apart
            else actor.call.options(concurrency_group=group)
        )
        self.calls[index] = (actor, call)

    def __len__(self) -> int:
        return len(self.calls)

    def put(self, value: Any) -> Any:
        """Put the value into Ray's object store once, from where it is."""
        home = next(homes_of(value), None)
        return home.make(value).ref if home else ray.put(jax.device_get(value))

    def submit(self, index: int, method: str, *args: Any) -> Pending:
        """Call a method of one worker."""
        actor, call = self.calls[index]
        ref = call.remote(index, self.restart_counts[index], time.time(), method, *args)
        return (Apart if self.apart else Pending)(ref, f"{self.name}, worker {index}", actor)

    def current(self, future: Any) -> bool:
        """Whether the process that was asked is the one at work."""
        return future.actor in self.actors

    def restart(self, index: int, restart_count: int, because: Any = None) -> None:
        """Make a worker anew with its next call; its process too, be it dead or hanging, unless that was done already."""
        self.restart_counts[index] = restart_count
        if because is not None and because.actor in self.actors:
            ray.kill(because.actor)
            self._start(self.actors.index(because.actor))
        self._reach(index)

    def ready(self, value: Any) -> bool:
        """Whether the device is done with it."""
        leaves: list[Any] = jax.tree.leaves(value)
        arrays = [x for x in leaves if isinstance(x, (jax.Array, RemoteArray))]
        return all(x.is_ready() for x in cast("list[Any]", arrays))

    def wait(self, futures: Sequence[Pending], timeout: float | None = None) -> int | None:
        """Which of these came first."""
        refs = [future.ref for future in futures]
        done, _ = ray.wait(refs, timeout=timeout)
        return refs.index(done[0]) if done else None

    def clocks(self) -> dict[str, Reading]:
        """Those of the workers whose processes answer in time."""
        asked = [actor.spent.remote() for actor in self.actors]
        done, _ = (
            ray.wait(asked, num_returns=len(asked), timeout=CLOSING_SECONDS) if asked else ([], [])
        )
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


def _nodes() -> list[Mapping[str, float]]:
    """What each node of the cluster has, by Ray's name of it."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _homes() -> list[str]:
    """The nodes of the cluster: each as often as it has cores, the first core of each before the second of any."""
    nodes = [
        (int(node["Resources"].get("CPU", 0)), node["NodeID"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    cores = sorted((core, name) for cpus, name in nodes for core in range(cpus))
    return [name for _, name in cores] or [name for _, name in nodes]


def _home(index: int) -> NodeAffinitySchedulingStrategy:
    """Where to start a process, by its number."""
    homes = _homes()
    return NodeAffinitySchedulingStrategy(homes[index % len(homes)], soft=False)


@cache
def _sharing() -> dict[str, Any]:
    """Environment variables by which what one worker compiled serves the others of its machine, those of later runs too."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        folder = tempfile.mkdtemp(prefix="flowrl-compiled-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    }


class RaySite(NearSite):
    """Functions in this process, workers in actors."""

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
        """Start the actors."""
        return (
            super().workers(count, make, stub)
            if near
            else RayWorkers(self.name, count, make, self.processes, self.apart, self.imports)
        )


class RayActor:
    """The process of a keeper."""

    def __init__(
        self, name: str, wanted: Actor, index: int | None, imports: Sequence[str] = ()
    ) -> None:
        """Start it: the one of a resource, or number `index` of those of a stage, which have one thread each."""
        asked = asked_of(wanted, index is None, _nodes())
        gpus = asked.get("GPU", 0)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "concurrency_groups": {"aside": 1},
            "runtime_env": {
                "env_vars": {
                    "JAX_PLATFORMS": "" if gpus else "cpu",
                    **traced(),
                    **({} if index is None else {"NPROC": "1"}),
                }
            },
            # Those that ask for nothing are spread over the nodes. Where the others fit Ray knows best.
            **({} if index is None or asked else {"scheduling_strategy": _home(index)}),
            **wanted.options,
        }
        kind: Any = ray.remote(**options)(Keeper)
        self.name = name
        self.actor = kind.remote(context(imports))

    def submit(self, method: str, *args: Any) -> Pending:
        """Call a method."""
        return Pending(getattr(self.actor, method).remote(*args), self.name, self.actor)

    def clock(self) -> Reading:
        """Its seconds by kind of work, if it answers in time."""
        with suppress(ray.exceptions.RayError):
            spent: Reading = ray.get(
                self.actor.spent.options(concurrency_group="aside").remote(),
                timeout=CLOSING_SECONDS,
            )
            return spent
        return Reading()

    def end(self) -> None:
        """End the process."""
        ray.kill(self.actor)


def start(
    address: str | None, init: Mapping[str, Any], graph: str = "", apart: bool = False
) -> Callable[[], None]:
    """Start or join Ray, unless this process is in one already. Returns what ends it again. `apart`: results stay where they are made.

    Raises:
        RuntimeFailed: Ray can't start or can't be joined.
    """
    if ray.is_initialized():
        if address is not None or init:
            raise RuntimeFailed(
                "this process is in a running Ray already, so address and init can't be used; leave them out, or call ray.shutdown() first",
                graph,
            )
        return lambda: None
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # Ray's own default to come; unset, it warns
    os.environ.setdefault(
        "RAY_IGNORE_UNHANDLED_ERRORS", "1"
    )  # where one runner's error ends a run, those of the others need no telling
    settings = {"logging_level": "error", "log_to_driver": True, **init}
    where = (
        address or os.environ.get("RAY_ADDRESS") or "local"
    )  # left to itself, Ray would join whatever ran here last, be it dead
    if where == "local":
        settings.setdefault("include_dashboard", False)
        if not apart:  # fragments up to 1 MiB come with the reply, not through the store
            settings.setdefault("_system_config", {"max_direct_call_object_size": 2**20})
    try:
        if re.fullmatch(r"[\w.-]+:\d+", where):
            _knock(where)
        with warnings.catch_warnings():  # jax warns of any fork; Ray's children call exec at once
            warnings.filterwarnings(
                "ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning
            )
            ray.init(address=where, **settings)
    except Exception as error:
        raise RuntimeFailed(
            f"Ray could not be {'started' if where == 'local' else f'joined at {where}'}: {_cause(error)}",
            graph,
        ) from error
    return ray.shutdown


def _knock(address: str) -> None:
    """Fail at once where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


@dataclass(frozen=True)
class RayRuntime:
    """Runners as Ray actors; the learner and the loop in this process.

    Args:
        address: of a running Ray to join; None starts one on this machine, its dashboard off, and ends it afterwards.
        place: by the name of a resource, or of the first node of a stage: the `Actor` that it has of its own. A stage that updates such a
            resource runs its functions there. Fragments and batches then go from process to process by reference, never through this one.
            With the learner on a GPU, this process needs none: start it with ``JAX_PLATFORMS=cpu``.
        processes: that share the runners of a resource, which are threads there; None for twice as many as there are cores. More of them only
            cost memory, start-up and changes of context; fewer share one interpreter, whose Python code runs one thread at a time.
        init: more keyword arguments for `ray.init`. ``{"runtime_env": {"working_dir": "."}}`` copies this folder to every node, where modules
            of your own in it are imported from then.
        imports: modules by name, or files by path (``envs.py``), that every process imports before anything else. Environments that are
            registered in this process are known to all of them anyway.

    Raises:
        SettingError: `processes` is no positive number, `place` holds something else than `Actor`, or `imports` is a single text.
    """

    address: str | None = None
    place: Mapping[str, Actor] = field(default_factory=dict)
    processes: int | None = None
    init: Mapping[str, Any] = field(default_factory=dict)
    imports: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.imports, str):
            raise SettingError(
                f"imports must be a list of modules, got {self.imports!r}; write imports=[{self.imports!r}]"
            )
        if self.processes is not None and self.processes < 1:
            raise SettingError(f"processes must be at least 1 or None, got {self.processes}")
        if not isinstance(self.place, Mapping):
            raise SettingError(
                f"place must be a mapping from names to fl.Actor, got {self.place!r}; write place={{'learner': fl.Actor()}}"
            )
        for name, actor in self.place.items():
            if not isinstance(actor, Actor):
                raise SettingError(
                    f"place must hold values of fl.Actor, got {name}={actor!r}; write place={{'{name}': fl.Actor()}}"
                )

    def open(self, plan: Plan, seed: int, stream: Stream | None = None) -> Session:
        """Start or join Ray and open the graph's resources.

        Raises:
            RuntimeFailed: Ray can't start or can't be joined.
            SettingError: `place` names something else than resources and the first nodes of stages, or asks for more than there is.
        """
        act = partial(RayActor, imports=self.imports)
        more = {"processes": self.processes, "apart": bool(self.place), "imports": self.imports}
        place = Placed(plan, seed, act, self.place, RaySite, stream=stream, **more)
        return Session(plan, place, Threads, partial(self._start, plan))

    def _start(self, plan: Plan) -> Callable[[], None]:
        """Start or join Ray, and see that it has what is asked for."""
        stop = start(self.address, self.init, plan.graph.name, bool(self.place))
        try:
            check_amounts(self.place, plan.graph.resources, _nodes())
        except SettingError as error:
            stop()
            raise error.at(plan.graph.name) from None
        return stop
