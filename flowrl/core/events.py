"""The events of a run, and the stream that brings them to observers. Nothing else reports."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from flowrl.core.items import Row, bytes_of, steps_of


class Started(NamedTuple):
    """Everything is open and the first pass begins."""

    plan: Any
    """The graph's plan."""
    profile: Callable[[], Any]
    """Where the time went so far, a `Profile`; any thread may ask, at any time."""


class Took(NamedTuple):
    """A node is about to take an item (None at a root). Only for observers that are `live`."""

    node: str
    source: str | None
    item: Any


class OperatorRan(NamedTuple):
    """A node was advanced once.

    JAX computes asynchronously, so the seconds are those of this thread: they hold what a node waited for, not all that it set going.
    """

    node: str
    seconds: float
    """Its own, without those of the nodes behind it."""
    steps: int
    """In the item that it yielded."""
    bytes: int
    """Of that item's arrays."""
    item: Any
    """What it yielded, None at the end of its step. Only those observers that are `live` are given it, for it may be large."""


class QueueLevel(NamedTuple):
    """An item was put into a queue or taken from it, which now holds so many."""

    queue: str
    level: int
    capacity: int


class Dropped(NamedTuple):
    """An item that stood or was put into a queue was dropped: there was no room, or it was too old."""

    queue: str
    steps: int


class WeightsSent(NamedTuple):
    """A version of weights was published to runners."""

    resource: str
    version: int
    bytes: int


class Restarted(NamedTuple):
    """A worker was started anew."""

    resource: str
    worker: int
    because: str
    lost_steps: int


class Updating(NamedTuple):
    """A learner is about to be updated. Only for observers that are `live`."""

    resource: str
    version: int
    """Before the update, which is number `version` + 1."""
    state: Any
    """A copy of the core's: weights, optimiser, loss, target network, and random keys as plain numbers."""
    batch: Any
    settings: dict[str, Any]
    """How it is used: ``epochs``, ``minibatch`` in steps, ``shuffle``."""
    core: Any
    """The learner's pure functions, with its policy, spaces, loss and optimiser."""


class Updated(NamedTuple):
    """A learner was updated. Only for observers that are `live`."""

    resource: str
    version: int
    """Before the update, as `Updating` told it."""
    trained: Any


class RowClosed(NamedTuple):
    """A Row closed."""

    row: Row


class Warned(NamedTuple):
    """Something is odd, and the run goes on."""

    text: str


class Ended(NamedTuple):
    """The run is over: why (``until``, ``steps``, ``closed``, ``interrupted`` or ``failed``), and the error if it failed."""

    reason: str
    error: BaseException | None = None


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
"""Events that are dropped, and counted, where observers can't keep up."""
MOST = 10_000
"""How many events wait for observers before that."""
TELL_SECONDS = 0.1
"""How long events that come in masses may wait for observers."""
CLOSING_SECONDS = 5.0
"""How long observers may take to end."""


class Observer(Protocol):
    """Takes the events of the kinds that it names.

    It does so in a thread of its own, so that it never holds the run up, unless it says ``live = True``: then at once, where the event happens.
    One that needs more than `CLOSING_SECONDS` to end says so: ``patience = 60.0``.
    """

    @property
    def kinds(self) -> tuple[type, ...]:
        """The events that it takes."""

    def __call__(self, event: Any) -> None:
        """Take one. An error here switches the observer off and never stops the run."""


class Tap:
    """An observer made of a function, which is told at once."""

    live = True

    def __init__(self, tell: Callable[[Any], None], *kinds: type) -> None:
        self.tell = tell
        self.kinds = kinds

    def __call__(self, event: Any) -> None:
        """Pass it on."""
        self.tell(event)


class Stream:
    """Brings events to observers. With nobody listening for a kind, nothing is built and nothing is called."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._live: dict[type, list[Observer]] = {}
        self._later: dict[type, list[Observer]] = {}
        for observer in observers:
            for kind in observer.kinds:
                (
                    self._live if getattr(observer, "live", False) is True else self._later
                ).setdefault(kind, []).append(observer)
        self._waiting: deque[Event | None] = deque()
        self._wake, self._starting = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._lost = 0
        self.silent = False
        """Whether nothing is told: see `muted`."""
        self.took = Took in self._live
        """Whether anybody listens for `Took`."""
        self.ran = self.wants(OperatorRan)
        """Whether anybody listens for `OperatorRan`."""
        self.levels = self.wants(QueueLevel)
        """Whether anybody listens for `QueueLevel`."""

    def wants(self, kind: type) -> bool:
        """Whether anybody listens for this kind."""
        return kind in self._live or kind in self._later

    def emit(self, event: Event) -> None:
        """Bring one event to all who listen for its kind."""
        kind = type(event)
        if self.silent:
            return
        if kind in self._live:
            self._tell(self._live[kind], event)
        if kind in self._later:
            self._leave(event, kind in MANY)

    def _leave(self, event: Event, many: bool) -> None:
        """Leave an event to the thread of the observers."""
        waiting = len(self._waiting)
        if many and waiting >= MOST:
            self._lost += 1
            return
        self._waiting.append(event)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="flowrl observers", daemon=True
                    )
                    self._thread.start()
        if (
            not many or waiting == MOST // 2
        ):  # to wake it for each of many would cost the run more than all else
            self._wake.set()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Meanwhile nothing is told: a program is traced, and what it will do does not happen yet."""
        before = self.took, self.ran, self.levels
        self.silent, self.took, self.ran, self.levels = True, False, False, False
        try:
            yield
        finally:
            self.silent, (self.took, self.ran, self.levels) = False, before

    def advanced(self, node: str, seconds: float, item: Any) -> None:
        """Tell that a node was advanced."""
        event = OperatorRan(node, seconds, steps_of(item), bytes_of(item), item)
        if OperatorRan in self._live:
            self._tell(self._live[OperatorRan], event)
        if OperatorRan in self._later:
            self._leave(event._replace(item=None), many=True)

    def close(self) -> None:
        """Let every observer take what is waiting for it."""
        if self._lost:
            self.emit(
                Warned(f"observers could not keep up, so {self._lost:,} events were not told")
            )
        if self._thread is not None:
            self._waiting.append(None)
            self._wake.set()
            self._thread.join(
                max(
                    [
                        CLOSING_SECONDS,
                        *(
                            getattr(o, "patience", 0.0)
                            for each in self._later.values()
                            for o in each
                        ),
                    ]
                )
            )
            self._thread = None

    def _work(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(TELL_SECONDS)
            self._wake.clear()
            while self._waiting:  # also behind the sign to end: an observer that fails with the last event is told of, too
                event = self._waiting.popleft()
                if event is None:
                    closing = True
                else:
                    self._tell(self._later[type(event)], event)

    def _tell(self, listeners: list[Observer], event: Event) -> None:
        for observer in tuple(listeners):
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer must never end a run
                self._switch_off(observer, error)

    def _switch_off(self, observer: Observer, error: Exception) -> None:
        for listeners in (*self._live.values(), *self._later.values()):
            listeners[:] = [o for o in listeners if o is not observer]
        self.emit(
            Warned(
                f"observer {type(observer).__name__} failed and is switched off: {type(error).__name__}: {error}"
            )
        )
