"""`VectorChecks`: checks of what a vector of environments returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.envs.flags import WANTED, are_flags
from flowrl.envs.guard import counted
from flowrl.envs.rewards import WANTED as NUMBER_WANTED
from flowrl.envs.rewards import no_number
from flowrl.errors import ContractError, EnvError
from flowrl.rl.spaces import Spaces, in_type, same_kind

Array = np.ndarray[Any, Any]
VALUES = {
    "reset": ("obs", "info"),
    "step": ("obs", "reward", "terminated", "truncated", "info"),
}
"""What each method of a vector returns."""


@dataclass(frozen=True)
class VectorChecks:
    """Checks what a vector returns, which may be one of the user's own.

    Args:
        name: what the environment is called.
        spaces: the spaces of one environment.
        envs: how many there are.
    """

    name: str
    spaces: Spaces
    envs: int

    def rewards(self, rewards: Any) -> Array:
        """Return the rewards of all environments as an array of them.

        Raises:
            EnvError: they are not one number for each environment.
        """
        x = rewards if type(rewards) is np.ndarray else np.asarray(rewards)
        self._check_one_each("reward", x)
        if x.dtype.kind in "biuf":
            return x
        for i, one in enumerate(x.tolist()):
            if wrong := no_number(one):
                raise EnvError(
                    f"environment {i} of {self.name} returned {wrong} as reward from "
                    f"step; {NUMBER_WANTED}",
                    what=self.name,
                    within=i,
                )
        return x.astype(np.float64)

    def flags(self, name: str, flags: Any) -> Array:
        """Return flags of all environments as the vector gave them, or as bools.

        Raises:
            EnvError: some are neither True nor False.
        """
        x = flags if type(flags) is np.ndarray else np.asarray(flags)
        self._check_one_each(name, x)
        if x.dtype.kind in "biu":
            return x
        if not are_flags(x):
            raise EnvError(
                f"{self.name} returned {x} as {name} from step; for each environment {WANTED}"
            )
        return x.astype(bool)

    def _check_one_each(self, name: str, x: Array) -> None:
        """Check that a vector returned an array of one value for each environment.

        Raises:
            EnvError: it has another shape, of which NumPy would make one that fits.
        """
        if x.shape != (self.envs,):
            raise EnvError(
                f"{self.name} returned an array {x.dtype}{list(x.shape)} as {name} "
                f"from step; it must be [{self.envs}], one for each environment"
            )

    def final(self, info: Mapping[str, Any], env: int) -> dict[str, Array]:
        """Return the final observation of an environment, by the names of its fields.

        Raises:
            EnvError: there is none, or it breaks what the space declares.
        """
        if "final_obs" not in info:
            raise EnvError(
                f"{self.name} resets in the step that ends an episode (SAME_STEP), but that step's "
                "info lacks final_obs; let it hold what each environment's step led to, as "
                "Gymnasium's vectors do"
            )
        obs = info["final_obs"][env]
        for part in self.spaces.parts:
            if wrong := part.mismatch(obs, "step"):
                raise EnvError(
                    f"environment {env} of {self.name} returned, as info['final_obs'], {wrong}",
                    what=self.name,
                    within=env,
                )
        return self.spaces.arrays(obs)

    def obs(self, obs: Any, verb: str) -> dict[str, Array]:
        """Return observations by the names of their fields, in the types that batches have.

        Raises:
            EnvError: they have another shape or type than the space declares, or are none of its
                choices.
        """
        checked, envs = {}, self.envs
        for part in self.spaces.parts:
            x = part.of(obs)
            x = x if type(x) is np.ndarray else np.asarray(x)
            if x.shape != (envs, *part.shape):
                raise EnvError(
                    f"{self.name} returned observations of shape {list(x.shape)} "
                    f"from {verb}, but its space declares {[envs, *part.shape]}; fix the "
                    "environment or its space"
                )
            # Floats would lose their fractions in integers.
            if not same_kind(x.dtype, part.declared):
                raise EnvError(
                    f"{self.name} returned observations{part.label} of type {x.dtype} "
                    f"from {verb}, but its space declares {part.declared}; fix the environment or "
                    "its space"
                )
            if wrong := part.no_choice(x, verb):
                raise EnvError(f"{self.name} returned {wrong}")
            try:
                checked[part.name] = in_type(x, part.dtype)
            except ContractError as error:
                raise EnvError(
                    f"{self.name} returned an observation{part.label} from {verb} "
                    f"that {error.message}; scale it, or declare floats"
                ) from None
        return checked

    def values(self, found: Any, verb: str) -> tuple[Any, ...]:
        """Return what `reset` or `step` returned, if it is a tuple of as many values as it must be.

        Raises:
            EnvError: it is not.
        """
        wanted = VALUES[verb]
        if not isinstance(found, tuple) or len(found) != len(wanted):
            raise EnvError(
                f"{self.name} returned {counted(found)} from {verb}; it must be "
                f"({', '.join(wanted)})"
            )
        return found
