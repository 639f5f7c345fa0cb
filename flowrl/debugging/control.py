"""Control of a debugged run: where it stops, its items and changes, and the way back."""

from __future__ import annotations

import math
import signal
import threading
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from flowrl.core.clock import PAUSED, here
from flowrl.core.events import OperatorRan, Took
from flowrl.core.items import Row, Trained, reached
from flowrl.core.texts import amount, plural
from flowrl.debugging.breaks import ROWS, Break, Spot, Standing
from flowrl.debugging.changes import change, settings
from flowrl.errors import FlowrlError, GraphError, NotFiniteError, unknown
from flowrl.graph.loop import Unit
from flowrl.graph.plan import Plan
from flowrl.graph.values import to_text
from flowrl.observe import looking
from flowrl.observe.progress import number as shown
from flowrl.running import Run
from flowrl.runtime.base import Session
from flowrl.starting import run


class Unwind(BaseException):
    """Exception that leaves a run within a pass, because the debugger quits or goes back.

    It is no `Exception`, so that no handler on the way takes it for an error.
    """


class Change(NamedTuple):
    """Change of a setting, with the place in the run at which it was made."""

    tick: int
    """How many events of the run came before the change."""
    address: str
    value: Any


class Control:
    """Observer that stops the run which it observes, and calls `ask` to know what to do then.

    A run is one stage after another in one thread, so the same seed leads to the same events in
    the same order. To go back is to run from the beginning to the end of a row, with every change
    made at the event at which it was made the first time.

    Args:
        plan: the plan to run.
        seed: the seed of the run.
        ask: a function that is called wherever the run stops; the run goes on once it returns.
        say: a function that prints a line for the user.
        poll: a function that is called at every event of the run, before it may stop.
    """

    live = True
    kinds: ClassVar[tuple[type, ...]] = (Took, OperatorRan)

    def __init__(
        self,
        plan: Plan,
        seed: int,
        ask: Callable[[], None],
        say: Callable[[str], None],
        poll: Callable[[], None],
    ) -> None:
        self.first = self.plan = plan
        self.seed = seed
        self.ask = ask
        self.say = say
        self.poll = poll
        self.opened: Callable[[Run], None] | None = None
        """What is called with each run that was opened, also where the user went back."""
        self.standing: Standing | None = None
        """Where the run stands while the user is asked; None while it goes on."""
        self.run: Run
        self.breaks: dict[int, Break] = {}
        self.goal: Break | None = Break("")
        """The place to stop at once, None for none."""
        self.changes: list[Change] = []
        """The changes that the user made and did not undo."""
        self.over = False
        """Whether the user quit."""
        self.pressed = False
        """Whether Ctrl-C was pressed and has not stopped the run yet."""
        self.return_row: int | None = None
        """The row after which a repeated run stops; None in a run that the user steers."""
        self.previous_rows: list[Row] = []
        """The rows of the run before the repeated one."""
        self._reset()

    def _reset(self) -> None:
        """Forget the last run, but not the changes and breaks of the user."""
        self.plan = self.first
        self.spot = Spot(1, "at")
        self.error: BaseException | None = None
        self.item: Any = None
        """The item that the node takes or yields where the run stands."""
        self.took: dict[str, Any] = {}
        """The last item that each node took."""
        self.given: dict[str, Any] = {}
        """The last item that each node yielded."""
        self.rows: list[Row] = []
        self.tick = 0
        """The number of events so far."""
        self.row_ticks = [1]
        """The `tick` at which each row was closed, that of the beginning first."""
        self._pending_changes = list(self.changes)
        """Changes of the run before that are still to be made in the repeated one."""
        self._stopped_by: set[int] = set()
        """The breaks that have stopped the run for the item that its node takes now."""

    @property
    def session(self) -> Session:
        """The session of the run, with its stages and handles."""
        return self.run._session  # noqa: SLF001 - a debugger looks inside

    # -- running

    def work(self) -> Run:
        """Run until the user quits, and again from the beginning whenever the user goes back.

        Returns:
            The last run, which is closed.
        """
        with on_interrupt(self._press):
            while not self.over:
                self._reset()
                self.run = run(self.first, seed=self.seed, observers=[self])
                if self.opened is not None:
                    self.opened(self.run)
                self._iterate()
        return self.run

    def _iterate(self) -> None:
        """Go through the rows of a run; show an error of it to the user."""
        try:
            with self.run:
                for row in self.run:
                    self._closed(row)
        except Unwind as left:
            if left.__cause__ is not None:
                raise left.__cause__ from None
            # The user left the run, so it did not fail.
            self.run.reason = "closed"
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the user looks into it
            self.over = _quit_by_pdb(error)
            if not self.over:
                self._failed(error)

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        """Handle Ctrl-C: stop at the next node, or at once where it comes a second time."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def __call__(self, event: Took | OperatorRan) -> None:
        """Take an event of the run, and stop there if there is a reason to."""
        # When pdb lets the run go on, it leaves a handler of its own in place of this one.
        again_on_interrupt(self._press)
        try:
            self.poll()
            self._take(event)
        except Exception as error:
            # An ordinary error of an observer only switches it off; this one must end the run.
            raise Unwind from error

    def _take(self, event: Took | OperatorRan) -> None:
        """Remember the item of an event, make the changes that belong here, and maybe stop."""
        self.tick += 1
        self._repeat_changes()
        row = len(self.rows) + 1
        if isinstance(event, Took):
            self.took[event.node] = event.item
            self._stop_if_wanted(Spot(row, "at", event.node), event.item)
        elif event.item is not None:
            self.given[event.node] = event.item
            self._stop_if_wanted(Spot(row, "after", event.node), event.item)

    def _stop_if_wanted(self, spot: Spot, item: Any) -> None:
        """Stop at a spot if there is a reason to."""
        why = self._why(spot, item)
        if why is not None:
            self.spot, self.item = spot, item
            self._stop(why)

    def _closed(self, row: Row) -> None:
        """Remember and show a row that has closed, and maybe stop there."""
        self.tick += 1
        self.rows.append(row)
        self.row_ticks.append(self.tick)
        self._repeat_changes()
        number = len(self.rows)
        if self.return_row is None:
            result = f"return {shown(row['return_mean'])}, loss {row['loss']:.4g}"
            count, what = reached(row)
            self.say(f"row {number}: {count:,} {what}, {result}")
        elif self._differs(number, row):
            self.say(
                f"row {number} differs from that of the run before: "
                "something in it does not follow from the seed"
            )
        self._stop_if_wanted(Spot(number, "closed"), row)

    def _differs(self, number: int, row: Row) -> bool:
        """Return whether a row of a repeated run is another one than in the run before."""
        if number > len(self.previous_rows):
            return False
        return _timeless(row) != _timeless(self.previous_rows[number - 1])

    def _repeat_changes(self) -> None:
        """Make the changes that were made at this event in the run before."""
        while self._pending_changes and self._pending_changes[0].tick <= self.tick:
            repeated = self._pending_changes.pop(0)
            self.plan = change(self.session, self.plan, repeated.address, repeated.value)

    # -- stopping

    def _why(self, spot: Spot, item: Any) -> str | None:
        """Return why to stop here, empty where that needs no words; None to go on."""
        # Ctrl-C also stops a run that is repeated, wherever it is by then.
        if self.pressed and spot.how == "at":
            self.pressed = False
            self._hand_over()
            return "interrupted"
        # A repeated run passes all breaks until it is where the user wants to be.
        if self.return_row is not None:
            beginning = self.return_row == 0 and spot.how == "at"
            if beginning or spot == Spot(self.return_row, "closed"):
                self._hand_over()
                return ""
            return None
        for number, stop in self.breaks.items():
            if (reasons := self._reasons(number, stop, spot, item)) is not None:
                return "; ".join([f"break {number}: {stop}", *reasons])
        # The goal of `next` and `until` has the number 0, which no break has.
        reasons = None if self.goal is None else self._reasons(0, self.goal, spot, item)
        return None if reasons is None else "".join(reasons)

    def _hand_over(self) -> None:
        """Let the user steer again, without the changes that have not been repeated yet."""
        self.return_row = None
        self.changes = [c for c in self.changes if c not in self._pending_changes]
        self._pending_changes = []

    def _reasons(self, number: int, stop: Break, spot: Spot, item: Any) -> list[str] | None:
        """Return why a break stops here, as a list of texts; None where it does not.

        A break stops once for an item: where its node takes it, or else where it yields one.
        """
        # The next node takes an item, so what stopped the run before is done with.
        if spot.how == "at":
            self._stopped_by.discard(number)
        places = (ROWS,) if spot.how == "closed" else (spot.node, "")
        if stop.node not in places or number in self._stopped_by:
            return None
        # Without a condition on its items, a node stops the run only where it takes one.
        if stop.when is None:
            return None if spot.how == "after" else []
        if stop.by_row:
            if spot.how == "after":
                return None
            compared = self.rows[-1] if self.rows else None
        else:
            compared = item
        value = looking.number(compared, stop.when.name)
        if value is None or not stop.when.holds(value):
            return None
        if spot.how == "at":
            self._stopped_by.add(number)
        return [f"{stop.when.name} is {value:.6g}"]

    def _stop(self, why: str) -> None:
        """Ask the user what to do here; leave the run where the user quits or goes back."""
        if why:
            self.say(why)
        # A goal holds for one stop only; the command that the user gives next sets another.
        self.goal = None
        if self.spot.how != "closed":
            self.say(self.here())
        with _nobody_at_work():
            self._ask()
        if self.over or self.return_row is not None:
            raise Unwind

    def _failed(self, error: BaseException) -> None:
        """Show an error that ended the run, and ask the user what to do."""
        self.error, self.pressed = error, False
        self._hand_over()
        node = self._culprit(error)
        self.spot = Spot(len(self.rows) + 1, "failed at" if node else "failed", node)
        self.item = self.took.get(node)
        kind = "" if isinstance(error, FlowrlError) else f"{type(error).__name__}: "
        self.say(f"{kind}{error}".removesuffix(": "))
        self._ask()

    def _ask(self) -> None:
        """Ask the user what to do where the run stands."""
        self.standing = Standing(self.spot, self.item)
        try:
            self.ask()
        finally:
            self.standing = None

    def _culprit(self, error: BaseException) -> str:
        """Return the node at which a run failed, empty where it was none."""
        # A loss is checked when a row closes, so the node at work then is not the one that trained.
        if isinstance(error, NotFiniteError):
            _, _, learner = error.where.rpartition(".")
            items = ((node, x) for node, x in self.given.items() if isinstance(x, Trained))
            # Nodes after the one that trained pass its item on.
            return next((node for node, x in items if x.learner == learner), "")
        outside = isinstance(error, FlowrlError) and error.where == self.plan.graph.name
        return "" if outside else self.session.place.ledger.at.node

    # -- what a user asks for

    def here(self) -> str:
        """Describe in a line the node where the run stands, and its item."""
        spot, item = self.spot, looking.brief(self.item)
        if spot.how == "after":
            return f"{spot.node} gave {item}"
        source = self.unit(spot.node).ctx.source
        return f"{source} -> {spot.node}: {item}" if source else f"{spot.node} begins a pass"

    def unit(self, node: str) -> Unit:
        """Return a node of the running graph.

        Raises:
            GraphError: there is no node of this name.
        """
        loops = self.session.turns.loops
        units = {name: unit for loop in loops for name, unit in loop.units.items()}
        if node not in units:
            raise GraphError(unknown("node", node, units))
        return units[node]

    def on_edge(self, before: str, after: str | None = None) -> Any:
        """Return the last item that a node yielded.

        Args:
            before: the node.
            after: the node that the item went to, None for any.

        Raises:
            GraphError: there is no such node or edge, or the node has yielded nothing yet.
        """
        self.unit(before)
        if after is not None:
            self.unit(after)
            sources = next(n.after for n in self.plan.graph.nodes if n.name == after)
            if before not in sources:
                takes = f"{after} takes from {', '.join(sources) or 'no node'}"
                raise GraphError(f"there is no edge {before} -> {after}; {takes}")
        if before not in self.given:
            raise GraphError(f"{before} has given nothing yet; until {before}, then next")
        return self.given[before]

    def set(self, address: str, value: Any) -> str:
        """Change a setting from here on, and return a line with its old and new value.

        Args:
            address: the setting, as `Graph.set` takes it.
            value: its new value.

        Raises:
            FlowrlError: it can't be changed, or not in this run.
        """
        self.alive()
        old = self._setting(address)
        self.plan = change(self.session, self.plan, address, value)
        self.changes.append(Change(self.tick, address, value))
        new = self._setting(address)
        return f"{address} was {old} and is {new} from here on"

    def _setting(self, address: str) -> str:
        """Return the value of a setting as text."""
        return to_text(settings(self.plan.graph).get(address), defaults=False)

    def alive(self) -> None:
        """Check that the run can go on.

        Raises:
            GraphError: the run has failed.
        """
        if self.error is not None:
            raise GraphError(
                "the run is over: it failed; look at it with show, where, settings and pdb, "
                "or go back, or quit"
            )

    def back(self) -> None:
        """Go to the end of the last row, or from there to the end of the row before it.

        Raises:
            GraphError: this is the beginning.
        """
        row = len(self.rows)
        # At the end of a row, going back means the row before it.
        if self.spot.how == "closed":
            row -= 1
        if row < 0 or (row == 0 and self.tick <= self.row_ticks[0] and self.error is None):
            raise GraphError("this is the beginning")
        # A change that was made after the row's end will not have been made there.
        kept = [c for c in self.changes if c.tick <= self.row_ticks[row]]
        for each in self.changes:
            result = "stays" if each in kept else "came later, and is undone"
            self.say(f"set {each.address} {each.value} {result}")
        self.changes, self.previous_rows, self.return_row = kept, self.rows, row
        self.say(f"running {row} {plural(row, 'row')} again" if row else "beginning again")

    def where(self) -> str:
        """List the nodes and what each holds, with an arrow at the node where the run stands."""
        ledger, graph = self.session.counts(), self.plan.graph
        held = self.session.audit().held_steps
        width = max(len(node.name) for node in graph.nodes)
        kinds_width = max(len(type(node.op).__name__) for node in graph.nodes)
        updates = amount(Fraction(ledger["updates"]), "update")
        place = f"{graph.name}, seed {self.seed}, {self.spot}"
        lines = [f"{place}: {ledger['sampled_steps']:,} steps sampled, {updates}"]
        previous = ""
        for node in graph.nodes:
            # A node that takes from the line above it needs no arrow to say so.
            source = f"<- {', '.join(node.after)}" if node.after not in ((), (previous,)) else ""
            facts = "  ".join(filter(None, (source, self._holds(node.name, held))))
            mark = "->" if node.name == self.spot.node else "  "
            kind = type(node.op).__name__
            lines.append(f"{mark} {node.name:<{width}}  {kind:<{kinds_width}}  {facts}".rstrip())
            previous = node.name
        return "\n".join(lines)

    def _holds(self, node: str, held_steps: Mapping[str, int]) -> str:
        """Describe what a node holds, empty where it holds nothing."""
        channels = self.session.turns.channels
        if node in channels:
            return f"holds {len(channels[node])} of {channels[node].capacity}"
        return f"holds {held_steps[node]:,} steps" if node in held_steps else ""


@contextmanager
def _nobody_at_work() -> Iterator[None]:
    """Count the time of a ``with`` block as no node's, for the user takes it."""
    clock = here()
    node = clock.node
    clock.at("")
    try:
        with PAUSED:
            yield
    finally:
        clock.at(node)


def _timeless(row: Row) -> dict[str, float]:
    """Return a row without what differs from run to run."""
    timed = ("seconds", "steps_per_second")
    return {name: x for name, x in row.items() if name not in timed and not math.isnan(x)}


def _quit_by_pdb(error: BaseException | None) -> bool:
    """Return whether the user quit pdb within an operator or an environment."""
    return error is not None and (isinstance(error, BdbQuit) or _quit_by_pdb(error.__cause__))


def again_on_interrupt(act: Callable[[int, FrameType | None], None]) -> None:
    """Let Ctrl-C call a function from now on; only the main thread can set that."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, act)


@contextmanager
def on_interrupt(act: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let Ctrl-C call a function within a ``with`` block."""
    before = signal.getsignal(signal.SIGINT)
    again_on_interrupt(act)
    try:
        yield
    finally:
        again_on_interrupt(before)  # type: ignore[arg-type]
