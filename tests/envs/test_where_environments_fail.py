"""Errors of masks, of vectors and of agents name the step since it was made and in the episode."""

import re
from decimal import Decimal
from functools import partial

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl
from flowrl.envs.agents import ParallelAgents
from flowrl.rl.policies import network
from flowrl.rl.spaces import Spaces
from flowrl.rollout.evaluation import play

MLP = fl.Policy(fl.networks.MLP, hidden=(4,))
MODES = [mode.value for mode in AutoresetMode]
WHEN = "at its step 5 since it was made, 2 of an episode"
KEY = "action_mask"


class Three(gym.Env):
    """Has episodes of three steps, and may give another reward or mask with its step 5."""

    observation_space: gym.Space = gym.spaces.Box(-1, 1, (2,))
    action_space: gym.Space = gym.spaces.Discrete(2)
    life, info, wrong = 0, {}, None
    """The steps taken, the usual info, and that of step 5."""
    reward = 1.0
    """That of step 5."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(2, self.observation_space.dtype), self.info

    def step(self, action):
        self.age, self.life = self.age + 1, self.life + 1
        at_five = self.life == 5
        info = self.wrong if at_five and self.wrong is not None else self.info
        reward = self.reward if at_five else 1.0
        obs = np.zeros(2, self.observation_space.dtype)
        return obs, reward, self.age == 3, False, info


class Masked(Three):
    info = {KEY: np.ones(2, np.int8)}  # noqa: RUF012


def kind_of(base, **attributes):
    return type("Mine", (base,), attributes)


def sampled(env, envs=1):
    runners = fl.Runners(env, MLP, envs_per_runner=envs, rollout_length=12).open()
    try:
        return runners.collect()
    finally:
        runners.close()


def failure(env, envs=1):
    with pytest.raises(fl.errors.EnvError) as caught:
        sampled(env, envs)
    return str(caught.value), caught.value.facts


class Demanding(Three):
    """Gives no number with its second step, and takes none in the third."""

    action_space = gym.spaces.Box(-1, 1, (2,))

    def step(self, action):
        assert np.isfinite(action).all(), "what is this"
        obs, *rest = super().step(action)
        return (obs * np.nan if self.life == 2 else obs), *rest


class DemandingParts(Demanding):
    """The same, in one of two parts of its observations."""

    observation_space = gym.spaces.Dict(
        far=gym.spaces.Box(-1, 1, (1,)), near=gym.spaces.Box(-1, 1, (1,))
    )

    def _of(self, obs):
        return {"far": np.zeros(1, np.float32), "near": obs[:1].astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return self._of(np.zeros(2)), {}

    def step(self, action):
        assert np.isfinite(action).all(), "what is this"
        self.age, self.life = self.age + 1, self.life + 1
        return self._of(np.full(2, np.nan if self.life == 2 else 0)), 1.0, False, False, {}


@pytest.mark.parametrize(
    ("env", "says"),
    [(Demanding, "the observation before"), (DemandingParts, "the observation ['near'] before")],
)
def test_what_an_environment_raises_after_its_own_nan_names_the_observation(env, says):
    text, facts = failure(env)
    assert "raised in step(array([nan, nan]" in text and "AssertionError: what is this" in text
    assert says in text and "is not finite: " in text and "fix that first" in text
    assert facts["step"] == 3


def test_what_an_environment_raises_for_another_reason_names_no_observation():
    class Late(Three):
        def step(self, action):
            assert self.life < 2, "what is this"
            return super().step(action)

    assert "before it" not in failure(Late)[0]


WRONG = {
    "missing": ({}, r"gave no info['action_mask'] with step"),
    "another shape": ({KEY: np.ones(3, np.int8)}, "an array [3] stands where [2] is wanted"),
    "nothing": ({KEY: np.zeros(2, np.int8)}, "allows no action at step 6 of the rollout"),
}


@pytest.mark.parametrize("how", WRONG)
def test_an_error_of_a_mask_names_the_step(how):
    wrong, says = WRONG[how]
    text, facts = failure(kind_of(Masked, wrong=wrong))
    assert "environment 0 of Mine" in text and says in text and WHEN in text
    assert (facts["step"], facts["episode_step"], facts["within"]) == (5, 2, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["missing", "nothing"])
def test_an_error_of_a_mask_in_a_vector_names_the_environment_and_its_step(how, mode):
    wrong, says = WRONG[how]

    def vector():
        made = [Masked, kind_of(Masked, wrong=wrong)]
        return SyncVectorEnv(made, autoreset_mode=AutoresetMode(mode))

    text, facts = failure(vector, 2)
    assert "environment 1 of " in text and says in text and WHEN in text
    assert (facts["step"], facts["episode_step"], facts["within"]) == (5, 2, 1)


def test_a_mask_that_allows_nothing_after_a_reset_names_the_reset():
    class Closed(Masked):
        def reset(self, *, seed=None, options=None):
            obs, _ = super().reset(seed=seed)
            return obs, {KEY: np.full(2, self.life < 3, np.int8)}

    text, facts = failure(Closed)
    assert "in a reset, after its step 3" in text and facts["episode_step"] == 0


class Breaks(SyncVectorEnv):
    """A vector of one's own that breaks in its sixth step."""

    def __init__(self, how, *args, life=0, **settings):
        super().__init__(*args, **settings)
        self.how, self.life = how, life

    def step(self, actions):
        result = super().step(actions)
        self.life += 1
        return self.how(*result) if self.life == 6 else result


