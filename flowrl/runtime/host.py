"""What runs in an actor that workers share: each of them in a thread of its own."""

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
        self.idle = time.time()
        self.worker: Any = None


class Host:
    """The actor: a process for some of the workers of a resource, each in a thread of its own."""

    def __init__(
        self, make: bytes, context: DriverContext, mine: Sequence[int], variables: Mapping[str, Any]
    ) -> None:
        began = perf_counter()

        def begin() -> None:
            context.enter(variables)
            jax.config.update(
                "jax_cpu_enable_async_dispatch", False
            )  # an act is over sooner than another thread takes it up
            self.make = from_driver(make)  # which may need what the context brings

        self.problem = problem_of(begin)
        self.slots = {index: Slot(began) for index in mine}

    def call(self, index: int, restart_count: int, asked: float, method: str, *args: Any) -> Any:
        """Call a method of an incarnation of a worker, as it was asked to at a time."""
        slot, now = self.slots[index], time.time()
        slot.clock.move(
            min(max(now - max(asked, slot.idle), 0.0), now - slot.idle), "waiting", "transfer"
        )  # it was on its way meanwhile
        try:
            with By(slot.clock), OTHER, on_this_node(self.problem):
                if slot.restart_count != restart_count:
                    with START:
                        self._renew(slot, index, restart_count)
                return getattr(slot.worker, method)(*args)
        finally:
            slot.idle = time.time()

    def _renew(self, slot: Slot, index: int, restart_count: int) -> None:
        if slot.worker is not None:
            with suppress(Exception):
                slot.worker.close()
        slot.worker, slot.restart_count = self.make(index, restart_count), restart_count

    def call_apart(self, *args: Any) -> tuple[Any, Packed]:
        """The same, with what is large apart from the rest."""
        tree, arrays = dig(self.call(*args), 2)
        return tree, Packed(arrays)

    def close(self, index: int) -> None:
        """Close a worker."""
        if self.slots[index].worker is not None:
            self.slots[index].worker.close()

    def spent(self) -> Mapping[int, Reading]:
        """By worker: its seconds by kind of work."""
        return {index: slot.clock.reading() for index, slot in self.slots.items()}
