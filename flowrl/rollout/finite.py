"""Checks of what environments give: numbers are finite, and some action is always allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.errors import EnvError, step_of
from flowrl.rl.spaces import ACTION_MASK, Spaces
from flowrl.rollout.counters import Counters, Skipped

Array = np.ndarray[Any, Any]


class Place(NamedTuple):
    """The environment, and where there are several the agent, that a column stands for."""

    name: str
    """What the environment is called; of several agents, after the agent's name."""
    within: int
    """Its number in the vector."""
    number: int
    """Its number, counted over all runners."""


class NotFiniteNumber(NamedTuple):
    """Where a number that is not finite is in a rollout."""

    rows: int
    """Rows of the rollout that there were by then, that of its step among them."""
    env: int
    """The column."""
    skipped: int
    """Skipped steps of the environment by then, the one that gave it among them."""
    in_reset: bool
    """Whether it came with a reset, not with a step."""
    field: str
    """``reward``, or the name of a field of observations."""
    value: Any


def all_finite(data: dict[str, Array], last: dict[str, Array], skipped: Sequence[Skipped]) -> bool:
    """Return whether all observations and rewards are finite.

    Args:
        data: observations, ``reward`` and ``valid`` of a rollout, ``[T, B, ...]``.
        last: the observations ``[B, ...]`` after it, by the names of their fields.
        skipped: the steps that were taken after it.
    """
    seen = [data["reward"], np.array([step.reward for step in skipped])]
    for name, x in last.items():
        seen += [data[name], x]
        # The policy acts on the observations of skipped steps too, which may be in no rollout.
        seen += [obs[name] for step in skipped for obs in (step.obs, step.next_obs)]
    return all(x.dtype.kind != "f" or np.isfinite(x).all() for x in seen)


def first_not_finite(
    data: dict[str, Array], last: dict[str, Array], skipped: Sequence[Skipped]
) -> NotFiniteNumber:
    """Return the earliest number that is not finite; the arguments are those of `all_finite`."""
    found = [*_in_rows(data, last), *_in_skipped(len(data["reward"]), skipped)]
    # What a step gave comes before what the reset after it gave.
    return min(found, key=lambda number: (number.rows, number.skipped, number.in_reset))


def check_allowed(
    spaces: Spaces, data: dict[str, Array], counters: Counters, place: Callable[[int], Place]
) -> None:
    """Raise an error if a mask of actions allows nothing in a step that was taken.

    Args:
        spaces: of the environment.
        data: observations, flags and ``valid`` of a rollout, ``[T, B, ...]``.
        counters: the runner's, before this rollout is counted.
        place: returns which environment a column stands for.

    Raises:
        EnvError: with the first such step.
    """
    nothing = spaces.nothing_allowed(data)
    if nothing is None or not (wrong := nothing & data["valid"]).any():
        return
    row, column = (int(index) for index in np.argwhere(wrong)[0])
    name, env, _ = place(column)
    # The mask came with the step before that of its row, or with a reset.
    step = int(counters.steps[column] + data["valid"][:row, column].sum())
    found = NotFiniteNumber(row, column, 0, False, ACTION_MASK, 0)
    episode_step = _steps_of_episode(found, data, counters, ())
    raise EnvError(
        f"environment {env} of {name} allows no action at step {row} of the rollout: its "
        f"{ACTION_MASK} is 0 for every choice; let it allow one, or end the episode, "
        f"{step_of(step, episode_step)}",
        what=name,
        within=env,
        field=ACTION_MASK,
        step=step,
        episode_step=episode_step,
        row=row,
    )


def _in_rows(data: dict[str, Array], last: dict[str, Array]) -> Iterator[NotFiniteNumber]:
    """Yield the numbers in a rollout and in the observations after it that are not finite."""
    # A reward comes with the step of its row, an observation before it.
    arrays = [("reward", data["reward"], 1)]
    for name, x in last.items():
        arrays += [(name, data[name], 0), (name, x[None], len(data["reward"]))]
    for field, values, offset in arrays:
        for place in _places(values):
            rows, env = int(place[0]) + offset, int(place[1])
            # The rollout before ended with the observation that this one begins with, and that was
            # checked there: unless the environment was reset in between.
            in_reset = field != "reward" and (rows == 0 or not data["valid"][rows - 1, env])
            yield NotFiniteNumber(rows, env, 0, in_reset, field, values[tuple(place)])


