"""The check that environments give finite numbers, and the error that locates the first other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.errors import EnvError
from flowrl.rollout.counters import Counters, Skipped

Array = np.ndarray[Any, Any]


class NotFiniteNumber(NamedTuple):
    """Where a number that is not finite is in a rollout."""

    rows: int
    """Rows of the rollout that there were by then, that of its step among them."""
    env: int
    """The index of the environment in its vector."""
    skipped: int
    """Skipped steps of the environment by then, the one that gave it among them."""
    field: str
    """``obs`` or ``reward``."""
    value: Any


def all_finite(data: dict[str, Array], last: Array, skipped: Sequence[Skipped]) -> bool:
    """Return whether all observations and rewards are finite.

    Args:
        data: ``obs`` and ``reward`` of a rollout, ``[T, B, ...]``.
        last: the observations ``[B, ...]`` after it.
        skipped: the steps that were taken after it.
    """
    skipped_rewards = np.array([reward for _, reward, _ in skipped])
    seen = (data["reward"], data["obs"], last, skipped_rewards)
    return all(x.dtype.kind != "f" or np.isfinite(x).all() for x in seen)


def first_not_finite(
    data: dict[str, Array], last: Array, skipped: Sequence[Skipped]
) -> NotFiniteNumber:
    """Return the earliest number that is not finite; the arguments are those of `all_finite`."""
    steps = len(data["reward"])
    found = []
    for index, (env, reward, _) in enumerate(skipped):
        if not np.isfinite(reward):
            envs_by_then = [other for other, _, _ in skipped[: index + 1]]
            by_then = envs_by_then.count(env)
            found.append(NotFiniteNumber(steps, int(env), by_then, "reward", reward))
    # A reward comes with the step of its row, an observation before it.
    arrays = (("reward", data["reward"], 1), ("obs", data["obs"], 0), ("obs", last[None], steps))
    for field, values, offset in arrays:
        if values.dtype.kind == "f":
            for place in np.argwhere(~np.isfinite(values)):
                rows, env = int(place[0]) + offset, int(place[1])
                found.append(NotFiniteNumber(rows, env, 0, field, values[tuple(place)]))
    return min(found, key=lambda number: (number.rows, number.skipped))


def not_finite_error(
    found: NotFiniteNumber,
    data: dict[str, Array],
    counters: Counters,
    *,
    env_name: str,
    env_number: int,
    seed: int,
) -> EnvError:
    """Return the error for a number that is not finite.

    Args:
        found: the number.
        data: the rollout that it is in.
        counters: the runner's, before this rollout is counted.
        env_name: what the environment is called.
        env_number: its number, counted over all runners.
        seed: the runner's.
    """
    rows, env, skipped, field, value = found
    valid = data["valid"][:rows, env]
    step = int(counters.steps[env] + valid.sum() + skipped)
    episode_step = int(_rows_of_episode(found, data, counters) + skipped)
    # The rollout before ended with the observation that this one begins with, and that was checked
    # there: unless the environment was reset in between.
    in_reset = field == "obs" and (rows == 0 or not data["valid"][rows - 1, env])
    when = (
        f"in a reset, after its step {step:,}"
        if in_reset
        else f"at its step {step:,} since it was made, {episode_step:,} of an episode"
    )
    # A reward belongs to the row of its step, the last one; an observation to the row after it.
    index = rows - 1 if field == "reward" else rows
    what = {"obs": "an observation", "reward": "a reward"}[field]
    place = "the end" if rows == len(data["valid"]) and field == "obs" else f"step {index}"
    return EnvError(
        f"environment {env} of {env_name} gave {what} that is not finite, at {place} of the "
        f"rollout: {value}, {when}; it is environment {env_number} over all runners, of a runner "
        f"with the seed {seed}; fix it (a division by zero? an unbounded state?)",
        what=env_name,
        within=env,
        field=field,
        value=str(value),
        step=step,
        episode_step=0 if in_reset else episode_step,
        row=int(counters.rows[env] + rows + skipped) - 1,
    )


def _rows_of_episode(found: NotFiniteNumber, data: dict[str, Array], counters: Counters) -> Any:
    """Return the steps of the number's episode that are rows, in this rollout or earlier ones."""
    rows, env = found.rows, found.env
    over = data["terminated"] | data["truncated"]
    # The last row's own step may end the episode that the number belongs to; only a skipped step
    # after it is one of a later episode.
    before = rows if found.skipped else rows - 1
    ended = np.flatnonzero(over[: max(before, 0), env])
    if len(ended):
        return data["valid"][ended[-1] + 1 : rows, env].sum()
    return counters.unfinished[1, env] + data["valid"][:rows, env].sum()
