"""What an environment returns against its spaces is an error that says which part and how."""

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl

ZEROS = np.zeros(2, np.float32)


class Returns(gym.Env):
    """Returns `first` from reset, and `obs` and `info` from each step."""

    observation_space: gym.Space = gym.spaces.Discrete(4, start=1)
    action_space = gym.spaces.Discrete(2)
    first, obs, reward, info = 1, 4, 1.0, {}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.first, {}

    def step(self, action):
        return self.obs, self.reward, False, False, self.info


def trained(**attributes):
    env = type("Broken", (Returns,), attributes)
    settings = fl.PPOSettings(rollout_length=8, batch_size=64, minibatch_size=64)
    return list(fl.run(fl.ppo(env, settings), steps=64))


@pytest.mark.parametrize(
    ("space", "first", "obs", "says"),
    [
        (gym.spaces.Discrete(4, start=1), 1, 5, "holds 5, but .* choices from 1 to 4"),
        (gym.spaces.Discrete(4, start=1), 1, 0, "holds 0, but .* choices from 1 to 4"),
        (
            gym.spaces.MultiDiscrete([3, 2]),
            np.array([0, 0]),
            np.array([2, 2]),
            r"holds 2, but .* choices from \[0, 0\] to \[2, 1\]",
        ),
        (
            gym.spaces.MultiBinary(2),
            np.zeros(2, np.int8),
            np.array([0, 7], np.int8),
            "holds 7, but .* choices from 0 to 1",
        ),
        (
            gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,)), b=gym.spaces.Discrete(3)),
            {"a": ZEROS, "b": 2},
            {"a": ZEROS, "b": 3},
            r"an observation \['b'\] from step that holds 3",
        ),
        (
            gym.spaces.Box(0, 255, (2,), np.uint8),
            np.zeros(2, np.uint8),
            np.array([3, 4]),
            r"an observation int64\[2\] from step, but .* declares uint8\[2\]",
        ),
    ],
    ids=["above", "below", "several", "binary", "a part", "a type"],
)
def test_choices_and_types_that_a_space_lacks(space, first, obs, says):
    with pytest.raises(fl.errors.EnvError, match=f"environment 0 of Broken returned .*{says}"):
        trained(observation_space=space, first=first, obs=obs)


def test_the_first_and_the_last_choice_pass():
    assert trained()[-1]["env_steps"] >= 64


def test_an_info_that_is_no_dict():
    with pytest.raises(fl.errors.EnvError, match="a NoneType as info from step; it must be a dict"):
        trained(info=None)


@pytest.mark.parametrize("reward", [None, "7"])
def test_a_reward_that_is_no_number(reward):
    with pytest.raises(fl.errors.EnvError, match="as reward from step; it must be a number"):
        trained(reward=reward)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_a_space_that_is_none(name):
    with pytest.raises(fl.errors.CheckError, match=f"Broken: its {name} is None, and no space"):
        trained(**{name: None})
