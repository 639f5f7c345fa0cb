"""What a page shows of a run: read by the server when a page asks, never sent by the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Protocol

from flowrl.core.controls import Controls
from flowrl.core.events import Ended, Observer, Restarted, Warned
from flowrl.core.profile import Profile
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.observe.drawn import drawn
from flowrl.observe.history import Entry, History
from flowrl.observe.looking import plain
from flowrl.observe.sinks import plain_event
from flowrl.page.items import LastItems
from flowrl.page.moment import moment, without_nan
from flowrl.page.past import evenly

WINDOW = 2.0
"""The seconds of a run that the page shows as now."""
MOST_EVENTS = 500
"""The newest events that are kept."""
MOST_ROWS = 1_000
"""The most rows of a run that a page gets; of more, every second, fourth, and so on."""


VERBS = ("pause", "go_on", "stop", "snapshot")
"""What a page may ask of a run: methods of `Controls`."""


class Cursor(NamedTuple):
    """What a page has already."""

    rows: int = 0
    """The rows of the run that it was shown."""
    events: int = 0
    """The number of the newest event that it was shown."""
    begun: int = 0
    """How often the run, or its rows, had begun again: those that it was shown are others since."""


class Source(Protocol):
    """A run, as a page sees it."""

    @property
    def number(self) -> int:
        """The number of the newest event, as far as that is known without a look."""

    every: float
    """The seconds between two looks of a page."""

    def facts(self) -> dict[str, Any]:
        """Return what never changes, as plain data."""

    def summary(self) -> dict[str, Any]:
        """Return a line about the run as plain data.

        These are its ``name``; its ``state``, what it does, in a word; the name of its ``graph``;
        its ``goal`` as text; ``env_steps`` and ``return_mean`` of its last row; and when it was
        ``started``, in seconds since the epoch. What is not known is None.
        """

    def graph(self) -> Graph:
        """Return the graph.

        Raises:
            FlowrlError: it was saved, and can't be read back.
        """

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return what is new since a moment as plain data, and what a page has then."""

    def item(self, node: str) -> dict[str, Any] | None:
        """Return the newest item of a node, empty before there is one; None for an unknown node."""

    def entries(self) -> Sequence[Entry]:
        """Return the history of the run: what it did up to each moment that is remembered."""

    def row(self, number: int) -> Mapping[str, float]:
        """Return the row of this number, counted from 1; the newest if it has not closed yet.

        It is empty where there is none.
        """

    def control(self, verb: str, node: str = "") -> bool:
        """Do what a page asks of the run, or of one of its nodes; return whether that can be done.

        Args:
            verb: one of those that `facts` lists.
            node: the node, empty where the verb concerns none.
        """


