"""Clocks of threads: every instant of a thread belongs to one node and one kind of work."""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import ContextDecorator, suppress
from pathlib import Path
from time import perf_counter, time
from types import MappingProxyType
from typing import Any, NamedTuple

from flowrl.core.spans import SPANS, Mark, Span, SpanLog, Spans

KINDS = (
    "start",
    "reset",
    "step",
    "inference",
    "transfer",
    "waiting",
    "blocked",
    "concat",
    "replay",
    "update",
    "weight sync",
    "evaluation",
    "other",
    "paused",
    "outside",
)
"""The kinds of work.

``start`` is making environments, processes and programs; ``waiting`` is waiting for something to
do; ``blocked`` is waiting for capacity downstream; ``paused`` is standing still for a debugger;
``outside`` is the time between rows, in the code that runs the graph.
"""
IDLE = ("waiting", "blocked", "paused", "outside")
"""The kinds in which a thread does no work of the graph."""
TRACE = "FLOWRL_TRACE"
"""The environment variable that makes clocks keep spans, if it is not empty.

It holds for this process and for those that a run starts.
"""
OF_DRIVER = "FLOWRL_CLOCK"
"""The environment variable by which processes of a run know the driver's `ahead`."""
AHEAD = time() - perf_counter()
"""Seconds to add to times of this process to get the seconds since 1970, when it began."""


def ahead() -> float:
    """Return the seconds to add to times of this process to get the seconds since 1970.

    Processes of one machine share `time.perf_counter`, so they take the driver's number: one that
    is started after the machine's clock was set would else be hours beside the others in a trace.
    """
    boot, _, seconds = os.environ.get(OF_DRIVER, "").partition(" ")
    return float(seconds) if boot and boot == _boot() else AHEAD


def _boot() -> str:
    """Return what identifies this machine since it was started; empty where nothing does."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


Spent = Mapping[tuple[str, str], float]
"""Seconds by node (empty where none is at work) and kind of work."""


class Reading(NamedTuple):
    """The state of a clock: the seconds so far, and the spans since its last reading, if any."""

    spent: Spent = MappingProxyType({})
    """The seconds so far, by node and kind of work."""
    spans: Spans = Spans()
    """The spans and marks since the last reading; empty where the clock keeps none."""
    ahead: float = 0.0
    """`ahead` of the clock's process."""
    cpu: float = math.nan
    """The seconds so far in which a core ran the thread; NaN where they were not measured."""


class Clock:
    """Count of the seconds of one thread or process, by node and kind of work.

    Where `TRACE` is set, `spans` holds the last `SPANS` times that it counted, one by one.

    Args:
        kind: the kind of work at first.
        since: the time of `time.perf_counter` from which it counts; None for now.
    """

    def __init__(self, kind: str, since: float | None = None) -> None:
        self.stack = [kind]
        self.node = ""
        self.slot = ("", kind)
        """The node and kind to which the current time belongs."""
        self.spent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.since = perf_counter() if since is None else since
        self.spans = SpanLog(self.since) if os.environ.get(TRACE) else None

    def at(self, node: str) -> None:
        """Count the time from now on for this node."""
        # This repeats `_count`, because a call makes it a third slower: it runs twice for each hop.
        now = perf_counter()
        self.spent[self.slot] += now - self.since
        if self.spans is not None:
            self.spans.add(self.slot, now)
        self.since, self.node, self.slot = now, node, (node, self.stack[-1])

    def enter(self, kind: str) -> None:
        """Count the time from now on as this kind of work."""
        self._count(self.node, kind)
        self.stack.append(kind)

    def leave(self) -> None:
        """Count the time from now on as the kind of work before the last `enter`."""
        self.stack.pop()
        self._count(self.node, self.stack[-1])

    def _count(self, node: str, kind: str) -> None:
        """Count the time up to now, and from now on for this node and kind."""
        now = perf_counter()
        self.spent[self.slot] += now - self.since
        if self.spans is not None:
            self.spans.add(self.slot, now)
        self.since, self.slot = now, (node, kind)

    def move(self, seconds: float, old: str, new: str) -> None:
        """Count some of this node's seconds of one kind as another kind."""
        self.spent[self.node, old] -= seconds
        self.spent[self.node, new] += seconds

    def started(self, began: float) -> None:
        """Count what this clock did not count from `began` up to now as ``start``."""
        now = perf_counter()
        self.spent["", "start"] += now - began - sum(self.spent.values())
        self.since = now

    def until(self) -> float:
        """Return the time up to which it counts: now, or when time outside began that is not over.

        Until somebody asks for another row, that holds nothing up, be it a user who reads the rows
        at a prompt.
        """
        slot, since = self.slot, self.since
        return since if slot[1] == "outside" else perf_counter()

    def read(self) -> Spent:
        """Return the seconds by node and kind, up to `until`; any thread may call this."""
        # Copied first: the thread of this clock may go on counting meanwhile.
        slot, since, spent = self.slot, self.since, self.spent.copy()
        if slot[1] != "outside":
            spent[slot] += perf_counter() - since
        return dict(spent)

    def mark(self, what: str, where: str, item: Any = None) -> None:
        """Record that an item was handed on, where spans are kept.

        Args:
            what: the event, one of those of `Mark`.
            where: the queue, or the process of the worker.
            item: the item; its identity is recorded.
        """
        if self.spans is not None:
            # The identity of the item links the mark of its put to that of its take.
            self.spans.marks.append(Mark(self.node, what, where, perf_counter(), id(item)))

    def reading(self) -> Reading:
        """Return the seconds so far, and the spans since the last reading: each span only once."""
        spent = self.read()
        return Reading(spent, self.spans.take() if self.spans else Spans(), ahead())


