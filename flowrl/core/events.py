"""The events of a run, and the stream that passes them to observers.

Nothing else in a run reports.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from flowrl.core.items import Row, bytes_of, steps_of


class Started(NamedTuple):
    """All resources are open and the first pass begins."""

    plan: Any
    """The graph's plan."""
    profile: Callable[[], Any]
    """Returns where the time went so far, a `Profile`; any thread may call it, at any time."""


class Took(NamedTuple):
    """A node is about to take an item; only for observers that are `live`."""

    node: str
    """The name of the node."""
    source: str | None
    """The node that yielded the item; None at a root."""
    item: Any
    """The item; None at a root."""


class OperatorRan(NamedTuple):
    """A node was advanced once.

    JAX computes asynchronously, so the seconds are those of this thread: they hold what a node
    waited for, not all that it started.
    """

    node: str
    """The name of the node."""
    seconds: float
    """The node's own seconds, without those of the nodes after it."""
    steps: int
    """The steps in the item that it yielded."""
    bytes: int
    """The bytes of that item's arrays."""
    item: Any
    """The item that it yielded; None at the end of its step.

    Only observers that are `live` get it, for it may be large.
    """


class QueueLevel(NamedTuple):
    """An item was put into a queue or taken from it."""

    queue: str
    """The name of the queue's node."""
    level: int
    """The items that the queue holds now."""
    capacity: int
    """The items that the queue may hold."""


class Dropped(NamedTuple):
    """An item in a queue, or on its way into it, was dropped.

    The queue was full, or the item was too old.
    """

    queue: str
    """The name of the queue's node."""
    steps: int
    """The steps in the item."""


class WeightsSent(NamedTuple):
    """A policy version was published to runners."""

    resource: str
    """The name of the runners."""
    version: int
    """The policy version."""
    bytes: int
    """The bytes of the weights."""


class Restarted(NamedTuple):
    """A worker was started again."""

    resource: str
    """The name of the resource that the worker belongs to."""
    worker: int
    """The index of the worker."""
    because: str
    """The reason."""
    lost_steps: int
    """The steps that were lost with the old worker."""


class Updating(NamedTuple):
    """A learner is about to be updated; only for observers that are `live`."""

    resource: str
    """The name of the learner."""
    version: int
    """The policy version before the update, which is number `version` + 1."""
    state: Any
    """A copy of the learner core's state.

    It holds weights, optimiser, loss, target network, and random keys as plain numbers.
    """
    batch: Any
    """The batch of the update."""
    settings: dict[str, Any]
    """``epochs``, ``minibatch_size`` (in steps) and ``shuffle``, by which the batch is used."""
    core: Any
    """The learner's pure functions, with its policy, spaces, loss and optimiser."""


class Updated(NamedTuple):
    """A learner was updated; only for observers that are `live`."""

    resource: str
    """The name of the learner."""
    version: int
    """The policy version before the update, as in `Updating`."""
    trained: Any
    """The result of the update."""


class RowClosed(NamedTuple):
    """A row of results closed."""

    row: Row
    """The row."""


class Warned(NamedTuple):
    """Something is odd, and the run goes on."""

    text: str
    """What is odd, and what can be done."""


class Ended(NamedTuple):
    """The run is over."""

    reason: str
    """``until``, ``steps``, ``closed``, ``interrupted`` or ``failed``."""
    error: BaseException | None = None
    """The error, if the run failed."""


Event = (
    Started
    | Took
    | OperatorRan
    | QueueLevel
    | Dropped
    | WeightsSent
    | Restarted
    | Updating
    | Updated
    | RowClosed
    | Warned
    | Ended
)
MANY: tuple[type, ...] = (OperatorRan, QueueLevel, Dropped, WeightsSent)
"""Frequent events: they are dropped, and counted, where observers can't keep up."""
MOST = 10_000
"""The number of events that may wait for observers before frequent ones are dropped."""
WAKE_SECONDS = 0.1
"""The seconds for which frequent events may wait for observers."""
CLOSING_SECONDS = 5.0
"""The seconds that observers may take to end."""


class Observer(Protocol):
    """A callable that takes the events of the kinds that it names; it needs no base class.

    It runs in a thread of the stream, so that it never holds the run up. One with the attribute
    ``live = True`` is called in the run's own thread, where the event happens. When a run ends, an
    observer has 5 seconds to take what waits for it, or as many as its attribute ``patience`` says.
    """

    @property
    def kinds(self) -> tuple[type, ...]:
        """The kinds of events that it takes, such as ``(RowClosed, Ended)``."""

    def __call__(self, event: Any) -> None:
        """Take one event; an error here switches the observer off and never stops the run."""


