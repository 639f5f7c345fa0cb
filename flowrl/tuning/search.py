"""The search for points: Optuna's tree-structured Parzen estimator (Bergstra et al. 2011)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.errors import RunError, SettingError, install
from flowrl.tuning.journal import Trial
from flowrl.tuning.spaces import Point, Space

COMBINATIONS = 100_000
"""The most points of which none is suggested twice."""


class Search:
    """Suggests points, and learns from the trials that ended.

    Args:
        spaces: by name of each setting: its space.
        mode: ``max`` or ``min``.
        seed: of the first random points.
        past: the trials so far, by number.

    Raises:
        SettingError: Optuna is not installed.
    """

    def __init__(
        self, spaces: Mapping[str, Space], mode: str, seed: int, past: Sequence[Trial]
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise SettingError(f"tune needs Optuna ({error}): {install('tune')}") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.states = optuna.trial.TrialState
        self.distributions = {name: space.distribution() for name, space in spaces.items()}
        # A study that goes on must not begin its random numbers again, or it would suggest points
        # that it has suggested before.
        words = np.random.SeedSequence([seed, len(past)]).generate_state(1)
        sampler = optuna.samplers.TPESampler(seed=int(words[0]))
        self.study = optuna.create_study(
            direction="maximize" if mode == "max" else "minimize", sampler=sampler
        )
        self.asked: dict[int, Any] = {}
        """By number: Optuna's own object of each trial that has not ended."""
        options = [space.options_in_order() for space in spaces.values()]
        finite = [points for points in options if points is not None]
        # The product holds all options of each space in memory. Of more points than that none is
        # likely to come twice.
        few = len(finite) == len(options) and math.prod(map(len, finite)) <= COMBINATIONS
        self.combinations = itertools.product(*finite) if few else None
        """All points, where there are only so many, and else None."""
        self.seen = {self._key(trial.settings) for trial in past}
        for trial in past:
            if trial.ended:
                self.study.add_trial(self._past(optuna, trial))
            else:
                self.asked[trial.number] = self._ask_for(trial.settings)

    def _past(self, optuna: Any, trial: Trial) -> Any:
        """Return a trial that ended, as Optuna has it."""
        state, value = self._state(trial)
        return optuna.trial.create_trial(
            state=state,
            value=value,
            params=dict(trial.settings),
            distributions=self.distributions,
            intermediate_values=dict(trial.reports),
        )

    def _state(self, trial: Trial) -> tuple[Any, float | None]:
        """Return how Optuna calls the end of a trial, and its value.

        One that was stopped has no value: it would be taken for that of a whole trial.
        """
        if trial.state == "done":
            return self.states.COMPLETE, trial.value
        return (self.states.PRUNED if trial.state == "stopped" else self.states.FAIL), None

    def ask(self, number: int) -> dict[str, Point]:
        """Return the points of a new trial, which are not those of an earlier one.

        Args:
            number: of the trial.
        """
        asked = self.study.ask(self.distributions)
        if self.combinations is not None and self._key(asked.params) in self.seen:
            # The seed of all trials is the same, so the same points would have the same result.
            self.study.tell(asked, state=self.states.FAIL)
            asked = self._ask_for(self._unseen(self.combinations))
        self.asked[number] = asked
        self.seen.add(self._key(asked.params))
        return dict(asked.params)

    def _unseen(self, combinations: Iterator[tuple[Point, ...]]) -> dict[str, Point]:
        """Return the next combination that no trial has."""
        for points in combinations:
            found = dict(zip(self.distributions, points, strict=True))
            if self._key(found) not in self.seen:
                return found
        raise RunError("there are fewer combinations than trials")  # `tune` has refused it

    def _ask_for(self, points: Mapping[str, Point]) -> Any:
        """Return Optuna's own object of a trial with these points."""
        self.study.enqueue_trial(dict(points))
        return self.study.ask(self.distributions)

    def _key(self, points: Mapping[str, Point]) -> tuple[Point, ...]:
        """Return points in the order of the spaces."""
        return tuple(points[name] for name in self.distributions)

    def learn(self, trial: Trial) -> None:
        """Take account of a trial that ended."""
        asked = self.asked.pop(trial.number)
        for env_steps, reported in trial.reports:
            asked.report(reported, env_steps)
        state, value = self._state(trial)
        self.study.tell(asked, value, state)
