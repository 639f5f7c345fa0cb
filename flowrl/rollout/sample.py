"""What a runner gives, and the numbers by which its environments are known and seeded."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from flowrl.core.items import Batch
from flowrl.core.metrics import Summed

Array = np.ndarray[Any, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episodes:
    """What happened beside the data: valid steps, steps that were taken but not given, the episodes that ended, and what was measured."""

    env_steps: int
    returns: Array
    lengths: Array
    skipped: int = 0
    metrics: dict[str, Summed] = field(default_factory=dict)
    infos: tuple[str, ...] = ()
    """Keys of `info` that came, where one that is wanted did not."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sample:
    """A fragment and its episodes."""

    batch: Batch
    episodes: Episodes


def numbers(runner: int, envs: int) -> Array:
    """Those of a runner's environments, counted over all runners."""
    return np.arange(runner * envs, (runner + 1) * envs, dtype=np.int32)


def seed_of(seed: int, name: str, runner: int, restart_count: int = 0) -> int:
    """What a runner's environments are seeded with: Gymnasium resets number i of its vector with this + i.

    Args:
        seed: the run's.
        name: of the runners.
        runner: its index.
        restart_count: how often it was restarted; it then goes other ways than those that led to its end.
    """
    again = [restart_count] if restart_count else []
    return int(
        np.random.SeedSequence([seed, zlib.crc32(name.encode()), runner, *again]).generate_state(1)[
            0
        ]
        >> 1
    )
