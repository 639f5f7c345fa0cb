"""What every runtime shares: a session that runs passes, the Rows made of what the clock closed, and the audit."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import jax
import numpy as np

from flowrl.errors import NotFinite
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Hook, Ledger, Loop
from flowrl.graph.site import Place
from flowrl.items import Batch, Row, Tally, Trained


class Runtime(Protocol):
    """A way to run a graph."""

    def open(self, graph: Graph, seed: int, hook: Hook | None = None) -> Session:
        """Make the resources and be ready for the first pass."""


class RowMaker:
    """Makes Rows: the running totals, which live here and nowhere else, and the means since the last Row."""

    def __init__(self, graph: str, started: float) -> None:
        self.graph = graph
        self.started = self.last = started
        self.totals = dict.fromkeys(("row", "env_steps", "trained_steps", "updates", "gradient_steps", "episodes"), 0)

    def row(self, tally: Tally) -> Row:
        """The next Row. Waits for the device.

        Raises:
            NotFinite: an update since the last Row gave NaN or infinity.
        """
        tally = jax.device_get(tally)
        updates = [dict(zip(u.metrics.names, map(float, u.metrics.values), strict=True)) for u in tally.updates]
        self._check(updates)
        names = dict.fromkeys(name for u in updates for name in u)
        metrics = {name: float(np.mean([u[name] for u in updates if name in u])) for name in names}
        for name in ("bad", "gradient_steps"):
            metrics.pop(name, None)
        told = dict(tally.episodes)
        steps = int(told.pop("env_steps"))
        totals = self.totals
        totals["row"] += 1
        totals["env_steps"] += steps
        totals["episodes"] += int(told.pop("episodes"))
        totals["trained_steps"] += sum(u.steps for u in tally.updates)
        totals["updates"] += len(updates)
        totals["gradient_steps"] += sum(int(u["gradient_steps"]) for u in updates)
        lags = np.array([u.lag for u in tally.updates], float).reshape(-1, 2)
        now = time.perf_counter()
        passed, self.last = max(now - self.last, 1e-9), now
        return Row(
            {
                **totals,
                "return_mean": float(told.pop("return_mean")),
                "length_mean": float(told.pop("length_mean")),
                "seconds": now - self.started,
                "steps_per_second": steps / passed,
                "lag_mean": float(lags[:, 0].mean()) if len(lags) else math.nan,
                "lag_max": float(lags[:, 1].max()) if len(lags) else math.nan,
                "loss": metrics.pop("loss", math.nan),
                **metrics,
                **{k: float(v) for k, v in told.items()},
            }
        )

    def _check(self, updates: list[dict[str, float]]) -> None:
        for number, update in enumerate(updates, self.totals["updates"] + 1):
            if update["bad"]:
                raise NotFinite(
                    f"update {number} gave a loss or weights that are not finite (loss {update['loss']}); the weights were left as they were "
                    "before it. Usual causes: a learning rate too high, rewards too large, a division by zero in a loss",
                    self.graph,
                )


@dataclass(frozen=True)
class Edge:
    """One edge in the audit: items and steps that were put onto it, and those that its node took and finished with."""

    before: str
    after: str
    put: int
    got: int
    put_steps: int
    got_steps: int


@dataclass(frozen=True)
class Audit:
    """The conservation audit: what was put onto each edge was taken and gone through. What a node does inside is not compared."""

    edges: tuple[Edge, ...]
    held_steps: dict[str, int]
    """By node: the steps that it holds for its next item."""

    @property
    def closed(self) -> bool:
        """Whether every edge gave what was put onto it."""
        return all((e.put, e.put_steps) == (e.got, e.got_steps) for e in self.edges)

    def __str__(self) -> str:
        lines = [f"{'edge':<24} {'items put':>12} {'got':>12} {'steps put':>14} {'got':>14} {'held behind':>12}"]
        for e in self.edges:
            name = f"{e.before} -> {e.after}"
            lines.append(f"{name:<24} {e.put:>12,} {e.got:>12,} {e.put_steps:>14,} {e.got_steps:>14,} {self.held_steps.get(e.after, 0):>12,}")
        return "\n".join([*lines, "the audit closes" if self.closed else "THE AUDIT DOES NOT CLOSE"]) + "\n"


def audit(ledger: Ledger, loop: Loop) -> Audit:
    """The audit of all passes so far."""
    held = {}
    for name, state in loop.states.items():
        items = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Batch | Trained))
        if steps := sum(x.steps for x in items if isinstance(x, Batch)):
            held[name] = steps
    edges = (Edge(*e, ledger.put[e], ledger.got[e], ledger.put_steps[e], ledger.got_steps[e]) for e in ledger.put)
    return Audit(tuple(edges), held)


class Session:
    """A graph at work in one runtime: opened resources, the stage loop, and the Rows so far."""

    def __init__(self, graph: Graph, place: Place, hook: Hook | None = None, stop: Callable[[], None] | None = None) -> None:
        """Open the resources of `place`. `stop`: ends what the runtime started, once they are closed."""
        self.place = place
        self.stop = stop
        self.rows = RowMaker(graph.name, time.perf_counter())
        self.interrupted = False
        """Whether an interrupt came that was not raised yet."""
        try:
            self.loop = Loop(graph.name, graph.nodes, place.open(), place.site, place.ledger, hook)
        except BaseException as error:
            noting(error, self.close)()
            raise

    def __iter__(self) -> Iterator[Row]:
        """Rows without end; each one after the pass that closed it has run to its end.

        An interrupt (Ctrl-C) is raised between passes; a second one at once.
        """
        while True:
            with interrupts_wait() as pressed:
                tallies = self.loop.run_pass()
            self.interrupted = pressed()
            for tally in tallies:
                yield self.rows.row(tally)
            self.raise_interrupt()

    def raise_interrupt(self) -> None:
        """Raise the interrupt that was held back, if there is one."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    def handle(self, name: str) -> Any:
        """The handle of a resource; its state may be read between passes."""
        return self.place.handles[name]

    def counts(self) -> Counter[str]:
        """What the nodes did so far, summed over them: the counters that the plan predicts."""
        return sum((c for (node, _), c in self.place.ledger.counts.items() if node), Counter())

    def audit(self) -> Audit:
        """The conservation audit so far."""
        return audit(self.place.ledger, self.loop)

    def close(self) -> None:
        """Close the resources, then what the runtime started."""
        try:
            self.place.close()
        finally:
            if self.stop is not None:
                self.stop()


def noting(error: BaseException | None, ending: Callable[[], None]) -> Callable[[], None]:
    """`ending`, whose own failure only becomes a note where there is an `error` already: the first one is the one to see."""

    def end() -> None:
        try:
            ending()
        except Exception as later:
            if error is None:
                raise
            error.add_note(f"and then {type(later).__name__}: {later}")

    return end


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Hold a first Ctrl-C back, so that a pass is never left midway. What it gives tells whether one came; raising is the caller's."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
