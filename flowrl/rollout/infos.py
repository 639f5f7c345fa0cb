"""`Infos`: numbers that environments return in the `info` of a step, gathered over a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from flowrl.core.keeping import Keeping
from flowrl.core.metrics import Summed
from flowrl.errors import EnvError

Array = np.ndarray[Any, Any]


def column(key: str) -> str:
    """Return the name that the metric of a key has in a Row."""
    return f"env/{key}"


class Infos(Keeping):
    """Gathers some keys of the infos that a vector of environments returns with its steps.

    What it returns with a reset does not count.

    Args:
        keys: those that are wanted.
        envs: the number of environments.
        name: what the environment is called.
        mode: how the vector begins the next episode of a column.
    """

    lasting = ("other_keys", "_over", "_values")
    remade = ("keys", "name", "mode")

    def __init__(self, keys: tuple[str, ...], envs: int, name: str, mode: AutoresetMode) -> None:
        self.keys = keys
        self.name = name
        self.mode = mode
        self.other_keys: dict[str, None] = {}
        """The keys that came while a wanted one was missing."""
        self._over = np.zeros(envs, bool)
        """Whose episode ended with the last step.

        The next step of these is a reset, where that takes a step of its own.
        """
        self._values: dict[str, list[Array]] = {key: [] for key in keys}

    def begin_again(self, lost: Array) -> None:
        """Forget whose episode ended, of those ``bool[B]`` that were reset since."""
        self._over &= ~lost

    def note(self, info: Mapping[str, Any], over: Array) -> None:
        """Add what came with one step of all environments.

        Args:
            info: what the vector returned.
            over: ``bool[B]``, whose episode ended with the step.

        Raises:
            EnvError: what a key holds is not one number per environment.
        """
        same_step = self.mode is AutoresetMode.SAME_STEP
        is_step = ~self._over if self.mode is AutoresetMode.NEXT_STEP else np.ones_like(self._over)
        self._take(info, is_step & ~over if same_step else is_step)
        # Where an episode ended, `info` is that of the reset, and that of the step stands apart.
        if same_step and over.any():
            self._take(info.get("final_info", {}), over)
        self._over = over.copy()

    def _take(self, info: Mapping[str, Any], count: Array) -> None:
        """Add the wanted keys of the environments that `count`, a ``bool[B]``."""
        for key, gathered in self._values.items():
            if key not in info:
                self._note_other_keys(info, count)
                continue
            # Gymnasium says under ``_key`` which environments gave the key.
            values, given = np.asarray(info[key]), info.get(f"_{key}", True)
            if values.shape != count.shape or values.dtype.kind not in "biuf":
                raise EnvError(
                    f"info['{key}'] of {self.name} is {values.dtype}{list(values.shape)}; metrics "
                    f"takes keys with one number per environment, {list(count.shape)}: leave "
                    f"'{key}' out, or let the environment return a number"
                )
            gathered.append(values[count & given].astype(np.float64))

    def _note_other_keys(self, info: Mapping[str, Any], count: Array) -> None:
        """Note the keys that came, for a warning that names the most similar one."""
        others = (key for key in info if not key.startswith(("_", "final_")))
        came = (key for key in others if np.any(count & info.get(f"_{key}", True)))
        self.other_keys.update(dict.fromkeys(came))

    def drain(self) -> dict[str, Summed]:
        """Return the sums of what came since the last call, by column."""
        sums = {
            column(key): Summed.of(np.concatenate([np.zeros(0), *gathered]))
            for key, gathered in self._values.items()
        }
        for gathered in self._values.values():
            gathered.clear()
        return sums
