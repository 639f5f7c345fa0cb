"""Videos of the episodes that an evaluation plays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from flowrl.envs.gym_envs import Make, env_name, probe
from flowrl.errors import EnvError, SaveError, SettingError, a, install
from flowrl.rl.spaces import Spaces

Wrappers = tuple[Callable[[Any], Any], ...]
EPISODES = 3
"""The number of episodes, the first ones, of which there are videos."""


class Filmed(gym.Wrapper[Any, Any, Any, Any]):
    """Writes a video of each of the first episodes: ``seed-7.mp4``, by the seed of the episode.

    Each frame is written at once: `gymnasium.wrappers.RecordVideo` keeps those of an episode, of
    which there may be 30,000, and its moviepy refuses newer versions of other packages.

    Args:
        env: the environment, which renders RGB arrays.
        folder: where videos go.
    """

    def __init__(self, env: gym.Env[Any, Any], folder: Path) -> None:
        super().__init__(env)
        self.folder = folder
        self.left = EPISODES
        """The number of videos that are still to be made."""
        self.writer: Any = None
        """Takes the frames of the video that is being made; None if there is none."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, and its video."""
        found = super().reset(seed=seed, options=options)
        self._finish()
        if self.left:
            self.left -= 1
            self._begin(self.folder / video_name(seed))
        return found

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step, and add its frame to the video."""
        found = super().step(action)
        if self.writer is not None:
            self.writer.send(self._frame())
        return found

    def close(self) -> None:
        """Finish the video and close the environment."""
        self._finish()
        super().close()

    def _begin(self, path: Path) -> None:
        import imageio_ffmpeg

        frame = self._frame()
        # Videos have an even number of pixels in each direction.
        self.writer = imageio_ffmpeg.write_frames(
            str(path),
            (frame.shape[1], frame.shape[0]),
            fps=self.metadata.get("render_fps", 30),
            macro_block_size=2,
            ffmpeg_log_level="error",
        )
        # A generator begins with None.
        self.writer.send(None)
        self.writer.send(frame)

    def _frame(self) -> np.ndarray[Any, Any]:
        """Return the picture of the environment, ``uint8[height, width, 3]``.

        Raises:
            EnvError: it is no such array.
        """
        frame: Any = self.env.render()
        image = isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3
        if not image or frame.shape[2] != 3:
            got = f"{frame.dtype}{list(frame.shape)}" if hasattr(frame, "dtype") else a(frame)
            raise EnvError(f"render() returned {got}; a video needs uint8[height, width, 3]")
        return np.ascontiguousarray(frame)

    def _finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def video_name(seed: int | None) -> str:
    """Return the name of the video of an episode."""
    return f"seed-{seed}.mp4"


def filmed(
    env: Make,
    wrappers: Wrappers,
    settings: Mapping[str, Any],
    spaces: Spaces,
    seed: int,
    folder: Path,
) -> tuple[Wrappers, Mapping[str, Any]]:
    """Return the wrappers and settings with which an environment writes videos of its episodes.

    Args:
        env: the environment.
        wrappers: put around it, the innermost first.
        settings: keyword arguments for making it.
        spaces: those of the policy that plays in it.
        seed: of the first episode.
        folder: where the videos go; it is made if it is not there.

    Raises:
        SettingError: the environment shows no images or comes as a vector, or a package is missing.
        SaveError: there is a video of these seeds in the folder.
    """
    try:
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise SettingError(f"videos need the package {error.name}: {install('video')}") from error
    for i in range(EPISODES):
        if (path := folder / video_name(seed + i)).exists():
            raise SaveError(
                f"{path} exists already, and nothing is ever overwritten; name another directory"
            )
    if _takes_mode(env):
        settings = {**settings, "render_mode": "rgb_array"}
    # It is made once more for this, so that nothing is played where nothing can be filmed.
    found = probe(env, (*wrappers, _checked), settings)[0]
    if found != spaces:
        raise SettingError(
            f"a single {env_name(env)} has other spaces than the vector in which this policy acts, "
            f"and only single environments are filmed: obs {found.obs}, action {found.action}; it "
            f"has {spaces}. Evaluate it in a single environment with such spaces (--env)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return (*wrappers, partial(Filmed, folder=folder)), settings


def _takes_mode(env: Make) -> bool:
    """Return whether an environment is made with the argument ``render_mode``."""
    if isinstance(env, str):
        return True
    parameters = inspect.signature(env).parameters.values()
    return any(x.name == "render_mode" or x.kind is x.VAR_KEYWORD for x in parameters)


def _checked(made: Any) -> Any:
    """Return an environment as it is.

    Raises:
        SettingError: it can't be filmed.
    """
    if not isinstance(made, gym.Env):
        raise SettingError(
            f"only single environments of Gymnasium are filmed, and this is {a(made)}; evaluate "
            "the policy in a single one with such spaces (--env)"
        )
    if made.render_mode != "rgb_array":
        raise SettingError(
            f"its render_mode is {made.render_mode!r}, and a video needs 'rgb_array'; let its "
            "class or function take render_mode, and list it in metadata['render_modes']"
        )
    return made
