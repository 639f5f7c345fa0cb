"""`make pictures`: what README.md and the documentation show, made by flowrl itself.

These are drawings, a trace, the live table and the learning curves of the gallery.
"""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

from rich.console import Console

import flowrl as fl
from flowrl.algos import STOCK
from flowrl.observe.table import Window, live_table

PICTURES = Path(__file__).parents[1] / "docs/pictures"


SEEDS = 5
STEPS = {"pg": 300_000, "a2c": 300_000, "sac": 8_000} | dict.fromkeys(("dqn", "apex"), 100_000)
"""By stock graph: the environment steps of its learning curve, where not 200,000."""


def curve(name: str) -> None:
    """Train a stock graph with several seeds in one XLA program, and draw what they learned."""
    env = "Pendulum-v1" if name == "sac" else "CartPole-v1"
    settings, steps = fl.tuned(name, env), STEPS.get(name, 200_000)
    graph = getattr(fl, name)(f"gymnax:{env}", **settings)
    with fl.run(graph, runtime=fl.XlaRuntime(seeds=SEEDS), steps=steps) as run:
        last = list(run)[-1]
    (PICTURES / f"curve_{name}.svg").write_text(run.curves().svg(), encoding="utf-8")
    ((mean, low, high),) = run.curves().summary().values()
    kind = "tuned settings" if settings else "default settings"
    command = (
        f"flowrl run {name} --env gymnax:{env} --runtime xla --seeds {SEEDS} --steps {steps:_}"
    )
    text = (
        f"{SEEDS} seeds in one XLA program, {kind}: after {last['env_steps']:,.0f} steps the "
        f"interquartile mean of the return is {mean[-1]:.0f}, its 95 % interval {low[-1]:.0f} to "
        f"{high[-1]:.0f}. `make pictures` drew it; this command trains the same:\n\n"
        f"```bash\n{command}\n```\n"
    )
    (PICTURES / f"curve_{name}.txt").write_text(text, encoding="utf-8")
    print(text, flush=True)


def main() -> None:
    for name in sys.argv[1:] or STOCK:
        curve(name)
    if sys.argv[1:]:
        return
    seeds()
    dataflow()


def seeds() -> None:
    """Draw what 32 seeds of PPO with its default settings learned in one XLA program."""
    graph = fl.ppo("gymnax:CartPole-v1")
    with fl.run(graph, runtime=fl.XlaRuntime(seeds=32), steps=500_000) as run:
        list(run)
    (PICTURES / "seeds.svg").write_text(run.curves().svg(), encoding="utf-8")


def dataflow() -> None:
    """Draw PPO and IMPALA, a stretch of IMPALA's run on Ray, and the live table of that run."""
    (PICTURES / "ppo.svg").write_text(fl.ppo("CartPole-v1").draw("svg"), encoding="utf-8")
    graph = fl.impala("CartPole-v1")
    (PICTURES / "impala.svg").write_text(graph.draw("svg"), encoding="utf-8")
    # What a run writes must be new.
    (PICTURES / "trace.svg").unlink(missing_ok=True)
    with fl.run(graph, runtime="ray", trace=PICTURES / "trace.svg") as run:
        next(run)
        window, began = Window(run.profile), time.perf_counter()
        while time.perf_counter() - began < 8:
            row, seen = next(run), window.look()
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(live_table(seen, row["lag_mean"]))
    drawn = console.export_svg(title="flowrl run impala --runtime ray")
    (PICTURES / "table.svg").write_text(
        re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8"
    )  # fonts that would be loaded from other hosts


if __name__ == "__main__":
    main()