class LiveRun:
    """The source of a run of this process. It is an observer of the run, for its events.

    Args:
        plan: the plan of the run.
        rows: returns the rows so far.
        profile: returns the run's profile so far; any thread may call it.
        controls: by which it is paused and stopped; None for a run that nobody controls.
        observe: begins to pass the events of the run to an observer, and returns what ends that;
            None if its items can't be shown.
        history: where its time went, over time; by default nothing is remembered.
        goal: when it ends, as text (default empty).
        started: when it was started, by `time.time`; None where that is not known (the default).
    """

    kinds: ClassVar[tuple[type, ...]] = (Restarted, Warned, Ended)
    every: float = 1.0
    """The seconds between two looks of a page."""

    def __init__(
        self,
        plan: Plan,
        rows: Callable[[], Sequence[Mapping[str, float]]],
        profile: Callable[[], Profile],
        controls: Controls | None = None,
        observe: Callable[[Observer], Callable[[], None]] | None = None,
        history: History | None = None,
        goal: str = "",
        started: float | None = None,
    ) -> None:
        self.plan, self.rows, self.profile = plan, rows, profile
        self.controls, self.goal, self.started = controls, goal, started
        self.verbs: tuple[str, ...] = VERBS if controls is not None else ()
        """What a page may ask of it."""
        self.history = history or History()
        self._drawn = drawn(plan)
        self._items = None if observe is None else LastItems(observe)
        self.events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self.number = 0
        """The number of the newest event."""
        self.state = "running"
        """``running``, or the reason for which it ended."""
        self.begun = 0
        """How often it has begun again, with rows that may differ from those before."""
        self._lock = Lock()
        self._profiles: list[tuple[float, Profile]] = []
        self._now: dict[str, Any] = {}
        self._over = False
        """Whether what was measured is of a run, or a part of it, that is over."""
        self._measuring = Lock()
        """Held while the run is measured. Events come meanwhile, so they must not wait for it."""

    def __call__(self, event: Any, when: float | None = None) -> None:
        """Keep an event of the run.

        Args:
            event: the event.
            when: when it was, by `time.time`; None: now (default None).
        """
        about = event_of(plain_event(event), self._drawn)
        with self._lock:
            self.number += 1
            self.events.append({"number": self.number, "time": when or time.time(), **about})
            if isinstance(event, Ended):
                self.state = event.reason
                self._begin_measuring_again()

    def _begin_measuring_again(self) -> None:
        """Forget what was measured, and the items."""
        self._over = True
        if self._items is not None:
            self._items.stop()

    def begin_again(self) -> None:
        """Show rows and profile from now on as those of a run that has just begun."""
        with self._lock:
            self.begun += 1
            self.state = "running"
            self._begin_measuring_again()

    def facts(self) -> dict[str, Any]:
        """Return the graph and its plan."""
        return {"graph": self._drawn, "plan": str(self.plan), "verbs": self.verbs}

    def graph(self) -> Graph:
        """Return the graph."""
        return self.plan.graph

    def summary(self) -> dict[str, Any]:
        """Return a line about the run."""
        with self._lock:
            state = self._state()
        rows, name = self.rows(), self.plan.graph.name
        about = {"name": name, "state": state, "graph": name, "goal": self.goal}
        return {**about, **ends_at(rows[-1] if rows else {}), "started": self.started}

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return new rows and events, and what the run does now."""
        # Read before the rows: of rows that come from a newer beginning the next look takes all.
        begun = self.begun
        rows = self.rows()
        # Counted once, for the run goes on meanwhile.
        begin, count = cursor.rows, len(rows)
        # A run that lost a process goes back to its newest snapshot, and makes its rows again.
        again = begin > count or cursor.begun != begun
        new = rows[0 if again else begin : count]
        now = self._moment()
        with self._lock:
            events = [event for event in self.events if event["number"] > cursor.events]
            found = {
                "state": self._state(),
                "fresh": cursor == Cursor(),
                "again": again or cursor == Cursor(),
                "rows": [dict(row) for row in evenly(new, MOST_ROWS)],
                "count": count,
                "events": events,
                "now": now,
                "past": len(self.history.entries()),
            }
            return Cursor(count, self.number, begun), without_nan(found)

    def entries(self) -> Sequence[Entry]:
        """Return the history of the run."""
        return self.history.entries()

    def row(self, number: int) -> Mapping[str, float]:
        """Return the row of this number, counted from 1; the newest if it has not closed yet."""
        rows = self.rows()
        return rows[min(number, len(rows)) - 1] if number and rows else {}

    def _state(self) -> str:
        """Return what the run does, in a word. Needs the lock."""
        paused = self.controls is not None and self.controls.paused
        return "paused" if paused and self.state == "running" else self.state

    def control(self, verb: str, node: str = "") -> bool:
        """Pause, stop or keep the run, and return whether that can be done.

        Args:
            verb: one of `VERBS`.
            node: empty, for these concern no node.
        """
        if self.controls is None or self.state != "running" or verb not in self.verbs or node:
            return False
        getattr(self.controls, verb)()
        return True

    def item(self, node: str) -> dict[str, Any] | None:
        """Return the newest item of a node as plain data.

        Args:
            node: its name.

        Returns:
            As `flowrl.observe.looking.plain` returns it; an empty dict before there is one, and
            None where there is no such node.
        """
        if all(node != known["name"] for known in self._drawn["nodes"]):
            return None
        if self._items is None or self.state != "running":
            return {}
        item = self._items.look(node)
        try:
            return {} if item is None else dict(without_nan(plain(item)))
        except RuntimeError:
            # The arrays of an item may be given to an update meanwhile.
            return {}

    def _moment(self) -> dict[str, Any]:
        """Return what the run does now. It is measured once a second, however many pages ask."""
        with self._lock:
            state = self._state()
        with self._measuring:
            now = time.monotonic()
            if self._over:
                self._over, self._profiles, self._now = False, [], {}
            # A run that has ended measures nothing any more.
            goes_on = state in ("running", "paused")
            if self._now and not (goes_on and now - self._profiles[-1][0] >= 1.0):
                return self._now
            newest = self.profile()
            # Where a run was opened again, its clocks began again.
            known = [each for each in self._profiles if each[1].seconds <= newest.seconds]
            self._profiles = [*known, (now, newest)]
            if state == "paused":
                self._profiles = self._profiles[-2:]
                # What it did before it was paused is no bottleneck of now.
                part = newest - self._profiles[0][1]
                self._now = {**moment(part, newest), "bottleneck": None}
            else:
                begin = self._begin(now, newest)
                self._now = moment(newest if begin is newest else newest - begin, newest)
            return self._now

    def _begin(self, now: float, newest: Profile) -> Profile:
        """Return the profile at which what the run does now begins, and forget older ones.

        A row closed since then, for where none did there is little to see: with slow rows, now is
        longer than `WINDOW`. It is `newest` itself, so now is the whole run, where no row closed
        since anybody looked: its first row is long, or its caller holds it between two rows.
        """
        older = [each for each in self._profiles if now - each[0] >= WINDOW]
        recent = self._profiles[len(older) :]
        closed = [each for each in older if each[1].rows < newest.rows]
        begin = closed[-1] if closed else self._profiles[0]
        # Of the others only the newest may be where a later part begins.
        self._profiles = [begin, *(each for each in (*older[-1:], *recent) if each is not begin)]
        return begin[1] if begin[1].rows < newest.rows else newest


def ends_at(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Source.summary` says of the last row of a run."""
    return {name: without_nan(row.get(name)) for name in ("env_steps", "return_mean")}


