"""Faults of the scheduler, planted in its source, each of which the simulator has to find."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flowrl.core.ledger import Ledger
from flowrl.graph.stages import Channel, Turns
from flowrl.ops.queue import Queue
from flowrl.replay.handle import ReplayHandle
from flowrl.replay.host_replay import HostReplay
from flowrl.rollout import gym_runners
from flowrl.rollout.gym_runners import GymRunners
from flowrl.rollout.published import WeightsByRunner
from flowrl.rollout.requests import AsyncRequests


@dataclass(frozen=True)
class Planted:
    """A fault.

    Args:
        graph: the graph whose schedules find it.
        owner: the class or module that has the function.
        name: of the function.
        right: what stands in its source.
        wrong: what stands there instead, while the fault is planted.
    """

    graph: str
    owner: Any
    name: str
    right: str
    wrong: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the fault in this context."""
        before = inspect.getattr_static(self.owner, self.name)
        function = before.fget if isinstance(before, property) else before
        source = textwrap.dedent(inspect.getsource(function))
        assert self.right in source, f"{self.name} has no {self.right!r} any more"
        edited = source.replace(self.right, self.wrong, 1)
        module = vars(sys.modules[function.__module__])
        found: dict[str, Any] = {}
        # `super()` finds its class by the name of a variable that encloses the function.
        body = "def made(__class__):\n" + textwrap.indent(edited, "    ")
        exec(f"{body}\n    return {self.name}\n", module, found)
        setattr(self.owner, self.name, found["made"](self.owner))
        try:
            yield
        finally:
            setattr(self.owner, self.name, before)


FAULTS = {
    "a lost result of a restarted worker is accepted": Planted(
        "impala", AsyncRequests, "replace", "self.going[worker] = deque()", "pass"
    ),
    "a result is returned twice": Planted(
        "ppo", AsyncRequests, "next", "self.going[worker].popleft()", "self.going[worker][0]"
    ),
    "a request is not made again after a restart": Planted(
        "ppo", GymRunners, "_restart", "range(lost)", "range(lost - 1)"
    ),
    "lost requests are not counted": Planted(
        "ppo", GymRunners, "_report_restart", "lost_requests=lost", "lost_requests=0"
    ),
    "a restarted runner is not said where the old one was": Planted(
        "ppo",
        GymRunners,
        "_restart",
        'self.pool.submit(runner, "go_on", self._turns[runner])',
        "pass",
    ),
    "a restarted runner lacks its operators": Planted(
        "apex", GymRunners, "_restart", "self._local_chain is not None", "False"
    ),
    "a restarted runner is not sent its weights": Planted(
        "impala", WeightsByRunner, "forget_sent", "self._last_sent[runner] = None", "pass"
    ),
    "a version goes back after newer weights": Planted(
        "impala", WeightsByRunner, "select", "newer.popleft()", "newer.pop()"
    ),
    "restarts in a row never end": Planted(
        "impala", GymRunners, "_count_received", "self._restarts_in_a_row[runner] = 0", "pass"
    ),
    "a time-out does not begin again after a result": Planted(
        "impala", AsyncRequests, "next", "self.since[worker] = self.now()", "pass"
    ),
    "patience is not reset by a result": Planted(
        "impala", AsyncRequests, "_succeeded", "self.patience[worker] = 1", "pass"
    ),
    "patience is reset by a failure": Planted(
        "impala",
        AsyncRequests,
        "next",
        "self.since[worker] = self.now()",
        "self.since[worker], self.patience[worker] = self.now(), 1",
    ),
    "patience is no longer after a restart": Planted(
        "ppo", AsyncRequests, "replace", "self.patience[worker] *= 2", "pass"
    ),
    "the largest policy lag is off by one": Planted(
        "impala", Queue, "step", "<= self.max_lag:", "<= self.max_lag + 1:"
    ),
    "pacing allows a request too many": Planted(
        "impala", gym_runners, "allowed_requests", "int((max_lag + 1 +", "int((max_lag + 2 +"
    ),
    "a queue takes one more than its capacity": Planted(
        "impala", Channel, "has_capacity", "< self.capacity", "<= self.capacity"
    ),
    "a queue gives what it keeps": Planted(
        "impala", Channel, "take", "self.items.popleft()", "self.items[0]"
    ),
    "what a queue drops is not counted": Planted(
        "impala", Ledger, "drop", "self.dropped_steps[edge] += steps", "pass"
    ),
    "a replay gives more than its ratio": Planted(
        "apex", ReplayHandle, "claim", "* ratio.denominator", "* (ratio.denominator - 1)"
    ),
    "what a lost shard held is not counted": Planted(
        "apex", HostReplay, "_restart", "old.lost + sent - evicted", "old.lost"
    ),
    "what was sent to a shard that ended is sampled": Planted(
        "apex", HostReplay, "_restart", "self.sending[shard].clear()", "pass"
    ),
    "a lost shard ends a snapshot": Planted(
        "apex", HostReplay, "_answered", "self._result(each)", "each.future.result()"
    ),
    "a snapshot forgets the requests in flight": Planted(
        "impala", AsyncRequests, "keep", "for requests in self.going]", "for requests in ()]"
    ),
    "a snapshot forgets whose turn is next": Planted(
        "impala",
        Turns,
        "keep",
        "**super().keep(),",
        '**super().keep(), "pick": type(self.pick)(0).keep(),',
    ),
    "a snapshot forgets what the queues hold": Planted(
        "impala", Turns, "keep", "name: channel.items for", "name: type(channel.items)() for"
    ),
    "a snapshot keeps the versions of failed requests": Planted(
        "impala", AsyncRequests, "of_kept", "if request.number in kept", "if True"
    ),
}
"""By what is wrong: the fault."""