def _in_skipped(rows: int, skipped: Sequence[Skipped]) -> Iterator[NotFiniteNumber]:
    """Yield the numbers of skipped steps, after so many rows, that are not finite."""
    taken: Counter[int] = Counter()
    for step in skipped:
        env, before = step.env, taken[step.env]
        taken[env] += 1
        # What was acted on came with the step before, where it was seen already, or with a reset.
        seen = [("reward", np.asarray(step.reward), before + 1, False)]
        seen += [(name, x, before, True) for name, x in step.obs.items()]
        seen += [(name, x, before + 1, False) for name, x in step.next_obs.items()]
        for field, values, number, in_reset in seen:
            for place in _places(values):
                yield NotFiniteNumber(rows, env, number, in_reset, field, values[tuple(place)])


def _places(values: Array) -> Array:
    """Return the indices ``[n, values.ndim]`` of the numbers that are not finite."""
    if values.dtype.kind != "f":
        return np.empty((0, values.ndim), int)
    return np.argwhere(~np.isfinite(values))


def not_finite_error(
    found: NotFiniteNumber,
    data: dict[str, Array],
    counters: Counters,
    skipped: Sequence[Skipped],
    place: Place,
    seed: int,
) -> EnvError:
    """Return the error for a number that is not finite.

    Args:
        found: the number.
        data: the rollout that it is in.
        counters: the runner's, before this rollout is counted.
        skipped: the steps that were taken after it.
        place: the environment that gave it.
        seed: the runner's.
    """
    rows, env, field, value = found.rows, found.env, found.field, found.value
    valid = data["valid"][:rows, env]
    step = int(counters.steps[env] + valid.sum() + found.skipped)
    episode_step = 0 if found.in_reset else _steps_of_episode(found, data, counters, skipped)
    # A reward belongs to the row of its step, the last one; an observation to the row after it.
    index = rows - 1 if field == "reward" else rows
    # Of observations with several parts, the name of the field says which.
    part = field.removeprefix("obs")
    what = "a reward" if field == "reward" else f"an observation{part and f' {part}'}"
    at_end = rows == len(data["valid"]) and field != "reward"
    at = "the end" if at_end else f"step {index}"
    return EnvError(
        f"environment {place.within} of {place.name} gave {what} that is not finite, at {at} of "
        f"the rollout: {value}, {step_of(step, episode_step)}; it is environment {place.number} "
        f"over all runners, of a runner with the seed {seed}; fix it (a division by zero? an "
        "unbounded state?)",
        what=place.name,
        within=place.within,
        field=field,
        value=str(value),
        step=step,
        episode_step=episode_step,
        row=int(counters.rows[env] + rows + found.skipped) - 1,
    )


def _steps_of_episode(
    found: NotFiniteNumber, data: dict[str, Array], counters: Counters, skipped: Sequence[Skipped]
) -> int:
    """Return the steps of the number's episode by then, in this rollout and around it."""
    rows, env = found.rows, found.env
    after_rows = [step for step in skipped if step.env == env][: found.skipped]
    # The number's own step may end the episode that it belongs to.
    ends = [index for index, step in enumerate(after_rows[:-1]) if step.over]
    if ends:
        return len(after_rows) - 1 - ends[-1]
    over = data["terminated"] | data["truncated"]
    before = rows if found.skipped else rows - 1
    ended = np.flatnonzero(over[: max(before, 0), env])
    if len(ended):
        in_rows = data["valid"][ended[-1] + 1 : rows, env].sum()
    else:
        in_rows = counters.unfinished[1, env] + data["valid"][:rows, env].sum()
    return int(in_rows + len(after_rows))
