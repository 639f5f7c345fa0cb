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
from flowrl.envs.gym_envs import env_name, make_vector
from flowrl.errors import EnvError, raised
from flowrl.rl.spaces import Spaces
from flowrl.rollout.columns import copies
from flowrl.rollout.infos import Infos
from flowrl.rollout.steps_taken import StepsTaken
from flowrl.rollout.vector_checks import VectorChecks

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = np.ndarray[Any, Any]


class Environments(Keeping):
    """The environments of one runner, as one vector.

    Args:
        spec: the settings of the runners.
        spaces: the spaces of one environment.
    """

    remade = ("spec", "spaces", "checks", "infos", "taken")

    def __init__(self, spec: Runners, spaces: Spaces) -> None:
        self.spec = spec
        self.spaces = spaces
        self.checks = VectorChecks(env_name(spec.env), spaces, spec.envs_per_runner)
        self.infos: Infos | None = None
        """What gathers the wanted keys of infos; None before `begin`, or where none is wanted."""
        self.taken: StepsTaken | None = None
        """The steps that the environments took; None before the first reset."""

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
        taken = self._steps_taken().keep()
        return {"vector": kept_environments(self.vector), "infos": infos, "taken": taken}

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
            arrays = self.checks.obs(seen, "reset") if env is None else self.spaces.arrays(seen)
            for name, x in arrays.items():
                obs[name][slice(None) if env is None else env] = x

        taken = self._steps_taken()
        # What was kept before steps were counted has none.
        if "taken" in state:
            taken.take(state["taken"])
        with self._in_reset(), RESET:
            lost = bring_back(self.vector, state["vector"], seed, put)
        taken.reset(lost)
        if self.infos is not None:
            self.infos.take(state["infos"])
            self.infos.begin_again(lost)
        return lost

    def reset(self, **how: Any) -> dict[str, Array]:
        """Reset the environments, and return their observations.

        Raises:
            EnvError: an environment raised, or broke its declared shape.
        """
        which = (how.get("options") or {}).get("reset_mask")
        self._steps_taken().reset(which)
        with self._in_reset(), RESET:
            obs, _ = self.checks.values(self.vector.reset(**how), "reset")
            return self.checks.obs(obs, "reset")

    def _steps_taken(self) -> StepsTaken:
        """Return the count of steps, which begins with the first call."""
        if self.taken is None:
            self.taken = StepsTaken(self.spec.envs_per_runner, self.mode)
        return self.taken

    def located(self, error: EnvError) -> EnvError:
        """Return an error with the step at which it came, unless it names one already."""
        return self._steps_taken().located(error)

    @contextmanager
    def _in_reset(self) -> Iterator[None]:
        """Name the environment and its step in whatever it raises within the context."""
        try:
            yield
        except EnvError as error:
            self.located(error)
            raise
        except Exception as error:
            name = env_name(self.spec.env)
            raise self.located(EnvError(f"{name} raised in reset: {raised(error)}")) from error

    def step(self, action: Any) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Array]]:
        """Step all environments.

        Returns:
            Observations to act on, rewards, flags of terminated and of truncated episodes, and the
            observations that the steps led to.
        """
        taken, checks = self._steps_taken(), self.checks
        taken.step()
        try:
            found = checks.values(self.vector.step(action), "step")
            obs, reward, terminated, truncated, info = found
            reward = checks.rewards(reward)
            terminated = checks.flags("terminated", terminated)
            truncated = checks.flags("truncated", truncated)
            # Steps led to these observations, except where the vector has reset already.
            final = obs = checks.obs(obs, "step")
            ended = np.logical_or(terminated, truncated)
            taken.took(ended)
            if self.infos is not None:
                self.infos.note(info, ended)
            if taken.ended and self.mode is not AutoresetMode.NEXT_STEP:
                final = copies(obs)  # a vector may return the same arrays again
                if self.mode is AutoresetMode.SAME_STEP:
                    for i in np.flatnonzero(ended).tolist():
                        for name, x in checks.final(info, i).items():
                            final[name][i] = x
                    taken.begun_again()
                else:
                    # The arrays may be the vector's own, which a reset may clear.
                    reward, terminated, truncated = map(np.array, (reward, terminated, truncated))
                    obs = self.reset(options={"reset_mask": ended})
        except EnvError as error:
            taken.located(error)
            raise
        except Exception as error:
            name = env_name(self.spec.env)
            # Gymnasium's vector fails only where it writes the reward into its array of them.
            if "_rewards[" in (traceback.extract_tb(error.__traceback__)[-1].line or ""):
                raise taken.located(
                    EnvError(
                        f"{name} gave a reward that is no single number ({raised(error)}); let its "
                        "step return float(reward)"
                    )
                ) from error
            raise taken.located(EnvError(f"{name} raised in step: {raised(error)}")) from error
        return obs, reward, terminated, truncated, final
