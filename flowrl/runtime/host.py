"""What runs in an actor that several workers share, each of them in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import jax

from flowrl.core.clock import OTHER, START, By, Clock, Reading
from flowrl.core.items import Packed
from flowrl.runtime.driver import DriverContext, from_driver, on_this_node, problem_of
from flowrl.runtime.keeper import dig


class Slot:
    """One worker in its process, and where its time goes."""

    def __init__(self, began: float) -> None:
        self.clock = Clock("waiting", began)
        self.clock.move(perf_counter() - began, "waiting", "start")
        self.restart_count = -1
        self.idle = perf_counter()
        """When its last call ended, in seconds of `time.perf_counter`."""
        self.worker: Any = None
        self.cpu = 0.0
        """The seconds in which a core ran its calls, which is less than they took if they slept."""


class Host:
    """The actor: a process for some of the workers of a resource, each in a thread of its own."""

    def __init__(
        self, make: bytes, context: DriverContext, mine: Sequence[int], variables: Mapping[str, Any]
    ) -> None:
        """Make this process ready for its workers, which are made with their first calls.

        Args:
            make: a function, pickled, that makes a worker by its index and restart count.
            context: what the driver's process has and this one needs.
            mine: the indices of the workers in this process.
            variables: environment variables to set.
        """
        began = perf_counter()

        def begin() -> None:
            context.enter(variables)
            # Acting takes less time than another thread needs to take it up.
            jax.config.update("jax_cpu_enable_async_dispatch", False)
            # Reading it may need what the context brings.
            self.make = from_driver(make)

        self.problem = problem_of(begin)
        self.slots = {index: Slot(began) for index in mine}

    def call(self, index: int, restart_count: int, sent_at: float, method: str, *args: Any) -> Any:
        """Call a method of a worker.

        Args:
            index: of the worker.
            restart_count: how often it was restarted; at a new count the worker is made again.
            sent_at: when the driver sent the call, in seconds since 1970.
            method: the method's name.
            args: its arguments.
        """
        slot = self.slots[index]
        # While the call was on its way the worker waited for its transfer, not for work. Clocks of
        # machines differ, and one may be set meanwhile, so the way is taken to begin no sooner than
        # the last call ended, and to last no less than 0 seconds.
        on_its_way = min(max(time.time() - sent_at, 0.0), perf_counter() - slot.idle)
        slot.clock.move(on_its_way, "waiting", "transfer")
        cpu = time.thread_time()
        try:
            with By(slot.clock), OTHER, on_this_node(self.problem):
                if slot.restart_count != restart_count:
                    with START:
                        self._renew(slot, index, restart_count)
                return getattr(slot.worker, method)(*args)
        finally:
            slot.idle = perf_counter()
            slot.cpu += time.thread_time() - cpu

    def _renew(self, slot: Slot, index: int, restart_count: int) -> None:
        """Make a worker in the place of the one that there was."""
        if slot.worker is not None:
            with suppress(Exception):
                slot.worker.close()
        slot.worker, slot.restart_count = self.make(index, restart_count), restart_count

    def call_packed(self, *args: Any) -> tuple[Any, Packed]:
        """Call a method as `call` does, and return its result and its large arrays apart.

        Large are those of two axes or more, such as ``[T, B]``. Where they were, the result has
        holes.
        """
        tree, arrays = dig(self.call(*args), 2)
        return tree, Packed(arrays)

    def close(self, index: int) -> None:
        """Close a worker."""
        if self.slots[index].worker is not None:
            self.slots[index].worker.close()

    def spent(self) -> Mapping[int, Reading]:
        """Return, by worker, its seconds by kind of work, and those in which a core ran it."""
        return {i: slot.clock.reading()._replace(cpu=slot.cpu) for i, slot in self.slots.items()}
