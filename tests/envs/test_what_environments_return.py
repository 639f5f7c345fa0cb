"""What an environment returns against its spaces is an error that says which part and how."""

import re
import types
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from flowrl.envs.agents import AgentsInTurn, ParallelAgents
from teams import TwoCartPoles

ZEROS = np.zeros(2, np.float32)


class Returns(gym.Env):
    """Returns `first` from reset, and `obs` and `info` from each step."""

    observation_space: gym.Space = gym.spaces.Discrete(4, start=1)
    action_space = gym.spaces.Discrete(2)
    first, obs, reward, info = 1, 4, 1.0, {}
    terminated = truncated = False

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.first, {}

    def step(self, action):
        return self.obs, self.reward, self.terminated, self.truncated, self.info


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
    with pytest.raises(fl.errors.EnvError, match="as reward from step; it must be a single number"):
        trained(reward=reward)


FLAGS = ["terminated", "truncated"]
NO_FLAGS = [(float("nan"), "nan"), (None, "None"), ("no", "'no'"), ([True, False], "a list")]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(("flag", "shown"), NO_FLAGS)
def test_a_flag_that_is_neither_true_nor_false(name, flag, shown):
    says = f"Broken returned {shown} as {name} from step; it must be True or False, .* its step 1 "
    with pytest.raises(fl.errors.EnvError, match=says):
        trained(**{name: flag})


@pytest.mark.parametrize("flag", [np.True_, 1, 1.0, np.array([1])])
def test_a_number_is_a_flag(flag):
    assert trained(truncated=flag)[-1]["length_mean"] == 1


class OfSeveral(TwoCartPoles):
    name, flag = "", None

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        {"terminated": terminated, "truncated": truncated}[self.name]["blue"] = self.flag
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(("flag", "shown"), NO_FLAGS)
def test_a_flag_of_an_agent_that_is_neither_true_nor_false(name, flag, shown):
    env = ParallelAgents(type("Broken", (OfSeveral,), {"name": name, "flag": flag})())
    env.reset(0)
    says = f"agent blue got {re.escape(shown)} as {name} from step; it must be True or False"
    with pytest.raises(fl.errors.EnvError, match=says):
        env.step({"red": 0, "blue": 0})


class InTurn:
    """One agent, who got a flag that is none before its first turn."""

    possible_agents = agents = ("red",)
    agent_selection = "red"

    def __init__(self, *flags):
        self.flags = flags

    def reset(self, seed=None):
        pass

    def last(self):
        return 0, 0.0, *self.flags, {}


@pytest.mark.parametrize(("flag", "shown"), NO_FLAGS)
def test_a_flag_of_an_agent_in_turn_that_is_neither_true_nor_false(flag, shown):
    for flags in ((flag, False), (False, flag)):
        with pytest.raises(fl.errors.EnvError, match=f"agent red got {shown} as t"):
            AgentsInTurn(InTurn(*flags)).reset()


def vector_with(flags):
    class Own(gym.vector.SyncVectorEnv):
        def step(self, actions):
            obs, reward, terminated, _, info = super().step(actions)
            return obs, reward, terminated, np.array(flags), info

    return Own([Returns, Returns])


def test_flags_of_a_vector_that_are_neither_true_nor_false():
    def sampled(flags):
        policy = fl.Policy(fl.networks.MLP, hidden=(4,))
        env = partial(vector_with, flags)
        runners = fl.Runners(env, policy, envs_per_runner=2, rollout_length=4).open()
        return runners.collect()

    assert sampled([0.0, 1.0])["truncated"].any(axis=0).tolist() == [False, True]
    for flags in ([0.0, np.nan], [None, False], ["no", "yes"]):
        with pytest.raises(fl.errors.EnvError, match="as truncated from step; for each env"):
            sampled(flags)


class Bare(gym.vector.VectorEnv):
    """A vector of the user's own that forgets what Gymnasium's have."""

    metadata = types.MappingProxyType({"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP})
    single_observation_space = gym.spaces.Box(-1, 1, (2,))
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, 2)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 2), np.float32), {}

    def step(self, action):
        return np.zeros((2, 2), np.float32), np.ones(2), np.ones(2, bool), np.zeros(2, bool), {}


@pytest.mark.parametrize(
    ("num_envs", "says"),
    [
        (None, "Bare made a vector that does not say of how many environments"),
        (2, r"Bare resets in the step that ends an episode \(SAME_STEP\), but .* lacks final_obs"),
    ],
)
def test_a_vector_that_lacks_what_its_way_of_resetting_needs(num_envs, says):
    policy = fl.Policy(fl.networks.MLP, hidden=(4,))
    env = partial(Bare, num_envs)
    with pytest.raises(fl.errors.EnvError, match=says):
        fl.Runners(env, policy, envs_per_runner=2, rollout_length=4).open().collect()


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_a_space_that_is_none(name):
    with pytest.raises(fl.errors.CheckError, match=f"Broken: its {name} is None, and no space"):
        trained(**{name: None})
