"""A simulator of faults: the real scheduler, requests and queues over fake workers.

All of it runs in one process with a virtual clock. A seed says what happens to every call to a
runner or a shard of a replay, so whatever is found can be run again.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import invariants
from fake_workers import (
    HARMLESS,
    RUNNER_FAULTS,
    SHARD_FAULTS,
    TIMEOUT,
    Clock,
    FakeWorkers,
    Violation,
)
from restored import Restored
from simulated_graphs import Case

from flowrl.core.events import Dropped, Restarted, Stream, Tap, Took
from flowrl.core.keeping import Draws
from flowrl.errors import EnvError, RunError
from flowrl.graph.site import HereSite, Place
from flowrl.graph.stages import Schedule
from flowrl.runtime.base import Session

MOST_ROUNDS = 600
"""Passes of a schedule; one that needs more never comes to its end."""
MOST_SECONDS = 3000.0
"""Virtual seconds of a schedule."""
KINDS = (*RUNNER_FAULTS, "crash")
"""All that may happen; new processes may end while they start."""
RESTARTS = 3
"""Restarts in a row of a runner or a shard, the default of both."""


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
        self.counts: Counter[str] = Counter()
        """What the nodes counted, when invariants were checked last."""
        self.violations: list[str] = []
        self.rounds = self.updates = self.rollouts = self.left_out = 0
        self.first_update: float | None = None
        self.keeping = self.armed = self.restored = False
        self.accepted: dict[int, int] = {}
        """By rollout that was taken: its index among them."""
        self.trained: Counter[int] = Counter()
        self.last_out = -1
        count = case.graph.resources["runners"].num_runners
        self.accepted_versions, self.selected = [-1] * count, [-1] * count
        self.results = [0] * count
        self.turns = [0] * count
        """By runner: the steps for which it had acted by its last result."""
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
        takes = kind == "plain" and draw.random() < 0.3
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
        self.counts = self.session.counts()
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
        if self.alone is not None and self.clock.now < TIMEOUT:
            return 0.5
        return self.random.uniform(2.0, 8.0) if fate == "delay" else self.random.uniform(0.2, 1.2)

    def on_its_way(self, fate: str, tries: int) -> float:
        """Draw the seconds for which a result is on its way; one that is late is late for sure."""
        if fate == "late":
            return self.random.uniform(1.5, 3.0) * TIMEOUT * 2**tries
        return self.random.uniform(0.5, 3.0) if fate == "reorder" else 0.0

    def ready_at(self) -> float:
        """Draw when weights are computed that are needed now."""
        return self.clock.now + self.random.choice((0.0, self.random.uniform(0.0, 4.0)))

    def starting(self) -> float:
        """Draw the seconds that a new process takes to start."""
        return 0.0 if self.calm else self.random.uniform(0.0, 9.0)

    def crashes(self, in_a_row: int) -> bool:
        """Draw whether a new process ends while it starts."""
        return not self.calm and in_a_row < RESTARTS and self.random.random() < self.rate / 2

    def new_rollout(self) -> int:
        self.rollouts += 1
        return self.rollouts

    # -- invariants of calls, checked where they are made

    def check_turn(self, index: int, turn: int) -> None:
        """A restarted runner goes on from where the old one was."""
        steps = self.turns[index]
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
        # Results that were restored come at once, whenever the time-out of their call would be.
        if not workers.are_runners or self.keeping or self.restored or self.case.evaluates:
            return
        due = [
            workers.since[i] + TIMEOUT * 2 ** workers.tries[i]
            for i, waiting in enumerate(workers.waiting)
            if waiting
        ]
        assert timeout is not None
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
        # With pacing, what hangs may hold the others up until its time-out.
        waits_for_nobody = self.case.is_async and not self.case.is_paced
        if waits_for_nobody and self.alone is not None and self.first_update > TIMEOUT:
            text = f"the first update came at {self.first_update:.3f} s"
            self.found("an_update_comes_with_one_healthy_runner", text)
