"""The recurrent network of action values: what it is made of, and what it refuses."""

import gymnasium as gym
import jax
import numpy as np
import pytest
from flax import nnx

import flowrl as fl
from flowrl.rl.policies import Memory, network
from flowrl.rl.spaces import Spaces

BOX, DISCRETE = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4)
IMAGE = gym.spaces.Box(0, 255, (36, 36, 2), np.uint8)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_values_are_those_of_layers_cell_and_heads(cell, dueling):
    module = fl.networks.RecurrentQNetwork(
        BOX, DISCRETE, hidden=(6, 5), cell=cell, size=7, dueling=dueling, rngs=nnx.Rngs(0)
    )
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(2, 3)).astype(np.float32)
    carry = jax.tree.map(
        lambda x: x + rng.normal(size=x.shape).astype(np.float32), module.initial_carry(2)
    )
    values, best, after = module(obs, carry)
    x = obs
    for layer in module.trunk.layers:
        x = np.maximum(x @ layer.kernel[...] + layer.bias[...], 0)
    expected, x = module.cell(carry, x)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    wanted = x @ module.advantage.kernel[...] + module.advantage.bias[...]
    if dueling:
        value = x @ module.value.kernel[...] + module.value.bias[...]
        wanted = value + wanted - wanted.mean(1, keepdims=True)
    np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(best, values.max(1))


def test_images_go_through_convolutions_and_the_carry_reaches_the_values():
    policy = fl.Policy(fl.networks.RecurrentQNetwork, hidden=(8,), size=4)
    net = network(policy, Spaces(IMAGE, DISCRETE))
    weights = net.init(jax.random.key(0))
    assert sum(x.ndim == 4 for x in weights.params.values()) == 3
    obs = np.zeros((2, 36, 36, 2), np.uint8)
    carry = jax.tree.map(lambda x: x.at[0].set(1.0), net.memory(weights, 2).carry)
    going_on = net.apply(weights, obs, Memory(carry, np.zeros(2, bool)))[0].logits
    begun = net.apply(weights, obs, Memory(carry, np.ones(2, bool)))[0].logits
    assert np.abs(going_on[0] - going_on[1]).max() > 1e-3
    np.testing.assert_array_equal(begun, np.stack([going_on[1]] * 2))


@pytest.mark.parametrize(
    ("spaces", "settings", "says"),
    [
        ((BOX, BOX), {}, r"has a value for each of n actions, not for Box.*take RNN"),
        ((BOX, DISCRETE), {"cell": "rnn"}, "cell must be one of lstm, gru, got 'rnn'"),
        ((IMAGE, DISCRETE), {"normalize": True}, "RecurrentQNetwork has convolutions for images"),
    ],
)
def test_what_does_not_fit_is_refused(spaces, settings, says):
    with pytest.raises(fl.errors.PolicyError, match=says):
        network(fl.Policy(fl.networks.RecurrentQNetwork, **settings), Spaces(*spaces))
