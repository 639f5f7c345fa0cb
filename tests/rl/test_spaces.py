"""Spaces as JSON, and actions on their way to an environment."""

import json

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

import flowrl as fl
from flowrl.rl.actions import head
from flowrl.rl.spaces import Spaces

INF = np.inf
f32 = lambda *x: np.array(x, np.float32)
KINDS = {
    "box": Box(-1, 1, (3,)),
    "box without axes": Box(-1, 1, ()),
    "infinite box": Box(-INF, INF, (2, 2)),
    "half-infinite box": Box(0, INF, (2,)),
    "bounds per element": Box(f32(-1, -INF, 0.1), f32(2, 5, INF)),
    "one bound per element, the other alike": Box(f32(-1, -2), f32(3, 3)),
    "float64 box": Box(-0.1, 1e300, (2,), np.float64),
    "float16 box": Box(-1, 1, (2,), np.float16),
    "image": Box(0, 255, (4, 5, 3), np.uint8),
    "integers": Box(-7, 9, (2,), np.int32),
    "integers to the end of their type": Box(
        np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64
    ),
    "discrete": Discrete(4),
    "discrete from -2": Discrete(4, start=-2),
    "multi-discrete": MultiDiscrete([3, 2]),
    "multi-discrete with starts": MultiDiscrete([3, 2], start=[5, -1]),
    "multi-discrete of two axes": MultiDiscrete(np.array([[3, 2], [2, 4]]), dtype=np.int32),
    "multi-binary": MultiBinary(3),
    "multi-binary of two axes": MultiBinary([2, 3]),
    "dict": gym.spaces.Dict(b=Box(-1, 1, (2,)), a=gym.spaces.Tuple([Discrete(2), Discrete(3)])),
    "tuple": gym.spaces.Tuple([MultiBinary(2), gym.spaces.Dict(x=Discrete(2))]),
}


@pytest.mark.parametrize("name", KINDS)
def test_json_brings_a_space_back(name):
    spaces = Spaces(KINDS[name], KINDS[name])
    back = Spaces.from_json(spaces.json)
    assert (back.obs, back.action) == (spaces.obs, spaces.action)
    assert back.parts == spaces.parts
    assert back == spaces and hash(back) == hash(spaces) and back.json == spaces.json


def test_json_is_plain_json_without_infinities():
    def refuse(constant):
        raise AssertionError(constant)

    both = json.loads(
        Spaces(KINDS["bounds per element"], KINDS["infinite box"]).json, parse_constant=refuse
    )
    assert both["obs"]["low"][1] is None and both["action"]["high"] == [None]


@pytest.mark.parametrize("name", KINDS)
def test_equality_is_by_value(name):
    same = [
        Spaces(space, Discrete(2))
        for space in (KINDS[name], Spaces.from_json(Spaces(KINDS[name], Discrete(2)).json).obs)
    ]
    assert same[0] == same[1] and len(set(same)) == 1
    others = [Spaces(space, Discrete(2)) for other, space in KINDS.items() if other != name]
    assert same[0] not in others and len({*same, *others}) == len(KINDS)


def test_observation_and_action_are_distinguished():
    assert Spaces(Discrete(2), Discrete(3)) != Spaces(Discrete(3), Discrete(2))
    assert Spaces(Discrete(2), Discrete(3)) != "Discrete(2), Discrete(3)"


def test_a_space_that_no_policy_fits_compares_but_does_not_come_back():
    texts = {n: gym.spaces.Text(n, charset="ab") for n in (2, 3)}
    spaces = Spaces(texts[2], Discrete(2))
    assert spaces == Spaces(texts[2], Discrete(2)) != Spaces(texts[3], Discrete(2))
    with pytest.raises(
        fl.errors.PolicyError, match=r"no policy fits a space of kind Text: Text\(1, 2"
    ):
        Spaces.from_json(spaces.json)


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (Box(-1, 1, (2,), np.float64), np.float32),
        (Box(0, 255, (2,), np.uint8), np.uint8),
        (Box(0, 9, (2,), np.int64), np.int32),
        (Discrete(3), np.int32),
        (MultiDiscrete([2, 2]), np.int32),
        (MultiBinary(3), np.int8),
    ],
    ids=str,
)
def test_observations_are_kept_small(space, dtype):
    (part,) = Spaces(space, Discrete(2)).parts
    assert (part.name, part.dtype, part.shape) == ("obs", dtype, space.shape)


