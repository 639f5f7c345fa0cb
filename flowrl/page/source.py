"""What a page shows of a run: read by the server when a page asks, never sent by the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Protocol

from flowrl.core.controls import Controls
from flowrl.core.events import Ended, Restarted, Warned
from flowrl.core.profile import Profile
from flowrl.graph.drawing import drawing
from flowrl.graph.plan import Plan
from flowrl.observe.history import History
from flowrl.page.moment import moment, without_nan
from flowrl.page.past import evenly, past_moment, past_of

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


class Source(Protocol):
    """A run, as a page sees it."""

    def facts(self) -> dict[str, Any]:
        """Return what never changes, as plain data."""

    def title(self) -> tuple[str, str]:
        """Return what the run is called, and what it does, in a word."""

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return what is new since a moment as plain data, and what a page has then."""

    def past(self) -> list[dict[str, Any]]:
        """Return when each moment was that is remembered of the run."""

    def past_moment(self, number: int) -> dict[str, Any] | None:
        """Return what the run did at one of these moments; None if there is none of this index."""

    def control(self, verb: str) -> bool:
        """Do what a page asks of the run, one of `VERBS`; return whether that can be done."""


class LiveRun:
    """The source of a run of this process. It is an observer of the run, for its events.

    Args:
        plan: the plan of the run.
        rows: returns the rows so far.
        profile: returns the run's profile so far; any thread may call it.
        controls: by which it is paused and stopped; None for a run that nobody controls.
        history: where its time went, over time; by default nothing is remembered.
    """

    kinds: ClassVar[tuple[type, ...]] = (Restarted, Warned, Ended)

    def __init__(
        self,
        plan: Plan,
        rows: Callable[[], Sequence[Mapping[str, float]]],
        profile: Callable[[], Profile],
        controls: Controls | None = None,
        history: History | None = None,
    ) -> None:
        self.plan, self.rows, self.profile = plan, rows, profile
        self.controls = controls
        self.history = history or History()
        self.events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self.number = 0
        """The number of the newest event."""
        self.state = "running"
        """``running``, or the reason for which it ended."""
        self._profiles: deque[tuple[float, Profile]] = deque()
        self._now: dict[str, Any] = {}
        self._lock = Lock()

    def __call__(self, event: Any) -> None:
        """Keep an event of the run."""
        kind = type(event).__name__.lower()
        about = {
            "text": text_of({"event": kind, **event._asdict()}),
            "kind": kind,
            "time": time.time(),
        }
        with self._lock:
            self.number += 1
            self.events.append({"number": self.number, **about})
            if isinstance(event, Ended):
                self.state = event.reason

    def facts(self) -> dict[str, Any]:
        """Return the graph and its plan."""
        verbs = VERBS if self.controls is not None else ()
        return {"graph": drawing(self.plan.graph), "plan": str(self.plan), "verbs": verbs}

    def title(self) -> tuple[str, str]:
        """Return the name of the graph, and what the run does."""
        with self._lock:
            return self.plan.graph.name, self._state()

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return new rows and events, and what the run does now."""
        rows = self.rows()
        begin = cursor.rows
        # A run that lost a process goes back to its newest snapshot, and makes its rows again.
        again = begin > len(rows)
        new = rows[0 if again else begin : len(rows)]
        with self._lock:
            events = [event for event in self.events if event["number"] > cursor.events]
            found = {
                "state": self._state(),
                "fresh": cursor == Cursor(),
                "again": again or cursor == Cursor(),
                "rows": thinned(new, MOST_ROWS),
                "count": len(rows),
                "events": events,
                "now": self._moment(),
                "past": len(self.history.entries()),
            }
            return Cursor(len(rows), self.number), without_nan(found)

    def past(self) -> list[dict[str, Any]]:
        """Return when each moment was that is remembered of the run."""
        return past_of(self.history.entries())

    def past_moment(self, number: int) -> dict[str, Any] | None:
        """Return what the run did at one of these moments.

        Args:
            number: its index; for any other number the moment is None.
        """
        return past_moment(self.history.entries(), self.rows(), number)

    def _state(self) -> str:
        """Return what the run does, in a word. Needs the lock."""
        paused = self.controls is not None and self.controls.paused
        return "paused" if paused and self.state == "running" else self.state

    def control(self, verb: str) -> bool:
        """Pause, stop or keep the run, and return whether that can be done.

        Args:
            verb: one of `VERBS`.
        """
        if self.controls is None or self.state != "running" or verb not in VERBS:
            return False
        getattr(self.controls, verb)()
        return True

    def _moment(self) -> dict[str, Any]:
        """Return what the run does now. It is measured once a second, however many pages ask."""
        now = time.monotonic()
        profiles = self._profiles
        # A run that has ended measures nothing any more.
        if self._now and (self.state != "running" or now - profiles[-1][0] < 1.0):
            return self._now
        profiles.append((now, self.profile()))
        while len(profiles) > 2 and now - profiles[1][0] >= WINDOW:
            profiles.popleft()
        newest = profiles[-1][1]
        part = newest - profiles[0][1] if len(profiles) > 1 else newest
        # Where no row closed meanwhile, the whole run says more than an empty part of it.
        self._now = moment(part if part.env_steps else newest)
        return self._now


def thinned(rows: Sequence[Mapping[str, float]], most: int) -> list[dict[str, float]]:
    """Return at most about so many rows, evenly spread and the last one among them."""
    return [dict(row) for row in evenly(rows, most)]


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
