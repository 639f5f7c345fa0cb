"""Trials as processes of Ray: Ray Tune runs them, and stops the worse ones early by ASHA.

This and `runtime/ray.py` are the only files that import ray.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from flowrl.core.machine import variables_kept
from flowrl.core.texts import plural
from flowrl.errors import RunError, SettingError, install
from flowrl.runtime.driver import (
    DriverContext,
    compilation_cache,
    context,
    for_worker,
    from_driver,
    on_this_node,
    problem_of,
)
from flowrl.runtime.ray import start
from flowrl.tuning.journal import Options, Trial
from flowrl.tuning.trial import Attempt, Job, is_of_full_disk
from flowrl.tuning.trials import Trials

try:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search import Searcher
except ImportError as error:
    raise SettingError(f"tune needs Ray Tune ({error}): {install('tune')}") from None

SILENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints a box in any case
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run's own directory has its rows
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the study as it ends a run
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that failed at once has no metric
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the journal is what a study goes on from
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # files of the user's are found where the driver finds them
}
"""Environment variables by which Ray Tune leaves to flowrl what is flowrl's."""
METRIC, STEPS = "value", "env_steps"


class Trainable(tune.Trainable):
    """The process of trials, one after another: what is compiled for one serves all others."""

    attempt: Attempt | None = None

    def setup(
        self, config: dict[str, Any], job: bytes = b"", driver: DriverContext | None = None
    ) -> None:
        """Make this process ready, and start its first trial.

        Args:
            config: which trial, and its points.
            job: what all trials have in common, pickled.
            driver: what the driver's process has and this one needs.
        """
        variables = {"NPROC": 1, "JAX_PLATFORMS": "cpu", **compilation_cache()}

        def begin() -> None:
            if driver is not None:
                driver.enter(variables)
            # Reading it may need what the context brings.
            self.job: Job = from_driver(job)

        self.problem = problem_of(begin)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the trial, and start another."""
        self.cleanup()
        self.attempt = None
        self.wanted = new_config
        return True

    def step(self) -> dict[str, Any]:
        """Return the next report of the trial."""
        try:
            with on_this_node(self.problem):
                if self.attempt is None:
                    points, directory = self.wanted["points"], self.wanted["directory"]
                    self.attempt = Attempt(self.job, points, directory)
        except SettingError as error:
            return {"done": True, "state": "failed", "error": str(error), STEPS: 0, "seconds": 0.0}
        report = self.attempt.report()
        if report[METRIC] is None:
            del report[METRIC]
        return {**report, "done": "state" in report}

    def cleanup(self) -> None:
        """End the trial."""
        if self.attempt is not None:
            self.attempt.close()


class Suggestions(Searcher):
    """Gives Ray Tune the trials of a study, and notes what it says of them."""

    def __init__(self, trials: Trials, mode: str) -> None:
        super().__init__(metric=METRIC, mode=mode)
        self.trials = trials
        self.numbers: dict[str, int] = {}
        """By Ray Tune's id of a trial: its number."""
        self.without_disk: dict[int, str] = {}
        """By number of a trial that a full disk ended: the error. It is not noted as ended."""

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial, or that there are no more."""
        started = self.trials.start()
        if not started:
            return Searcher.FINISHED
        trial = started[0]
        self.numbers[trial_id] = trial.number
        return {"points": dict(trial.settings), "directory": trial.directory}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Note a report of a trial that goes on."""
        self.trials.reported(self.numbers[trial_id], result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Note how a trial ended. Its process goes on after this, not before."""
        number = self.numbers.pop(trial_id)
        if result is None or error:
            state, problem = "failed", "its process ended: it was killed, or memory ran out"
            self.trials.ended([{"trial": number, "state": state, "error": problem}])
            return
        if is_of_full_disk(result.get("error", "")):
            self.without_disk[number] = result["error"]
            return
        # Ray Tune gives what a trial ended with here alone, and ASHA compares others with it.
        if METRIC in result:
            self.trials.reported(number, result)
        names = (STEPS, METRIC, "seconds", "error")
        facts = {name: result[name] for name in names if name in result}
        self.trials.ended([{"trial": number, "state": result.get("state", "stopped"), **facts}])

    def check_disk(self) -> None:
        """Make sure that no trial ended because a disk was full.

        Raises:
            RunError: some did.
        """
        if self.without_disk:
            number, error = next(iter(self.without_disk.items()))
            every = ", ".join(map(str, self.without_disk))
            raise RunError(
                f"{plural(len(self.without_disk), 'trial')} {every} found the disk full, trial "
                f"{number} with: {error}; make space, and call the study again, which starts them "
                "once more"
            )

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the journal has it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing: a study goes on from its journal."""


def scheduler(options: Options, past: Sequence[Trial]) -> Any:
    """Return ASHA as it is after the reports of trials that ended before this process began."""
    asha: Any = ASHAScheduler(
        time_attr=STEPS,
        metric=METRIC,
        mode=options.mode,
        max_t=options.steps,
        grace_period=options.grace_steps,
        reduction_factor=options.reduction,
    )
    for trial in past:
        if trial.ended:
            stub = SimpleNamespace(trial_id=f"before-{trial.number}")
            asha.on_trial_add(None, stub)
            for env_steps, value in trial.reports:
                asha.on_trial_result(None, stub, {STEPS: env_steps, METRIC: value})
    return asha


def run_trials(trials: Trials, job: Job, parallel: int | None, address: str | None) -> None:
    """Run all trials that are left.

    Args:
        trials: of the study.
        job: what they have in common.
        parallel: how many at once; None for one per core.
        address: of a running Ray; None for the environment variable ``RAY_ADDRESS``, or a new one.

    Raises:
        RunError: Ray can't start or can't be joined, or a full disk ended some of them.
        SettingError: the graph or its settings can't be sent to another process.
    """
    sent = for_worker(job, f"{job.source.name} (its env or settings)")
    scratch = Path(job.folder) / ".tune"
    with ExitStack() as last:
        last.enter_context(_silent())
        last.callback(shutil.rmtree, scratch, ignore_errors=True)
        last.callback(start(address, {}))
        cores = ray.cluster_resources().get("CPU", 1.0)
        suggestions = Suggestions(trials, trials.options.mode)
        at_once = parallel or max(1, int(cores))
        options = trials.options
        tune.run(
            tune.with_parameters(Trainable, job=sent, driver=context(options.imports)),
            name="study",
            storage_path=str(scratch),
            search_alg=suggestions,
            scheduler=scheduler(options, trials.journal.trials),
            num_samples=trials.left,
            max_concurrent_trials=at_once,
            # More trials than cores share the cores.
            resources_per_trial={"cpu": min(1.0, cores / at_once)},
            reuse_actors=True,
            raise_on_failed_trial=False,
            verbose=0,
        )
    suggestions.check_disk()


@contextmanager
def _silent() -> Iterator[None]:
    """Let Ray Tune print and log nothing in this context."""
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.air", "ray.train")]
    levels = [logger.level for logger in loggers]
    with variables_kept(SILENT):
        os.environ.update(SILENT)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
