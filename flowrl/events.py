"""The events of a run, and the stream that brings them to observers. Nothing else reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from flowrl.items import Row


@dataclass(frozen=True)
class Started:
    """Everything is open and the first pass begins. `plan` is the graph's plan."""

    plan: Any


@dataclass(frozen=True)
class OperatorRan:
    """A node was advanced once: its own seconds, and the item that it yielded (None at the end of its step).

    JAX computes asynchronously, so the seconds are those of this thread: they hold what a node waited for, not all that it set going.
    """

    node: str
    seconds: float
    item: Any


@dataclass(frozen=True)
class RowClosed:
    """A Row closed."""

    row: Row


@dataclass(frozen=True)
class Warned:
    """Something is odd, and the run goes on."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The run is over: why (``until``, ``steps``, ``closed``, ``interrupted`` or ``failed``), and the error if it failed."""

    reason: str
    error: BaseException | None = None


Event = Started | OperatorRan | RowClosed | Warned | Ended


class Observer(Protocol):
    """Takes the events of the kinds that it names."""

    kinds: ClassVar[tuple[type, ...]]

    def __call__(self, event: Any) -> None:
        """Take one. An error here switches the observer off and never stops the run."""


class Stream:
    """Brings events to observers. With nobody listening for a kind, nothing is built and nothing is called."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._by_kind: dict[type, list[Observer]] = {}
        for observer in observers:
            for kind in observer.kinds:
                self._by_kind.setdefault(kind, []).append(observer)

    def wants(self, kind: type) -> bool:
        """Whether anybody listens for this kind."""
        return bool(self._by_kind.get(kind))

    def emit(self, event: Event) -> None:
        """Bring one event to all who listen for its kind."""
        for observer in tuple(self._by_kind.get(type(event), ())):
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer must never end a run
                self._switch_off(observer, error)

    def hook(self) -> Callable[[str, float, Any], None] | None:
        """What the stage loop calls, if anybody listens for `OperatorRan`."""
        if not self.wants(OperatorRan):
            return None
        return lambda node, seconds, item: self.emit(OperatorRan(node, seconds, item))

    def _switch_off(self, observer: Observer, error: Exception) -> None:
        for listeners in self._by_kind.values():
            listeners[:] = [o for o in listeners if o is not observer]
        self.emit(Warned(f"observer {type(observer).__name__} failed and is switched off: {type(error).__name__}: {error}"))
