"""The live table of a run: per node and per set of runners how busy, starved and blocked it is, and what flows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from flowrl.core.profile import Profile
from flowrl.observe.explain import bottleneck, shares

SECONDS = 1.0
"""How often the numbers are taken."""
WINDOW = 5
"""Over how many of these they are means."""


class Window:
    """The last seconds of a run: what `profile` tells, every now and then."""

    def __init__(
        self, profile: Callable[[], Profile], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.profile = profile
        self.clock = clock
        self.seen: deque[tuple[float, Profile]] = deque(maxlen=WINDOW + 1)

    def look(self) -> Profile | None:
        """The difference over the window; None before there are two looks at the run."""
        now = self.clock()
        if not self.seen or now - self.seen[-1][0] >= SECONDS:
            self.seen.append((now, self.profile()))
        return self.seen[-1][1] - self.seen[0][1] if len(self.seen) > 1 else None


def live_table(p: Profile, lag: float) -> Table:
    """A stretch of a run as a table; the bottleneck is marked.

    Args:
        p: the stretch.
        lag: of the data that was trained last, in updates.
    """
    worst = bottleneck(p)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("node", "operator"):
        table.add_column(name)
    for name in ("busy", "starved", "blocked", "steps/s", "queue", "lag"):
        table.add_column(name, justify="right")
    for share in shares(p):
        queue = p.queues.get(share.node)
        steps = sum(steps for (_, b), (_, steps) in p.edges.items() if b == share.node) or sum(
            steps for (a, _), (_, steps) in p.edges.items() if a == share.node
        )
        marked = worst is not None and worst.where.partition(",")[0] == share.node
        table.add_row(
            Text(f"{share.node}{' <- bottleneck' if marked else ''}", "bold red" if marked else ""),
            Text(share.does, "dim"),
            *(
                Text(f"{x:.0%}", "bold" if x >= 0.5 else "dim" if x < 0.005 else "")
                for x in (share.busy, share.starved, share.blocked)
            ),
            f"{steps / max(p.seconds, 1e-9):,.0f}" if steps else "",
            f"{queue[0]}/{queue[1]}" if queue else "",
            f"{lag:.1f}" if share.trains and lag == lag else "",  # noqa: PLR0124 - NaN is none
        )
    return table
