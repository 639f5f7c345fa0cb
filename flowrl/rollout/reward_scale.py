"""Rewards scaled by the running deviation of returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class RewardScale:
    """Divides rewards by the running deviation of discounted returns (as in Engstrom et al. 2020, section 3).

    Each runner keeps its own moments, of its own environments.
    """

    envs: int
    gamma: float

    def __post_init__(self) -> None:
        self.returns = np.zeros(self.envs)
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def __call__(self, data: dict[str, Array], skipped: Sequence[tuple[int, float, bool]]) -> Array:
        """The rewards ``[T, B]`` of a fragment, scaled by the moments that include it and the steps `skipped` behind it."""
        seen = []
        for reward, valid, done in zip(
            data["reward"], data["valid"], data["terminated"] | data["truncated"], strict=True
        ):
            self.returns = np.where(valid, self.returns * self.gamma + reward, self.returns)
            seen.append(self.returns[valid])
            self.returns = np.where(done, 0.0, self.returns)
        for b, reward, over in skipped:
            self.returns[b] = self.returns[b] * self.gamma + reward
            seen.append(self.returns[b : b + 1].copy())
            self.returns[b] *= not over
        x = np.concatenate(seen)
        if len(x):
            delta, total = x.mean() - self.mean, self.count + len(x)
            self.var = (
                self.var * self.count + x.var() * len(x) + delta**2 * self.count * len(x) / total
            ) / total
            self.mean, self.count = self.mean + delta * len(x) / total, total
        scaled: Array = (data["reward"] / np.sqrt(self.var + 1e-8)).astype(np.float32)
        return scaled