class Tap:
    """Observer made of a function, which is called at once.

    Args:
        take: the function that takes an event.
        kinds: the kinds of events that it takes.
    """

    live = True

    def __init__(self, take: Callable[[Any], None], *kinds: type) -> None:
        self.take = take
        self.kinds = kinds

    def __call__(self, event: Any) -> None:
        """Pass the event to the function."""
        self.take(event)


class Stream:
    """Passes events to observers; where nobody listens for a kind, no event of it is made.

    Args:
        observers: those who listen, each for its `kinds`.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._live: dict[type, list[Observer]] = {}
        self._threaded: dict[type, list[Observer]] = {}
        for observer in observers:
            live = getattr(observer, "live", False) is True
            by_kind = self._live if live else self._threaded
            for kind in observer.kinds:
                by_kind.setdefault(kind, []).append(observer)
        self._waiting: deque[Event | None] = deque()
        self._wake, self._starting = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._lost = 0
        self.silent = False
        """Whether no events are passed on: see `muted`."""
        self.took = Took in self._live
        """Whether anybody listens for `Took`."""
        self.ran = self.wants(OperatorRan)
        """Whether anybody listens for `OperatorRan`."""
        self.levels = self.wants(QueueLevel)
        """Whether anybody listens for `QueueLevel`."""

    def wants(self, kind: type) -> bool:
        """Return whether anybody listens for this kind."""
        return kind in self._live or kind in self._threaded

    def emit(self, event: Event) -> None:
        """Pass one event to all who listen for its kind."""
        kind = type(event)
        if self.silent:
            return
        if kind in self._live:
            self._deliver(self._live[kind], event)
        if kind in self._threaded:
            self._enqueue(event, kind in MANY)

    def _enqueue(self, event: Event, many: bool) -> None:
        """Leave an event to the thread of the observers; `many` says that its kind is frequent."""
        waiting = len(self._waiting)
        if many and waiting >= MOST:
            self._lost += 1
            return
        self._waiting.append(event)
        # The first event starts the thread; any thread of the run may be the one that emits it.
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="flowrl observers", daemon=True
                    )
                    self._thread.start()
        # To wake the thread for each frequent event would cost the run more than all else.
        if not many or waiting == MOST // 2:
            self._wake.set()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Pass no events on in this context.

        It is for the time in which a program is traced: what it will do does not happen yet.
        """
        before = self.took, self.ran, self.levels
        self.silent, self.took, self.ran, self.levels = True, False, False, False
        try:
            yield
        finally:
            self.silent, (self.took, self.ran, self.levels) = False, before

    def advanced(self, node: str, seconds: float, item: Any) -> None:
        """Emit that a node was advanced and yielded an item, in so many seconds of its own."""
        event = OperatorRan(node, seconds, steps_of(item), bytes_of(item), item)
        if OperatorRan in self._live:
            self._deliver(self._live[OperatorRan], event)
        # A waiting event must not keep a large item alive.
        if OperatorRan in self._threaded:
            self._enqueue(event._replace(item=None), many=True)

    def close(self) -> None:
        """Wait until every observer has taken the events that wait for it, or its patience ends."""
        if self._lost:
            self.emit(
                Warned(f"observers could not keep up, so {self._lost:,} events were not reported")
            )
        if self._thread is not None:
            # None is the sign to end.
            self._waiting.append(None)
            self._wake.set()
            self._thread.join(self._patience())
            self._thread = None

    def _patience(self) -> float:
        """Return the seconds that the most patient observer may take to end."""
        patience = CLOSING_SECONDS
        for observers in self._threaded.values():
            for observer in observers:
                patience = max(patience, getattr(observer, "patience", 0.0))
        return patience

    def _work(self) -> None:
        """Pass waiting events on, in the thread of the observers, until the sign to end."""
        closing = False
        while not closing:
            self._wake.wait(WAKE_SECONDS)
            self._wake.clear()
            # The rest after the sign to end is passed on, too: where an observer fails with the
            # last event, that is a warning for the others.
            while self._waiting:
                event = self._waiting.popleft()
                if event is None:
                    closing = True
                else:
                    self._deliver(self._threaded[type(event)], event)

    def _deliver(self, listeners: list[Observer], event: Event) -> None:
        # A copy, because an observer that fails is removed from the list meanwhile.
        for observer in tuple(listeners):
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer must never end a run
                self._switch_off(observer, error)

    def _switch_off(self, observer: Observer, error: Exception) -> None:
        """Remove an observer that failed, and warn the others."""
        for listeners in (*self._live.values(), *self._threaded.values()):
            listeners[:] = [other for other in listeners if other is not observer]
        name = type(observer).__name__
        reason = f"{type(error).__name__}: {error}"
        self.emit(Warned(f"observer {name} failed and is switched off: {reason}"))