def fails(*_):
    raise OSError("the simulator is gone")


def vector_that(how, mode="NextStep", env=Three, envs=2):
    return partial(Breaks, how, [env] * envs, autoreset_mode=AutoresetMode(mode))


@pytest.mark.parametrize(("mode", "step"), [("NextStep", 5), ("SameStep", 6), ("Disabled", 6)])
def test_an_error_that_a_vector_raises_names_the_step(mode, step):
    text, facts = failure(vector_that(fails, mode), 2)
    says = f"at its step {step} since it was made, {step - 3} of an episode"
    assert "raised in step: OSError: the simulator is gone" in text and says in text
    assert (facts["step"], facts["episode_step"]) == (step, step - 3)


def test_an_error_of_a_vector_whose_environments_differ_names_the_steps_of_all():
    class Long(Three):
        def step(self, action):
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, self.age == 7, truncated, info

    def vector():
        return Breaks(fails, [Three, Long, *[Three] * 4])

    text, facts = failure(vector, 6)
    assert "at steps [5, 6, 5, 5, ...] of its environments since they were made" in text
    assert text.count("since they were made") == 1
    assert "[2, 6, 2, 2, ...] of their episodes" in text
    assert facts["steps"] == [5, 6, 5, 5, 5, 5]


def test_an_error_in_a_reset_within_a_step_of_a_vector_names_the_steps_once():
    class Once(Breaks):
        def reset(self, **how):
            if self.life:
                raise OSError("no such level")
            return super().reset(**how)

    def vector():
        return Once(lambda *x: x, [Three, Three], autoreset_mode=AutoresetMode.DISABLED)

    text, _ = failure(vector, 2)
    assert text.count("in a reset, after its step 3") == 1


RETURNS = {
    "rewards of another shape": (lambda o, r, *x: (o, r[:, None], *x), "float64[2, 1] as reward"),
    "one reward": (lambda o, r, *x: (o, 1.0, *x), "float64[] as reward from step; it must be [2]"),
    "text": (lambda o, r, *x: (o, np.array(["1", "2"]), *x), "returned '1' as reward"),
    "flags of another shape": (lambda o, r, t, *x: (o, r, t[:, None], *x), "[2, 1] as terminated"),
    "four values": (lambda o, r, t, u, i: (o, r, t, i), "4 values from step; it must be (obs, re"),
    "whole numbers": (lambda o, *x: (o.astype(int), *x), "type int64 from step, but its space"),
}


@pytest.mark.parametrize("how", RETURNS)
def test_what_a_vector_returns_is_checked(how):
    returned, says = RETURNS[how]
    text, _ = failure(vector_that(returned), 2)
    assert says in text and WHEN in text


def test_fractions_of_a_vector_are_not_cut_off():
    whole = kind_of(Three, observation_space=gym.spaces.Box(-1, 1, (2,), np.int32))
    text, _ = failure(vector_that(lambda o, *x: (o + 0.5, *x), env=whole), 2)
    assert "type float64 from step, but its space declares int32" in text


def test_an_evaluation_names_the_step_too():
    def evaluated(env, spaces):
        net = network(MLP, spaces)
        play(env, net, net.init(jax.random.key(0)), 4, 0, (), {})

    spaces = Spaces(Three.observation_space, Three.action_space)
    with pytest.raises(fl.errors.EnvError, match="OSError.*at its step 2 since it was made, 2 of"):
        evaluated(lambda: Breaks(fails, [Three, Three], life=4), spaces)
    masked = gym.spaces.Dict(observation=spaces.obs, action_mask=gym.spaces.MultiBinary(2))
    with pytest.raises(fl.errors.EnvError, match="environment 0 of .* allows no action: .* its st"):
        evaluated(kind_of(Masked, wrong=WRONG["nothing"][0], life=3), Spaces(masked, spaces.action))


@pytest.mark.parametrize("reward", [np.array([2.0]), np.array([[2]]), Decimal(2), np.float16(2)])
def test_one_number_is_a_reward_in_any_type(reward):
    assert sampled(kind_of(Three, reward=reward))["reward"][5, 0] == 2


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ([1.0], "a list"),
        (np.zeros(2), "an array float64[2]"),
        (1j, "a complex"),
        (np.timedelta64(3), "a timedelta64"),
    ],
)
def test_what_is_no_single_number_is_named_with_the_step(reward, shown):
    text, _ = failure(kind_of(Three, reward=reward))
    assert f"environment 0 of Mine returned {shown} as reward from step" in text and WHEN in text


