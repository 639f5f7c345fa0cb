"""What gathers with the samples until a Row tells of it."""

from __future__ import annotations

import math
from collections import deque
from threading import Lock
from typing import Any

import numpy as np

from flowrl.core.events import Warned
from flowrl.errors import unknown
from flowrl.graph.protocols import Site
from flowrl.rollout.evaluation import Evaluation
from flowrl.rollout.handle import EVALUATED, RECENT
from flowrl.rollout.infos import column
from flowrl.rollout.sample import Episodes


class EpisodeStatistics:
    """Episodes, evaluations, restarts and metrics of runners. Any stage may ask, so all of it is under a lock."""

    def __init__(self, site: Site, keys: tuple[str, ...]) -> None:
        self.site = site
        self.keys = dict.fromkeys(keys)
        """Those of `info` that are waited for and did not come yet."""
        self.known: dict[str, None] = {}
        """Those that came in their place."""
        self.evaluated: dict[str, float] = {}
        self.restarted: dict[str, int] = {}
        """Restarts, and steps that were asked for and never came, if there were any."""
        self._lock = Lock()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._since = {"env_steps": 0, "episodes": 0}

    def note(self, episodes: Episodes) -> None:
        """Take what came with a sample."""
        with self._lock:
            self._since["env_steps"] += episodes.env_steps + episodes.skipped
            self._since["episodes"] += len(episodes.returns)
            self._recent.extend(
                zip(episodes.returns.tolist(), episodes.lengths.tolist(), strict=True)
            )
            if self.keys:
                self.keys = {
                    key: None for key in self.keys if not episodes.metrics[column(key)].number
                }
                self.known.update(dict.fromkeys(episodes.infos))
        if episodes.metrics:
            self.site.metrics.merge(episodes.metrics, self.site.name)

    def restart(self, steps: int) -> None:
        """A runner was started anew, and so many steps were lost."""
        with self._lock:
            old = self.restarted
            self.restarted = {
                "restarts": old.get("restarts", 0) + 1,
                "lost_steps": old.get("lost_steps", 0) + steps,
            }

    def evaluate(self, parts: list[Evaluation]) -> dict[str, float]:
        """Take what runners evaluated; the next Row reports it."""
        found = Evaluation.join(parts) if parts else None
        numbers = (
            (found.mean(), found.std(), found.min(), found.max(), float(found.cut.sum()))
            if found
            else (math.nan,) * len(EVALUATED)
        )
        self.evaluated = dict(zip(EVALUATED, numbers, strict=True))
        return self.evaluated

    def tell(self) -> dict[str, Any]:
        """All that gathered since the last time."""
        with self._lock:
            since, self._since = self._since, {"env_steps": 0, "episodes": 0}
            returns, lengths = (
                zip(*self._recent, strict=True) if self._recent else ((math.nan,), (math.nan,))
            )
            told, self.evaluated = {**self.evaluated, **self.restarted}, {}
        if self._recent:
            self.complain()
        return {
            **since,
            "return_mean": float(np.mean(returns)),
            "length_mean": float(np.mean(lengths)),
            **told,
        }

    def complain(self) -> None:
        """Warn once of keys that never came, though whole episodes did or the run is over."""
        with self._lock:
            missing, self.keys = self.keys, {}
        for key in missing:
            what = unknown("key", key, self.known).removeprefix("unknown ")
            self.site.stream.emit(
                Warned(
                    f"{self.site.name}: metrics: no step's info ever had the {what}; {column(key)} is NaN"
                )
            )
