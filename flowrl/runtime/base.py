"""What every runtime shares: a `Session`, which runs a graph pass by pass and returns its Rows."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, Protocol

from flowrl.core.clock import EPOCHS, UPDATE, By, Spent, ahead, without_waiting
from flowrl.core.events import Stream
from flowrl.core.items import Row
from flowrl.core.keeping import Keeping
from flowrl.core.machine import machine
from flowrl.core.profile import DRIVER, Profile
from flowrl.core.spans import Newest
from flowrl.errors import SaveError, SettingError
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.refs import resource_and_part
from flowrl.graph.site import Place
from flowrl.graph.stages import Make, Turns, loops_of
from flowrl.runtime.audit import Audit, audit
from flowrl.runtime.closing import interrupts_come, interrupts_wait, noting
from flowrl.runtime.rows import RowMaker


class Runtime(Protocol):
    """A way to run a graph; a class of your own needs `open` and no base class."""

    def open(self, plan: Plan, seed: int, stream: Stream | None = None) -> Session:
        """Open the resources and return a session that is ready for its first pass.

        Args:
            plan: plan to run, which holds its graph.
            seed: seed of every random number in the run.
            stream: stream that brings the run's events to its observers; None: nobody listens.
        """


def check_positive(name: str, value: Any, or_none: bool = True) -> None:
    """Refuse a setting that is no whole number of at least 1.

    Args:
        name: of the setting.
        value: of the setting.
        or_none: whether it may be None.

    Raises:
        SettingError: it is something else.
    """
    if value is None and or_none:
        return
    if not isinstance(value, Integral) or value < 1:
        wanted = "a whole number, at least 1 or None" if or_none else "a whole number, at least 1"
        raise SettingError(f"{name} must be {wanted}, got {value!r}")


class Session(Keeping):
    """A graph at work in one runtime: its opened resources and its stage loops; it yields rows."""

    # `keep` has all that lasts of these; profiles are those of the part of the run since it began
    # or was resumed.
    remade = (
        "graph", "place", "per_row", "stop", "rows", "turns", "steps", "began", "worked", "marks",
        "spans", "between_rounds", "interrupted", "pending_rows", "_profile_lock",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        place: Place,
        turns: Callable[[Graph, Make], Turns],
        start: Callable[[], Callable[[], None]] | None = None,
        rows: Any = None,
        threads: int | None = None,
    ) -> None:
        """Open the resources of `place`.

        Args:
            plan: plan to run.
            place: where the resources are opened.
            turns: makes what gives the stages their turns.
            start: starts what the runtime needs, and returns a function that ends it, which is
                called once the resources are closed.
            rows: makes the Rows; a `RowMaker` by default.
            threads: of XLA in this process; None: as many as the plan gives.
        """
        began = self.began = time.perf_counter()
        self.worked = machine()[1]
        """Seconds of all cores of this machine at work before it was opened."""
        graph = self.graph = plan.graph
        self._profile_lock = threading.Lock()
        """Held by whoever reads the time of all processes, and while these processes end."""
        self.place = place
        place.metrics.expect(plan.found.metrics)
        place.threads, place.ahead = threads or plan.threads, plan.ahead
        self.per_row = plan.per_row("sampled_steps") + plan.per_row("most_sampled_steps")
        self.stop = start() if start is not None else None
        self.rows = rows or RowMaker(graph.name, began, plan.learners)
        self.marks = (Profile(), Profile())
        """Where `steady` begins, and the newest profile that was remembered. The second takes the
        place of the first when the age of the run has doubled."""
        self.spans: defaultdict[str, Newest] = defaultdict(Newest)
        """By process: the newest of what it did, in seconds since 1970, if `TRACE` asks for it."""
        self.between_rounds = True
        """Whether no round is under way, none ended by an error, and all its rows are made."""
        self.interrupted = False
        """Whether an interrupt came that was not raised yet."""
        self.pending_rows = 0
        """Rows that are closed and not yet returned."""
        self.steps: int | None = None
        """Environment steps after which no more rows are wanted."""
        # What opened until an error has to be closed again.
        try:
            with place.computing():
                make = partial(loops_of, graph, place.open(), place.site_of, place.ledger)
                self.turns = turns(graph, make)
            self.turns.computing = place.computing
        except BaseException as error:
            noting(error, self.close)()
            raise
        # The clocks were made on the way, so what they have not counted of the opening is added.
        for clock in self.turns.clocks.values():
            clock.started(began)

    def __iter__(self) -> Iterator[Row]:
        """Yield Rows without end, each one after the pass that closed it has run to its end.

        An interrupt (Ctrl-C) is raised between passes; a second one at once.
        """
        try:
            yield from self._rows_without_end()
        finally:
            # After an error nobody can take the rows that closed after the one that raised it.
            self.pending_rows = 0

    def _rows_without_end(self) -> Iterator[Row]:
        while True:
            with interrupts_come():
                self.turns.wait()
            began, dropped_before = self.rows.last, self._dropped()
            self.between_rounds = False
            with interrupts_wait() as pressed, self.place.computing():
                tallies = self.turns.round(self._rows_wanted())
            self.interrupted = pressed()
            # Rows that one round closed share its time and what was dropped in it.
            seconds_each = (time.perf_counter() - began) / max(len(tallies), 1)
            for number, tally in enumerate(tallies, 1):
                self.pending_rows = len(tallies) - number
                closed_at = began + number * seconds_each if len(tallies) > 1 else None
                dropped = self._dropped_until(dropped_before, number / len(tallies))
                # Rows that are not made yet could not be taken after an interrupt.
                with interrupts_wait() as pressed, By(self.turns.clock), UPDATE:
                    row = self.rows.row(tally, closed_at, **dropped)
                self.interrupted = self.interrupted or pressed()
                # Only the last row of a round closes at this moment.
                if not self.pending_rows:
                    self._mark()
                    self.between_rounds = True
                yield row
            self.between_rounds = True
            self.raise_interrupt()

    def _rows_wanted(self) -> float:
        """Return how many more rows reach the goal by the plan; infinity where there is no goal.

        A round need not close more, for these would go beyond it.
        """
        if self.steps is None:
            return math.inf
        steps_left = self.steps - self.rows.totals["env_steps"]
        return max(1, math.ceil(steps_left / max(self.per_row, 1)))

    def _dropped(self) -> dict[str, float]:
        """Return the column of the steps that queues dropped, if the graph has queues."""
        if not self.turns.channels:
            return {}
        # A copy, since other threads count on meanwhile.
        steps = sum(self.place.ledger.dropped_steps.copy().values())
        return {"dropped_steps": float(steps)}

    def _dropped_until(self, before: dict[str, float], share: float) -> dict[str, float]:
        """Return the column of dropped steps at a share of a round, from 0 to 1."""
        now = self._dropped()
        return {name: before[name] + share * (now[name] - before[name]) for name in now}

    def raise_interrupt(self) -> None:
        """Raise the interrupt that was held back, if there is one.

        Raises:
            KeyboardInterrupt: an interrupt came during a pass.
        """
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    @contextmanager
    def handle(self, name: str) -> Iterator[Any]:
        """Yield the handle of a resource, or of a part of one that ``resource.part`` names.

        Its state may be read meanwhile: no stage is within a pass.
        """
        resource, part = resource_and_part(name)
        with self.turns.still(), self.place.computing():
            handle = self.place.handles[resource]
            yield handle.part(part) if part else handle

    def change(self, name: str, work: Callable[[Any], None]) -> None:
        """Change the state of a resource before the first round; of many runs that of each.

        Args:
            name: of the resource.
            work: gets its handle.
        """
        with self.place.computing():
            self.turns.change(lambda: work(self.place.handles[name]))

    def keep(self) -> Any:
        """Return all that lasts of the run. No stage is in a pass."""
        return {"place": self.place.keep(), "turns": self.turns.keep(), "rows": self.rows.keep()}

    @contextmanager
    def kept(self) -> Iterator[Any]:
        """Yield all that lasts of the run, which stays as it is meanwhile, to be encoded.

        A run is kept between two rounds, and never after an error within one.

        Raises:
            SaveError: a stage is within a pass, or failed in one, so something would be missing.
        """
        with self.turns.still() as whole, self.place.computing():
            if not whole:
                raise SaveError("a stage failed, or has not ended what it does")
            yield self.keep()

    def take(self, state: Any) -> None:
        """Go on from what was kept of a run of the same plan, before the first round.

        Raises:
            SaveError: it is not of such a run.
        """
        with self.place.computing():
            self.place.take(state["place"])
            # Stages need what the resources hold.
            self.turns.take(state["turns"])
        self.rows.take(state["rows"])

    def counts(self) -> Counter[str]:
        """Return what the nodes did so far, by the counters that the plan predicts.

        They are summed over the nodes, and over all runs that go on at once.
        """
        total: Counter[str] = Counter()
        # What is counted under no node belongs to the opening of resources, not to the plan.
        # Copies, since the stages' threads count on meanwhile.
        for (node, _), counts in self.place.ledger.counts.copy().items():
            if node:
                total = total + Counter(counts)
        return Counter({name: self.rows.runs * number for name, number in total.items()})

    def audit(self) -> Audit:
        """Return the conservation audit so far.

        Of many runs at once it is that of each of them, since all do the same.
        """
        with self.turns.still():
            return audit(
                self.place.ledger, self.turns.loops, self.turns.channels, self.place.handles
            )

    def profile(self) -> Profile:
        """Return where the time went so far, and what flowed. Any thread may call it."""
        with self._profile_lock:
            return self._profile()

    def _profile(self) -> Profile:
        # Copies throughout, since the stages' threads count on meanwhile.
        handles, ledger, turns = dict(self.place.handles), self.place.ledger, self.turns
        cores, busy = machine()
        seconds = turns.clock.until() - self.began
        # What other programs took was not the same all the time, but only their sum is known.
        busy = (busy - self.worked) * seconds / (time.perf_counter() - self.began)
        spent, cpu = self._read_clocks()
        return Profile(
            seconds,
            self.rows.totals["row"],
            self.rows.totals["env_steps"],
            spent,
            turns.stages(),
            {key: dict(numbers) for key, numbers in ledger.counts.copy().items() if key[0]},
            {edge: (items, ledger.put_steps[edge]) for edge, items in dict(ledger.put).items()},
            {name: (len(channel), channel.capacity) for name, channel in turns.channels.items()},
            {node.name: type(node.op).__name__ for node in self.graph.nodes},
            {name: facts for name, handle in handles.items() if (facts := handle.facts())},
            cores,
            busy,
            tuple(f for handle in handles.values() for f in handle.findings()),
            cpu=cpu,
        )

    def _read_clocks(self) -> tuple[dict[str, Spent], dict[str, float]]:
        """Return, by process, where its time went and the seconds in which cores ran it.

        The spans that came with the readings are kept in `spans`.
        """
        readings = {name: clock.reading() for name, clock in self.turns.clocks.items()}
        # Until somebody asks for another row, other processes wait for no part of the run, and the
        # clocks of the stages stand still: beside them, that would make shares of work too small.
        at_prompt = time.perf_counter() - self.turns.clock.until()
        readings |= {
            name: reading._replace(spent=without_waiting(reading.spent, at_prompt))
            for name, reading in self.place.clocks().items()
        }
        for name, reading in readings.items():
            self.spans[name].add(reading.spans.later(reading.ahead))
        # Epochs are recorded from within compiled updates, outside of any process's clock.
        if EPOCHS:
            epochs = tuple(EPOCHS.popleft().later(ahead()) for _ in range(len(EPOCHS)))
            self.spans["within updates"].add(epochs)
        # Threads of this process compute for one another, so their seconds are known together.
        cpu = {DRIVER: time.process_time()}
        cpu |= {name: r.cpu for name, r in readings.items() if not math.isnan(r.cpu)}
        return {name: reading.spent for name, reading in readings.items()}, cpu

    def steady(self, now: Profile | None = None) -> Profile:
        """Return the profile of the run without its beginning, in which it is compiled.

        It begins after the first row. Once the run is twice as old as it was then, it covers at
        least half of it.

        Args:
            now: the profile at which it ends; that of this moment by default.
        """
        now = now or self.profile()
        return now - self.marks[0] if now.rows > self.marks[0].rows else now

    def _mark(self) -> None:
        """Remember the profile after the first row, and whenever the run's age has doubled."""
        newest = self.marks[1]
        if not newest.rows or time.perf_counter() - self.began >= 2 * newest.seconds:
            now = self.profile()
            self.marks = (newest if newest.rows else now, now)

    def rest(self) -> None:
        """Let every stage end its pass, and start no other."""
        self.turns.close()

    def close(self) -> None:
        """Close the resources, then what the runtime started."""
        try:
            with self._profile_lock:
                self.place.close()
        finally:
            if self.stop is not None:
                self.stop()