@pytest.mark.parametrize(
    ("name", "spaces"),
    [
        ("action", [gym.spaces.Discrete(2), gym.spaces.Discrete(5)]),
        ("observation", [gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (3,))]),
    ],
)
@pytest.mark.parametrize(("same", "envs", "number"), [(2, 2, 1), (1, 1, 0)])
def test_an_environment_with_other_spaces_than_one_before_is_an_error(
    name, spaces, same, envs, number
):
    class Varying(Three):
        made = 0

        def __init__(self):
            Varying.made += 1
            setattr(self, f"{name}_space", spaces[Varying.made > same])

    # A single one is checked by what it shows.
    says = {"action": f"environment {number} of .* has the action space Discrete.5."}
    says["observation"] = "has the observation space Box" if envs == 2 else "declares float32.3."
    text, _ = failure(Varying, envs)
    assert re.search(says[name], text)


class Team:
    """Two agents who act at once, of which `returned` changes what step 3 returns."""

    possible_agents = ("red", "blue")
    observation_space = staticmethod(lambda _: gym.spaces.Box(-1, 1, (2,)))
    action_space = staticmethod(lambda _: gym.spaces.Discrete(2))
    returned = staticmethod(lambda *x: x)

    def all(self, value):
        return dict.fromkeys(self.agents, value)

    def reset(self, seed=None, options=None):
        self.agents, self.age = list(self.possible_agents), 0
        return self.all(np.zeros(2, np.float32)), {}

    def step(self, actions):
        self.age += 1
        obs = self.all(np.zeros(2, np.float32))
        result = obs, self.all(1.0), self.all(self.age > 6), self.all(False), {}
        return self.returned(*result) if self.age == 3 else result

    def close(self):
        pass


class InTurn(Team):
    reward = None

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.agent_selection = "red"

    def step(self, action):
        self.age += 1
        self.agent_selection = self.agents[self.age % 2]

    def last(self):
        reward = self.reward if self.age == 3 else 1.0
        return np.zeros(2, np.float32), reward, False, False, {}


AT_3 = "at its step 3 since it was made, 3 of an episode"
REWARDS = [("7", "'7'"), (None, "None"), ([1.0], "a list"), (np.ones(2), "an array float64[2]")]


@pytest.mark.parametrize(("reward", "shown"), REWARDS)
def test_a_reward_of_an_agent_that_is_no_number_is_named_with_the_agent_and_the_step(reward, shown):
    def returned(obs, rewards, *rest):
        return obs, {**rewards, "blue": reward}, *rest

    at_once = kind_of(Team, returned=staticmethod(returned))
    for env in (at_once, kind_of(InTurn, reward=reward)):
        text, facts = failure(env)
        assert f"environment 0 of Mine: agent blue got {shown} as reward from" in text
        assert AT_3 in text and facts["step"] == 3


def test_an_agent_may_get_one_number_of_any_type():
    for reward in (np.array([2.0]), Decimal(2)):
        batch = sampled(kind_of(InTurn, reward=reward))
        assert 2 in batch["reward"]


OF_AGENTS = {
    "four values": (lambda o, r, t, u, i: (o, r, t, i), "4 values came from step; it must return"),
    "one reward": (lambda o, r, *x: (o, 1.0, *x), "a float came as rewards from step; they must"),
    "no observation": (
        lambda o, *x: ({"red": o["red"]}, *x),
        "agent blue is in env.agents, but step returned no observation of it",
    ),
}


@pytest.mark.parametrize("how", OF_AGENTS)
def test_what_agents_at_once_return_is_checked(how):
    returned, says = OF_AGENTS[how]
    text, _ = failure(kind_of(Team, returned=staticmethod(returned)))
    assert says in text and AT_3 in text


def test_a_reset_of_agents_that_returns_no_pair_is_named():
    class NoPair(Team):
        def reset(self, seed=None, options=None):
            return super().reset(seed)[0]

    # Two agents' observations could be taken apart as a pair.
    with pytest.raises(fl.errors.EnvError, match="a dict came from reset; it must return"):
        ParallelAgents(NoPair()).reset()


@pytest.mark.parametrize("number", [1.5, 300.0, -1.0])
def test_act_takes_no_float_that_an_integer_can_not_hold(number):
    spaces = Spaces(gym.spaces.Box(0, 255, (2,), np.uint8), gym.spaces.Discrete(2))
    with pytest.raises(fl.errors.ContractError, match=f"that uint8 can't hold: {number}"):
        spaces.batched(np.array([2.0, number]))
    assert spaces.batched(np.array([2.0, 3.0]))[0]["obs"].tolist() == [[2, 3]]


def test_act_takes_fractions_where_floats_are_declared():
    spaces = Spaces(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))
    assert spaces.batched(np.array([0.5, 0.25]))[0]["obs"].tolist() == [[0.5, 0.25]]
