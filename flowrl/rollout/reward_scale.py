"""`RewardScale`: rewards divided by the running deviation of returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flowrl.core.keeping import Keeping
from flowrl.rollout.counters import Skipped

Array = np.ndarray[Any, Any]


@dataclass
class RewardScale(Keeping):
    """Divides rewards by the running deviation of discounted returns.

    Each runner, or part of a replay, keeps its own moments, of its own environments (as in
    Engstrom et al. 2020, section 3).

    Args:
        envs: the number of environments.
        gamma: the discount of the returns.
    """

    lasting: ClassVar = ("returns", "mean", "var", "count")
    remade: ClassVar = ("envs", "gamma")

    envs: int
    gamma: float

    def __post_init__(self) -> None:
        self.returns = np.zeros(self.envs)
        # Mean, variance and count; a count of nearly 0, as in Gymnasium's NormalizeReward, lets the
        # first rollout replace the other two.
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def __call__(self, rewards: Array) -> Array:
        """Return rewards of any shape, divided by the deviation so far."""
        scaled: Array = (rewards / np.sqrt(self.var + 1e-8)).astype(np.float32)
        return scaled

    def observe(
        self,
        data: Mapping[str, Array],
        skipped: Sequence[Skipped] = (),
        envs: slice | Array = slice(None),
    ) -> None:
        """Add the returns of a rollout to the moments.

        Args:
            data: the rollout's ``reward``, ``valid``, ``terminated`` and ``truncated``, ``[T, B]``.
            skipped: the steps taken after it.
            envs: the environments of its columns (default all).
        """
        self._update(np.concatenate(self._discounted(data, skipped, envs)))

    def _discounted(
        self, data: Mapping[str, Array], skipped: Sequence[Skipped], envs: slice | Array
    ) -> list[Array]:
        """Return the discounted returns after each step, by row and then by skipped step."""
        seen, returns = [], self.returns[envs]
        done_by_row = data["terminated"] | data["truncated"]
        for reward, valid, done in zip(data["reward"], data["valid"], done_by_row, strict=True):
            returns = np.where(valid, returns * self.gamma + reward, returns)
            seen.append(returns[valid])
            returns = np.where(done, 0.0, returns)
        self.returns[envs] = returns
        for step in skipped:
            env = step.env
            self.returns[env] = self.returns[env] * self.gamma + step.reward
            seen.append(self.returns[env : env + 1].copy())
            if step.over:
                self.returns[env] = 0.0
        return seen

    def _update(self, returns: Array) -> None:
        """Add returns ``[N]`` to the running mean, variance and count."""
        number = len(returns)
        if not number:
            return
        delta, total = returns.mean() - self.mean, self.count + number
        # The variance between the old returns and the new ones comes on top of that within each.
        between = delta**2 * self.count * number / total
        self.var = (self.var * self.count + returns.var() * number + between) / total
        self.mean, self.count = self.mean + delta * number / total, total
