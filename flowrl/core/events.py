"""The events of a run, and the stream that passes them to observers.

Nothing else in a run reports.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from flowrl.core.items import Row, bytes_of, steps_of
from flowrl.core.logs import log


class Started(NamedTuple):
    """All resources are open and the first pass begins."""

    plan: Any
    """The graph's plan."""
    profile: Callable[[], Any]
    """Returns where the time went so far, a `Profile`; any thread may call it, at any time."""
    first: Row | None = None
    """The first row of a run that goes on; None if it has no rows yet."""


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

    JAX may compute asynchronously, so the seconds are those of this thread: they hold what a node
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

    It runs in a thread of its own, so that it never holds up the run or another observer. One with
    the attribute ``live = True`` is called in the run's own thread, where the event happens. When a
    run ends, an observer has 5 seconds to take what waits for it, or as many as its attribute
    ``patience`` says; what it has not taken by then is counted in a warning.
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


class Mailbox:
    """Events on their way to one observer, which takes them in order in a thread of its own.

    Args:
        observer: the one that takes them.
        failed: function that is called with the observer and the error that it raised.
    """

    def __init__(self, observer: Observer, failed: Callable[[Observer, Exception], None]) -> None:
        self.observer, self.failed = observer, failed
        self.lost = 0
        """Frequent events that were dropped, because the observer could not keep up."""
        self._waiting: deque[Event | threading.Event | None] = deque()
        """Events, and signs: one that is set once all before it are taken, and None to end."""
        self._at_hand: Event | None = None
        """The event that the observer is taking."""
        self._is_off = False
        """Whether the observer failed, so that it takes no more."""
        self._wake, self._starting = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, event: Event, many: bool) -> None:
        """Leave an event to the observer; `many` says that its kind is frequent."""
        waiting = len(self._waiting)
        if many and waiting >= MOST:
            self.lost += 1
            return
        self._append(event)
        # To wake the thread for each frequent event would cost the run more than all else.
        if not many or waiting == MOST // 2:
            self._wake.set()

    def _append(self, event: Event | threading.Event | None) -> None:
        self._waiting.append(event)
        # The first event starts the thread; any thread of the run may be the one that emits it.
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    name = f"flowrl observer {type(self.observer).__name__}"
                    self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                    self._thread.start()

    def all_taken(self) -> threading.Event:
        """Return what is set once the observer has taken all events until now."""
        sign = threading.Event()
        if self._thread is None:
            sign.set()
        else:
            self._append(sign)
            self._wake.set()
        return sign

    def left(self) -> tuple[int, int]:
        """Return how many events the observer has not taken, and how many of them are rows."""
        events = [self._at_hand, *tuple(self._waiting)]
        kinds = [type(event) for event in events if isinstance(event, tuple)]
        return len(kinds), kinds.count(RowClosed)

    def end(self, seconds: float) -> None:
        """Let the thread end once all events are taken, and wait so many seconds for it."""
        if self._thread is not None:
            self._append(None)
            self._wake.set()
            self._thread.join(seconds)

    def _work(self) -> None:
        """Pass events on until the sign to end."""
        while True:
            self._wake.wait(WAKE_SECONDS)
            self._wake.clear()
            while self._waiting:
                event = self._waiting.popleft()
                if event is None:
                    return
                if isinstance(event, threading.Event):
                    event.set()
                elif not self._is_off:
                    self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        self._at_hand = event
        try:
            self.observer(event)
        except Exception as error:  # noqa: BLE001 - an observer must never end a run
            self._is_off = True
            self.failed(self.observer, error)
        finally:
            self._at_hand = None


