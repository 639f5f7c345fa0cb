"""`Counters`: what a runner counts of each of its environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.keeping import Keeping
from flowrl.rollout.sample import Episodes

Array = np.ndarray[Any, Any]


class Skipped(NamedTuple):
    """A step that is in no rollout."""

    env: int
    """The index of its environment in the vector."""
    reward: float
    over: bool
    """Whether it ended an episode."""
    obs: dict[str, Array]
    """The observation that was acted on, by the names of its fields."""
    next_obs: dict[str, Array]
    """The observation that it led to."""


class Counters(Keeping):
    """Counts rows, steps and unfinished episodes by environment.

    Args:
        envs: the number of environments.
    """

    lasting = ("rows", "steps", "unfinished")

    def __init__(self, envs: int) -> None:
        self.rows = np.zeros(envs, np.int32)
        """Rows of all rollouts so far, with resets and final observations, and skipped steps."""
        self.steps = np.zeros(envs, np.int64)
        """Those of the rows that were steps, not resets or final observations."""
        self.unfinished = np.zeros((2, envs))
        """The return and the length so far of each environment's unfinished episode."""

    def add(self, valid: Array, skipped: Sequence[Skipped]) -> None:
        """Count a rollout.

        Args:
            valid: ``bool[T, B]``, which rows are steps.
            skipped: the steps that were taken after it.
        """
        self.rows += len(valid)
        self.steps += valid.sum(axis=0)
        for count in (self.rows, self.steps):
            np.add.at(count, [step.env for step in skipped], 1)

    def begin_again(self, envs: Array) -> None:
        """Forget the unfinished episodes of environments ``bool[B]`` that were reset.

        What follows does not go on from their last rows, which a replay sees by the numbers.
        """
        self.unfinished[:, envs] = 0
        self.rows += envs

    def episodes(self, data: dict[str, Array], skipped: Sequence[Skipped]) -> Episodes:
        """Return the episodes that ended in a rollout, and carry the unfinished ones on.

        Args:
            data: the rollout's ``reward``, ``valid``, ``terminated`` and ``truncated``, ``[T, B]``.
            skipped: the steps that were taken after it.
        """
        valid, done = data["valid"], data["terminated"] | data["truncated"]
        sums = np.cumsum([data["reward"], valid], axis=1, dtype=np.float64)
        # What the sums of a column were when its unfinished episode began.
        at_begin = np.zeros_like(self.unfinished)
        ended = []
        for row, env in np.argwhere(done):
            ended.append(self.unfinished[:, env] + sums[:, row, env] - at_begin[:, env])
            self.unfinished[:, env] = 0
            at_begin[:, env] = sums[:, row, env]
        self.unfinished += sums[:, -1] - at_begin
        for step in skipped:
            self.unfinished[:, step.env] += (step.reward, 1)
            if step.over:
                ended.append(self.unfinished[:, step.env].copy())
                self.unfinished[:, step.env] = 0
        returns, lengths = np.array(ended).reshape(-1, 2).T
        return Episodes(int(valid.sum()), returns, lengths, len(skipped))
