"""`AsyncRequests`: bounded calls in flight to numbered workers, and their results as they come."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from flowrl.core.clock import TRANSFER, WAITING
from flowrl.core.keeping import Keeping
from flowrl.core.workers import SILENT_SECONDS, Done, Failed
from flowrl.graph.protocols import Future

KEEP_SECONDS = 30.0
"""How long a snapshot waits for all calls to end. What hangs for longer is left out of it."""


@dataclass(frozen=True)
class Request:
    """One call to a worker, and its result to come.

    Args:
        worker: the number of the worker.
        restart_count: how often the worker had been restarted when it was called.
        number: the index of the call among all calls, from 1 on.
        future: the result to come.
        succeeded: function that is called once there is a result that is no error.
    """

    worker: int
    restart_count: int
    number: int
    future: Future
    succeeded: Callable[[], None] = field(repr=False, compare=False)

    def result(self) -> Any:
        """Wait for the result, then return it or raise what the call raised."""
        value = self.future.result()
        self.succeeded()
        return value


class LateError(TimeoutError):
    """A worker let a call wait for too long.

    Args:
        worker: number of the worker.
        seconds: seconds that the call waited.
    """

    def __init__(self, worker: int, seconds: float) -> None:
        super().__init__(f"worker {worker} gave nothing for {seconds:g} s")
        self.worker = worker
        self.seconds = seconds


def whom_to_ask(
    order: Sequence[int], pending: Sequence[int], in_flight: int, most: float
) -> list[int]:
    """Return the workers to call until each has `in_flight` calls, in the order of the calls.

    Workers with the fewest calls come first, and of these the one that was called the longest time
    ago.

    Args:
        order: the workers, first the one that was called the longest time ago.
        pending: by worker, the calls that have no result yet.
        in_flight: calls to each worker at once.
        most: the most calls to start.
    """
    calls: list[int] = []
    waiting = list(order)
    for level in range(in_flight):
        now = [worker for worker in waiting if pending[worker] <= level]
        # Those that are called now were called last.
        waiting = [worker for worker in waiting if worker not in now] + now
        calls += now
    return calls if math.isinf(most) else calls[: int(most)]


def kept_result(future: Any, wait: Callable[..., int | None], seconds: float) -> tuple[bool, Any]:
    """Return whether a call has a result within so many seconds, and the result.

    Args:
        future: the result to come.
        wait: as `AsyncRequests` takes it.
        seconds: how long to wait; a tenth of a second where there is less left.
    """
    # Where it is there already nothing is waited for, nor any random number drawn.
    if not isinstance(future, Done | Failed) and wait([future], max(seconds, 0.1)) is None:
        return False, None
    try:
        return True, future.result()
    except Exception:  # noqa: BLE001 - its caller finds the error once it asks for the result
        return False, None


class AsyncRequests(Keeping):
    """Keeps up to `in_flight` calls to each of `count` workers going, and returns their results.

    Results are returned as they come, those of one worker in order. Nothing polls. A result is
    returned once, and only while the worker has not been restarted since the call: what a replaced
    worker still sends is ignored.

    Args:
        submit: function that starts a call to a worker, given the worker's number.
        wait: function that returns which of several futures is done, or the first to be, within so
            many seconds (None: no limit); None where none is.
        count: number of workers.
        in_flight: calls to each worker at the same time (default 1).
        now: function that returns the time in seconds, by which time-outs are counted (default
            `time.monotonic`).
        report_silent: function that is called where calls without a time-out take long, with the
            workers that give nothing and the least seconds for which each has not (default: none).

    >>> from flowrl.core.workers import Done, HereWorkers
    >>> requests = AsyncRequests(lambda i: Done(10 * i), HereWorkers(0, Done).wait, count=3)
    >>> requests.fill()
    >>> [requests.next().result() for _ in range(3)]
    [0, 10, 20]
    """

    lasting = ("in_flight", "going", "restart_counts", "last", "issued")
    # Times and patience begin again.
    remade = (
        "submit", "wait", "now", "report_silent",
        "since", "patience", "before_other", "_reported", "_call_lock",
    )  # fmt: skip

    def __init__(
        self,
        submit: Callable[[int], Future],
        wait: Callable[[Sequence[Future], float | None], int | None],
        count: int,
        in_flight: int = 1,
        now: Callable[[], float] = time.monotonic,
        report_silent: Callable[[Sequence[int], float], None] | None = None,
    ) -> None:
        self.submit = submit
        self.wait = wait
        self.now = now
        self.report_silent = report_silent
        self.in_flight = in_flight
        self.going: list[deque[Request]] = [deque() for _ in range(count)]
        """By worker: the calls without a result, the oldest first."""
        self.since = [0.0] * count
        """By worker: when it could begin with its oldest call, in seconds of `now`."""
        self.patience = [1] * count
        """By worker: the factor by which a time-out is multiplied.

        It doubles with each restart, for a new worker must start first, which takes longer on a
        busy machine, and is 1 again after a result that is no error.
        """
        self.restart_counts = [0] * count
        """By worker: how often it was restarted."""
        self.last = [0] * count
        """By worker: the number of its last call."""
        self.issued = 0
        """The number of calls so far."""
        self.before_other: list[int | None] = [None] * count
        """By worker: the number of the last call before other work that it was given, which is not
        over yet; None without such work.
        """
        self._reported = [0.0] * count
        """By worker: the most seconds for which it was reported to give nothing."""
        self._call_lock = Lock()  # for it to be known which calls go out before other work

    def keep(self) -> Any:
        """Return the calls that go on with their results, which are waited for.

        A call that failed, or hangs, is left out: it is made again.
        """
        # All of them together have this time, however many hang.
        until = self.now() + KEEP_SECONDS

        def results(requests: Iterable[Request]) -> list[tuple[int, Any]]:
            found = [
                (r.number, *kept_result(r.future, self.wait, until - self.now())) for r in requests
            ]
            return [(number, result) for number, done, result in found if done]

        return {**super().keep(), "going": [results(requests) for requests in self.going]}

    def of_kept(self, each: Sequence[Iterable[Any]], state: Any) -> list[deque[Any]]:
        """Return, by worker, those of some values that are of calls that were kept.

        Args:
            each: by worker a value for each of its calls.
            state: what `keep` returned.
        """
        found: list[deque[Any]] = []
        for values, requests, calls in zip(each, self.going, state["going"], strict=True):
            kept = {number for number, _ in calls}
            both = zip(values, requests, strict=True)
            found.append(deque(value for value, request in both if request.number in kept))
        return found

    def take(self, state: Any) -> None:
        """Go on with results that are there already."""
        super().take(state)
        self.going = [deque[Request]() for _ in self.restart_counts]
        for worker, (requests, calls) in enumerate(zip(self.going, state["going"], strict=True)):
            requests += [self._request(worker, number, Done(result)) for number, result in calls]

    def __len__(self) -> int:
        """Return the number of calls that have no result yet."""
        return sum(map(len, self.going))

    def fill(self, most: float = math.inf) -> None:
        """Call every worker again that has less than `in_flight` calls.

        Workers with the fewest calls come first, and of these the one that was called the longest
        time ago.

        Args:
            most: the most calls to start.
        """
        pending = [len(requests) for requests in self.going]
        for worker in whom_to_ask(self.order(), pending, self.in_flight, most):
            self.ask(worker)

    def order(self) -> list[int]:
        """Return the workers, first the one that was called the longest time ago."""
        return sorted(range(len(self.going)), key=self.last.__getitem__)

    def ask(self, worker: int) -> None:
        """Start one call to a worker."""
        with self._call_lock, TRANSFER:
            self.issued += 1
            self.last[worker] = self.issued
            # A worker with other calls can begin with this one only after them: see `next`.
            if not self.going[worker]:
                self.since[worker] = self.now()
            self.going[worker].append(self._request(worker, self.issued, self.submit(worker)))

    def _request(self, worker: int, number: int, future: Future) -> Request:
        """Return a call to a worker, whose result ends a series of restarts."""
        count = self.restart_counts[worker]
        return Request(worker, count, number, future, partial(self._succeeded, worker, count))

    def _succeeded(self, worker: int, restart_count: int) -> None:
        """Give a worker the plain time-out again, unless it was restarted since."""
        if self.restart_counts[worker] == restart_count:
            self.patience[worker] = 1

    def give_other(self, worker: int, submit: Callable[[], Future]) -> Future:
        """Give a worker other work than these calls, from any thread.

        Calls that it gets later wait for it, and are not late until `end_other`.

        Args:
            worker: its number.
            submit: function that starts the work.
        """
        with self._call_lock:
            self.before_other[worker] = self.last[worker]
            return submit()

    def end_other(self, worker: int) -> None:
        """Count the time of a worker's oldest call from now on, for its other work is over."""
        self.since[worker] = self.now()
        self.before_other[worker] = None

    def next(self, timeout: float | None = None) -> Request:
        """Wait for the next result.

        If several results are there, the one of the worker whose call is the oldest comes first.

        Args:
            timeout: seconds that a worker may take for a call, twice as many after each restart in
                a row; None for any.

        Returns:
            The request whose result is there.

        Raises:
            LateError: a worker took longer, and no other has a result.
            LookupError: no worker has been called.
        """
        if not any(self.going):
            raise LookupError("nobody was asked; call fill() or ask(worker) first")
        oldest = sorted(
            (requests[0] for requests in self.going if requests),
            key=lambda request: request.number,
        )
        worker = oldest[self._first_done(oldest, timeout)].worker
        if timeout is None:
            self._report_silent(oldest)
        # From now on the worker can work on its next call, if there is one.
        self.since[worker] = self.now()
        return self.going[worker].popleft()

    def _first_done(self, oldest: Sequence[Request], timeout: float | None) -> int:
        """Return which of the oldest calls to the workers has a result, once one has.

        Raises:
            LateError: a worker took longer than it may, and no other has a result.
        """
        futures = [request.future for request in oldest]
        while True:
            deadlines = [self._deadline(request, timeout) for request in oldest]
            most_urgent = min(range(len(oldest)), key=deadlines.__getitem__)
            deadline, request = deadlines[most_urgent], oldest[most_urgent]
            left = SILENT_SECONDS if timeout is None else max(0.0, deadline - self.now())
            with WAITING:
                found = self.wait(futures, left)
            if found is not None:
                return found
            if timeout is None:
                self._report_silent(oldest)
                continue
            # Other work that it has, or had until just now, puts its deadline off.
            if self._deadline(request, timeout) <= deadline:
                raise LateError(request.worker, timeout * self.patience[request.worker])

    def _report_silent(self, oldest: Sequence[Request]) -> None:
        """Report workers that give nothing for long; again once they do so for twice as long.

        Args:
            oldest: the oldest call to each worker, in the order of the calls.
        """
        # Who gives nothing keeps its call, which becomes the oldest of all.
        if self.report_silent is None or self._seconds_silent(oldest[0]) < SILENT_SECONDS:
            return
        found = {}
        for request in oldest:
            worker, seconds = request.worker, self._seconds_silent(request)
            late = seconds >= max(SILENT_SECONDS, 2 * self._reported[worker])
            # A result may lie there because nobody asked for it, such as at a prompt.
            if late and self.wait([request.future], 0.0) is None:
                found[worker] = self._reported[worker] = seconds
        if found:
            self.report_silent(sorted(found), min(found.values()))

    def _seconds_silent(self, request: Request) -> float:
        """Return for how long a worker could have worked on its oldest call."""
        return self.now() - self._deadline(request, 0.0)

    def _deadline(self, request: Request, timeout: float | None) -> float:
        """Return when the oldest call to a worker is late, in seconds of `now`."""
        worker = request.worker
        last_before = self.before_other[worker]
        waits = last_before is not None and request.number > last_before
        since = self.now() if waits else self.since[worker]
        return since + (timeout or 0.0) * self.patience[worker]

    def replace(self, worker: int) -> list[Request]:
        """Return the calls that are lost because a worker was restarted.

        They will never have a result, and later calls go to the new worker.
        """
        self.restart_counts[worker] += 1
        self.patience[worker] *= 2
        self.before_other[worker] = None
        lost = list(self.going[worker])
        self.going[worker] = deque()
        return lost
