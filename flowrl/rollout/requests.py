"""`AsyncRequests`: bounded calls in flight to numbered workers, and their results as they come."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.core.clock import TRANSFER, WAITING
from flowrl.graph.protocols import Future


@dataclass(frozen=True)
class Request:
    """One call: to which worker, to which incarnation of it, the how manieth, and its result to come."""

    worker: int
    restart_count: int
    number: int
    future: Future

    def result(self) -> Any:
        """Wait, then return it or raise what the call raised."""
        return self.future.result()


class Late(TimeoutError):
    """A worker let a call wait for too long."""

    def __init__(self, worker: int, seconds: float) -> None:
        super().__init__(f"worker {worker} gave nothing for {seconds:g} s")
        self.worker = worker
        self.seconds = seconds


class AsyncRequests:
    """Keeps up to `in_flight` calls going to each of `count` workers and gives their results as they come, those of one worker in order.

    Nothing polls. A result is given once, and only while the incarnation of the worker that was asked is the one at work: what a dead one
    still sends is nobody's.

    Args:
        submit: starts a call to a worker by its number.
        wait: which of several futures is done, or the first to be, within so many seconds (None for any); None where none is.
        count: workers.
        in_flight: calls to each at once.

    >>> from flowrl.core.workers import Done, HereWorkers
    >>> requests = AsyncRequests(lambda i: Done(10 * i), HereWorkers(0, Done).wait, count=3)
    >>> requests.fill()
    >>> [requests.next().result() for _ in range(3)]
    [0, 10, 20]
    """

    def __init__(
        self,
        submit: Callable[[int], Future],
        wait: Callable[[Sequence[Future], float | None], int | None],
        count: int,
        in_flight: int = 1,
    ) -> None:
        self.submit = submit
        self.wait = wait
        self.in_flight = in_flight
        self.going: list[deque[Request]] = [deque() for _ in range(count)]
        """By worker: the calls that have not come back, the oldest first."""
        self.since = [0.0] * count
        """By worker: when it could begin with its oldest call, by `time.monotonic`."""
        self.patience = [1] * count
        """By worker: what a time-out is multiplied with. It doubles with each restart, for a new worker must start first, which takes longer on a
        busy machine, and is 1 again after a result."""
        self.restart_counts = [0] * count
        self.last = [0] * count
        """By worker: the number of its last call."""
        self.issued = 0

    def __len__(self) -> int:
        """The calls that have not come back."""
        return sum(map(len, self.going))

    def fill(self, most: float = math.inf) -> None:
        """Ask every worker again that has less than `in_flight` calls, first those with the fewest; `most` calls in all."""
        for level in range(self.in_flight):
            for worker in self.order():
                if len(self.going[worker]) <= level and most > 0:
                    self.ask(worker)
                    most -= 1

    def order(self) -> list[int]:
        """The workers, first who was not asked for the longest time."""
        return sorted(range(len(self.going)), key=self.last.__getitem__)

    def ask(self, worker: int) -> None:
        """Start one call."""
        self.issued += 1
        self.last[worker] = self.issued
        if not self.going[worker]:
            self.since[worker] = time.monotonic()
        with TRANSFER:
            self.going[worker].append(
                Request(worker, self.restart_counts[worker], self.issued, self.submit(worker))
            )

    def next(self, timeout: float | None = None) -> Request:
        """Wait for the next result. Of several that are there, that of the worker whose call is the oldest comes first.

        Args:
            timeout: seconds that a worker may take for a call, twice as many after each restart in a row; None for any.

        Raises:
            Late: one took longer, and no other has a result.
            LookupError: nobody was asked.
        """
        if not any(self.going):
            raise LookupError("nobody was asked; call fill() or ask(worker) first")
        oldest = sorted(
            (going[0] for going in self.going if going), key=lambda request: request.number
        )
        ends = {
            request.worker: self.since[request.worker]
            + (timeout or 0.0) * self.patience[request.worker]
            for request in oldest
        }
        slowest = min(ends, key=ends.__getitem__)
        left = None if timeout is None else max(0.0, ends[slowest] - time.monotonic())
        with WAITING:
            found = self.wait([request.future for request in oldest], left)
        if found is None:
            raise Late(slowest, (timeout or 0.0) * self.patience[slowest])
        worker = oldest[found].worker
        self.since[worker] = time.monotonic()
        self.patience[worker] = 1
        return self.going[worker].popleft()

    def replace(self, worker: int) -> list[Request]:
        """A new incarnation of a worker is at work: the calls to the old one will never come back, and are returned."""
        self.restart_counts[worker] += 1
        self.patience[worker] *= 2
        lost, self.going[worker] = list(self.going[worker]), deque()
        return lost
