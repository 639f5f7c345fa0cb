"""Numbers that environments tell in the `info` of a step, gathered over a fragment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from flowrl.core.metrics import Summed
from flowrl.errors import EnvironmentFailed

Array = np.ndarray[Any, Any]


def column(key: str) -> str:
    """What the metric of a key is called in a Row."""
    return f"env/{key}"


class Infos:
    """Gathers some keys of what a vector of environments tells with its steps. What it tells with a reset does not count."""

    def __init__(self, keys: tuple[str, ...], envs: int, name: str, mode: AutoresetMode) -> None:
        self.keys = keys
        self.name = name
        self.mode = mode
        self.known: dict[str, None] = {}
        """The keys that there were."""
        self.over = np.zeros(envs, bool)
        """Whose episode ended with the last step: the next one is a reset, where that takes a step of its own."""
        self.came: dict[str, list[Array]] = {key: [] for key in keys}

    def note(self, info: Mapping[str, Any], over: Array) -> None:
        """Take what came with one step of all environments; `over`: whose episode ended with it.

        Raises:
            EnvironmentFailed: what a key holds is not one number per environment.
        """
        count = ~self.over if self.mode is AutoresetMode.NEXT_STEP else np.ones_like(self.over)
        self._take(info, count & ~over if self.mode is AutoresetMode.SAME_STEP else count)
        if (
            self.mode is AutoresetMode.SAME_STEP and over.any()
        ):  # what came with the reset stands in the other's place
            self._take(info.get("final_info", {}), over)
        self.over = over.copy()

    def _take(self, info: Mapping[str, Any], count: Array) -> None:
        for key, came in self.came.items():
            if key not in info:
                others = (k for k in info if not k.startswith(("_", "final_")))
                self.known.update(
                    dict.fromkeys(k for k in others if np.any(count & info.get(f"_{k}", True)))
                )
                continue
            values, told = np.asarray(info[key]), info.get(f"_{key}", True)
            if values.shape != count.shape or values.dtype.kind not in "biuf":
                raise EnvironmentFailed(
                    f"info['{key}'] of {self.name} is {values.dtype}{list(values.shape)}; metrics takes keys with one number per environment, "
                    f"{list(count.shape)}: leave '{key}' out, or let the environment tell a number"
                )
            came.append(values[count & told].astype(np.float64))

    def tell(self) -> dict[str, Summed]:
        """What came since the last time, by column."""
        told = {
            column(key): Summed.of(np.concatenate([np.zeros(0), *came]))
            for key, came in self.came.items()
        }
        for came in self.came.values():
            came.clear()
        return told
