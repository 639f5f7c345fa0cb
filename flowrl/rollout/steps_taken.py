"""`StepsTaken`: how many steps the environments of a vector took, for errors that name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from flowrl.core.keeping import Keeping
from flowrl.errors import EnvError, step_of

Array = np.ndarray[Any, Any]
MOST = 4
"""The most environments of which an error lists the steps."""


class StepsTaken(Keeping):
    """Counts the steps of each environment of a vector, since it was made and in its episode.

    A vector of the user's own does not say which of its environments it fails in; one of single
    environments does (`Guard`).

    Args:
        envs: how many environments there are.
        mode: how the vector begins the next episode of an environment.
    """

    lasting = ("count", "beside", "before_episode", "over", "ended")
    remade = ("mode",)

    def __init__(self, envs: int, mode: AutoresetMode) -> None:
        self.mode = mode
        self.count = 0
        """Steps of the vector, the one being taken among them: what each step costs is one sum."""
        self.beside = np.zeros(envs, np.int64)
        """By environment: what its steps since it was made are more than those of the vector."""
        self.before_episode = np.zeros(envs, np.int64)
        """Those of them that were before its episode."""
        self.over = np.zeros(envs, bool)
        """Whose episode ended with the last step."""
        self.ended = False
        """Whether any did."""

    @property
    def steps(self) -> Array:
        """By environment: its steps since it was made, the one being taken among them."""
        return self.beside + self.count

    def reset(self, which: Array | None = None) -> None:
        """Note that environments are reset: those ``bool[B]``, or all."""
        which = np.ones_like(self.over) if which is None else which
        self.before_episode[which] = self.steps[which]
        self.took(self.over & ~which)

    def step(self) -> None:
        """Note that a step is taken, before it is."""
        self.count += 1
        if self.ended and self.mode is AutoresetMode.NEXT_STEP:
            # The step of those whose episode is over is their reset.
            self.beside -= self.over
            np.copyto(self.before_episode, self.steps, where=self.over)

    def took(self, over: Array) -> None:
        """Note whose episode ended with the step, a ``bool[B]`` that nobody writes to any more."""
        # To count the bools of an array is many times as fast as to ask for any.
        self.over, self.ended = over, bool(np.count_nonzero(over))

    def begun_again(self) -> None:
        """Note that those whose episode ended were reset within the step."""
        if self.ended:
            self.reset(self.over)

    def located(self, error: EnvError) -> EnvError:
        """Return an error with the step at which it came, unless it names one already.

        Args:
            error: it names an environment of the vector by its fact `within`, where that is known.
        """
        if "step" in error.facts or "steps" in error.facts:
            return error
        within = error.facts.get("within")
        which = slice(None) if within is None else slice(within, within + 1)
        steps = self.steps[which].tolist()
        in_episode = (self.steps - self.before_episode)[which].tolist()
        if len({*zip(steps, in_episode, strict=True)}) == 1:
            error.message += f"; it happened {step_of(steps[0], in_episode[0])}"
            error.facts |= {"step": steps[0], "episode_step": in_episode[0]}
        else:
            error.message += (
                f"; it happened at steps {_first(steps)} of its environments since they were made, "
                f"{_first(in_episode)} of their episodes"
            )
            error.facts |= {"steps": steps, "episode_steps": in_episode}
        return error


def _first(numbers: Sequence[int]) -> str:
    """Return the first numbers as a list, with dots where there are more."""
    shown = ", ".join(f"{number:,}" for number in numbers[:MOST])
    return f"[{shown}, ...]" if len(numbers) > MOST else f"[{shown}]"
