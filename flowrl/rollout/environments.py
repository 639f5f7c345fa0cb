"""`Environments`: those of one runner, which are made, stepped, checked, and brought back."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from flowrl.core.clock import RESET
from flowrl.core.keeping import Keeping
from flowrl.core.metrics import Summed
from flowrl.envs.bringing_back import bring_back, kept_environments
from flowrl.envs.flags import WANTED, are_flags
from flowrl.envs.gym_envs import env_name, make_vector
from flowrl.errors import ContractError, EnvError, raised
from flowrl.rl.spaces import Spaces, in_type
from flowrl.rollout.columns import copies
from flowrl.rollout.infos import Infos

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = np.ndarray[Any, Any]


class Environments(Keeping):
    """The environments of one runner, as one vector.

    Args:
        spec: the settings of the runners.
        spaces: the spaces of one environment.
    """

    remade = ("spec", "spaces", "infos")

    def __init__(self, spec: Runners, spaces: Spaces) -> None:
        self.spec = spec
        self.spaces = spaces
        self.infos: Infos | None = None
        """What gathers the wanted keys of infos; None before `begin`, or where none is wanted."""

    def close(self) -> None:
        """Close the environments."""
        # They may have been made even if their first reset failed. The reference to them goes too,
        # for Atari games end their threads only then.
        if "vector" in self.__dict__:
            self.__dict__.pop("vector").close()

    @cached_property
    def vector(self) -> Any:
        """The environments, made at first use."""
        return make_vector(
            self.spec.env,
            self.spec.envs_per_runner,
            self.spec.wrappers,
            self.spec.env_settings,
            self.spaces,
        )

    @cached_property
    def mode(self) -> AutoresetMode:
        """How the vector begins the next episode of an environment."""
        return AutoresetMode(self.vector.metadata["autoreset_mode"])

    def begin(self) -> None:
        """Make the environments, and gather infos from now on, where any are wanted."""
        mode, spec = self.mode, self.spec
        if spec.metrics:
            self.infos = Infos(spec.metrics, spec.envs_per_runner, env_name(spec.env), mode)

    def measured(self) -> tuple[dict[str, Summed], tuple[str, ...]]:
        """Return what infos held since the last call, by column, and the keys of other infos."""
        if self.infos is None:
            return {}, ()
        return self.infos.drain(), tuple(self.infos.other_keys)

    def keep(self) -> Any:
        """Return what brings the environments back, as far as anything can."""
        infos = self.infos.keep() if self.infos is not None else None
        return {"vector": kept_environments(self.vector), "infos": infos}

    def bring_back(self, state: Any, seed: int, obs: dict[str, Array]) -> Array:
        """Bring the environments back, and reset those that can't be.

        Args:
            state: what `keep` returned.
            seed: of those that are reset.
            obs: the observations to act on, ``[B, ...]``; theirs are replaced.

        Returns:
            ``bool[B]``: which were reset.

        Raises:
            EnvError: an environment raised, or broke its declared shape.
        """

        def put(env: int | None, seen: Any) -> None:
            arrays = self.checked(seen, "reset") if env is None else self.spaces.arrays(seen)
            for name, x in arrays.items():
                obs[name][slice(None) if env is None else env] = x

        with self._in_reset(), RESET:
            lost = bring_back(self.vector, state["vector"], seed, put)
        if self.infos is not None:
            self.infos.take(state["infos"])
            self.infos.begin_again(lost)
        return lost

    def reset(self, **how: Any) -> dict[str, Array]:
        """Reset the environments, and return their observations.

        Raises:
            EnvError: an environment raised, or broke its declared shape.
        """
        with self._in_reset(), RESET:
            return self.checked(self.vector.reset(**how)[0], "reset")

    @contextmanager
    def _in_reset(self) -> Iterator[None]:
        """Name the environment in whatever it raises within the context."""
        try:
            yield
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(f"{env_name(self.spec.env)} raised in reset: {raised(error)}") from error

    def step(self, action: Any) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Array]]:
        """Step all environments.

        Returns:
            Observations to act on, rewards, flags of terminated and of truncated episodes, and the
            observations that the steps led to.
        """
        try:
            obs, reward, terminated, truncated, info = self.vector.step(action)
            terminated = self._flags("terminated", terminated)
            truncated = self._flags("truncated", truncated)
            # Steps led to these observations, except where the vector has reset already.
            final = obs = self.checked(obs, "step")
            if self.infos is not None:
                self.infos.note(info, terminated | truncated)
            if self.mode is not AutoresetMode.NEXT_STEP and (ended := terminated | truncated).any():
                final = copies(obs)  # a vector may return the same arrays again
                if self.mode is AutoresetMode.SAME_STEP:
                    for i in np.flatnonzero(ended):
                        for name, x in self.spaces.arrays(info["final_obs"][i]).items():
                            final[name][i] = x
                else:
                    # The arrays may be the vector's own, which a reset may clear.
                    reward, terminated, truncated = map(np.array, (reward, terminated, truncated))
                    obs = self.reset(options={"reset_mask": ended})
        except EnvError:
            raise
        except Exception as error:
            name = env_name(self.spec.env)
            # Gymnasium's vector fails only where it writes the reward into its array of them.
            if "_rewards[" in (traceback.extract_tb(error.__traceback__)[-1].line or ""):
                raise EnvError(
                    f"{name} gave a reward that is no single number ({raised(error)}); let its "
                    "step return float(reward)"
                ) from error
            raise EnvError(f"{name} raised in step: {raised(error)}") from error
        return obs, reward, terminated, truncated, final

    def _flags(self, name: str, flags: Array) -> Array:
        """Return flags of all environments as the vector gave them, or as bools.

        Raises:
            EnvError: some are neither True nor False.
        """
        if flags.dtype.kind in "biu":
            return flags
        if not are_flags(flags):
            raise EnvError(
                f"{env_name(self.spec.env)} returned {flags} as {name} from step; for each "
                f"environment {WANTED}"
            )
        return flags.astype(bool)

    def checked(self, obs: Any, verb: str) -> dict[str, Array]:
        """Return observations by the names of their fields, in the types that batches have.

        Raises:
            EnvError: they have another shape than the space declares.
        """
        checked, envs = {}, self.spec.envs_per_runner
        for part in self.spaces.parts:
            x = part.of(obs)
            if x.shape != (envs, *part.shape):
                raise EnvError(
                    f"{env_name(self.spec.env)} returned observations of shape {list(x.shape)} "
                    f"from {verb}, but its space declares {[envs, *part.shape]}; fix the "
                    "environment or its space"
                )
            try:
                checked[part.name] = in_type(x, part.dtype)
            except ContractError as error:
                raise EnvError(
                    f"{env_name(self.spec.env)} returned an observation{part.label} from {verb} "
                    f"that {error.message}; scale it, or declare floats"
                ) from None
        return checked