def test_a_part_of_observations_that_is_no_array_names_the_wrapper_that_helps():
    space = gym.spaces.Dict(a=Discrete(2), b=gym.spaces.Sequence(Discrete(2)))
    with pytest.raises(
        fl.errors.PolicyError,
        match=r"observations in Sequence.* are no array of one shape; .*TransformObservation",
    ):
        _ = Spaces(space, Discrete(2)).parts


def test_parts_are_named_as_python_indexes_them_and_make_up_the_observation_again():
    space = gym.spaces.Dict(
        arm=gym.spaces.Tuple([Box(-1, 1, (2,), np.float64), Discrete(3)]),
        camera=Box(0, 255, (2, 2, 3), np.uint8),
    )
    spaces, obs = Spaces(space, Discrete(2)), space.sample()
    arrays = spaces.arrays(obs)
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        "obs['arm'][0]": ((2,), np.float32),
        "obs['arm'][1]": ((), np.int32),
        "obs['camera']": ((2, 2, 3), np.uint8),
    }
    tree = spaces.tree(arrays)
    assert isinstance(tree["arm"], tuple) and (tree["camera"] == obs["camera"]).all()
    assert tree["arm"][1] == obs["arm"][1]
    np.testing.assert_allclose(tree["arm"][0], obs["arm"][0], rtol=1e-6)


@pytest.mark.parametrize("key", ["observation", "observations", "obs", "board"])
def test_a_mask_is_not_seen_and_an_observation_alone_beside_it_is_seen_as_itself(key):
    space = gym.spaces.Dict({key: Box(-1, 1, (2,)), "action_mask": MultiBinary(3)})
    spaces = Spaces(space, Discrete(3))
    obs = {key: np.ones((1, 2), np.float32), "action_mask": np.array([[1, 0, 1]], np.int8)}
    seen, mask = spaces.split(obs)
    alone = key != "board"
    assert spaces.seen == (space[key] if alone else gym.spaces.Dict({key: space[key]}))
    assert (seen if alone else seen[key]) is obs[key]
    assert mask.tolist() == [[True, False, True]]


PARTS = gym.spaces.Dict(a=Discrete(2), b=MultiDiscrete([2, 2]), c=Box(0, 1))


@pytest.mark.parametrize(
    ("mask", "action"),
    [
        (gym.spaces.Dict(b=MultiBinary(4), a=MultiBinary(2)), PARTS),
        (gym.spaces.Tuple([MultiBinary(2), MultiBinary(4)]), MultiDiscrete([2, 4])),
        (gym.spaces.Tuple([MultiBinary(2)] * 3), PARTS),
        (MultiBinary(6), PARTS),
    ],
    ids=["by key", "by number", "by number of parts", "whole"],
)
def test_a_mask_may_have_the_parts_of_actions_or_their_numbers(mask, action):
    spaces = Spaces(gym.spaces.Dict(obs=Discrete(2), action_mask=mask), action)
    assert spaces.seen == Discrete(2) and spaces.head.choices == 6


@pytest.mark.parametrize(
    ("space", "action", "says"),
    [
        (
            gym.spaces.Dict(obs=Discrete(2), action_mask=MultiBinary(2)),
            Discrete(3),
            r"action_mask has 2 numbers, but actions in Discrete\(3\) have 3 choices",
        ),
        (
            gym.spaces.Dict(obs=Discrete(2), action_mask=MultiBinary(2)),
            Box(-1, 1, (2,)),
            r"action_mask has 2 numbers, but actions in Box.* have 0 choices",
        ),
        (gym.spaces.Dict(action_mask=MultiBinary(3)), Discrete(3), r"are a mask alone"),
        (
            gym.spaces.Dict(
                obs=Discrete(2),
                action_mask=gym.spaces.Dict(a=MultiBinary(3), b=MultiBinary(2)),
            ),
            gym.spaces.Dict(a=Discrete(2), b=Discrete(3)),
            r"action_mask has parts of \[3, 2\] numbers, but actions .* have \[2, 3\] choices",
        ),
    ],
    ids=["too short", "of real numbers", "alone", "parts that are exchanged"],
)
def test_a_mask_that_fits_no_action_is_refused(space, action, says):
    with pytest.raises(fl.errors.PolicyError, match=says):
        _ = Spaces(space, action).seen


