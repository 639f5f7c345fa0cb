"""`make pictures`: what README.md and docs/seeing.md show, made by flowrl itself.

These are the drawings, the trace and the live table.
"""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

from rich.console import Console

import flowrl as fl
from flowrl.observe.table import Window, live_table

PICTURES = Path(__file__).parents[1] / "docs/pictures"


def main() -> None:
    graph = fl.impala("CartPole-v1")
    (PICTURES / "impala.svg").write_text(graph.draw("svg"), encoding="utf-8")
    with fl.run(graph, runtime="ray", trace=PICTURES / "trace.svg") as run:
        next(run)
        window, began = Window(run.profile), time.perf_counter()
        while time.perf_counter() - began < 8:
            row, seen = next(run), window.look()
    console = Console(record=True, width=88, file=io.StringIO())
    console.print(live_table(seen, row["lag_mean"]))
    drawn = console.export_svg(title="flowrl run impala --runtime ray")
    (PICTURES / "table.svg").write_text(
        re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8"
    )  # fonts that would be loaded from other hosts


if __name__ == "__main__":
    main()
