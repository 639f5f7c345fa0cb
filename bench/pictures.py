"""`make pictures`: what README.md and the documentation show, made by flowrl itself.

These are drawings, a trace, the live table and the learning curves of the gallery.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import time
from contextlib import chdir, closing
from pathlib import Path
from shutil import which
from typing import Any

from rich.console import Console

import flowrl as fl
import learn_offline
import team_envs  # beside this script
from flowrl.algos import STOCK
from flowrl.core.items import reached
from flowrl.observe.table import Window, live_table
from flowrl.page.serving import serve_saved

PICTURES = Path(__file__).parents[1] / "docs/pictures"


SEEDS = 5
PENDULUM = ("sac", "td3", "ddpg")
"""The stock graphs for actions in a Box."""
STEPS = {
    **dict.fromkeys(("pg", "a2c", "a3c"), 300_000),
    **dict.fromkeys(("dqn", "apex", "r2d2"), 100_000),
    "rainbow": 20_000,
    "es": 600_000,
    **dict.fromkeys(PENDULUM, 8_000),
}
"""By stock graph: the environment steps of its learning curve, where not 200,000."""


GAME = {"learning_starts": 200, "epsilon_steps": 4_000}
TEAMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vdn": ("TwoSteps", GAME, 8_000),
    "qmix": ("TwoSteps", GAME, 8_000),
    "multi_ppo": ("TwoCartPoles", {"lr": 1e-3, "gamma": 0.98, "gae_lambda": 0.8}, 60_000),
}
"""By stock graph of several agents: environment in team_envs.py, settings, environment steps."""


def team_curve(name: str) -> None:
    """Train a stock graph of several agents with one seed after another, and draw the same."""
    env, settings, steps = TEAMS[name]
    graph = getattr(fl, name)(getattr(team_envs, env), **settings)
    rows = []
    for seed in range(SEEDS):
        with fl.run(graph, seed=seed, steps=steps) as run:
            rows.append(tuple(run))
    names = tuple(f"seed {seed}" for seed in range(SEEDS))
    changes = " ".join(f"--set {key}={value}" for key, value in settings.items())
    saved(
        name,
        fl.Curves(names, ("",) * SEEDS, tuple(rows)),
        f"{SEEDS} seeds on {env} of bench/team_envs.py",
        f"flowrl run {name} --env bench/team_envs.py:{env} --seeds {SEEDS} --steps {steps:_} "
        f"{changes}",
    )


OFFLINE = {"bc": 1_000, "marwil": 3_000, "iql": 4_000, "cql": 4_000}
"""By stock graph that learns from a dataset: the updates of its learning curve."""


def offline_curve(name: str) -> None:
    """Draw the evaluations of the runs by which a graph that learns from a dataset is judged."""
    env, make, what = "Pendulum-v1", learn_offline.half_trained, "the first 4,000 steps of SAC"
    if name == "bc":
        env, make, what = "CartPole-v1", learn_offline.expert, "20,000 steps of a trained PPO"
    updates, seeds = OFFLINE[name], range(learn_offline.SEEDS)
    for seed in seeds:
        learn_offline.played(name, env, make(seed), seed, updates)
    runs = [learn_offline.saved_run(name, env, seed, updates) for seed in seeds]
    rows = [fl.Curves.load(path).rows[0] for path in runs]
    saved(
        name,
        fl.Curves(tuple(map(str, runs)), ("",) * len(rows), tuple(rows)),
        f"{len(rows)} seeds on {what} on {env} (bench/learn_offline.py), with tuned settings",
        f"flowrl run {name} --env {env} --set data=DATASET --until 'updates>={updates}'",
        "eval/return_mean",
    )


def curve(name: str) -> None:
    """Train a stock graph with several seeds in one XLA program, and draw what they learned."""
    env = "Pendulum-v1" if name in PENDULUM else "CartPole-v1"
    settings, steps = fl.tuned(name, env), STEPS.get(name, 200_000)
    graph = getattr(fl, name)(f"gymnax:{env}", **settings)
    with fl.run(graph, runtime=fl.XlaRuntime(seeds=SEEDS), steps=steps) as run:
        list(run)
    kind = "tuned settings" if settings else "default settings"
    command = (
        f"flowrl run {name} --env gymnax:{env} --runtime xla --seeds {SEEDS} --steps {steps:_}"
    )
    saved(name, run.curves(), f"{SEEDS} seeds in one XLA program, {kind}", command)


def saved(
    name: str, curves: fl.Curves, what: str, command: str, column: str = "return_mean"
) -> None:
    """Write a picture of curves, and the text below it."""
    (PICTURES / f"curve_{name}.svg").write_text(curves.svg(column), encoding="utf-8")
    ((mean, low, high),) = curves.summary(column).values()
    count, over = reached(curves.rows[-1][-1])
    # The interquartile mean needs two figures where returns are small.
    digits = 2 if abs(mean[-1]) < 10 else 0
    text = (
        f"{what}: after {count:,} {over} the "
        f"interquartile mean of the return is {mean[-1]:.{digits}f}, its 95 % interval "
        f"{low[-1]:.{digits}f} to {high[-1]:.{digits}f}. `make pictures` drew it; this command "
        f"trains the same:\n\n```bash\n{command}\n```\n"
    )
    (PICTURES / f"curve_{name}.txt").write_text(text, encoding="utf-8")
    print(text, flush=True)


def main() -> None:
    for name in sys.argv[1:] or STOCK:
        draw = offline_curve if name in OFFLINE else team_curve if name in TEAMS else curve
        draw(name)
    if sys.argv[1:]:
        return
    seeds()
    dataflow()
    live_page()


def seeds() -> None:
    """Draw what 32 seeds of PPO with its default settings learned in one XLA program."""
    graph = fl.ppo("gymnax:CartPole-v1")
    with fl.run(graph, runtime=fl.XlaRuntime(seeds=32), steps=500_000) as run:
        list(run)
    (PICTURES / "seeds.svg").write_text(run.curves().svg(), encoding="utf-8")


def live_page() -> None:
    """Take pictures of the page in Chromium: of IMPALA on Ray, and of saved runs side by side."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        watched(browser)
        compared(browser)
        browser.close()


