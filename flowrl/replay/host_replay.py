"""`HostReplay`: a replay in host memory, of one or several shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np

from flowrl.core.clock import WAITING, Reading
from flowrl.core.events import Restarted
from flowrl.core.items import Batch
from flowrl.core.texts import in_bytes, plural
from flowrl.core.workers import Done
from flowrl.errors import GraphError, RunError, SaveError, SettingError, lasting
from flowrl.graph.protocols import Future, Site
from flowrl.replay.handle import ReplayHandle, Stock
from flowrl.replay.shards import (
    columns_between,
    needed,
    ring,
    row_bytes,
    stub,
    too_large,
    too_small,
)

if TYPE_CHECKING:
    from flowrl.replay.replay import Replay

Array = Any
SENDING = 2
"""Calls with rollouts and priorities that may be on their way to a shard at once."""


class _Request(NamedTuple):
    """A batch that a shard was asked for."""

    shard: int
    restart_count: int
    """How often the shard had been restarted when it was asked."""
    future: Future


def _empty_report() -> dict[str, int]:
    """Return what an empty ring reports that it holds."""
    return dict.fromkeys(("added", "evicted", "held", "usable"), 0)


class HostReplay(ReplayHandle):
    """Rings in host memory.

    There is one in this process, or there are several, each with its own environments, where the
    runtime has its workers.
    """

    lasting = (
        *ReplayHandle.lasting, "nbytes", "reports", "sent_steps", "restart_counts", "failures",
        "lost_stock", "last_failure", "late_priorities", "next_shard", "all_steps", "requests",
    )  # fmt: skip
    remade = (*ReplayHandle.remade, "bounds", "rows", "pool", "locks", "sending")

    def __init__(self, spec: Replay, site: Site) -> None:
        super().__init__(spec, site)
        total, shards = self.runners.environments, spec.shards
        if shards > total:
            raise GraphError(
                f"{shards} shards have {total} environments between them; take as many at most"
            )
        self.bounds = tuple(i * total // shards for i in range(shards + 1))
        """The first environment of each shard, and the number of environments."""
        self.rows = -(-spec.buffer_size // total) + 1
        """Rows of each environment: one more than its steps, for the observation after the last."""
        make = partial(ring, spec, self.rows, self.bounds, site.name, site.seed)
        self.nbytes = 0
        try:
            self.pool = site.workers(
                shards, make, partial(stub, spec, self.bounds), near=shards == 1
            )
        except MemoryError as error:
            raise self._too_large() from error
        self.locks = [RLock() for _ in range(shards)]
        """By shard, the lock that is held while it is sent something.

        Several are taken in their order, and `lock` within them, never the other way round.
        """
        self.sending: list[deque[Future]] = [deque() for _ in range(shards)]
        """By shard, the calls whose results were not received yet, the oldest first."""
        self.reports = [_empty_report() for _ in range(shards)]
        """By shard, what it held by the last result that was received."""
        self.sent_steps, self.restart_counts = [0] * shards, [0] * shards
        self.failures = [0] * shards
        """By shard, how often in a row it was lost."""
        self.lost_stock = Stock(0, 0, 0, 0)
        """The stock of shards that were lost."""
        self.last_failure = ""
        self.late_priorities: list[dict[str, Array]] = []
        """Priorities that may still be being computed."""
        self.requests: dict[str, deque[_Request]] = {}
        """By reader, the batches that were asked for beforehand."""
        self.next_shard = 0
        self.all_steps = 0
        """All steps that were ever added."""

    @property
    def state(self) -> Any:
        """The static part of the state; the rows are in the rings."""
        return self.static

    @state.setter
    def state(self, state: Any) -> None:
        self.steps, self.pending = state["steps"], dict(state["pending"])

    def keep(self) -> Any:
        """Return what lasts, the rings' rows and the batches that were asked for among it."""
        # All that was sent arrives first, and what was asked for is waited for.
        self.stock()
        rings = [self.pool.submit(shard, "keep") for shard in range(len(self.pool))]
        asked = {reader: self._answered(requests) for reader, requests in self.requests.items()}
        rows = [self._rows(shard, ring) for shard, ring in enumerate(rings)]
        return {**super().keep(), "requests": asked, "rings": rows}

    def _answered(self, requests: Iterable[_Request]) -> list[tuple[int, int, Batch]]:
        """Return the batches that were asked for, with shard and restart count of each.

        A batch of a shard that was lost is left out: another one is asked for in its place.
        """
        answers = [(each, self._result(each)) for each in requests]
        return [
            (each.shard, each.restart_count, batch) for each, batch in answers if batch is not None
        ]

    def _rows(self, shard: int, call: Future) -> Any:
        """Return what a shard keeps, which is nothing if it was lost and restarted meanwhile."""
        while True:
            try:
                return call.result()
            except RunError as error:
                with self.locks[shard]:
                    # If what was asked of it was lost too, it is a new one already.
                    if self.pool.current(call):
                        self._restart(shard, error, call)
                call = self.pool.submit(shard, "keep")

    def take(self, state: Any) -> None:
        """Go on with what was kept; the shards must be as many as then."""
        rings, asked = state["rings"], state["requests"]
        if len(rings) != len(self.pool):
            raise SaveError(f"{self.site.name} was kept in {len(rings)} shards, and has others now")
        super().take(self.lasting_of(state))
        for call in [self.pool.submit(i, "take", rows) for i, rows in enumerate(rings)]:
            call.result()
        self.requests = {reader: _requests(answered) for reader, answered in asked.items()}

    @property
    def drawable(self) -> bool:
        """Whether every shard holds something to sample, by what it reported last."""
        return all(report["usable"] for report in self.reports)

    def clocks(self) -> dict[str, Reading]:
        """Return the clocks of the shards that are in other processes."""
        return self.pool.clocks()

    def facts(self) -> dict[str, Any]:
        """Return how many shards there are."""
        return {"shards": self.spec.shards}

    def close(self) -> None:
        """Close the rings."""
        self.pool.close()

    # -- adding

    def add(self, batch: Batch) -> None:
        """Send every shard its columns."""
        batch = needed(self.spec, batch)
        too_small(self.spec, self.site.name, self.rows - 1, batch.shape[0], self.bounds[-1])
        if not self.nbytes:
            self.nbytes = self.rows * self.bounds[-1] * row_bytes(self.spec, batch)
        for shard, (low, high) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            part = batch if self.spec.shards == 1 else self._columns(batch, low, high)
            if part is not None and part.shape[1]:
                with self.locks[shard]:
                    self.sent_steps[shard] += part.steps
                    self._send(shard, "add", part)
        self.all_steps += batch.steps
        self._note_added(batch.steps)

    def _columns(self, batch: Batch, low: int, high: int) -> Batch | None:
        """Return the columns of environments from `low` to below `high`; None if there are none."""
        env = batch.columns["env"]
        # Most batches are of one shard: they are passed on as they are, or not at all.
        # Where the batch lies in another process its numbers are not known here: the columns are
        # picked over there, perhaps none.
        inside = (env >= low) & (env < high) if isinstance(env, np.ndarray) else None
        if inside is not None and inside.all() == inside.any():
            return batch if inside.all() else None
        return cast("Batch", self.site.call(partial(columns_between, low=low, high=high), batch))

    def _send(self, shard: int, verb: str, *args: Any) -> None:
        """Call a verb of a shard, and receive the results of older calls."""
        self.sending[shard].append(self.pool.submit(shard, verb, *args))
        # A single ring is in this process, and its results are there at once.
        most = 0 if len(self.pool) == 1 else SENDING
        while len(self.sending[shard]) > most:
            self._receive(shard)

    def _receive(self, shard: int) -> None:
        """Receive the result of the oldest call to a shard."""
        future = self.sending[shard].popleft()
        try:
            self.reports[shard] = future.result()
            self.failures[shard] = 0
        except MemoryError as error:
            raise self._too_large() from error
        except RunError as error:
            self._restart(shard, error, future)

    def _too_large(self) -> SettingError:
        """Return the error of a replay that memory can't hold."""
        if self.nbytes:
            return too_large(self.spec, self.site.name, in_bytes(self.nbytes))
        # Before the first batch only the size of observations is known.
        one = self.runners.spaces.bytes_of_obs
        takes = f"{in_bytes(self.rows * self.bounds[-1] * one)} for observations alone"
        return too_large(self.spec, self.site.name, takes)

    def _restart(self, shard: int, error: RunError, because: Future) -> None:
        """Restart a shard that was lost, with nothing in it.

        Args:
            shard: its index.
            error: what a call to it raised.
            because: that call.

        Raises:
            RunError: `error`, once it was restarted as many times in a row as it may be.
        """
        if self.failures[shard] >= self.spec.restarts:
            raise lasting(error)
        self.failures[shard] += 1
        self.restart_counts[shard] += 1
        self.sending[shard].clear()
        sent, evicted = self.sent_steps[shard], self.reports[shard]["evicted"]
        self.sent_steps[shard], self.reports[shard] = 0, _empty_report()
        with self.lock:
            self.pool.restart(shard, self.restart_counts[shard], because)
            old = self.lost_stock
            self.lost_stock = Stock(
                old.added + sent, 0, old.evicted + evicted, old.lost + sent - evicted
            )
            self.last_failure = str(error)
            # Where nothing is left, sampling waits for the first steps again.
            if not any(self.sent_steps):
                self.steps = 0
        self.site.count(restarts=1, lost_steps=sent - evicted)
        self.site.stream.emit(Restarted(self.site.name, shard, str(error), sent - evicted))

    # -- sampling

    def sample(self, size: int, reader: str, ahead: int = 0) -> Batch | None:
        """Return a batch from the next shard that has anything to sample."""
        self._send_priorities()
        requests = self.requests.setdefault(reader, deque())
        while True:
            while len(requests) <= ahead and (request := self._request(size)) is not None:
                requests.append(request)
            if not requests:
                break
            request = requests.popleft()
            batch = self._result(request)
            if batch is None:
                continue
            self._note_sampled(size)
            if not self.spec.prioritized:
                return batch
            shards = np.full(size, request.shard, np.int32)
            return Batch(batch.data, {**batch.columns, "shard": shards})
        # A shard that was restarted may be empty for now; with none, nothing will ever come.
        if any(self.restart_counts):
            # The steps that made a batch due were lost, also where an `add` counted them only
            # afterwards. While one is due nothing is added, so all readers wait for steps again.
            with self.lock:
                self.steps = 0
                self.claim(reader, -1)
            return None
        raise self._nothing_to_sample()

    def _request(self, size: int) -> _Request | None:
        """Ask the next shard that has anything to sample for a batch; None if there is none."""
        for _ in range(len(self.pool)):
            with self.lock:
                shard = self.next_shard
                self.next_shard = (shard + 1) % len(self.pool)
            with self.locks[shard]:
                # What is on its way may make a row usable.
                while not self.reports[shard]["usable"] and self.sending[shard]:
                    self._receive(shard)
                if self.reports[shard]["usable"]:
                    future = self.pool.submit(shard, "sample", size, self._beta())
                    return _Request(shard, self.restart_counts[shard], future)
        return None

    def _result(self, request: _Request) -> Batch | None:
        """Wait for a batch; None if its shard was lost."""
        shard = request.shard
        try:
            with WAITING:
                batch: Batch = request.future.result()
        except RunError as error:
            with self.locks[shard]:
                # If it was restarted since, a thread that added to it found out first.
                if self.restart_counts[shard] == request.restart_count:
                    self._restart(shard, error, request.future)
            return None
        return batch

    def _beta(self) -> float:
        """Return the power of the importance weights, which rises from `beta` to 1."""
        share = min(1.0, self.all_steps / self.spec.beta_steps) if self.spec.beta_steps else 0.0
        return self.spec.beta + (1 - self.spec.beta) * share

    # -- priorities

    def prioritize(self, feedback: dict[str, Array]) -> None:
        """Keep priorities until the next batch is sampled.

        The update that computes them may still be running: looking at them now would wait for it.
        """
        self._note_prioritized(feedback)
        with self.lock:
            self.late_priorities.append(feedback)

    def _send_priorities(self) -> None:
        """Send every shard the priorities of its rows."""
        with self.lock:
            late, self.late_priorities = self.late_priorities, []
        for feedback in late:
            if isinstance(feedback["priority"], jax.ShapeDtypeStruct):
                continue
            slot, stamp, shard, priority = (
                np.asarray(feedback[k]) for k in ("slot", "stamp", "shard", "priority")
            )
            # Rows that were sampled from another replay may be of shards that this one lacks.
            for i in map(int, np.unique(shard[shard < len(self.pool)])):
                at = shard == i
                with self.locks[i]:
                    self._send(i, "prioritize", slot[at], stamp[at], priority[at])

    # -- accounts

    def stock(self) -> Stock:
        """Return what was added so far, and its whereabouts.

        It waits until all that was sent has arrived; nothing is added meanwhile.
        """
        with ExitStack() as locked:
            for shard, lock in enumerate(self.locks):
                locked.enter_context(lock)
                while self.sending[shard]:
                    self._receive(shard)
            old = self.lost_stock
            held = sum(report["held"] for report in self.reports)
            evicted = sum(report["evicted"] for report in self.reports)
            return Stock(old.added + sum(self.sent_steps), held, old.evicted + evicted, old.lost)

    def findings(self) -> Iterator[str]:
        """Report how many steps were lost with shards, and why."""
        if times := sum(self.restart_counts):
            were = "was" if times == 1 else "were"
            yield (
                f"{self.site.name}: {times} {plural(times, 'shard')} {were} restarted, "
                f"the last one because: {self.last_failure}; "
                f"{self.lost_stock.lost:,} steps were lost"
            )


def _requests(answered: Iterable[tuple[int, int, Batch]]) -> deque[_Request]:
    """Return requests that have their batches already."""
    return deque(_Request(shard, count, Done(batch)) for shard, count, batch in answered)
