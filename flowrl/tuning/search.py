"""The search for points: Optuna's tree-structured Parzen estimator (Bergstra et al. 2011)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.errors import SettingError, install
from flowrl.tuning.journal import Trial
from flowrl.tuning.spaces import Point, Space


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
        # Optuna numbers trials in the order in which it gets them.
        for trial in past:
            if trial.ended:
                self.study.add_trial(self._past(optuna, trial))
            else:
                self.study.enqueue_trial(dict(trial.settings))
                self.ask()

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

    def ask(self) -> dict[str, Point]:
        """Return the points of a new trial."""
        asked = self.study.ask(self.distributions)
        self.asked[asked.number] = asked
        return dict(asked.params)

    def learn(self, trial: Trial) -> None:
        """Take account of a trial that ended."""
        asked = self.asked.pop(trial.number)
        for env_steps, reported in trial.reports:
            asked.report(reported, env_steps)
        state, value = self._state(trial)
        self.study.tell(asked, value, state)
