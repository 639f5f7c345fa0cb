"""`EpisodeStatistics`: what runners report between two Rows."""

from __future__ import annotations

import math
from collections import deque
from threading import Lock
from typing import Any

import numpy as np

from flowrl.core.events import Warned
from flowrl.core.keeping import Keeping
from flowrl.core.texts import plural
from flowrl.errors import unknown
from flowrl.graph.protocols import Site
from flowrl.rollout.evaluation import Evaluation
from flowrl.rollout.handle import EVALUATED, RECENT
from flowrl.rollout.infos import column
from flowrl.rollout.sample import Episodes


class EpisodeStatistics(Keeping):
    """Gathers episodes, evaluations, restarts and metrics of runners until a Row reports them.

    Any stage may call it, so what is counted is changed under a lock.

    Args:
        site: the site of the runners, which gets metrics and warnings.
        keys: the keys of `info` that are metrics.
    """

    lasting = (
        "missing_keys", "other_keys", "evaluated", "restarted", "_recent", "_since_last",
    )  # fmt: skip
    remade = ("site", "_lock")

    def __init__(self, site: Site, keys: tuple[str, ...]) -> None:
        self.site = site
        self.missing_keys = dict.fromkeys(keys)
        """The keys of `info` that are wanted and never came yet."""
        self.other_keys: dict[str, None] = {}
        """The keys of `info` that came while a wanted one was missing."""
        self.evaluated: dict[str, float] = {}
        """The last evaluation, until it is reported."""
        self.restarted: dict[str, int] = {}
        """Restarts, and requested steps that were lost by them; empty before the first restart."""
        self._lock = Lock()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """The returns and lengths of the newest episodes."""
        self._since_last = {"env_steps": 0, "episodes": 0}
        """The counts since `drain` was called last."""

    def note(self, episodes: Episodes) -> None:
        """Add what came with a sample."""
        with self._lock:
            self._since_last["env_steps"] += episodes.env_steps + episodes.skipped
            self._since_last["episodes"] += len(episodes.returns)
            if episodes.cut is not None:
                before = self._since_last.get("cut_episodes", 0)
                self._since_last["cut_episodes"] = before + episodes.cut
            self._recent.extend(
                zip(episodes.returns.tolist(), episodes.lengths.tolist(), strict=True)
            )
            if self.missing_keys:
                self.missing_keys = {
                    key: None
                    for key in self.missing_keys
                    if not episodes.metrics[column(key)].number
                }
                self.other_keys.update(dict.fromkeys(episodes.infos))
        self.warn_of_reset(episodes.reset)
        if episodes.metrics:
            self.site.metrics.merge(episodes.metrics, self.site.name)

    def warn_of_reset(self, envs: int) -> None:
        """Warn of environments that could not be brought back, if there are any."""
        if envs:
            many = f"{envs} {plural(envs, 'environment')}"
            text = f"{many} could not be brought back to where they were, and began a new episode"
            self.site.stream.emit(Warned(f"{self.site.name}: {text}"))

    def restart(self, steps: int) -> None:
        """Count that a runner was restarted, by which so many steps were lost."""
        with self._lock:
            before = self.restarted
            self.restarted = {
                "restarts": before.get("restarts", 0) + 1,
                "lost_steps": before.get("lost_steps", 0) + steps,
            }

    def evaluate(self, parts: list[Evaluation]) -> dict[str, float]:
        """Join what runners evaluated, and keep it for the next Row.

        Returns:
            Numbers by the names in `EVALUATED`; NaN where all runners were lost.
        """
        found = Evaluation.join(parts) if parts else None
        numbers = (
            (found.mean(), found.std(), found.min(), found.max(), float(found.cut.sum()))
            if found
            else (math.nan,) * len(EVALUATED)
        )
        evaluated = dict(zip(EVALUATED, numbers, strict=True))
        # Another stage may drain at any time.
        with self._lock:
            self.evaluated = evaluated
        return evaluated

    @property
    def unreported(self) -> int:
        """The environment steps since `drain` was called last."""
        return int(self._since_last["env_steps"])

    def drain(self) -> dict[str, Any]:
        """Return all that gathered since the last call, and start gathering again.

        The means stay those of the newest `RECENT` episodes, and restarts are counted from the
        start of the run.
        """
        with self._lock:
            since_last, self._since_last = self._since_last, {"env_steps": 0, "episodes": 0}
            returns, lengths = (
                zip(*self._recent, strict=True) if self._recent else ((math.nan,), (math.nan,))
            )
            extra = {**self.evaluated, **self.restarted}
            self.evaluated = {}
        # A key that has not come after a whole episode is likely misspelled.
        if self._recent:
            self.warn_of_missing_keys()
        return {
            **since_last,
            "return_mean": float(np.mean(returns)),
            "length_mean": float(np.mean(lengths)),
            **extra,
        }

    def warn_of_missing_keys(self) -> None:
        """Warn once of keys that never came, though whole episodes did or the run is over."""
        with self._lock:
            missing, self.missing_keys = self.missing_keys, {}
        for key in missing:
            what = unknown("key", key, self.other_keys).removeprefix("unknown ")
            text = f"no step's info ever had the {what}; {column(key)} is NaN"
            self.site.stream.emit(Warned(f"{self.site.name}: metrics: {text}"))