def watched(browser: Any) -> None:
    """Take a picture of a run that goes on, with a node chosen."""
    with (
        fl.run(fl.impala("CartPole-v1"), runtime="ray") as run,
        closing(fl.serve(run)) as page,
    ):
        tab = browser.new_page(viewport={"width": 1200, "height": 1000})
        tab.goto(page.link)
        began = time.perf_counter()
        while time.perf_counter() - began < 20:
            next(run)
        tab.click("g.node[data-name=train]")
        # A look comes once a second.
        for _ in range(3):
            next(run)
            tab.wait_for_timeout(500)
        tab.screenshot(path=PICTURES / "page.png")


def compared(browser: Any) -> None:
    """Take a picture of two runs with different learning rates, in the dark."""
    # The picture shows the names of the runs, which begin at this directory.
    with tempfile.TemporaryDirectory() as name, chdir(name):
        for rate in (1e-3, 3e-4):
            graph = fl.ppo("CartPole-v1").set("learner.optimizer.lr", rate)
            with fl.run(graph, steps=60_000, out=f"runs/lr-{rate:g}") as run:
                list(run)
        with closing(serve_saved(["runs"])) as page:
            view = {"width": 1200, "height": 1000}
            tab = browser.new_page(viewport=view, color_scheme="dark")
            tab.goto(page.link)
            tab.wait_for_selector("#runs tbody tr >> nth=1")
            tab.check("#runs input[type=checkbox]:not(:disabled)")
            tab.click("#ask-differences")
            tab.fill("#smooth", "0.6")
            tab.wait_for_selector("#differences li")
            tab.wait_for_timeout(1000)
            tab.screenshot(path=PICTURES / "page_runs.png")


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
    assert seen is not None
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(live_table(seen, row["lag_mean"]))
    drawn = console.export_svg(title="flowrl run impala --runtime ray")
    (PICTURES / "table.svg").write_text(
        re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8"
    )  # fonts that would be loaded from other hosts


if __name__ == "__main__":
    main()
