"""Masks in `info`: in every way of giving them, from one environment and from a vector of them."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

import flowrl as fl
from flowrl.envs.masks import as_declared, with_mask_of_info
from flowrl.rl.spaces import Spaces

KEY = "action_mask"
N = 2
"""As many environments as the actions have parts: what is for one must not be taken for other."""


def split(mask):
    return [mask[:2], mask[2:]]


ONE, TWO = Discrete(4), MultiDiscrete([2, 2])
# What an environment gives, by its flat mask of four choices.
FORMS = {
    "array": (ONE, lambda mask: mask),
    "list": (ONE, lambda mask: mask.tolist()),
    "list in a list": (ONE, lambda mask: [mask.tolist()]),
    "array of several": (TWO, lambda mask: mask),
    "list of several": (TWO, lambda mask: mask.tolist()),
    "list by number": (TWO, split),
    "tuple by number": (TWO, lambda mask: tuple(split(mask))),
    "uneven list": (MultiDiscrete([3, 1]), lambda mask: [mask[:3], mask[3:]]),
    "objects": (
        MultiDiscrete([3, 1]),
        lambda mask: np.array([mask[:3], mask[3:], 0], object)[:2],
    ),
    "nested": (MultiDiscrete([[2, 2]]), lambda mask: (tuple(split(mask)),)),
    "dict": (Dict(b=Discrete(2), a=Discrete(2)), lambda mask: {"a": mask[2:], "b": mask[:2]}),
    "dict with reals": (Dict(a=ONE, b=Box(0, 1, (2,))), lambda mask: {"a": mask}),
    "tuple": (Tuple([Discrete(2), Discrete(2)]), lambda mask: tuple(split(mask))),
    "tuple with reals": (Tuple([Box(0, 1), ONE]), lambda mask: (None, mask)),
    "tuple of several": (
        Tuple([MultiDiscrete([1, 1]), Discrete(2)]),
        lambda mask: ([mask[:1], mask[1:2]], mask[2:]),
    ),
}


class Masking(gym.Env):
    """Observes its mask, for episodes whose lengths differ."""

    observation_space = Box(-1, 1, (4,))

    def __init__(self, number, space, form):
        self.number, self.action_space, self.form = number, space, form

    def _seen(self):
        mask = self.np_random.integers(2, size=4)
        return mask.astype(np.float32), {KEY: self.form(mask)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self._seen()

    def step(self, action):
        self.age += 1
        obs, info = self._seen()
        return obs, 0.0, self.age == 3 + self.number, False, info


class Given(VectorWrapper):
    """A vector of which the masks of all environments are given in a way of its own."""

    def __init__(self, env, form):
        super().__init__(env)
        self.form = form

    def _given(self, info):
        formed = {KEY: self.form(info[KEY])} if KEY in info else {}
        if "final_info" in info:
            formed["final_info"] = self._given(info["final_info"])
        return {**info, **formed}

    def reset(self, **how):
        obs, info = self.env.reset(**how)
        return obs, self._given(info)

    def step(self, action):
        *found, info = self.env.step(action)
        return (*found, self._given(info))


def by_part(masks):
    return masks[:, :2], masks[:, 2:]


# What a vector of its own gives, by the flat masks ``[N, 4]`` of all environments.
VECTORS = {
    "lists": (ONE, lambda masks: masks.tolist()),
    "list by environment": (ONE, list),
    "list by number": (TWO, lambda masks: list(by_part(masks))),
    "by number": (TWO, lambda masks: masks.reshape(N, 2, 2)),
    "dict": (
        Dict(a=Discrete(2), b=Discrete(2)),
        lambda masks: dict(zip("ab", by_part(masks), strict=True)),
    ),
    "tuple": (Tuple([Discrete(2), Discrete(2)]), by_part),
}


def vector_of(mode, space, form):
    made = [lambda i=i: Masking(i, space, form) for i in range(N)]
    return SyncVectorEnv(made, autoreset_mode=AutoresetMode(mode))


def masked(vector):
    spaces = Spaces(vector.single_observation_space, vector.single_action_space)
    return as_declared(vector, with_mask_of_info(spaces, vector), "Masking")


def plays(vector):
    """Masks are what the environments observed, with every reset and step and at every end."""
    mode = vector.metadata["autoreset_mode"]
    vector = masked(vector)

    def fits(seen):
        np.testing.assert_array_equal(seen[KEY], seen["observation"])

    obs, _ = vector.reset(seed=3)
    fits(obs)
    ends = 0
    for _ in range(12):
        obs, _, terminated, _, info = vector.step(vector.action_space.sample())
        fits(obs)
        if terminated.any():
            ends += 1
            if mode is AutoresetMode.SAME_STEP:
                assert [x is not None for x in info["final_obs"]] == terminated.tolist()
                for i in np.flatnonzero(terminated):
                    fits(info["final_obs"][i])
            if mode is AutoresetMode.DISABLED:
                obs, _ = vector.reset(options={"reset_mask": terminated})
                fits(obs)
    assert ends > N


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("form", FORMS)
def test_a_vector_of_environments_keeps_the_mask_of_each(form, mode):
    plays(vector_of(mode, *FORMS[form]))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("form", VECTORS)
def test_the_masks_of_a_vector_are_those_of_its_environments(form, mode):
    space, given = VECTORS[form]
    plays(Given(vector_of(mode, space, lambda mask: mask), given))


@pytest.mark.parametrize("form", FORMS)
def test_one_environment_has_its_mask(form):
    env = masked_one(*FORMS[form])
    obs, _ = env.reset(seed=1)
    np.testing.assert_array_equal(obs[KEY], obs["observation"])


def masked_one(space, form):
    env = Masking(0, space, form)
    spaces = Spaces(env.observation_space, space)
    return as_declared(env, with_mask_of_info(spaces, env), "Masking")


BOTH = Dict(a=Discrete(2), b=Discrete(2))


@pytest.mark.parametrize(
    ("space", "form", "says"),
    [
        (ONE, lambda mask: mask[:3], r"an array \[3\] stands where \[4\] is wanted"),
        (TWO, lambda mask: [mask[:3], mask[3:]], r"an array \[3\] stands where \[2\] is wanted"),
        (TWO, lambda mask: [mask, mask, mask], "it has 3 arrays, and actions have 2 numbers"),
        (BOTH, lambda mask: {"a": mask[:2]}, "it has nothing for the part 'b'"),
        (Tuple([ONE]), lambda mask: (mask, mask), "it has 2 parts, and actions have 1"),
        (ONE, lambda mask: {"a": mask}, "it is a dict, and actions are not"),
        (ONE, lambda _: "all", "it is a str"),
    ],
)
def test_a_mask_that_does_not_fit_is_an_error_that_says_where(space, form, says):
    with pytest.raises(
        fl.errors.EnvError, match=rf"Masking gave .* with reset.*: {says}.*; a mask"
    ):
        masked_one(space, form).reset()


@pytest.mark.parametrize(
    ("space", "form"),
    [
        (TWO, list),
        (MultiDiscrete([3, 1]), list),
        (ONE, lambda masks: masks.T),
        (Tuple([Discrete(2), Discrete(2)]), lambda masks: [tuple(split(mask)) for mask in masks]),
        (BOTH, lambda masks: [{"a": mask[:2], "b": mask[2:]} for mask in masks]),
    ],
    ids=["numbers", "uneven numbers", "the other way round", "tuples", "dicts"],
)
def test_masks_of_a_vector_that_do_not_fit_are_an_error(space, form):
    vector = masked(Given(vector_of("SameStep", space, lambda mask: mask), form))
    says = r"Masking gave .* with its 2 environments as the first axis"
    with pytest.raises(fl.errors.EnvError, match=says):
        vector.reset(seed=0)
