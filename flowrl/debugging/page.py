"""The live page of a debugged run: where it stands, and the commands that a page may give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from flowrl.core.events import Ended, Tap
from flowrl.debugging.breaks import Standing
from flowrl.debugging.control import Control
from flowrl.graph.graph import Graph
from flowrl.observe import looking
from flowrl.observe.drawn import drawn
from flowrl.observe.history import Entry
from flowrl.page.source import Cursor, LiveRun
from flowrl.running import Run

LINES = {"next": "next", "row": "until row", "continue": "continue"}
"""What a page may ask of a debugged run, and the line of the prompt that does it."""
OF_NODE = ("until", "break", "clear")
"""What it may ask of a node: commands of the prompt, before the node's name."""


class DebuggedRun:
    """The source of a run under the debugger, and of those that `back` begins in its place.

    Args:
        debugger: control of the run.
        ask: gives a line to the prompt, from any thread; returns False where it takes none.
    """

    every = 0.25
    """The seconds between two looks of a page, which shows each step of a user."""

    def __init__(self, debugger: Control, ask: Callable[[str], bool]) -> None:
        self.debugger, self.ask = debugger, ask
        # The run is another one once the user goes back.
        self.live = LiveRun(
            debugger.plan,
            lambda: debugger.rows,
            lambda: debugger.run.profile(),  # noqa: PLW0108
            observe=lambda observer: debugger.run.observe(observer),  # noqa: PLW0108
        )
        self._edition = 0
        """How often a setting was changed, or a change undone."""
        self._plan = debugger.plan
        self._described: tuple[Standing | None, str] = None, ""
        """Where the run stood when its item was described last, and the description."""
        self._lock = Lock()

    @property
    def number(self) -> int:
        """The number of the newest event."""
        return self.live.number

    def begin(self, run: Run) -> None:
        """Show a run that was opened just now, from its beginning."""
        self.live.begin_again()
        run.observe(Tap(self._take, *LiveRun.kinds))

    def _take(self, event: Any) -> None:
        """Keep an event of the run, unless it ends only to begin again."""
        if not (isinstance(event, Ended) and self.debugger.return_row is not None):
            self.live(event)

    def facts(self) -> dict[str, Any]:
        """Return the graph with its settings as they are now, and the commands there are."""
        edition = self.edition()
        return {
            "graph": drawn(self._plan),
            "plan": str(self._plan),
            "verbs": tuple(LINES),
            "node_verbs": OF_NODE,
            "edition": edition,
        }

    def summary(self) -> dict[str, Any]:
        """Return a line about the run."""
        summary = self.live.summary()
        return {**summary, "state": _state(summary["state"], self.debugger.standing)}

    def graph(self) -> Graph:
        """Return the graph with its settings as they are now."""
        return self.debugger.plan.graph

    def entries(self) -> Sequence[Entry]:
        """Return nothing, for the past of a debugged run is what `back` leads to."""
        return ()

    def row(self, number: int) -> Mapping[str, float]:
        """Return the row of this number, counted from 1."""
        return self.live.row(number)

    def item(self, node: str) -> dict[str, Any] | None:
        """Return the newest item of a node, empty before there is one; None for an unknown node."""
        return self.live.item(node)

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return what is new, and where the run stands and should stop."""
        standing = self.debugger.standing
        cursor, news = self.live.since(cursor)
        found = {
            "edition": self.edition(),
            # A copy, for the thread of the run changes them meanwhile.
            "breaks": [
                {"number": number, "node": stop.node, "text": str(stop)}
                for number, stop in self.debugger.breaks.copy().items()
            ],
            "failed": self.debugger.error is not None,
            "stands": None,
        }
        if standing is not None:
            spot = standing.spot
            found["stands"] = {"at": str(spot), "node": spot.node, "item": self._item(standing)}
        return cursor, {**news, "state": _state(news["state"], standing), "debugger": found}

    def control(self, verb: str, node: str = "") -> bool:
        """Give a command to the prompt, and return whether there is such a one.

        Args:
            verb: one of `LINES`; with a node one of `OF_NODE`.
            node: the name of a node of the graph, empty for none.
        """
        if self.debugger.over:
            return False
        if not node:
            return verb in LINES and self.ask(LINES[verb])
        nodes = [each.name for each in self._plan.graph.nodes]
        return verb in OF_NODE and node in nodes and self.ask(f"{verb} {node}")

    def edition(self) -> int:
        """Return the number of the plan that the run has now."""
        with self._lock:
            if self._plan is not self.debugger.plan:
                self._plan = self.debugger.plan
                self._edition += 1
            return self._edition

    def _item(self, standing: Standing) -> str:
        """Return the item where the run stands as text; however many pages ask, it is made once."""
        described, text = self._described
        if described is not standing:
            try:
                text = "" if standing.item is None else looking.whole(standing.item)
            except Exception as error:  # noqa: BLE001 - its own code, such as its repr, may raise
                text = f"{type(error).__name__}: {error}"
            self._described = standing, text
        return text


def _state(state: str, standing: Standing | None) -> str:
    """Return what the run does, in a few words; `state` is where it does not stand."""
    return state if standing is None else f"stopped: {standing.spot}"
