"""The live table of a run, with a line for each node and each set of runners.

It shows how busy, starved and blocked they are, and the environment steps per second.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.text import Text

from flowrl.core.profile import Profile
from flowrl.observe.bottleneck import bottleneck
from flowrl.observe.breakdown import shares

HEAD = ("node", "operator", "busy", "starved", "blocked", "steps/s", "queue", "policy lag")
"""The names of the table's columns."""
SECONDS = 1.0
"""The seconds between two profiles that are taken."""
WINDOW = 5
"""The numbers shown are means over this many of these intervals."""


class Window:
    """The last `WINDOW` x `SECONDS` seconds of a run.

    Args:
        profile: returns where the time of the run went so far.
        clock: returns the time in seconds.
    """

    def __init__(
        self, profile: Callable[[], Profile], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.profile = profile
        self.clock = clock
        self.seen: deque[tuple[float, Profile]] = deque(maxlen=WINDOW + 1)

    def look(self) -> Profile | None:
        """Return the profile of the window; None before two profiles were taken."""
        now = self.clock()
        if not self.seen or now - self.seen[-1][0] >= SECONDS:
            self.seen.append((now, self.profile()))
        return self.seen[-1][1] - self.seen[0][1] if len(self.seen) > 1 else None


def live_table(p: Profile, lag: float) -> Group:
    """Return a table for a terminal in which the bottleneck is marked.

    A bottleneck that is neither a node nor a set of runners, such as the loop over the rows, has a
    line of its own.

    The table is made of lines of text, since a table of rich's takes ten times as long to draw, and
    the run waits for that.

    Args:
        p: the profile of a part of a run.
        lag: the policy lag of the data that was trained last, in updates; NaN if not known.
    """
    worst = bottleneck(p)
    # A straggler is one worker of a resource, whose line is marked.
    marked = worst.where.partition(",")[0] if worst is not None else ""
    rows = [[(name, "dim") for name in HEAD]]
    nodes = shares(p)
    for share in nodes:
        steps, queue = _steps(p, share.node), p.queues.get(share.node)
        rows.append(
            [
                _name(share.node, is_bottleneck=share.node == marked),
                (share.does, "dim"),
                *(_percent(x) for x in (share.busy, share.starved, share.blocked)),
                (f"{steps / max(p.seconds, 1e-9):,.0f}" if steps else "", ""),
                (f"{queue[0]}/{queue[1]}" if queue else "", ""),
                (f"{lag:.1f}" if share.trains and not math.isnan(lag) else "", ""),
            ]
        )
    if worst is not None and all(share.node != marked for share in nodes):
        others = [("", "")] * (len(HEAD) - 3)
        rows.append(
            [_name(worst.where, is_bottleneck=True), ("", ""), _percent(worst.share), *others]
        )
    widths = [_width(column) for column in zip(*rows, strict=True)]
    return Group(*(_line(row, widths) for row in rows))


def _name(name: str, *, is_bottleneck: bool) -> tuple[str, str]:
    return (f"{name} <- bottleneck", "bold red") if is_bottleneck else (name, "")


def _width(column: Sequence[tuple[str, str]]) -> int:
    return max(len(text) for text, _ in column)


def _line(row: Sequence[tuple[str, str]], widths: Sequence[int]) -> Text:
    """Return a line of texts with their styles: the first two to the left, numbers to the right."""
    line = Text(no_wrap=True)
    for number, ((text, style), width) in enumerate(zip(row, widths, strict=True)):
        padded = text.ljust(width) if number < 2 else text.rjust(width)
        line.append(padded, style)
        line.append("  ")
    return line


def _steps(p: Profile, node: str) -> int:
    """Return the environment steps that came to a node; of the first node, those that left it."""
    came = sum(steps for (_, target), (_, steps) in p.edges.items() if target == node)
    if came:
        return came
    return sum(steps for (source, _), (_, steps) in p.edges.items() if source == node)


def _percent(share: float) -> tuple[str, str]:
    """Return a share in percent and its style: large ones bold, those that round to 0 % dim."""
    if share >= 0.5:
        return f"{share:.0%}", "bold"
    return f"{share:.0%}", "dim" if share < 0.005 else ""