@pytest.mark.parametrize(
    ("space", "outputs", "width", "kind"),
    [
        (Discrete(4), 4, 0, "categorical"),
        (MultiDiscrete([3, 2]), 5, 2, "multi_categorical"),
        (MultiBinary(3), 6, 3, "multi_categorical"),
        (MultiBinary([2, 2]), 8, 4, "multi_categorical"),
        (Box(-1, 1, (3,)), 6, 3, "gaussian"),
        (Box(-1, 1, (2, 2)), 8, 4, "gaussian"),
        (Box(-1, 1, ()), 2, 1, "gaussian"),
        (Box(0, 9, (2,), np.int32), 20, 2, "multi_categorical"),
        (MultiDiscrete([[2, 3], [4, 5]]), 14, 4, "multi_categorical"),
        (gym.spaces.Tuple([Discrete(2), Discrete(3)]), 5, 2, "multi_categorical"),
        (gym.spaces.Dict(a=Box(-1, 1, (2,)), b=Box(0, 1, ())), 6, 3, "gaussian"),
        (gym.spaces.Dict(a=Box(-1, 1, (2,)), b=Discrete(3)), 7, 3, "mixed"),
    ],
    ids=str,
)
def test_head(space, outputs, width, kind):
    found = head(space)
    assert (found.outputs, found.width, found.kind) == (
        outputs,
        width,
        kind,
    ) and fl.networks.action_outputs(space) == outputs


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (
            gym.spaces.Dict(a=gym.spaces.Text(3)),
            r"there is no policy for actions in Text.*; it can be Discrete, .* or Tuple of these",
        ),
        (
            KINDS["integers to the end of their type"],
            r"integers with 18,446,744,073,709,551,616 choices for one number, .*closer bounds",
        ),
        (gym.spaces.Tuple([]), r"actions in Tuple\(\), which is empty"),
    ],
    ids=["text", "endless integers", "nothing"],
)
def test_an_action_space_without_a_policy_says_which_ones_have_one(space, says):
    with pytest.raises(fl.errors.PolicyError, match=says):
        head(space)


def test_actions_of_several_parts_come_as_the_tree_that_the_environment_takes():
    space = gym.spaces.Dict(
        go=Discrete(3, start=1),
        arm=gym.spaces.Tuple([Box(0, 4, (2,)), Box(5, 9, (1, 2), np.int64)]),
        grip=Box(-1, 1, (1,), np.float64),
    )
    found = head(space)
    # Choices come first (those of the integers and of `go`), then real numbers.
    order = [part.path for part in found.parts]
    assert order == [("arm", 0), ("arm", 1), ("go",), ("grip",)] or order[0] == ("go",)
    numbers = {("go",): [2], ("arm", 1): [0, 4], ("arm", 0): [-1, 1], ("grip",): [0.5]}
    row = [x for part in found.parts if part.discrete for x in numbers[part.path]]
    row += [x for part in found.parts if not part.discrete for x in numbers[part.path]]
    acted = found.to_env(np.array([row], np.float32))
    assert acted["go"].tolist() == [3] and acted["arm"][1].tolist() == [[[5, 9]]]
    assert acted["arm"][0].tolist() == [[0, 4]] and acted["grip"].tolist() == [[0.5]]
    one = {
        "go": acted["go"][0],
        "arm": tuple(x[0] for x in acted["arm"]),
        "grip": acted["grip"][0],
    }
    assert space.contains(one)


