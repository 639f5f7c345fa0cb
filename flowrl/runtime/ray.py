"""`RayRuntime`: workers as Ray actors. The only file that imports ray."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import jax
import ray

from flowrl.clock import OTHER, START, By, Clock
from flowrl.errors import FlowrlError, RuntimeFailed
from flowrl.graph.loop import Hook
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Workers
from flowrl.graph.site import HereSite, Place
from flowrl.graph.values import importing
from flowrl.runtime.base import Session
from flowrl.runtime.threads import Threads

CLOSING_SECONDS = 5.0
"""How long an actor may take to close its environments before it is ended."""


class Host:
    """The actor: makes one worker and calls its methods."""

    def __init__(self, make: bytes, index: int, incarnation: int, path: Sequence[str]) -> None:
        self.clock = Clock("waiting")
        sys.path.extend(p for p in path if p not in sys.path)
        with By(self.clock), START, importing("a Ray worker"):
            self.worker = cloudpickle.loads(make)(index, incarnation)
        self.idle = time.time()

    def call(self, asked: float, method: str, *args: Any) -> Any:
        """Call a method of the worker, as it was asked to at a time."""
        now = time.time()
        self.clock.move(min(max(now - max(asked, self.idle), 0.0), now - self.idle), "waiting", "transfer")  # it was on its way meanwhile
        try:
            with By(self.clock), OTHER:
                return getattr(self.worker, method)(*args)
        finally:
            self.idle = time.time()

    def spent(self) -> Mapping[str, float]:
        """The seconds by kind of work."""
        return self.clock.read()


class Pending:
    """The result of an actor call."""

    def __init__(self, ref: Any, label: str) -> None:
        self.ref = ref
        self.label = label

    def result(self) -> Any:
        """Wait for it.

        Raises:
            RuntimeFailed: the actor's process ended.
        """
        try:
            return ray.get(self.ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, FlowrlError):
                cause.add_note(f"in {self.label}:\n{error.traceback_str}")
            raise cause from None
        except ray.exceptions.RayActorError as error:
            raise RuntimeFailed(f"{self.label}'s process ended: {_cause(error)}") from None


def _cause(error: Exception) -> str:
    """The line of Ray's long texts that says what went wrong: the last one of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if any(line.startswith("File ") for line in lines) else lines[0]


class RayWorkers:
    """Workers as actors of one XLA thread each."""

    def __init__(self, name: str, count: int, make: Callable[[int, int], Any]) -> None:
        self.name = name
        self.kind: Any = ray.remote(Host).options(
            num_cpus=0,  # any number of runners can be placed, on any number of nodes, whatever else runs there
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"NPROC": "1", "JAX_PLATFORMS": "cpu"}},
        )
        self.make = ray.put(cloudpickle.dumps(make))
        self.actors: list[Any] = [self.kind.remote(self.make, i, 0, sys.path) for i in range(count)]

    def __len__(self) -> int:
        return len(self.actors)

    def put(self, value: Any) -> Any:
        """Put the value into Ray's object store once."""
        return ray.put(jax.device_get(value))

    def submit(self, index: int, method: str, *args: Any) -> Pending:
        """Call a method of one actor."""
        return Pending(self.actors[index].call.remote(time.time(), method, *args), f"{self.name}, worker {index}")

    def restart(self, index: int, incarnation: int) -> None:
        """Kill an actor, be it dead or hanging, and start another."""
        ray.kill(self.actors[index])
        self.actors[index] = self.kind.remote(self.make, index, incarnation, sys.path)

    def ready(self, value: Any) -> bool:
        """Whether the device is done with it."""
        return all(x.is_ready() for x in jax.tree.leaves(value) if hasattr(x, "is_ready"))

    def wait(self, futures: Sequence[Pending], timeout: float | None = None) -> int | None:
        """Which of these came first."""
        refs = [future.ref for future in futures]
        done, _ = ray.wait(refs, timeout=timeout)
        return refs.index(done[0]) if done else None

    def clocks(self) -> dict[str, Mapping[str, float]]:
        """Those of the actors that answer in time."""
        asked = [actor.spent.remote() for actor in self.actors]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=CLOSING_SECONDS) if asked else ([], [])
        found = {}
        for index, ref in enumerate(asked):
            with suppress(ray.exceptions.RayError):
                if ref in done:
                    found[f"{self.name}, {index}"] = ray.get(ref)
        return found

    def close(self) -> None:
        """Close what the actors hold, then end them."""
        try:
            ray.wait([a.call.remote(0.0, "close") for a in self.actors], num_returns=len(self.actors), timeout=CLOSING_SECONDS)
        finally:
            for actor in self.actors:
                ray.kill(actor)
            self.actors = []


class RaySite(HereSite):
    """Functions in this process, workers as actors."""

    def workers(self, count: int, make: Callable[[int, int], Any], twin: Callable[[int, int], Any]) -> Workers:
        """Start the actors."""
        return RayWorkers(self.name, count, make)


def start(address: str | None, init: Mapping[str, Any], graph: str = "") -> Callable[[], None]:
    """Start or join Ray, unless this process is in one already. Returns what ends it again.

    Raises:
        RuntimeFailed: Ray can't start or can't be joined.
    """
    if ray.is_initialized():
        if address is not None or init:
            raise RuntimeFailed(
                "this process is in a running Ray already, so address and init can't be used; leave them out, or call ray.shutdown() first", graph
            )
        return _nothing
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's own default to come; unset, it warns
    os.environ.setdefault("RAY_max_direct_call_object_size", str(2**20))  # fragments up to 1 MiB come with the reply, not through the store
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # where one runner's error ends a run, those of the others need no telling
    settings = {"logging_level": "error", "log_to_driver": False, **init}
    where = address or os.environ.get("RAY_ADDRESS") or "local"  # left to itself, Ray would join whatever ran here last, be it dead
    if where == "local":
        settings.setdefault("include_dashboard", False)
    try:
        if re.fullmatch(r"[\w.-]+:\d+", where):
            _knock(where)
        with warnings.catch_warnings():  # jax warns of any fork; Ray's children call exec at once
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
            ray.init(address=where, **settings)
    except Exception as error:
        raise RuntimeFailed(f"Ray could not be {'started' if where == 'local' else f'joined at {where}'}: {_cause(error)}", graph) from error
    return ray.shutdown


def _knock(address: str) -> None:
    """Fail at once where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


def _nothing() -> None:
    """Nothing was started, so there is nothing to end."""


@dataclass(frozen=True)
class RayRuntime:
    """Runners as Ray actors; the learner and the loop in this process.

    Args:
        address: of a running Ray to join; None starts one on this machine, its dashboard off, and ends it afterwards.
        init: more keyword arguments for `ray.init`.
    """

    address: str | None = None
    init: Mapping[str, Any] = field(default_factory=dict)

    def open(self, plan: Plan, seed: int, hook: Hook | None = None) -> Session:
        """Start or join Ray and open the graph's resources.

        Raises:
            RuntimeFailed: Ray can't start or can't be joined.
        """
        graph = plan.graph
        stop = start(self.address, self.init, graph.name)
        return Session(graph, Place(graph.name, graph.resources, seed, RaySite, plan.found.totals), Threads, hook, stop)
