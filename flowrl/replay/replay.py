"""`Replay`: what was experienced, to be trained on again; and the handle that operators call."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, ClassVar, cast

import jax
import numpy as np

from flowrl.core.clock import WAITING, Reading
from flowrl.core.events import Restarted
from flowrl.core.items import Batch
from flowrl.core.texts import in_bytes
from flowrl.errors import GraphError, RuntimeFailed, SettingError
from flowrl.graph.protocols import Future, Handle, Ref, Resource, Site, Use
from flowrl.replay.handle import ReplayHandle, Stock
from flowrl.replay.jax_replay import JaxReplay
from flowrl.replay.shards import (
    columns_between,
    needed,
    ring,
    row_bytes,
    stub,
    too_large,
    too_small,
)
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.jax_runners import JaxRunners

Array = Any
SENDING = 2
"""Fragments and priorities on their way to a shard."""


class HostReplay(ReplayHandle):
    """Rings in host memory: one in this process, or several, each with its own environments, where the runtime has its workers."""

    def __init__(self, spec: Replay, site: Site) -> None:
        super().__init__(spec, site)
        total, shards = self.runners.environments, spec.shards
        if shards > total:
            raise GraphError(
                f"{shards} shards have {total} environments between them; take as many at most"
            )
        self.bounds = tuple(i * total // shards for i in range(shards + 1))
        self.rows = -(-spec.buffer_size // total) + 1
        make = partial(ring, spec, self.rows, self.bounds, site.name, site.seed)
        self.nbytes = 0
        try:
            self.pool = site.workers(
                shards, make, partial(stub, spec, self.bounds), near=shards == 1
            )
        except MemoryError as error:
            raise self._too_large() from error
        self.locks = [RLock() for _ in range(shards)]
        """By shard: held while it is sent something; several in their order, and `lock` within them, never the other way round."""
        self.sending: list[deque[Future]] = [deque() for _ in range(shards)]
        self.told = [
            dict.fromkeys(("added", "evicted", "held", "usable"), 0) for _ in range(shards)
        ]
        self.sent, self.restart_counts, self.failures = [0] * shards, [0] * shards, [0] * shards
        self.before = Stock(0, 0, 0, 0)
        """Of shards that were lost."""
        self.because = ""
        self.late: list[dict[str, Array]] = []
        """Priorities that may still be being computed."""
        self.asked: dict[str, deque[tuple[int, int, Future]]] = {}
        """By reader: draws that were asked for beforehand."""
        self.turn = 0
        self.all = 0

    @property
    def state(self) -> Any:
        """What is static."""
        return self.static

    @state.setter
    def state(self, state: Any) -> None:
        self.steps, self.pending = state["steps"], dict(state["pending"])

    @property
    def drawable(self) -> bool:
        """By what the rings told."""
        return all(told["usable"] for told in self.told)

    def clocks(self) -> dict[str, Reading]:
        """Those of the shards that are elsewhere."""
        return self.pool.clocks()

    def facts(self) -> dict[str, Any]:
        """How many shards there are."""
        return {"shards": self.spec.shards}

    def close(self) -> None:
        """Let go of the rings."""
        self.pool.close()

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
                    self.sent[shard] += part.steps
                    self._send(shard, "add", part)
        self.all += batch.steps
        self._noted(batch.steps)

    def _columns(self, batch: Batch, low: int, high: int) -> Batch | None:
        """The columns of environments from `low` to below `high`; most batches are of one shard, so that nothing is cut."""
        env = batch.columns["env"]
        inside = (env >= low) & (env < high) if isinstance(env, np.ndarray) else None
        if inside is not None and inside.all() == inside.any():
            return batch if inside.all() else None
        return cast("Batch", self.site.call(partial(columns_between, low=low, high=high), batch))

    def _send(self, shard: int, verb: str, *args: Any) -> None:
        """Send something to a shard, and take what it told of older ones."""
        self.sending[shard].append(self.pool.submit(shard, verb, *args))
        while len(self.sending[shard]) > (0 if len(self.pool) == 1 else SENDING):
            self._hear(shard)

    def _hear(self, shard: int) -> None:
        """Take what a shard told of the oldest thing that was sent to it."""
        future = self.sending[shard].popleft()
        try:
            self.told[shard] = future.result()
            self.failures[shard] = 0
        except MemoryError as error:
            raise self._too_large() from error
        except RuntimeFailed as error:
            self._lost(shard, error, future)

    def _too_large(self) -> SettingError:
        spaces = self.runners.spaces
        observations = (
            self.rows
            * self.bounds[-1]
            * math.prod(spaces.obs.shape or ())
            * np.dtype(spaces.obs_dtype).itemsize
        )
        takes = (
            in_bytes(self.nbytes)
            if self.nbytes
            else f"{in_bytes(observations)} for observations alone"
        )
        return too_large(self.spec, self.site.name, takes)

    def _lost(self, shard: int, error: RuntimeFailed, because: Future) -> None:
        """Start a shard anew, with nothing in it.

        Raises:
            RuntimeFailed: `error`, after as many times in a row as it has.
        """
        if self.failures[shard] >= self.spec.restarts:
            raise error
        self.failures[shard] += 1
        self.restart_counts[shard] += 1
        self.sending[shard].clear()
        sent, evicted = self.sent[shard], self.told[shard]["evicted"]
        self.sent[shard], self.told[shard] = (
            0,
            dict.fromkeys(("added", "evicted", "held", "usable"), 0),
        )
        with self.lock:
            self.pool.restart(shard, self.restart_counts[shard], because)
            was = self.before
            self.before = Stock(
                was.added + sent, 0, was.evicted + evicted, was.lost + sent - evicted
            )
            self.because = str(error)
            self.steps *= any(
                self.sent
            )  # where nothing is left, drawing waits for the first steps anew
        self.site.count(restarts=1, lost_steps=sent - evicted)
        self.site.stream.emit(Restarted(self.site.name, shard, str(error), sent - evicted))

    def sample(self, size: int, reader: str, ahead: int = 0) -> Batch | None:
        """Draw from the next shard that has anything."""
        self._prioritize()
        asked = self.asked.setdefault(reader, deque())
        while True:
            while len(asked) <= ahead and (call := self._ask(size)) is not None:
                asked.append(call)
            if not asked:
                break
            shard, restart_count, future = asked.popleft()
            try:
                with WAITING:
                    batch: Batch = future.result()
            except RuntimeFailed as error:
                with self.locks[shard]:
                    if (
                        self.restart_counts[shard] == restart_count
                    ):  # if not, who added to it found out first
                        self._lost(shard, error, future)
                continue
            self._drew(reader, size)
            return (
                batch
                if not self.spec.prioritized
                else Batch(batch.data, {**batch.columns, "shard": np.full(size, shard, np.int32)})
            )
        if any(self.restart_counts):
            return None
        raise self._nothing()

    def _ask(self, size: int) -> tuple[int, int, Future] | None:
        """Ask the next shard that has anything: which, which incarnation of it, and what it will give."""
        for _ in range(len(self.pool)):
            with self.lock:
                shard, self.turn = self.turn, (self.turn + 1) % len(self.pool)
            with self.locks[shard]:
                while not self.told[shard]["usable"] and self.sending[shard]:
                    self._hear(shard)
                if self.told[shard]["usable"]:
                    return (
                        shard,
                        self.restart_counts[shard],
                        self.pool.submit(shard, "sample", size, self._beta()),
                    )
        return None

    def _beta(self) -> float:
        share = min(1.0, self.all / self.spec.beta_steps) if self.spec.beta_steps else 0.0
        return self.spec.beta + (1 - self.spec.beta) * share

    def prioritize(self, feedback: dict[str, Array]) -> None:
        """They are looked at when the next are drawn: the update that computes them may still go on."""
        self._prioritized(feedback)
        with self.lock:
            self.late.append(feedback)

    def _prioritize(self) -> None:
        with self.lock:
            late, self.late = self.late, []
        for feedback in late:
            if isinstance(feedback["priority"], jax.ShapeDtypeStruct):
                continue
            slot, stamp, shard, priority = (
                np.asarray(feedback[k]) for k in ("slot", "stamp", "shard", "priority")
            )
            for i in map(
                int, np.unique(shard[shard < len(self.pool)])
            ):  # those of another replay may have more
                at = shard == i
                with self.locks[i]:
                    self._send(i, "prioritize", slot[at], stamp[at], priority[at])

    def stock(self) -> Stock:
        """Once all that was sent is there; nothing is added meanwhile."""
        with ExitStack() as held:
            for shard, lock in enumerate(self.locks):
                held.enter_context(lock)
                while self.sending[shard]:
                    self._hear(shard)
            was, now = (
                self.before,
                {k: sum(told[k] for told in self.told) for k in ("held", "evicted")},
            )
            return Stock(
                was.added + sum(self.sent), now["held"], was.evicted + now["evicted"], was.lost
            )

    def findings(self) -> Iterator[str]:
        """What was lost, and why."""
        if times := sum(self.restart_counts):
            yield (
                f"{self.site.name}: {times} shard{'s were' if times > 1 else ' was'} started anew, the last one because: {self.because}; "
                f"{self.before.lost:,} steps were lost"
            )


@dataclass(frozen=True)
class Replay(Resource):
    """What runners experienced, to be trained on again: the newest `capacity` steps, every observation once.

    What is drawn are transitions of `n_step` steps: ``obs``, ``action``, ``reward`` (the discounted sum), ``next_obs``, and ``discount``, by
    which the value of what comes behind is multiplied: ``gamma ** k`` where k <= n_step steps were taken, and 0 where the episode ended by
    itself. One that was cut short goes on from its last observation.

    Args:
        buffer_size: steps, those between two episodes included.
        prioritized: drawn by priority (Schaul et al. 2016), with importance weights as the field ``weight``; else each as likely as any other.
        n_step: steps of a return.
        gamma: discount.
        shards: parts, each with its own environments: one in this process; several where the workers of the runtime are. A replay over
            environments in JAX lies on the device, and is one part whatever this says.
        alpha: the power of a priority; 0 draws all alike.
        beta: the power of the importance weights, at first.
        beta_steps: steps that come over which it rises to 1, where the correction is whole; 0 for never. Schaul et al. (2016) let it rise over
            the run, whose length a replay does not know: give it the steps of the run, or those over which the policy still changes much.
        eps: added to every priority, so that none is 0.
        extra: fields that are stored, too, and drawn as they were at the first of the steps.
        restarts: how often in a row a shard whose process ended is started anew, empty; 0 for never.
        runners: whose experience it is.
    """

    buffer_size: int
    prioritized: bool = False
    n_step: int = 1
    gamma: float = 0.99
    shards: int = 1
    alpha: float = 0.6
    beta: float = 0.4
    beta_steps: int = 100_000
    eps: float = 1e-6
    extra: tuple[str, ...] = ()
    restarts: int = 3
    runners: Ref[RunnersHandle] = "runners"

    handle: ClassVar[type[Handle]] = ReplayHandle  # type: ignore[type-abstract]

    def __post_init__(self) -> None:
        for name in ("buffer_size", "n_step", "shards"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("gamma", "alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.eps <= 0:
            raise SettingError(
                f"eps must be above 0, or what has priority 0 is never drawn again, got {self.eps}"
            )
        if self.beta_steps < 0 or self.restarts < 0:
            raise SettingError(f"beta_steps and restarts must not be negative, got {self}")

    def open(self, site: Site) -> ReplayHandle:
        """Make it, empty: on the device where runners are functions of it."""
        return (
            JaxReplay(self, site)
            if isinstance(site.resource(self.runners), JaxRunners)
            else HostReplay(self, site)
        )

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Does anything come in and out of it, and do priorities come back?"""
        if use.idle and not use.total("added_steps"):
            yield (
                use.name,
                f"nothing is added to it before {use.idle[0]}; put add=ReplayAdd() in front of it",
            )
        if not use.traced:
            return
        if not use.total("added_steps"):
            yield use.name, "nothing is added to it; put add=ReplayAdd() behind a ParallelSample"
        if not use.total("draws"):
            yield use.name, "nothing is drawn from it; add draw=ReplaySample(batch_size=...)"
        elif self.prioritized and not use.total("prioritized_steps"):
            yield (
                use.name,
                "its priorities are never told what an update found; add prio=UpdatePriorities() behind TrainOneStep, or set prioritized=False",
            )

    def describe(self) -> str:
        """``50,000 steps, prioritized, 3-step returns``."""
        parts = [
            f"{self.buffer_size:,} steps",
            *["prioritized"] * self.prioritized,
            *[f"{self.n_step}-step returns"] * (self.n_step > 1),
        ]
        return ", ".join([*parts, *[f"{self.shards} shards"] * (self.shards > 1)])
