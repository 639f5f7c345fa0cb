"""`RowMaker`: makes the Rows of a run out of what its reporting operator closed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar

import jax
import numpy as np

from flowrl.core.broken import NOT_FINITE, TEXTS, Broken
from flowrl.core.items import LOSS_PART, Row, Tally, Trained
from flowrl.core.keeping import Keeping
from flowrl.core.metrics import summed
from flowrl.errors import EnvError, NotFiniteError

TOTALS = ("row", "env_steps", "trained_steps", "updates", "gradient_steps", "episodes")
"""The columns of a Row that count from the beginning of the run."""


class RowMaker(Keeping):
    """Makes Rows: it holds the running totals, and takes the means of all updates since a Row."""

    lasting: ClassVar[tuple[str, ...]] = ("totals",)
    remade: ClassVar[tuple[str, ...]] = ("graph", "started", "last", "learners")
    runs = 1
    """How many runs go on at once."""

    def __init__(self, graph: str, started: float, learners: Sequence[str] = ()) -> None:
        """Begin with totals of 0.

        Args:
            graph: the graph's name, for errors.
            started: when the run started, by `time.perf_counter`.
            learners: the names of the graph's learners. If there are several, each has columns of
                its own, such as ``loss/red`` (default none).
        """
        self.graph = graph
        self.learners = learners if len(learners) > 1 else ()
        self.started = self.last = started
        self.totals = dict.fromkeys((*TOTALS, *(f"updates/{name}" for name in self.learners)), 0)

    def keep(self) -> Any:
        """Return the totals, and how long the run has gone on."""
        return {**super().keep(), "seconds": self.last - self.started}

    def take(self, state: Any) -> None:
        """Count on from what was kept; the time until now does not count."""
        super().take(self.lasting_of(state))
        self.last = time.perf_counter()
        self.started = self.last - state["seconds"]

    def row(self, tally: Tally, now: float | None = None, **extra: float) -> Row:
        """Make the next Row. Waits for the device.

        Args:
            tally: what gathered since the last Row.
            now: when the Row closed, by `time.perf_counter`; this moment by default.
            extra: more columns.

        Raises:
            EnvError: an environment gave NaN or infinity since the last Row.
            NotFiniteError: an update since the last Row gave NaN or infinity.
        """
        # One transfer for everything that is still on the device.
        if not _is_on_host(tally):
            tally = jax.device_get(tally)
        episodes, measured = dict(tally.episodes), summed(tally.metrics)
        self._check_environments(episodes.pop("broken", (-1, 0, 0)))
        for name, number in episodes.pop("since_last", {}).items():
            self.totals[name] = self.totals.get(name, 0) + int(number)
        updates = [_named_metrics(update) for update in tally.updates]
        self._check_updates(updates, [update.learner for update in tally.updates])
        metrics = self._metrics(tally.updates, updates)
        steps = int(episodes.pop("env_steps"))
        self._count(tally, updates, steps, int(episodes.pop("episodes")))
        now = time.perf_counter() if now is None else now
        passed, self.last = max(now - self.last, 1e-9), now
        measured_columns: dict[str, float] = {}
        for name, values in measured.items():
            measured_columns.update(values.columns(name))
        return Row(
            {
                **self.totals,
                "return_mean": float(episodes.pop("return_mean")),
                "length_mean": float(episodes.pop("length_mean")),
                "seconds": now - self.started,
                "steps_per_second": steps / passed,
                **_policy_lags(tally.updates),
                "loss": metrics.pop("loss", math.nan),
                **metrics,
                **measured_columns,
                **{name: float(value) for name, value in episodes.items()},
                **extra,
            }
        )

    def _count(
        self, tally: Tally, updates: list[dict[str, float]], steps: int, episodes: int
    ) -> None:
        """Add what gathered since the last Row to the totals."""
        totals = self.totals
        totals["row"] += 1
        totals["env_steps"] += steps
        totals["episodes"] += episodes
        totals["trained_steps"] += sum(update.steps for update in tally.updates)
        totals["updates"] += len(updates)
        totals["gradient_steps"] += sum(int(update["gradient_steps"]) for update in updates)

    def _metrics(
        self, trained: tuple[Trained, ...], updates: list[dict[str, float]]
    ) -> dict[str, float]:
        """Return the means of the metrics since the last Row, of each learner if there are several.

        Each then has the number of its updates and their policy lag, too.
        """
        if not self.learners:
            return _means(updates)
        losses = [update["loss"] for update in updates if "loss" in update]
        columns = {"loss": fmean(losses)} if losses else {}
        for learner in self.learners:
            chosen = [i for i, update in enumerate(trained) if update.learner == learner]
            self.totals[f"updates/{learner}"] += len(chosen)
            means = _means([updates[i] for i in chosen])
            lags = _policy_lags(tuple(trained[i] for i in chosen))
            columns |= {f"{name}/{learner}": x for name, x in (means | lags).items()}
        return columns

    def _check_environments(self, broken: Any) -> None:
        """Raise if an environment gave what no policy can learn from.

        Args:
            broken: three numbers: the first such environment, counted over all runners, or -1;
                its runner; and how many steps it had made. Of several agents it is a `Broken`.
        """
        if isinstance(broken, Broken):
            broken.check(self.graph, self.totals["row"] + 1)
            return
        env, runner, step = (int(x) for x in broken)
        if env < 0:
            return
        # A reset counts as a step here, for it gives a row of experience too. The fact `row` is the
        # index of that row of experience, from 0, which `flowrl why` shows; the row in the message
        # is one of results.
        raise EnvError(
            f"environment {env}, counted over all runners, which is one of runner {runner}, at "
            f"its step {step:,} with its resets, {TEXTS[NOT_FINITE]}, before row "
            f"{self.totals['row'] + 1}; fix the environment",
            self.graph,
            env=env,
            runner=runner,
            row=step - 1,
        )

    def _check_updates(self, updates: list[dict[str, float]], learners: list[str]) -> None:
        """Raise for the first update whose loss or weights were not finite."""
        numbered = enumerate(zip(updates, learners, strict=True), self.totals["updates"] + 1)
        for number, (update, learner) in numbered:
            if update["bad"]:
                raise NotFiniteError(
                    f"update {number}, of row {self.totals['row'] + 1}, gave a loss or weights "
                    f"that are not finite (loss {update['loss']}); the weights were left as they "
                    "were before it. Usual causes: too high a learning rate, large rewards, a "
                    "division by zero in a loss",
                    f"{self.graph}.{learner}",
                    update=number,
                )


def _is_on_host(tally: Tally) -> bool:
    """Return whether nothing of a tally is on a device."""
    leaves = jax.tree.leaves(tally)
    return all(isinstance(x, np.ndarray | np.generic | float | int) for x in leaves)


def _named_metrics(update: Trained) -> dict[str, float]:
    return dict(zip(update.metrics.names, update.metrics.values.tolist(), strict=True))


def _means(updates: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it.

    A part of the loss is NaN in an update in which its group of parameters rested.
    """
    metrics: dict[str, float] = {}
    # The names of all updates, each once, in the order in which they first occur.
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name.startswith(LOSS_PART):
            values = [x for x in values if not math.isnan(x)] or [math.nan]
        metrics[name] = fmean(values)
    # The checks and the totals use these two; their means would say nothing.
    for name in ("bad", "gradient_steps"):
        metrics.pop(name, None)
    return metrics


def _policy_lags(updates: tuple[Trained, ...]) -> dict[str, float]:
    """Return the columns of the policy lag: its mean over the updates, and its maximum."""
    means = [float(update.lag[0]) for update in updates]
    most = [float(update.lag[1]) for update in updates]
    return {
        "lag_mean": fmean(means) if means else math.nan,
        "lag_max": max(most, default=math.nan),
    }
