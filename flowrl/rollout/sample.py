"""What a runner returns, and the numbers by which its environments are known and seeded."""

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
    """What happened in the environments while a rollout was sampled.

    Args:
        env_steps: the rollout's valid rows, which are steps.
        returns: ``[episodes]``, of the episodes that ended.
        lengths: ``[episodes]``, of the same, in steps.
        skipped: steps that were taken and are in no rollout.
        metrics: what environments and operators at the sampler measured, by column.
        infos: the keys of `info` that came while one that is wanted did not.
        reset: environments that were reset because they could not be brought back when the run was
            resumed.
        cut: episodes that were cut; None where none ever are.
    """

    env_steps: int
    returns: Array
    lengths: Array
    skipped: int = 0
    metrics: dict[str, Summed] = field(default_factory=dict)
    infos: tuple[str, ...] = ()
    reset: int = 0
    cut: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sample:
    """A rollout, its episodes, and the steps for which its runner has acted by its end.

    These are counted by calls of the policy: more than a rollout has rows where columns wait for
    others, or where agents take turns. A schedule of exploration goes by them.
    """

    batch: Batch
    episodes: Episodes
    turn: int = 0


def numbers(runner: int, envs: int) -> Array:
    """Return the numbers ``int32[envs]`` of a runner's environments, counted over all runners."""
    return np.arange(runner * envs, (runner + 1) * envs, dtype=np.int32)


def seed_of(seed: int, name: str, runner: int, restart_count: int = 0) -> int:
    """Return the seed of a runner's environments.

    Gymnasium resets number i of its vector with this seed + i.

    Args:
        seed: the run's.
        name: of the runners.
        runner: its index.
        restart_count: how often it was restarted; it then takes other paths than those that led
            to its end.
    """
    again = [restart_count] if restart_count else []
    sequence = np.random.SeedSequence([seed, zlib.crc32(name.encode()), runner, *again])
    # Some environments keep their seed as a signed integer of 32 bits.
    return int(sequence.generate_state(1)[0] >> 1)
