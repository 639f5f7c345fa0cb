"""Videos of evaluated episodes."""

import sys
from functools import partial

import gymnasium as gym
import imageio_ffmpeg
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl
from flowrl.rollout.runners import Runners

MLP = fl.Policy(fl.networks.MLP, hidden=(4,))


class Painted(gym.Env):
    """Episodes of 4 to 8 steps, by the seed, with a picture of an odd height."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 4 + seed % 5
        return np.float32([self.left]), {}

    def step(self, action):
        self.left -= 1
        return np.float32([self.left]), 1.0, self.left == 0, False, {}

    def render(self):
        return np.full((33, 48, 3), 20 * self.left, np.uint8)


class Unseen(Painted):
    """Takes no render_mode."""

    def __init__(self):
        super().__init__()


class Bytes(Painted):
    def render(self):
        return super().render()[..., 0]


class Growing(Painted):
    def render(self):
        picture = super().render()
        return picture if self.left > 2 else picture.transpose(1, 0, 2)


class Odd(Painted):
    """Its rate is none."""

    metadata = {**Painted.metadata, "render_fps": -1}  # noqa: RUF012


def vector():
    return SyncVectorEnv([Painted] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


def trained(env):
    spaces = Runners(env, MLP).spaces()
    made = fl.TrainedPolicy(MLP, spaces, None, env)
    weights = jax.jit(made.network.init)(jax.random.key(0))
    return fl.TrainedPolicy(MLP, spaces, weights, env)


def painted(**how):
    return Painted(**how)


@pytest.mark.parametrize("env", [Painted, painted])
def test_the_first_episodes_are_filmed_and_play_as_they_do_unseen(env, tmp_path):
    policy, folder = trained(env), tmp_path / "new" / "videos"
    found = policy.evaluate(5, seed=7, video=folder)
    np.testing.assert_array_equal(found.lengths, policy.evaluate(5, seed=7).lengths)
    films = [folder / f"seed-{seed}.mp4" for seed in (7, 8, 9)]
    assert sorted(folder.iterdir()) == films
    frames = [imageio_ffmpeg.count_frames_and_secs(str(film))[0] for film in films]
    # The first frame is that of the reset.
    assert frames == (found.lengths[:3] + 1).tolist() and len(set(frames)) == 3
    with pytest.raises(fl.errors.SaveError, match=r"seed-8.mp4 exists already.*another directory"):
        policy.evaluate(2, seed=8, video=folder)


@pytest.mark.parametrize(
    ("env", "kind", "says"),
    [
        (Unseen, "SettingError", "Unseen: its render_mode is None, and a video needs 'rgb_array'"),
        (vector, "SettingError", "vector: only single environments .* and this is a SyncVectorEnv"),
        (Odd, "SaveError", r"seed-0.mp4 could not be written: \S"),
        (
            Growing,
            "EnvError",
            r"render\(\) returned uint8\[48, 33, 3\], but the first .* was \[33, 48, 3\]; a video",
        ),
        (Bytes, "EnvError", r"render\(\) returned uint8\[33, 48\]; a video needs uint8\[height"),
    ],
)
def test_what_can_not_be_filmed_is_refused(env, kind, says, tmp_path):
    with pytest.raises(getattr(fl.errors, kind), match=says):
        trained(env).evaluate(1, video=tmp_path / "videos")


def test_a_vector_that_observes_otherwise_than_one_environment_is_not_filmed(tmp_path):
    policy = trained(Painted)
    other = gym.spaces.Box(0, 1, (9,))
    spaces = type(policy.spaces)(other, policy.spaces.action)
    seen = fl.TrainedPolicy(MLP, spaces, policy.weights, Painted)
    with pytest.raises(fl.errors.SettingError, match="a single Painted has other spaces than the"):
        seen.evaluate(1, video=tmp_path / "videos")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(fl.errors.SettingError, match=r"imageio_ffmpeg: .*'flowrl\[video\]'"):
        trained(partial(Painted)).evaluate(1, video=tmp_path / "videos")
