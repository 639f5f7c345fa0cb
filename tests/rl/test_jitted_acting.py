"""Several policies that act in one call do what each does alone."""

import gymnasium as gym
import jax
import numpy as np
import pytest

import flowrl as fl
from flowrl.rl.jitted_acting import ActTogether, Layout, jitted_act, jitted_noise
from flowrl.rl.policies import NOTHING, network
from flowrl.rl.spaces import Spaces

SAMPLED = fl.Sampled()
POLICY = fl.Policy(fl.networks.MLP, hidden=(4,))
REAL = Spaces(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,)))
CHOICE = Spaces(gym.spaces.Discrete(100), gym.spaces.Discrete(3))
PARTS = Spaces(
    gym.spaces.Dict(
        {
            "action_mask": gym.spaces.Box(0, 1, (3,), np.int8),
            "bytes": gym.spaces.Box(0, 255, (4,), np.uint8),
            "near": gym.spaces.Box(-1, 1, ()),
        }
    ),
    gym.spaces.Discrete(3),
)


def question(spaces, seed, columns):
    """A policy, its weights, what it sees in so many columns, and the noise of its actions."""
    net, rng = network(POLICY, spaces), np.random.default_rng(seed)
    arrays = {}
    for part in spaces.parts:
        shape = (columns, *part.shape)
        whole = part.dtype.kind in "iu"
        arrays[part.name] = (
            rng.integers(1, 100, shape) if whole else rng.normal(size=shape)
        ).astype(part.dtype)
    draw = jitted_noise(net, 1, columns, SAMPLED)
    noise = draw(jax.random.key(seed), np.uint32(0), np.arange(columns, dtype=np.int32))
    return net, net.init(jax.random.key(seed)), spaces.tree(arrays), np.asarray(noise[0])


@pytest.mark.parametrize("kinds", [(REAL, CHOICE), (PARTS, REAL, PARTS), (CHOICE,)])
def test_whatever_they_see_it_is_what_each_does_alone(kinds):
    each = [question(spaces, seed, 2 + seed) for seed, spaces in enumerate(kinds)]
    nets, weights, obs, noise = zip(*each, strict=True)
    act = ActTogether(nets, [SAMPLED] * len(nets))
    for _ in range(2):
        found = act(weights, obs, noise, [NOTHING] * len(nets))
        for (net, *given), (packed, _) in zip(each, found, strict=True):
            np.testing.assert_array_equal(packed, jitted_act(net)(*given)[0])


def test_numbers_of_other_types_are_not_packed_with_those_of_float32():
    tree = {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.int32), "c": np.zeros((), "f4")}
    leaves, structure = jax.tree.flatten(tree)
    layout = Layout.of(leaves, structure)
    packed, others = layout.packed(leaves)
    assert packed.shape == (7,) and [x.dtype for x in others] == [np.int32]
    back = layout.unpacked(packed, others)
    assert all(back[k].shape == x.shape and (back[k] == x).all() for k, x in tree.items())
