"""`Guard`: checks what one environment of a vector returns, and names it in every error."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from flowrl.envs.bringing_back import Retraced
from flowrl.envs.flags import FLAGS, not_flags
from flowrl.envs.rewards import REWARDS, WANTED, as_number, no_number
from flowrl.errors import EnvError, a, raised
from flowrl.rl.spaces import Spaces, same_kind


class Guard(Retraced):
    """Wraps one environment of a vector, so that its errors have its number.

    What it raises, and what breaks its declared space, becomes an `EnvError`.

    Args:
        env: the environment.
        index: its number in the vector.
        name: what it is called.
    """

    def __init__(self, env: gym.Env[Any, Any], index: int, name: str) -> None:
        super().__init__(env)
        self.index = index
        self.name = name
        self.label = f"environment {index} of {name}"
        self.parts = Spaces(env.observation_space, env.action_space).parts

    def failed(self, text: str) -> EnvError:
        """Return an error with the number of this environment, by which its step is found.

        Args:
            text: what is wrong, and the way out.
        """
        return EnvError(text, what=self.name, within=self.index)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and check the observation's shape and type, or its choices.

        Raises:
            EnvError: the environment raised, or returned anything else than five values
                with such an observation and a dict.
        """
        try:
            result = super().step(action)
        except Exception as error:
            raise self.failed(
                f"{self.label} raised in step({action!r}): {raised(error)}{self._nan_before()}"
            ) from error
        if not isinstance(result, tuple) or len(result) != 5:
            raise self.failed(
                f"{self.label} returned {counted(result)} from step; it must be (obs, reward, "
                "terminated, truncated, info)"
            )
        if type(result[1]) not in REWARDS:
            if wrong := no_number(result[1]):
                raise self.failed(
                    f"{self.label} returned {wrong} as reward from step; {WANTED}, such as by "
                    "float(reward)"
                )
            # Gymnasium's vectors take no array of one number with several axes.
            result = (result[0], as_number(result[1]), *result[2:])
        usual = type(result[2]) in FLAGS and type(result[3]) in FLAGS
        if not usual and (wrong := not_flags(result[2], result[3])):
            raise self.failed(f"{self.label} returned {wrong}")
        self._check(result[0], result[4], "step")
        return result

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and check the observation's shape and type, or its choices.

        Raises:
            EnvError: the environment raised, or returned anything else than two values
                with such an observation and a dict.
        """
        try:
            result = super().reset(seed=seed, options=options)
        except Exception as error:
            raise self.failed(f"{self.label} raised in reset: {raised(error)}") from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.failed(
                f"{self.label} returned {counted(result)} from reset; it must be (obs, info)"
            )
        self._check(result[0], result[1], "reset")
        return result

    def _nan_before(self) -> str:
        """Return whether the last observation is the cause of what the step raised; else nothing.

        A rollout is searched for such numbers only at its end, and the policy makes a NaN of them.
        """
        for part in self.parts if self.seen is not None else ():
            found = np.asarray(part.of(self.seen))
            if found.dtype.kind == "f" and not np.isfinite(found).all():
                wrong = found[~np.isfinite(found)][0]
                return (
                    f"; the observation{part.label} before it, which the policy got, is not "
                    f"finite: {wrong}; fix that first (a division by zero? an unbounded state?)"
                )
        return ""

    def _check(self, obs: Any, info: Any, verb: str) -> None:
        for part in self.parts:
            if wrong := part.mismatch(obs, verb, converts=_stacks):
                raise self.failed(f"{self.label} returned {wrong}")
        if not isinstance(info, dict):
            raise self.failed(
                f"{self.label} returned {a(info)} as info from {verb}; it must be a dict"
            )


def _stacks(found: Any, declared: Any) -> bool:
    """Return whether Gymnasium's vectors write numbers of one type into arrays of another."""
    return found == declared or (
        same_kind(found, declared) and np.can_cast(found, declared, "same_kind")
    )


def counted(result: Any) -> str:
    """Describe what an environment returned in place of a tuple of the right length."""
    return f"{len(result)} values" if isinstance(result, tuple) else a(result)