class Stream:
    """Passes events to observers; where nobody listens for a kind, no event of it is made.

    Args:
        observers: those who listen, each for its `kinds`.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._live: dict[type, list[Observer]] = {}
        self._threaded: dict[type, list[Mailbox]] = {}
        self._mailboxes: list[Mailbox] = []
        """Those of all observers that are not live."""
        self._changing = threading.RLock()
        """Held by whoever changes who listens, which any thread may do."""
        self.silent = False
        """Whether no events are passed on: see `muted`."""
        self.took = self.ran = self.levels = False
        """Whether anybody listens for `Took`, for `OperatorRan`, and for `QueueLevel`. These are
        looked up for every item, so they are attributes."""
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """Pass events from now on to one observer more. Any thread may call it."""
        with self._changing:
            if getattr(observer, "live", False) is True:
                for kind in observer.kinds:
                    self._live.setdefault(kind, []).append(observer)
            else:
                # One that blocks, such as a service that does not answer, must not hold others up.
                mailbox = Mailbox(observer, self._switch_off)
                self._mailboxes.append(mailbox)
                for kind in observer.kinds:
                    self._threaded.setdefault(kind, []).append(mailbox)
            self._note_kinds()

    def remove(self, observer: Observer) -> None:
        """Pass no more events on to an observer. Any thread may call it."""
        with self._changing:
            for listeners in self._live.values():
                listeners[:] = [other for other in listeners if other is not observer]
            for mailboxes in self._threaded.values():
                mailboxes[:] = [other for other in mailboxes if other.observer is not observer]
            self._note_kinds()

    def wants(self, kind: type) -> bool:
        """Return whether anybody listens for this kind."""
        return bool(self._live.get(kind) or self._threaded.get(kind))

    def _note_kinds(self) -> None:
        """Note for which of the frequent kinds somebody listens. Needs `_changing`."""
        heard = not self.silent
        self.took = heard and bool(self._live.get(Took))
        self.ran = heard and self.wants(OperatorRan)
        self.levels = heard and self.wants(QueueLevel)

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
        """Leave an event to the threads of the observers; `many` says that it is frequent."""
        # A copy, because an observer that fails is removed from the list meanwhile.
        for mailbox in tuple(self._threaded[type(event)]):
            mailbox.put(event, many)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Pass no events on in this context.

        It is for the time in which a program is traced: what it will do does not happen yet.
        """
        with self._changing:
            self.silent = True
            self._note_kinds()
        try:
            yield
        finally:
            with self._changing:
                self.silent = False
                self._note_kinds()

    def advanced(self, node: str, seconds: float, item: Any) -> None:
        """Emit that a node was advanced and yielded an item, in so many seconds of its own."""
        event = OperatorRan(node, seconds, steps_of(item), bytes_of(item), item)
        if OperatorRan in self._live:
            self._deliver(self._live[OperatorRan], event)
        # A waiting event must not keep a large item alive.
        if OperatorRan in self._threaded:
            self._enqueue(event._replace(item=None), many=True)

    def close(self) -> None:
        """Wait until every observer has taken the events that wait for it, or its patience ends.

        What one did not take until then, or could not keep up with, is a warning for the others.
        """
        if lost := sum(mailbox.lost for mailbox in self._mailboxes):
            self.emit(Warned(f"observers could not keep up, so {lost:,} events were not reported"))
        late = self._late()
        for mailbox, seconds in late.items():
            self.emit(Warned(_not_taken(mailbox, seconds)))
        # Where an observer failed with the last event, that warning is passed on, too.
        for mailbox in self._mailboxes:
            mailbox.end(0.0 if mailbox in late else CLOSING_SECONDS)

    def _late(self) -> dict[Mailbox, float]:
        """Wait for all observers at once; return those that were too late, with their patience."""
        began = time.monotonic()
        waited_for = [(mailbox, mailbox.all_taken()) for mailbox in self._mailboxes]
        late: dict[Mailbox, float] = {}
        for mailbox, sign in waited_for:
            patience = max(CLOSING_SECONDS, getattr(mailbox.observer, "patience", 0.0))
            if not sign.wait(max(0.0, began + patience - time.monotonic())):
                late[mailbox] = patience
        return late

    def _deliver(self, listeners: list[Observer], event: Event) -> None:
        # A copy, because an observer that fails is removed from the list meanwhile.
        for observer in tuple(listeners):
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer must never end a run
                self._switch_off(observer, error)

    def _switch_off(self, observer: Observer, error: Exception) -> None:
        """Remove an observer that failed, and warn the others."""
        self.remove(observer)
        name = type(observer).__name__
        reason = f"{type(error).__name__}: {error}"
        self.emit(Warned(f"observer {name} failed and is switched off: {reason}"))


def _not_taken(mailbox: Mailbox, seconds: float) -> str:
    """Describe what an observer did not take in so many seconds after the end of the run."""
    events, rows = mailbox.left()
    return (
        f"observer {type(mailbox.observer).__name__} did not take {events:,} events within "
        f"{seconds:g} s of the end of the run, {rows:,} rows among them, so it lacks these"
    )


def with_warnings(observers: tuple[Observer, ...]) -> tuple[Observer, ...]:
    """Return the observers, with one that logs warnings if none of them takes these.

    So a warning always reaches somebody: standard error, if nobody set `logging` up.
    """
    if any(Warned in observer.kinds for observer in observers):
        return observers
    return (*observers, Tap(lambda event: log(event.text), Warned))
