"""Videos of the episodes that an evaluation plays."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import gymnasium as gym
import numpy as np

from flowrl.core.new_files import check_new
from flowrl.envs.gym_envs import Make, env_name, probe
from flowrl.errors import EnvError, SaveError, SettingError, a, install
from flowrl.rl.spaces import Spaces

Array = np.ndarray[Any, Any]
Wrappers = tuple[Callable[[Any], Any], ...]
EPISODES = 3
"""The number of episodes, the first ones, of which there are videos."""


class Film:
    """A video that is written frame by frame, through a process of ffmpeg.

    Args:
        path: of the file.
        size: the width and height of a frame in pixels.
        fps: frames per second.
    """

    def __init__(self, path: Path, size: tuple[int, int], fps: float) -> None:
        # Its `write_frames` would fork this process, in which JAX has threads.
        from imageio_ffmpeg import get_ffmpeg_exe

        self.path = path
        self.size = size
        frames = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[0]}x{size[1]}"]
        # Most players need an even number of pixels in each direction.
        even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"
        command = [get_ffmpeg_exe(), "-n", "-loglevel", "error", *frames, "-r", str(fps), "-i", "-"]
        command += ["-an", "-vf", even, "-pix_fmt", "yuv420p", str(path)]
        self.process = subprocess.Popen(  # noqa: S603 - its arguments are no user's text
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def add(self, frame: Array) -> None:
        """Add a frame ``uint8[height, width, 3]``.

        Raises:
            EnvError: it is not as large as the first one.
        """
        height, width, _ = frame.shape
        # ffmpeg gets bytes alone, and would go on with the next ones wherever this frame ends.
        if (width, height) != self.size:
            raise EnvError(
                f"render() returned uint8{list(frame.shape)}, but the first picture of the episode "
                f"was {[self.size[1], self.size[0], 3]}; a video needs pictures of one size"
            )
        # Where ffmpeg has ended early, `close` says why.
        with suppress(BrokenPipeError):
            cast("IO[bytes]", self.process.stdin).write(frame.tobytes())

    def close(self) -> None:
        """Finish the file.

        Raises:
            SaveError: ffmpeg could not write it.
        """
        _, text = self.process.communicate()
        if self.process.returncode != 0:
            raise SaveError(f"{self.path} could not be written: {text.decode().strip()}")


class Filmed(gym.Wrapper[Any, Any, Any, Any]):
    """Writes a video of each of the first episodes: ``seed-7.mp4``, by the seed of the episode.

    Each frame is written at once: `gymnasium.wrappers.RecordVideo` keeps those of an episode, of
    which there may be 30,000, and its moviepy takes no pillow from version 12 on.

    Args:
        env: the environment, which renders RGB arrays.
        folder: where videos go.
    """

    def __init__(self, env: gym.Env[Any, Any], folder: Path) -> None:
        super().__init__(env)
        self.folder = folder
        self.left = EPISODES
        """The number of videos that are still to be made."""
        self.film: Film | None = None
        """The video that is being made."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, and its video."""
        found = super().reset(seed=seed, options=options)
        self._finish()
        if self.left:
            self.left -= 1
            frame = self._frame()
            path, fps = self.folder / video_name(seed), self.metadata.get("render_fps", 30)
            self.film = Film(path, (frame.shape[1], frame.shape[0]), fps)
            self.film.add(frame)
        return found

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step, and add its frame to the video."""
        found = super().step(action)
        if self.film is not None:
            self.film.add(self._frame())
        return found

    def close(self) -> None:
        """Finish the video and close the environment."""
        self._finish()
        super().close()

    def _frame(self) -> Array:
        """Return the picture of the environment, ``uint8[height, width, 3]``.

        Raises:
            EnvError: it is no such array.
        """
        frame: Any = self.env.render()
        array = isinstance(frame, np.ndarray)
        if not array or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            got = f"{frame.dtype}{list(frame.shape)}" if array else a(frame)
            raise EnvError(f"render() returned {got}; a video needs uint8[height, width, 3]")
        return cast("Array", frame)

    def _finish(self) -> None:
        film, self.film = self.film, None
        if film is not None:
            film.close()


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
        check_new(folder / video_name(seed + i), "name another directory")
    if _takes_mode(env):
        settings = {**settings, "render_mode": "rgb_array"}
    # It is made once more for this, so that nothing is played where nothing can be filmed.
    found = probe(env, (*wrappers, _checked), settings).first
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
