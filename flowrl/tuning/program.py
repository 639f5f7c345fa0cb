"""Trials as one XLA program, where they differ only in numbers and the environment is in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.core.events import Tap, Warned
from flowrl.core.items import Row
from flowrl.errors import EnvError, NotFiniteError, SettingError, described
from flowrl.graph.graph import Graph
from flowrl.rollout.runners import Runners
from flowrl.running import run
from flowrl.runtime.members import Sweep, differing_numbers
from flowrl.runtime.xla import XlaRuntime
from flowrl.tuning.journal import Trial
from flowrl.tuning.trial import NO_NUMBER, Job
from flowrl.tuning.trials import Trials

AT_ONCE = 16
"""Trials in one program; the search learns from them when all have ended."""


def fits_program(job: Job) -> bool:
    """Return whether all trials of a study can be runs of one program."""
    if job.runtime != "xla":
        return False
    first = {name: space.examples()[0] for name, space in job.search.items()}
    graphs = [job.graph(first)]
    for name, space in job.search.items():
        graphs += [job.graph({**first, name: point}) for point in space.examples()[1:]]
    runners = [r for r in graphs[0].resources.values() if isinstance(r, Runners)]
    in_jax = bool(runners) and all(r.jax_env is not None for r in runners)
    return in_jax and differing_numbers(graphs) is not None


def run_program(trials: Trials, job: Job, at_once: int | None) -> bool:
    """Run all trials that are left, many at once, each to its end.

    Args:
        trials: of the study.
        job: what they have in common.
        at_once: how many runs a program has; None for `AT_ONCE`.

    Returns:
        False where what is searched turned out to shape the program; the trials are still left.
    """
    while batch := trials.start(at_once or AT_ONCE):
        graphs = [job.graph(trial.settings) for trial in batch]
        try:
            endings = _train(batch, graphs, job)
        except (EnvError, NotFiniteError) as error:
            # It ended all of them, so the others start again without it.
            bad = batch[int(error.facts.get("run", 0))]
            trials.again([trial.number for trial in batch if trial is not bad])
            endings = [{"trial": bad.number, "state": "failed", "error": described(error)}]
        except SettingError:
            trials.again([trial.number for trial in batch])
            return False
        except Exception as error:  # noqa: BLE001 - trials that fail do not end the study
            failed = {"state": "failed", "error": described(error)}
            endings = [{"trial": trial.number, **failed} for trial in batch]
        trials.ended(endings)
    return True


def _train(batch: Sequence[Trial], graphs: Sequence[Graph], job: Job) -> list[dict[str, Any]]:
    """Train all of a batch, and return how they ended."""
    numbers = differing_numbers(graphs) or [{}]
    # A batch of one trial differs in nothing.
    runtime = XlaRuntime(seeds=1, sweep=Sweep.points(numbers) if numbers[0] else None)
    out = f"{job.folder}/{batch[0].directory}"
    silent = Tap(lambda _: None, Warned)
    with run(
        graphs[0], runtime=runtime, seed=job.seed, steps=job.steps, out=out, observers=[silent]
    ) as training:
        for _ in training:
            pass
    curves = training.curves()
    return [_ending(t, rows, job) for t, rows in zip(batch, curves.rows, strict=True)]


def _ending(trial: Trial, rows: Sequence[Row], job: Job) -> dict[str, Any]:
    """Return how one of the runs ended."""
    values = [row[job.metric] for row in rows if np.isfinite(row[job.metric])]
    found: dict[str, Any] = {
        "trial": trial.number,
        "env_steps": int(rows[-1]["env_steps"]),
        "seconds": round(float(rows[-1]["seconds"]), 3),
    }
    if not values:
        return {**found, "state": "failed", "error": NO_NUMBER.format(job.metric)}
    return {**found, "state": "done", "value": float(values[-1])}
