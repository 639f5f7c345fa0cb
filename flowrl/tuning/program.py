"""Trials as one XLA program, where they differ only in numbers and the environment is in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.core.events import Tap, Warned
from flowrl.core.items import Row
from flowrl.errors import EnvError, NotFiniteError, RunError, SettingError, described
from flowrl.rollout.runners import Runners
from flowrl.runtime.members import Members, Sweep, differing_numbers, numbers_at
from flowrl.runtime.xla import XlaRuntime
from flowrl.starting import run
from flowrl.tuning.journal import Trial
from flowrl.tuning.trial import NO_NUMBER, Job, is_of_full_disk
from flowrl.tuning.trials import Trials

AT_ONCE = 16
"""Trials in one program; the search learns from them when all have ended."""
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""What the errors of XLA begin with where there is no memory for a program."""


def numbers_of_program(job: Job) -> list[str] | None:
    """Return the paths of the numbers in which trials differ, if these can be one program.

    Returns:
        None where they differ in anything else, or the environment is not written in JAX.
    """
    if job.runtime != "xla":
        return None
    first = {name: space.examples()[0] for name, space in job.search.items()}
    graphs = [job.graph(first)]
    for name, space in job.search.items():
        graphs += [job.graph({**first, name: point}) for point in space.examples()[1:]]
    runners = [r for r in graphs[0].resources.values() if isinstance(r, Runners)]
    in_jax = bool(runners) and all(r.jax_env is not None for r in runners)
    return differing_numbers(graphs) or None if in_jax else None


def run_program(trials: Trials, job: Job, paths: Sequence[str], at_once: int | None) -> bool:
    """Run all trials that are left, many at once, each to its end.

    Args:
        trials: of the study.
        job: what they have in common.
        paths: of the numbers in which they differ.
        at_once: how many runs a program has; None for `AT_ONCE`.

    Returns:
        False where what is searched turned out to shape the program; the trials are still left.
    """
    size = min(at_once or AT_ONCE, trials.left)
    while batch := trials.start(size):
        try:
            endings = _train(batch, job, paths, size)
        except (EnvError, NotFiniteError) as error:
            # It ended all of them, so the others start again without it.
            bad = batch[min(int(error.facts.get("run", 0)), len(batch) - 1)]
            trials.again([trial.number for trial in batch if trial is not bad])
            endings = [{"trial": bad.number, "state": "failed", "error": described(error)}]
        except SettingError:
            trials.again([trial.number for trial in batch])
            return False
        except OSError:
            # A disk that is full is no trial's fault: the study goes on with them another time.
            trials.again([trial.number for trial in batch])
            raise
        except Exception as error:
            if is_of_full_disk(described(error)):
                trials.again([trial.number for trial in batch])
                raise
            if OUT_OF_MEMORY in described(error):
                trials.again([trial.number for trial in batch])
                raise RunError(
                    f"{size} trials in one program need more memory than there is "
                    f"({described(error)}); the study goes on with fewer at once: "
                    f"parallel={max(1, size // 2)} (--parallel)"
                ) from error
            failed = {"state": "failed", "error": described(error)}
            endings = [{"trial": trial.number, **failed} for trial in batch]
        trials.ended(endings)
    return True


def _train(
    runs: Sequence[Trial], job: Job, paths: Sequence[str], size: int
) -> list[dict[str, Any]]:
    """Train many trials in one program, and return how they ended."""
    # A program of another size would have to be compiled, so the last trial fills it up.
    filled = [*runs, *[runs[-1]] * (size - len(runs))]
    graphs = [job.graph(trial.settings) for trial in filled]
    found = differing_numbers(graphs)
    # The program has the other numbers of the first trial, for all of them.
    if found is None or not set(found) <= set(paths):
        raise SettingError("the graph's function makes another graph of some numbers")
    sweep = Sweep.points([numbers_at(graph, paths) for graph in graphs])
    out = f"{job.folder}/{runs[-1].directory}"
    silent = Tap(lambda _: None, Warned)
    with run(
        graphs[0],
        runtime=XlaRuntime(sweep=sweep),
        seed=job.options.seed,
        steps=job.options.steps,
        out=out,
        observers=[silent],
    ) as training:
        for _ in training:
            pass
    curves, members = training.curves(), Members.of(job.options.seed, None, sweep)
    # Trials with the same settings are one of the curves.
    rows_of = dict(zip(curves.labels, curves.rows, strict=True))
    return [_ending(t, rows_of[members.label(i)], job) for i, t in enumerate(runs)]


def _ending(trial: Trial, rows: Sequence[Row], job: Job) -> dict[str, Any]:
    """Return how one of the runs ended."""
    column = [row.get(job.options.metric, np.nan) for row in rows]
    values = [value for value in column if np.isfinite(value)]
    found: dict[str, Any] = {
        "trial": trial.number,
        "env_steps": int(rows[-1]["env_steps"]),
        "seconds": round(float(rows[-1]["seconds"]), 3),
    }
    if not values:
        return {**found, "state": "failed", "error": NO_NUMBER.format(job.options.metric)}
    return {**found, "state": "done", "value": float(values[-1])}