EPOCHS: deque[Span] = deque(maxlen=SPANS)
"""The last epochs of updates in this process, until they are fetched."""
_epoch_start = [0.0]


def update_begins() -> None:
    """Count the epochs that end from now on as those of another update."""
    _epoch_start[0] = perf_counter()


def epoch_ended(number: Any, _: Any) -> None:
    """Record the end of an epoch; called from within an update, where spans are kept.

    Args:
        number: the index of the epoch in its update, from 0.
    """
    now = perf_counter()
    EPOCHS.append(Span("", f"epoch {int(number) + 1}", _epoch_start[0], now))
    _epoch_start[0] = now


def traced() -> dict[str, str]:
    """Return the environment variables for clocks of a process that is about to be started."""
    return {TRACE: os.environ.get(TRACE, ""), OF_DRIVER: f"{_boot()} {ahead()}"}


def without_waiting(spent: Spent, seconds: float) -> Spent:
    """Return the seconds by node and kind without so many of those of waiting.

    >>> without_waiting({("", "waiting"): 5.0, ("", "step"): 1.0}, 3.0)
    {('', 'waiting'): 2.0, ('', 'step'): 1.0}
    """
    left, found = seconds, dict(spent)
    for (node, kind), waited in spent.items():
        if kind == "waiting":
            taken = min(max(left, 0.0), waited)
            found[node, kind] = waited - taken
            left -= taken
    return found


def by_kind(spent: Spent) -> dict[str, float]:
    """Return the seconds by kind of work, added up over nodes."""
    seconds_by_kind: defaultdict[str, float] = defaultdict(float)
    for (_, kind), seconds in spent.items():
        seconds_by_kind[kind] += seconds
    return dict(seconds_by_kind)


class _OfThread(threading.local):
    """The clock of each thread."""

    def __init__(self) -> None:
        self.clock = Clock("outside")


_of_thread = _OfThread()


def here() -> Clock:
    """Return the clock of this thread."""
    return _of_thread.clock


class Work(ContextDecorator):
    """A kind of work that counts towards the clock of the thread.

    It counts the block in ``with STEP: ...``, and each call of a function that is marked ``@STEP``.

    Args:
        kind: one of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        _of_thread.clock.enter(self.kind)

    def __exit__(self, *_: object) -> None:
        _of_thread.clock.leave()


class UnlessSaid(Work):
    """A kind of work that counts only where the code around has not said what it does."""

    def __enter__(self) -> None:
        said = _of_thread.clock.stack[-1]
        _of_thread.clock.enter(self.kind if said == OTHER.kind else said)


class By:
    """Context in which another clock counts for this thread: ``with By(clock): ...``.

    Args:
        clock: the clock that counts in the block.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __enter__(self) -> None:
        self.before, _of_thread.clock = _of_thread.clock, self.clock

    def __exit__(self, *_: object) -> None:
        _of_thread.clock = self.before


(
    START,
    RESET,
    STEP,
    INFERENCE,
    TRANSFER,
    WAITING,
    BLOCKED,
    CONCAT,
    REPLAY,
    UPDATE,
    WEIGHTS,
    EVALUATION,
    OTHER,
    PAUSED,
) = map(Work, KINDS[:-1])
COMPUTING = UnlessSaid("update")
"""Pure functions: an update, unless a handle says that they step environments or sample."""
