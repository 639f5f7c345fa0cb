"""What drives a run that is debugged: where it stops, what flowed along its edges, what was changed when, and the way back."""

from __future__ import annotations

import math
import signal
import threading
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from flowrl.core.events import OperatorRan, Took
from flowrl.core.items import Row, Trained
from flowrl.core.texts import amount
from flowrl.debugging.breaks import ROWS, Break, Spot
from flowrl.debugging.changes import change, settings
from flowrl.errors import FlowrlError, GraphError, NotFinite, unknown
from flowrl.graph.loop import Unit
from flowrl.graph.plan import Plan
from flowrl.graph.values import to_text
from flowrl.observe import looking
from flowrl.observe.progress import number as shown
from flowrl.running import Run, run
from flowrl.runtime.base import Session


class Unwind(BaseException):
    """Leaves a run in the midst of a pass: the debugger quits, or goes back. Never an error, so that nothing on the way takes it for one."""


class Change(NamedTuple):
    """A setting that was changed, and at which event of the run."""

    tick: int
    address: str
    value: Any


class Control:
    """An observer that stops the run which it observes, and `ask`s what to do then.

    A run is one stage after another in one thread, so the same seed leads to the same events in the same order. To go back is to run from the
    beginning to the end of a row, with every change made at the event at which it was made the first time.

    Args:
        plan: what to run.
        seed: of the run.
        ask: called wherever the run stops; it goes on once this returns.
        say: takes a line for the user.
    """

    live = True
    kinds: ClassVar[tuple[type, ...]] = (Took, OperatorRan)

    def __init__(
        self, plan: Plan, seed: int, ask: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.first = self.plan = plan
        self.seed = seed
        self.ask = ask
        self.say = say
        self.run: Run
        self.breaks: dict[int, Break] = {}
        self.goal: Break | None = Break("")
        """Where to stop once."""
        self.changes: list[Change] = []
        self.over = False
        self.pressed = False
        """Whether Ctrl-C was."""
        self.begin: int | None = None
        """The row behind which a fresh run is to stop; None in one that the user leads."""
        self.before: list[Row] = []
        """The rows of the run before it."""
        self._fresh()

    def _fresh(self) -> None:
        self.plan = self.first
        self.spot = Spot(1, "at")
        self.error: BaseException | None = None
        self.item: Any = None
        """What the run has in hand where it stands."""
        self.took: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        """By node: the last item that it took, and that it gave."""
        self.rows: list[Row] = []
        self.tick = 0
        """Events so far."""
        self.marks = [1]
        """By row: the event behind which it stood; that of the beginning first."""
        self._due = list(self.changes)
        self._met: set[int] = set()

    @property
    def session(self) -> Session:
        """The run's, with its stages and handles."""
        return self.run._session  # noqa: SLF001 - a debugger looks inside

    # -- running

    def work(self) -> Run:
        """Run, once more whenever the user goes back, until the user quits. Returns the last run, which is closed."""
        with on_interrupt(self._press):
            while not self.over:
                self._fresh()
                self.run = run(self.first, seed=self.seed, observers=[self])
                self._go()
        return self.run

    def _go(self) -> None:
        try:
            with self.run:
                for row in self.run:
                    self._closed(row)
        except Unwind as left:
            if left.__cause__ is not None:
                raise left.__cause__ from None
            self.run.reason = "closed"  # it was left, not lost
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told to the user, who may look at what led to it
            self.over = _quit_by_pdb(error)
            if not self.over:
                self._failed(error)

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def __call__(self, event: Took | OperatorRan) -> None:
        """Stop here, if anything says so."""
        again_on_interrupt(self._press)  # pdb, once it goes on, has put its own in this place
        try:
            self._take(event)
        except Exception as error:  # raised where the run was started, for here it would only switch this observer off
            raise Unwind from error

    def _take(self, event: Took | OperatorRan) -> None:
        self.tick += 1
        self._catch_up()
        row = len(self.rows) + 1
        if isinstance(event, Took):
            self.took[event.node] = event.item
            self._arrive(Spot(row, "at", event.node), event.item)
        elif event.item is not None:
            self.given[event.node] = event.item
            self._arrive(Spot(row, "behind", event.node), event.item)

    def _arrive(self, spot: Spot, item: Any) -> None:
        why = self._why(spot, item)
        if why is not None:
            self.spot, self.item = spot, item
            self._stop(why)

    def _closed(self, row: Row) -> None:
        self.tick += 1
        self.rows.append(row)
        self.marks.append(self.tick)
        self._catch_up()
        number = len(self.rows)
        if self.begin is None:
            self.say(
                f"row {number}: {row['env_steps']:,} steps, return {shown(row['return_mean'])}, loss {row['loss']:.4g}"
            )
        elif number <= len(self.before) and _timeless(row) != _timeless(self.before[number - 1]):
            self.say(
                f"row {number} came out in another way than before: something in it does not follow from the seed"
            )
        self._arrive(Spot(number, "closed"), row)

    def _catch_up(self) -> None:
        """Make those changes that were made at this event when it came the last time."""
        while self._due and self._due[0].tick <= self.tick:
            due = self._due.pop(0)
            self.plan = change(self.session, self.plan, due.address, due.value)

    # -- stopping

    def _why(self, spot: Spot, item: Any) -> str | None:
        """Why to stop here, in words; None to go on."""
        if self.pressed and spot.how == "at":
            self.pressed = False
            self._lead()
            return "interrupted"
        if self.begin is not None:
            there = spot.how == "at" if self.begin == 0 else spot == Spot(self.begin, "closed")
            if there:
                self._lead()
            return "" if there else None
        for number, stop in self.breaks.items():
            if (met := self._meets(number, stop, spot, item)) is not None:
                return "; ".join([f"break {number}: {stop}", *met])
        met = None if self.goal is None else self._meets(0, self.goal, spot, item)
        return None if met is None else "".join(met)

    def _lead(self) -> None:
        """From here on the user leads again."""
        self.begin = None
        self.changes = [c for c in self.changes if c not in self._due]
        self._due = []

    def _meets(self, number: int, stop: Break, spot: Spot, item: Any) -> list[str] | None:
        """What makes a break stop here, in words if there are any; None where it does not. It does so once for an item."""
        if spot.how == "at":
            self._met.discard(number)
        if (
            stop.node not in ((ROWS,) if spot.how == "closed" else (spot.node, ""))
            or number in self._met
        ):
            return None
        if stop.when is None:
            return None if spot.how == "behind" else []
        if stop.by_row and spot.how == "behind":
            return None
        held = (self.rows[-1] if self.rows else None) if stop.by_row else item
        value = looking.number(held, stop.when.name)
        if value is None or not stop.when.holds(value):
            return None
        if spot.how == "at":
            self._met.add(number)
        return [f"{stop.when.name} is {value:.6g}"]

    def _stop(self, why: str) -> None:
        if why:
            self.say(why)
        self.goal = None
        if self.spot.how != "closed":
            self.say(self.here())
        self.ask()
        if self.over or self.begin is not None:
            raise Unwind

    def _failed(self, error: BaseException) -> None:
        self.error, self.pressed = error, False
        self._lead()
        self.spot = Spot(
            len(self.rows) + 1, "failed at" if (node := self._culprit(error)) else "failed", node
        )
        self.item = self.took.get(node)
        kind = "" if isinstance(error, FlowrlError) else f"{type(error).__name__}: "
        self.say(f"{kind}{error}".removesuffix(": "))
        self.ask()

    def _culprit(self, error: BaseException) -> str:
        """The node at which a run failed, as far as it was one."""
        trained = (node for node, item in self.given.items() if isinstance(item, Trained))
        if isinstance(error, NotFinite):
            return next(trained, "")
        outside = isinstance(error, FlowrlError) and error.where == self.plan.graph.name
        return "" if outside else self.session.place.ledger.at.node

    # -- what a user asks for

    def here(self) -> str:
        """The node where the run stands and what it has in hand, in a line."""
        spot, taken = self.spot, looking.brief(self.item)
        if spot.how == "behind":
            return f"{spot.node} gave {taken}"
        source = self.unit(spot.node).ctx.source
        return f"{source} -> {spot.node}: {taken}" if source else f"{spot.node} begins a pass"

    def unit(self, node: str) -> Unit:
        """A node at work.

        Raises:
            GraphError: there is none of this name.
        """
        units = {
            name: unit for loop in self.session.turns.loops for name, unit in loop.units.items()
        }
        if node not in units:
            raise GraphError(unknown("node", node, units))
        return units[node]

    def on_edge(self, before: str, after: str | None = None) -> Any:
        """The last item that a node gave, to `after` if named.

        Raises:
            GraphError: there is no such node or edge, or nothing was given yet.
        """
        self.unit(before)
        if after is not None:
            self.unit(after)
            sources = next(n.after for n in self.plan.graph.nodes if n.name == after)
            if before not in sources:
                raise GraphError(
                    f"there is no edge {before} -> {after}; {after} takes from {', '.join(sources) or 'no node'}"
                )
        if before not in self.given:
            raise GraphError(f"{before} has given nothing yet; until {before}, then next")
        return self.given[before]

    def set(self, address: str, value: Any) -> str:
        """Change a setting from here on, and say what it was and is.

        Raises:
            FlowrlError: it can't be changed, or not in this run.
        """
        self.alive()
        before = settings(self.plan.graph)
        self.plan = change(self.session, self.plan, address, value)
        self.changes.append(Change(self.tick, address, value))
        old, new = (
            to_text(known.get(address), defaults=False)
            for known in (before, settings(self.plan.graph))
        )
        return f"{address} was {old} and is {new} from here on"

    def alive(self) -> None:
        """See that the run goes on.

        Raises:
            GraphError: it is over.
        """
        if self.error is not None:
            raise GraphError(
                "the run is over: it failed; look at it with show, where, settings and pdb, or go back, or quit"
            )

    def back(self) -> None:
        """Go to the end of the last row, or from there to that of the row before it.

        Raises:
            GraphError: this is the beginning.
        """
        row = len(self.rows) - (self.spot.how == "closed")
        if row < 0 or (row == 0 and self.tick <= self.marks[0] and self.error is None):
            raise GraphError("this is the beginning")
        kept = [c for c in self.changes if c.tick <= self.marks[row]]
        for each in self.changes:
            self.say(
                f"set {each.address} {each.value} {'stays' if each in kept else 'came later, and is undone'}"
            )
        self.changes, self.before, self.begin = kept, self.rows, row
        self.say(f"running {row} row{'s' * (row != 1)} again" if row else "beginning again")

    def where(self) -> str:
        """The nodes in a list, an arrow at the one where the run stands, what each holds; and how far it is."""
        ledger, graph = self.session.counts(), self.plan.graph
        channels, held = self.session.turns.channels, self.session.audit().held_steps
        wide, kinds = (
            max(map(len, names))
            for names in ([n.name for n in graph.nodes], [type(n.op).__name__ for n in graph.nodes])
        )
        lines = [
            f"{graph.name}, seed {self.seed}, {self.spot}: {ledger['sampled_steps']:,} steps sampled, {amount(Fraction(ledger['updates']), 'update')}"
        ]
        before = ""
        for node in graph.nodes:
            holds = f"holds {held[node.name]:,} steps" if node.name in held else ""
            if node.name in channels:
                holds = f"holds {len(channels[node.name])} of {channels[node.name].capacity}"
            source = f"<- {', '.join(node.after)}" if node.after not in ((), (before,)) else ""
            mark = "->" if node.name == self.spot.node else "  "
            lines.append(
                f"{mark} {node.name:<{wide}}  {type(node.op).__name__:<{kinds}}  {'  '.join(filter(None, (source, holds)))}".rstrip()
            )
            before = node.name
        return "\n".join(lines)


def _timeless(row: Row) -> dict[str, float]:
    """A row without what differs from run to run."""
    timed = ("seconds", "steps_per_second")
    return {name: x for name, x in row.items() if name not in timed and not math.isnan(x)}


def _quit_by_pdb(error: BaseException | None) -> bool:
    """Whether somebody quit pdb, within an operator or an environment."""
    return error is not None and (isinstance(error, BdbQuit) or _quit_by_pdb(error.__cause__))


def again_on_interrupt(act: Callable[[int, FrameType | None], None]) -> None:
    """Let Ctrl-C do this from now on, where it is for this thread to say."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, act)


@contextmanager
def on_interrupt(act: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let Ctrl-C do this for a while."""
    before = signal.getsignal(signal.SIGINT)
    again_on_interrupt(act)
    try:
        yield
    finally:
        again_on_interrupt(before)  # type: ignore[arg-type]