BOXES = {
    "finite": (
        Box(f32(-2, 0), f32(2, 10)),
        [[-9, -1], [0, 0.5], [1, 9]],
        [[-2, 0], [0, 7.5], [2, 10]],
    ),
    "infinite": (Box(-INF, INF, (2,)), [[-1e6, 0.25]], [[-1e6, 0.25]]),
    "half-infinite": (
        Box(f32(0, -INF), f32(INF, 5)),
        [[-3, 9], [-1, 1], [0, 0], [3, -9]],
        [[0, 5], [0, 5], [1, 4], [4, -5]],
    ),
    "of all kinds": (
        Box(f32(-4, -INF, 0, -INF), f32(4, INF, INF, 1)),
        [[0.5, 7, -7, 7]],
        [[2, 7, 0, 1]],
    ),
    "half-infinite, far from 0": (
        Box(f32(100, -INF), f32(INF, -100)),
        [[0.5, 0.5]],
        [[101.5, -100.5]],
    ),
    "of two axes": (Box(-2, 2, (2, 2)), [[-1, 0, 0.5, 1]], [[[-2, 0], [1, 2]]]),
    "without axes": (Box(0, 4, ()), [[0.5], [3.0]], [3, 4]),
    "float64": (Box(-2, 2, (1,), np.float64), [[0.25]], [[0.5]]),
}


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", BOXES)
def test_box_actions_keep_to_their_bounds(name, xp):
    space, actions, wanted = BOXES[name]
    if xp is jnp and space.dtype == np.float64:
        space = Box(-2, 2, (1,))
    found = head(space).to_env(xp.asarray(actions, np.float32))
    assert found.dtype == space.dtype and found.shape == (len(actions), *space.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert all(space.contains(np.asarray(action)) for action in found)


def test_bounds_whose_range_overflows_are_none():
    most = np.finfo(np.float32).max
    space = Box(f32(-most, -1), f32(most, 1))
    actions = f32([-1e38, 0.5], [0.5, -0.5], [3.0, 0.0])
    given = head(space).from_env({(): actions})
    np.testing.assert_array_equal(given, actions)
    np.testing.assert_array_equal(head(space).to_env(given), actions)


@pytest.mark.parametrize("scale", [1, 1e3, 1e30])
def test_any_gaussian_action_is_one_that_the_environment_takes(scale):
    space = Box(f32(-0.1, -3e38, 0.3, 1e-6), f32(0.7, 1e6, INF, 1.1e-6))
    actions = np.random.default_rng(0).normal(scale=scale, size=(200, 4)).astype(np.float32)
    assert all(space.contains(action) for action in head(space).to_env(actions))


@pytest.mark.parametrize(
    ("space", "actions", "wanted"),
    [
        (Discrete(3), [0, 2], [0, 2]),
        (Discrete(3, start=-1), [0, 2], [-1, 1]),
        (MultiDiscrete([3, 2]), [[2, 0], [0, 1]], [[2, 0], [0, 1]]),
        (MultiDiscrete([3, 2], start=[5, -1]), [[2, 0], [0, 1]], [[7, -1], [5, 0]]),
        (MultiBinary(3), [[1, 0, 1]], [[1, 0, 1]]),
        (MultiBinary([2, 2]), [[1, 0, 1, 1]], [[[1, 0], [1, 1]]]),
    ],
    ids=str,
)
def test_integer_actions_count_from_the_start_and_have_the_space_s_shape(space, actions, wanted):
    found = head(space).to_env(np.array(actions, np.int32))
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == space.dtype and all(space.contains(action) for action in found)


def test_a_dict_is_no_mask_of_numbers_that_have_no_names():
    # A Dict sorts its keys: joint10 comes before joint2.
    joints = Dict({f"joint{i}": MultiBinary(2) for i in range(11)})
    obs = Dict({"observation": Box(0, 1, (1,)), "action_mask": joints})
    spaces = Spaces(obs, MultiDiscrete([2] * 11))
    with pytest.raises(fl.errors.PolicyError, match="action_mask has parts of"):
        spaces.allowed(spaces.arrays(obs.sample()))