def event_of(event: Mapping[str, Any], graph: Mapping[str, Any]) -> dict[str, str]:
    """Return an event as a page shows it.

    Args:
        event: the event, as ``events.jsonl`` holds it.
        graph: the graph, as `drawn` returns it.

    Returns:
        Its ``kind``; ``text``, a sentence; ``part``, the node or resource that it is about, empty
        if there is none; and ``worker``, which worker of a resource, as profiles name it.
    """
    kind, text = event["event"], text_of(event)
    address = str(event.get("resource") or event.get("where") or text.partition(":")[0])
    parts = address.removeprefix(f"{graph['name']}.").split(".")
    names = {part["name"] for part in (*graph["nodes"], *graph["resources"])}
    worker = f"{event['resource']}, {event['worker']}" if "worker" in event else ""
    part = parts[0] if parts[0] in names else ""
    return {"kind": kind, "text": text, "part": part, "worker": worker}


def text_of(event: Mapping[str, Any]) -> str:
    """Return an event as a sentence; it is given as ``events.jsonl`` holds it."""
    match event["event"]:
        case "started":
            return f"the run started: {event['plan']}"
        case "ended":
            return f"the run ended: {event['error'] or event['reason']}"
        case "restarted":
            who = f"{event['resource']}, runner {event['worker']}"
            return (
                f"{who} was restarted: {event['because']}; {event['lost_steps']:,} steps were lost"
            )
        case "dropped":
            return f"queues dropped {sum(event['items'].values()):,} items so far"
    return str(event["text"])
