"""Losses that learn from a dataset alone: behaviour cloning, and what improves on it.

They are functions as those of `losses` are. ``batch`` holds transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flowrl.errors import SettingError
from flowrl.rl.losses import Bound, Loss, Metrics
from flowrl.rl.masked import mean

Array = Any


@dataclass(frozen=True)
class BCLoss(Loss):
    """Behaviour cloning: the negative log-likelihood of the dataset's actions (Pomerleau 1989).

    Returns play no part in it, so the policy becomes as good as the data's mean, or as the one
    policy that they are from.
    """

    needs: ClassVar[tuple[str, ...]] = ("obs", "action")
    on_policy: ClassVar[bool] = False

    def __call__(
        self, policy: Bound, params: Any, batch: Mapping[str, Array]
    ) -> tuple[Array, Metrics]:
        """Return the loss and its metrics."""
        dist, _ = policy(params, batch["obs"])
        loss = -mean(dist.log_prob(batch["action"]), batch["valid"])
        return loss, {"loss/policy": loss}
