"""What every runtime shares: a session that runs passes, the Rows made of what the clock closed, and the audit."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from types import FrameType
from typing import Any, Protocol

import jax
import numpy as np

from flowrl.core.clock import AHEAD, EPOCHS, SPANS, UPDATE, By, Mark, Span, Spent
from flowrl.core.events import Stream
from flowrl.core.items import Batch, Row, Tally, Trained, steps_of
from flowrl.core.ledger import Ledger
from flowrl.core.metrics import summed
from flowrl.core.profile import Profile, machine
from flowrl.errors import EnvironmentFailed, NotFinite
from flowrl.graph.graph import Graph
from flowrl.graph.loop import Loop
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Handle
from flowrl.graph.site import Place
from flowrl.graph.stages import Channel, Make, Turns, loops_of


class Runtime(Protocol):
    """A way to run a graph."""

    def open(self, plan: Plan, seed: int, stream: Stream | None = None) -> Session:
        """Make the resources and be ready for the first pass."""


class RowMaker:
    """Makes Rows: the running totals, which live here and nowhere else, and the means since the last Row."""

    runs = 1
    """That go on at once."""

    def __init__(self, graph: str, started: float) -> None:
        self.graph = graph
        self.started = self.last = started
        self.totals = dict.fromkeys(
            ("row", "env_steps", "trained_steps", "updates", "gradient_steps", "episodes"), 0
        )

    def row(self, tally: Tally, now: float | None = None, **extra: float) -> Row:
        """The next Row, with `extra` columns; it closed at the time `now`, which is this moment if not given. Waits for the device.

        Raises:
            EnvironmentFailed: an environment gave NaN or infinity since the last Row.
            NotFinite: an update since the last Row gave NaN or infinity.
        """
        if not all(
            isinstance(x, np.ndarray | np.generic | float | int) for x in jax.tree.leaves(tally)
        ):
            tally = jax.device_get(tally)
        told, metered = dict(tally.episodes), summed(tally.metrics)
        env, runner, gone = (int(x) for x in told.pop("broken", (-1, 0, 0)))
        if env >= 0:
            raise EnvironmentFailed(
                f"environment {env}, counted over all runners, which is one of runner {runner}, at its step {gone:,} with its resets, gave an "
                f"observation or a reward that is not finite before row {self.totals['row'] + 1}; mend the environment",
                self.graph,
                env=env,
                runner=runner,
                row=gone - 1,
            )
        updates = [
            dict(zip(u.metrics.names, u.metrics.values.tolist(), strict=True))
            for u in tally.updates
        ]
        self._check(updates)
        names = dict.fromkeys(name for u in updates for name in u)
        metrics = {name: fmean(u[name] for u in updates if name in u) for name in names}
        for name in ("bad", "gradient_steps"):
            metrics.pop(name, None)
        steps = int(told.pop("env_steps"))
        totals = self.totals
        totals["row"] += 1
        totals["env_steps"] += steps
        totals["episodes"] += int(told.pop("episodes"))
        totals["trained_steps"] += sum(u.steps for u in tally.updates)
        totals["updates"] += len(updates)
        totals["gradient_steps"] += sum(int(u["gradient_steps"]) for u in updates)
        lags = [(float(mean), float(most)) for mean, most in (u.lag for u in tally.updates)]
        now = time.perf_counter() if now is None else now
        passed, self.last = max(now - self.last, 1e-9), now
        return Row(
            {
                **totals,
                "return_mean": float(told.pop("return_mean")),
                "length_mean": float(told.pop("length_mean")),
                "seconds": now - self.started,
                "steps_per_second": steps / passed,
                "lag_mean": fmean(mean for mean, _ in lags) if lags else math.nan,
                "lag_max": max((most for _, most in lags), default=math.nan),
                "loss": metrics.pop("loss", math.nan),
                **metrics,
                **{
                    column: x
                    for name, of_one in metered.items()
                    for column, x in of_one.columns(name).items()
                },
                **{k: float(v) for k, v in told.items()},
                **extra,
            }
        )

    def _check(self, updates: list[dict[str, float]]) -> None:
        for number, update in enumerate(updates, self.totals["updates"] + 1):
            if update["bad"]:
                raise NotFinite(
                    f"update {number}, of row {self.totals['row'] + 1}, gave a loss or weights that are not finite (loss {update['loss']}); the "
                    "weights were left as they were before it. Usual causes: too high a learning rate, large rewards, a division by zero in a loss",
                    self.graph,
                    update=number,
                )


@dataclass(frozen=True)
class Amount:
    """Items, and the steps in them."""

    items: int = 0
    steps: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.items + other.items, self.steps + other.steps)


@dataclass(frozen=True)
class Edge:
    """One edge in the audit: what was put onto it, what its node took and finished with, what was dropped, what a queue holds."""

    before: str
    after: str
    put: Amount
    got: Amount
    dropped: Amount
    held: Amount


@dataclass(frozen=True)
class Audit:
    """The conservation audit: on each edge put = got + dropped + held. What a node does inside is not compared."""

    edges: tuple[Edge, ...]
    held_steps: dict[str, int]
    """By node: the steps that it holds for its next item."""
    stocks: dict[str, Any] = field(default_factory=dict)
    """By replay: what came in and what became of it."""

    @property
    def closed(self) -> bool:
        """Whether every edge and every replay accounts for what came in."""
        return all(e.put == e.got + e.dropped + e.held for e in self.edges) and all(
            stock.closed for stock in self.stocks.values()
        )

    def __str__(self) -> str:
        heads = ("items put", "got", "dropped", "held", "steps put", "got", "dropped", "held")
        lines = [f"{'edge':<24}" + "".join(f"{head:>12}" for head in heads)]
        for e in self.edges:
            parts = (e.put, e.got, e.dropped, e.held)
            numbers = (*(p.items for p in parts), *(p.steps for p in parts))
            lines.append(
                f"{f'{e.before} -> {e.after}':<24}" + "".join(f"{n:>12,}" for n in numbers)
            )
        lines += [
            f"{node} holds {steps:,} steps for its next item"
            for node, steps in self.held_steps.items()
        ]
        lines += [f"{name}: {stock}" for name, stock in self.stocks.items()]
        return (
            "\n".join([*lines, "the audit closes" if self.closed else "THE AUDIT DOES NOT CLOSE"])
            + "\n"
        )


def audit(
    ledger: Ledger,
    loops: Sequence[Loop],
    channels: Mapping[str, Channel],
    handles: Mapping[str, Handle],
) -> Audit:
    """The audit of all passes so far."""
    inside = {}
    for loop in loops:
        for name, state in loop.states.items():
            items = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Batch | Trained))
            if steps := sum(x.steps for x in items if isinstance(x, Batch)):
                inside[name] = steps

    def amount(
        items: Counter[tuple[str, str]], steps: Counter[tuple[str, str]], edge: tuple[str, str]
    ) -> Amount:
        return Amount(items[edge], steps[edge])

    edges = []
    for before, after in list(ledger.put):
        edge = (before, after)
        waiting = (
            [item for source, item in channels[after].items if source == before]
            if after in channels
            else []
        )
        edges.append(
            Edge(
                before,
                after,
                amount(ledger.put, ledger.put_steps, edge),
                amount(ledger.got, ledger.got_steps, edge),
                amount(ledger.dropped, ledger.dropped_steps, edge),
                Amount(len(waiting), sum(map(steps_of, waiting))),
            )
        )
    stocks = {name: handle.stock() for name, handle in handles.items()}
    return Audit(
        tuple(edges), inside, {name: stock for name, stock in stocks.items() if stock is not None}
    )


class Session:
    """A graph at work in one runtime: opened resources, the stage loop, and the Rows so far."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        turns: Callable[[Graph, Make], Turns],
        start: Callable[[], Callable[[], None]] | None = None,
        rows: Any = None,
    ) -> None:
        """Open the resources of `place`.

        Args:
            plan: what is to run.
            place: where.
            turns: makes what gives the stages their turns.
            start: starts what the runtime needs, and returns what ends it, once the resources are closed.
            rows: makes the Rows; a `RowMaker` by default.
        """
        began = self.began = time.perf_counter()
        graph = self.graph = plan.graph
        self._looking = threading.Lock()
        """Held by who asks all processes for their time, and while these end."""
        self.place = place
        place.metrics.expect(plan.found.metrics)
        self.per_row = plan.per_row("sampled_steps")
        self.stop = start() if start is not None else None
        self.rows = rows or RowMaker(graph.name, time.perf_counter())
        self.marks = (Profile(), Profile())
        """Where the run was when it was less than half as old, and before that."""
        self.spans: dict[str, deque[Span | Mark]] = {}
        """By process: the last that it did, in seconds since 1970, if `TRACE` says that it is wanted."""
        self.interrupted = False
        """Whether an interrupt came that was not raised yet."""
        self.coming = 0
        """Rows that are closed and not given yet."""
        self.steps: int | None = None
        """Environment steps after which no more rows are wanted."""
        try:
            self.turns = turns(
                graph, partial(loops_of, graph, place.open(), place.site_of, place.ledger)
            )
        except BaseException as error:
            noting(error, self.close)()
            raise
        for clock in self.turns.clocks.values():
            clock.spent["", "start"] += time.perf_counter() - began

    def __iter__(self) -> Iterator[Row]:
        """Rows without end; each one after the pass that closed it has run to its end.

        An interrupt (Ctrl-C) is raised between passes; a second one at once.
        """
        while True:
            self.turns.wait()
            began, before = self.rows.last, self._dropped()
            with interrupts_wait() as pressed:
                tallies = self.turns.round(self._wanted())
            self.interrupted = pressed()
            each = (time.perf_counter() - began) / max(
                len(tallies), 1
            )  # those that one round closed share its time
            for number, tally in enumerate(tallies, 1):
                self.coming = len(tallies) - number
                share = number / len(tallies)
                dropped = {
                    k: before[k] + share * (now - before[k]) for k, now in self._dropped().items()
                }
                with By(self.turns.clock), UPDATE:
                    row = self.rows.row(
                        tally, began + number * each if len(tallies) > 1 else None, **dropped
                    )
                if not self.coming:
                    self._mark()
                yield row
            self.raise_interrupt()

    def _wanted(self) -> float:
        """How many rows there must still be at least."""
        if self.steps is None:
            return math.inf
        return max(
            1, math.ceil((self.steps - self.rows.totals["env_steps"]) / max(self.per_row, 1))
        )

    def _dropped(self) -> dict[str, float]:
        """The steps that queues dropped, in a graph that has any."""
        return (
            {"dropped_steps": float(sum(self.place.ledger.dropped_steps.copy().values()))}
            if self.turns.channels
            else {}
        )

    def raise_interrupt(self) -> None:
        """Raise the interrupt that was held back, if there is one."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    @contextmanager
    def handle(self, name: str) -> Iterator[Any]:
        """The handle of a resource, whose state may be read meanwhile: no stage is within a pass."""
        with self.turns.still():
            yield self.place.handles[name]

    def counts(self) -> Counter[str]:
        """What the nodes did so far, summed over them and over all runs that go on at once: the counters that the plan predicts."""
        total: Counter[str] = sum(
            (c for (node, _), c in list(self.place.ledger.counts.items()) if node), Counter()
        )
        return Counter({name: self.rows.runs * number for name, number in total.items()})

    def audit(self) -> Audit:
        """The conservation audit so far; of many runs at once that of each, for they do the same."""
        with self.turns.still():
            return audit(
                self.place.ledger, self.turns.loops, self.turns.channels, self.place.handles
            )

    def profile(self) -> Profile:
        """Where the time went so far, and what flowed. Any thread may ask."""
        with self._looking:
            return self._profile()

    def _profile(self) -> Profile:
        handles, ledger, turns = dict(self.place.handles), self.place.ledger, self.turns
        cores, busy = machine()
        return Profile(
            time.perf_counter() - self.began,
            self.rows.totals["row"],
            self.rows.totals["env_steps"],
            self._read(),
            turns.stages(),
            {key: dict(numbers) for key, numbers in ledger.counts.copy().items() if key[0]},
            {edge: (items, ledger.put_steps[edge]) for edge, items in dict(ledger.put).items()},
            {name: (len(channel), channel.capacity) for name, channel in turns.channels.items()},
            {node.name: type(node.op).__name__ for node in self.graph.nodes},
            {name: facts for name, handle in handles.items() if (facts := handle.facts())},
            cores,
            busy,
            tuple(f for handle in handles.values() for f in handle.findings()),
        )

    def _read(self) -> dict[str, Spent]:
        """By process: where its time went. What it tells of spans is kept in `spans`."""
        readings = {
            name: clock.reading() for name, clock in self.turns.clocks.items()
        } | self.place.clocks()
        for name, reading in readings.items():
            self.spans.setdefault(name, deque(maxlen=SPANS)).extend(
                x.later(reading.ahead) for x in reading.spans
            )
        if EPOCHS:
            self.spans.setdefault("within updates", deque(maxlen=SPANS)).extend(
                EPOCHS.popleft().later(AHEAD) for _ in range(len(EPOCHS))
            )
        return {name: reading.spent for name, reading in readings.items()}

    def steady(self, now: Profile | None = None) -> Profile:
        """Up to `now` (this moment), the run without its beginning, in which it is compiled: at least half of it, behind the first row."""
        now = now or self.profile()
        return now - self.marks[0] if now.rows > self.marks[0].rows else now

    def _mark(self) -> None:
        """Remember where the run is: behind its first row, and whenever it is twice as old as the last time."""
        before = self.marks[1]
        if not before.rows or time.perf_counter() - self.began >= 2 * before.seconds:
            now = self.profile()
            self.marks = (before if before.rows else now, now)

    def rest(self) -> None:
        """Let every stage end its pass, and no more."""
        self.turns.close()

    def close(self) -> None:
        """Close the resources, then what the runtime started."""
        try:
            with self._looking:
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
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
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
