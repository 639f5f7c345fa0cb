"""A simulator of faults: the real scheduler, requests and queues over fake workers.

All of it runs in one process with a virtual clock. A seed says what happens to every call to a
runner or a shard, so a schedule in which an invariant does not hold can be run again:

    python tests/faults/simulator.py impala --seed 17 --log
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import invariants
from fake_workers import HARMLESS, RUNNER_FAULTS, SHARD_FAULTS, TIMEOUT, Clock, Violation, canned
from fake_workers import FakeWorkers

import flowrl as fl
from flowrl.core.encoding import decoded, encoded
from flowrl.core.events import Dropped, Restarted, Stream, Tap, Took
from flowrl.core.keeping import Draws
from flowrl.errors import EnvError, FlowrlError, RunError
from flowrl.graph.plan import Plan
from flowrl.graph.site import HereSite, Place
from flowrl.graph.stages import Schedule
from flowrl.runtime.base import Session

POLICY = fl.Policy(fl.networks.MLP, hidden=(4,))
SMALL = {"num_runners": 3, "envs_per_runner": 1, "rollout_length": 2, "policy": POLICY}
CARE = {"timeout": TIMEOUT, "on_error": "restart"}
"""How the runners of every simulated run are watched."""
MOST_ROUNDS = 600
"""Passes of a schedule; one that needs more never comes to its end."""
MOST_SECONDS = 3000.0
"""Virtual seconds of a schedule."""
RESTARTS = 3
"""Restarts in a row of a runner or a shard, the default of both."""


@dataclass(frozen=True)
class Case:
    """A graph that is simulated, and what its invariants need to know.

    Args:
        name: what the table calls it: ``GRAPH`` or ``GRAPH, variant``.
        graph: the graph.
        rows: after so many a schedule ends.
        lag_bound: the largest policy lag of a batch that is trained on.
        fifo: whether what leaves the queue leaves it in the order in which it came.
    """

    name: str
    graph: fl.Graph
    rows: int = 4
    lag_bound: float = float("inf")
    fifo: bool = False

    @cached_property
    def plan(self) -> Plan:
        return self.graph.compile()

    @cached_property
    def ops(self) -> dict[str, Any]:
        return {node.name: node.op for node in self.graph.nodes}

    @cached_property
    def canned(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return canned(self.graph.resources["runners"], self.chain)

    @property
    def data(self) -> dict[str, Any]:
        return self.canned[0]

    @property
    def columns(self) -> dict[str, Any]:
        return self.canned[1]

    @property
    def chain(self) -> Any:
        return self.ops["sample"].local

    @property
    def replays(self) -> bool:
        return "replay" in self.graph.resources

    @property
    def is_async(self) -> bool:
        return self.ops["sample"].mode == "async"

    @property
    def evaluates(self) -> bool:
        return "play" in self.ops

    @property
    def in_flight(self) -> int:
        return self.ops["sample"].in_flight if self.is_async else 1

    @property
    def graph_capacity(self) -> int:
        return self.ops["queue"].capacity

    @cached_property
    def rollout_steps(self) -> int:
        runners = self.graph.resources["runners"]
        return runners.envs_per_runner * runners.rollout_length

    @cached_property
    def first(self) -> str:
        """The node that takes the rollouts."""
        return "add" if self.replays else "batch"


def with_care(graph: fl.Graph) -> fl.Graph:
    """Return a graph whose runners are watched."""
    for name, value in CARE.items():
        graph = graph.set(f"runners.{name}", value)
    return graph


@cache
def cases() -> dict[str, tuple[Case, ...]]:
    """Return by graph the cases that its seeds take in turn."""
    ppo = with_care(fl.ppo("CartPole-v1", **SMALL, batch_size=6, minibatch_size=6, epochs=1))
    impala = with_care(
        fl.impala(
            "CartPole-v1", **SMALL, batch_size=4, report_every=2, max_lag=2, queue_capacity=2
        )
    )
    apex = with_care(
        fl.apex(
            "CartPole-v1", **SMALL, batch_size=4, buffer_size=60, learning_starts=12, n_step=1,
            updates_per_step=0.25, queue_capacity=2, sync_every=2, report_every=2,
        )
    )  # fmt: skip
    paced = impala.set("queue.on_stale", "pace").set("queue.max_lag", 3)
    newest = impala.set("queue.full", "drop_oldest").set("queue.order", "lifo")
    newest = newest.set("queue.max_lag", None).set("sync.wait", False)
    played = ppo.insert(after="sync", play=fl.Evaluate(every=2, episodes=2))
    return {
        "ppo": (
            Case("ppo", ppo, lag_bound=0),
            Case("ppo, with evaluations", played, lag_bound=0),
        ),
        "impala": (
            Case("impala", impala, lag_bound=2, fifo=True),
            Case("impala, paced", paced, lag_bound=3, fifo=True),
            Case("impala, newest first", newest),
        ),
        "apex": (
            Case("apex", apex),
            Case("apex, one shard", apex.set("replay.shards", 1).set("sample.in_flight", 1)),
        ),
    }


# -- a run over fake workers -----------------------------------------------------------------------


class SimulatedPlace(Place):
    """A place whose time is virtual."""

    sim: Any

    def seconds(self) -> float:
        return self.sim.clock.now + self.earlier


class SimulatedSite(HereSite):
    """A site whose workers are fakes."""

    def __init__(self, place: Place, name: str, seed: int, sim: Any) -> None:
        super().__init__(place, name, seed)
        self.sim = sim

    def workers(self, count, make, stub, near=False):
        if near:
            return super().workers(count, make, stub)
        return FakeWorkers(self.sim, self.name, count, make)


class CheckedSchedule(Schedule):
    """The schedule of the local runtime, after each pass of which invariants are checked."""

    sim: Any

    def round(self, most: float) -> Any:
        tallies = super().round(most)
        self.sim.after_pass(bool(tallies))
        return tallies


class Simulation:
    """One schedule: a session over fake workers, and what happens to it.

    Args:
        case: what is run.
        seed: decides everything.
        calm: whether no faults happen, and every call takes one second.
    """

    def __init__(self, case: Case, seed: int, calm: bool = False) -> None:
        self.case, self.seed, self.calm = case, seed, calm
        self.random = random.Random(f"{case.name} {seed}")
        self.clock = Clock()
        self.log: list[str] = []
        self.flow: list[str] = []
        """What went through the graph, without what happened to calls."""
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []
        self.rounds = self.updates = self.rollouts = self.left_out = 0
        self.first_update: float | None = None
        self.keeping = self.armed = False
        self.accepted: dict[int, int] = {}
        """By rollout that was taken: its index among them."""
        self.trained: Counter[int] = Counter()
        self.last_out = -1
        count = case.graph.resources["runners"].num_runners
        self.accepted_versions, self.selected = [-1] * count, [-1] * count
        self.results = [0] * count
        """By runner: the rollouts that were taken."""
        self.weights_by_version: dict[int, Any] = {}
        self._draw_profile(count)
        self._open(seed)

    def _draw_profile(self, count: int) -> None:
        """Draw what this schedule is like: its faults, and how frequent they are."""
        draw = self.random
        some = draw.sample(RUNNER_FAULTS, draw.randint(1, len(RUNNER_FAULTS)))
        self.kinds = {"runners": some, "replay": SHARD_FAULTS}
        self.rate = draw.choice((0.02, 0.1, 0.3))
        kind = draw.choice(("plain",) * 8 + ("alone", "doomed"))
        self.alone = draw.randrange(count) if kind == "alone" else None
        """The only runner that answers until the first time-out."""
        self.doomed = draw.randrange(count) if kind == "doomed" else None
        """A runner that fails whatever is done about it."""
        # A snapshot waits for half a minute for each call that hangs, so not where all but one do.
        takes = kind == "plain" and draw.random() < 0.5
        self.snapshot_at = draw.randint(2, 25) if takes else None
        """The pass after which a snapshot is taken."""

    def _open(self, seed: int) -> None:
        plan, graph = self.case.plan, self.case.graph
        stream = Stream([Tap(self._happened, Took, Dropped, Restarted)])
        place = SimulatedPlace(
            graph.name, graph.resources, seed, SimulatedSite, plan.found.totals, stream, sim=self
        )
        place.sim = self
        self.session = Session(plan, place, partial(CheckedSchedule, pick=Draws(seed)))
        self.session.turns.sim = self
        self.runners = place.handles["runners"]
        # These two wait for real seconds in a run.
        self.runners.requests.now = self.clock
        self.runners._is_closing = self.clock
        self.armed = True

    # -- what happens

    def note(self, text: str) -> None:
        self.log.append(f"{self.clock.now:9.3f}  {text}")

    def found(self, invariant: str, text: str) -> None:
        """Note that an invariant does not hold; the pass goes on to its end."""
        self.violations.append(f"{invariant}: {text}")
        self.note(f"VIOLATION of {invariant}: {text}")

    def violate(self, invariant: str, text: str) -> None:
        self.found(invariant, text)
        raise Violation(self.violations[-1])

    def _happened(self, event: Any) -> None:
        """Note an event of the session. What is raised here would be lost, for it observes."""
        try:
            if isinstance(event, Took):
                self._took(event.node, event.item)
            else:
                self.flow.append(str(event))
                self.note(str(event))
        except Exception as error:  # noqa: BLE001 - reported as what it is
            self.found("nothing_else_is_raised", repr(error))

    def _took(self, node: str, item: Any) -> None:
        if node not in (self.case.first, "queue", "train"):
            return
        columns = item.columns
        what = columns["rollout" if "rollout" in columns else "version"].tolist()
        self.flow.append(f"{node} takes {what}")
        self.note(self.flow[-1])
        if node == self.case.first:
            invariants.rollouts_are_taken_in_order(self, item)
        elif node == "queue":
            if not self.case.replays:
                invariants.the_queue_keeps_its_order(self, item)
        else:
            invariants.lag_keeps_its_bound(self, item)
            self.trained.update(columns["rollout"].tolist() if "rollout" in columns else ())
            self.updates += 1
            if self.first_update is None:
                self.first_update = self.clock.now
            self.clock.pass_by(0.5 if self.calm else self.random.uniform(0.0, 1.0))

    def after_pass(self, closed: bool) -> None:
        """Check what holds between two passes; where no row closed, maybe take a snapshot."""
        self.rounds += 1
        self.check(invariants.PASS)
        if self.rounds > MOST_ROUNDS or self.clock.now > MOST_SECONDS:
            self.violate("an_update_comes", f"{self.updates} updates in {self.rounds} passes")
        if not closed:
            self.barrier()

    def check(self, several: Any) -> None:
        for invariant in several:
            if wrong := invariant(self):
                self.found(invariant.__name__, wrong)
        if self.violations:
            raise Violation(self.violations[0])

    # -- what the fake workers ask

    def fate(self, call: Any, in_a_row: int) -> str:
        """Draw what happens to a call."""
        if call.workers.are_runners and call.index == self.doomed and call.method == "sample":
            return "break"
        if self.calm or self.keeping or not self.armed or call.copy_of is not None:
            return "deliver"
        kinds = self._kinds(call)
        if self.alone is not None and self.clock.now < TIMEOUT:
            is_rollout = call.workers.are_runners and call.method == "sample"
            return "hang" if is_rollout and call.index != self.alone else "deliver"
        if not kinds or self.random.random() >= self.rate:
            return "deliver"
        fate = self.random.choice(kinds)
        # More in a row than a runner may be restarted would rightly end the run.
        return fate if fate in HARMLESS or in_a_row < RESTARTS else "deliver"

    def _kinds(self, call: Any) -> Any:
        """Return the faults that may happen to a call."""
        if not call.workers.are_runners:
            verbs = ("sample", "add", "prioritize")
            return self.kinds["replay"] if call.method in verbs else ()
        if call.method == "evaluate":
            return ("delay", "kill")
        return self.kinds["runners"] if call.method == "sample" else ()

    def duration(self, call: Any, fate: str) -> float:
        """Draw the seconds that a call takes."""
        if call.method not in ("sample", "evaluate", "add"):
            return 0.01
        if self.calm:
            return 1.0
        return self.random.uniform(2.0, 8.0) if fate == "delay" else self.random.uniform(0.2, 1.2)

    def on_its_way(self, fate: str, tries: int) -> float:
        """Draw the seconds for which a result is on its way; one that is late is late for sure."""
        if fate == "late":
            return self.random.uniform(1.5, 3.0) * TIMEOUT * 2**tries
        return self.random.uniform(0.5, 3.0) if fate == "reorder" else 0.0

    def starting(self) -> float:
        """Draw the seconds that a new process takes to start."""
        return 0.0 if self.calm else self.random.uniform(0.0, 9.0)

    def crashes(self, in_a_row: int) -> bool:
        """Draw whether a new process ends while it starts."""
        return not self.calm and in_a_row < RESTARTS and self.random.random() < self.rate / 2

    def new_rollout(self, runner: Any) -> int:
        self.rollouts += 1
        return self.rollouts

    # -- invariants of calls, checked where they are made

    def check_turn(self, index: int, turn: int) -> None:
        """A restarted runner goes on from where the old one was."""
        steps = self.results[index] * self.case.graph.resources["runners"].rollout_length
        if turn != steps:
            self.found("a_restarted_runner_goes_on", f"runner {index} from {turn}, not {steps}")

    def check_weights(self, runner: Any) -> None:
        """Every runner has the weights of the version that it says it has."""
        known = self.weights_by_version.setdefault(runner.version, runner.weights)
        if runner.weights is None:
            self.found("every_runner_has_weights", f"runner {runner.index} has none")
        elif known is not runner.weights:
            text = f"runner {runner.index} has others of version {runner.version}"
            self.found("every_runner_has_weights", text)

    def check_patience(self, workers: Any, futures: Any, timeout: float | None) -> None:
        """A wait ends where the first runner is late by the rules, and no other time."""
        if not workers.are_runners or self.keeping or self.case.evaluates or timeout is None:
            return
        due = [
            workers.since[i] + TIMEOUT * 2 ** workers.tries[i]
            for i, waiting in enumerate(workers.waiting)
            if waiting
        ]
        left = max(0.0, min(due, default=0.0) - self.clock.now)
        if abs(left - timeout) > 1e-6:
            text = f"a wait of {timeout:.3f} s where the first runner is late in {left:.3f} s"
            self.found("time_outs_are_what_the_rules_say", text)

    def check_restart(self, workers: Any, index: int, because: Any) -> None:
        """Only a worker that failed, or is late, is restarted."""
        failed = workers.last_error[index] is not None
        late = self.clock.now >= workers.since[index] + TIMEOUT * 2 ** workers.tries[index] - 1e-6
        if not (failed or (workers.are_runners and late)):
            self.found("no_healthy_worker_is_restarted", f"{workers.name} {index}: {because}")

    # -- snapshots

    def barrier(self) -> None:
        """Take a snapshot if it is time for one, and compare what is restored from it."""
        if self.snapshot_at is None or self.rounds < self.snapshot_at or self.calm:
            return
        self.snapshot_at = None
        Restored(self).check()

    def run(self) -> None:
        """Run the schedule to its end."""
        try:
            self._run()
        except Violation:
            pass
        except (RunError, EnvError) as error:
            if self.doomed is None:
                self.found("no_run_ends_by_a_fault", str(error))
        except Exception as error:  # noqa: BLE001 - reported as what it is
            if not self.violations:
                self.found("nothing_else_is_raised", repr(error))
        finally:
            self.session.close()

    def _run(self) -> None:
        for row in self.session:
            self.note(f"row {row['row']}: {row['updates']} updates")
            self.check(invariants.ROW)
            self.barrier()
            if row["row"] >= self.case.rows:
                break
        if self.case.is_async and self.alone is not None and self.first_update > TIMEOUT:
            text = f"the first update came at {self.first_update:.3f} s"
            self.found("an_update_comes_with_one_healthy_runner", text)


class Restored:
    """A run that is restored from a snapshot of another, which goes on."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.arrays: dict[str, bytes] = {}
        self.lost_runners: list[int] | None = None
        """The runners of which the snapshot has nothing."""

    def check(self) -> None:
        """Compare what both keep and hold; and if nothing was lost, how they go on."""
        sim = self.sim
        text = self._kept(sim)
        # What fails or hangs is left out of a snapshot, and made again.
        left_out = len(sim.runners.requests) - sum(
            len(calls) for calls in self.state["place"]["handles"]["runners"]["requests"]["going"]
        )
        again = self._again(left_out)
        again.check((*invariants.PASS, *invariants.ROW))
        if (other := self._kept(again)) != text:
            sim.violate("a_snapshot_restores_an_equal_state", difference(text, other))
        if not left_out and not self.lost_runners:
            self._compare_the_rest(again)
        again.session.close()
        sim.note("a snapshot was restored, and kept the same")

    def _kept(self, sim: Simulation) -> str:
        """Return all that a session keeps, as text; times of this machine are left out."""
        sim.keeping = True
        try:
            self.state = sim.session.keep()
        finally:
            sim.keeping = False
        self.encoded = encoded(self.state, self._put)
        text = json.loads(json.dumps(self.encoded))
        place = text["dict"]["place"]["dict"]
        del place["clock"], text["dict"]["rows"]["dict"]["seconds"]
        # A runner that gave nothing is a new one in the restored run.
        runners = place["handles"]["dict"]["runners"]["dict"]["runners"]["list"]
        if self.lost_runners is None:
            self.lost_runners = [i for i, kept in enumerate(runners) if kept is None]
        for i in self.lost_runners:
            runners[i] = None
        return json.dumps(text, indent=1, sort_keys=True)

    def _put(self, x: Any) -> str:
        data = x.tobytes()
        name = hashlib.sha1(data).hexdigest()
        self.arrays[name] = data
        return name

    def _again(self, left_out: int) -> Simulation:
        """Return a calm simulation that goes on from the snapshot."""
        sim = self.sim
        again = Simulation(sim.case, sim.seed, calm=True)
        for name in ("accepted", "trained", "accepted_versions", "selected", "results"):
            setattr(again, name, getattr(sim, name).copy())
        for name in ("updates", "rollouts", "last_out", "first_update"):
            setattr(again, name, getattr(sim, name))
        again.left_out = sim.left_out + left_out
        again.keeping = True
        again.session.take(decoded(self.encoded, lambda name, size: bytearray(self.arrays[name])))
        again.keeping = False
        return again

    def _compare_the_rest(self, again: Simulation) -> None:
        """Let both runs go on without faults, and compare what goes through the graph."""
        sim = self.sim
        sim.calm = True
        flows = []
        for each in (sim, again):
            each.flow.clear()
            rows = iter(each.session)
            for _ in range(2):
                row = next(rows)
                kept = {k: v for k, v in row.items() if k not in ("seconds", "steps_per_second")}
                each.flow.append(json.dumps(kept))
            flows.append("\n".join(each.flow))
        if flows[0] != flows[1]:
            sim.violate("a_restored_run_goes_on_equally", difference(*flows))


def difference(text: str, other: str) -> str:
    """Return the first lines in which two texts differ."""
    lines, others = text.splitlines(), other.splitlines()
    at = next((i for i, (x, y) in enumerate(zip(lines, others, strict=False)) if x != y), None)
    at = min(len(lines), len(others)) if at is None else at
    return f"line {at}: {' '.join(lines[at : at + 3])!r}, then {' '.join(others[at : at + 3])!r}"
