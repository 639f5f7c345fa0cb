"""Noisy layers against explicit weights, their noise by row, and how runners explore by it."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flowrl as fl
from flowrl.learner.core import core_of
from flowrl.rl.function_loss import as_loss
from flowrl.rl.noisy_layers import NOISE, NoisyLinear, RowNoise, noise_of_rows
from flowrl.rl.policies import network
from flowrl.rl.spaces import Spaces

SPACES = Spaces(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3))
NOISY = fl.Policy(fl.networks.QNetwork, hidden=(8,), noisy=True)


def layer(inputs=3, outputs=2):
    made = NoisyLinear(inputs, outputs, rngs=nnx.Rngs(0))
    # Deviations that differ show which of them is multiplied by what.
    made.kernel_deviation[...] = jnp.arange(1.0, 1 + inputs * outputs).reshape(inputs, outputs)
    made.bias_deviation[...] = jnp.arange(1.0, 1 + outputs)
    return made


def bits(n, seed=0):
    return jax.random.bits(jax.random.key(seed), (n, 2))


def test_a_row_s_output_is_that_of_its_explicit_weights():
    made, x = layer(), np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    with noise_of_rows(bits(5)):
        found = made(x)
    left, right = RowNoise(bits(5), 0).of_next_layer(3, 2)
    for i in range(5):
        kernel = made.kernel[...] + made.kernel_deviation[...] * np.outer(left[i], right[i])
        bias = made.bias[...] + made.bias_deviation[...] * right[i]
        np.testing.assert_allclose(found[i], x[i] @ kernel + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made(x), x @ made.kernel[...] + made.bias[...], rtol=1e-5)


def test_mean_and_variance_are_those_of_the_weights():
    made, n = layer(), 60_000
    x = np.float32([0.5, -1.0, 2.0])
    with noise_of_rows(bits(n)):
        found = np.asarray(made(jnp.broadcast_to(x, (n, 3))))
    mean = x @ made.kernel[...] + made.bias[...]
    # f(e) has the mean 0 and the mean square E|e| = sqrt(2 / pi), and f(e_i) f(e_j) its square.
    square = np.sqrt(2 / np.pi)
    kernel, bias = (np.asarray(w[...]) for w in (made.kernel_deviation, made.bias_deviation))
    variance = square**2 * ((x[:, None] * kernel) ** 2).sum(0) + square * bias**2
    np.testing.assert_allclose(found.mean(0), mean, atol=4 * np.sqrt(variance.max() / n))
    np.testing.assert_allclose(found.var(0), variance, rtol=0.03)


def test_first_weights_are_those_of_the_paper():
    made = NoisyLinear(400, 50, rngs=nnx.Rngs(0))
    bound = 400**-0.5
    for mean in (made.kernel[...], made.bias[...]):
        assert np.abs(mean).max() <= bound and np.abs(mean).max() > 0.9 * bound
    for deviation in (made.kernel_deviation[...], made.bias_deviation[...]):
        np.testing.assert_allclose(deviation, 0.5 * bound, rtol=1e-6)


def test_rows_calls_and_layers_have_noise_of_their_own_and_it_does_not_depend_on_how_rows_are_cut():
    whole, other = RowNoise(bits(6), 0), RowNoise(bits(6), 1)
    one, two = whole.of_next_layer(2, 3)[0], whole.of_next_layer(2, 3)[0]
    found = np.concatenate([one, two, other.of_next_layer(2, 3)[0]])
    assert len(np.unique(found)) == found.size
    part = RowNoise(bits(6)[2:4], 0).of_next_layer(2, 3)[0]
    np.testing.assert_array_equal(part, one[2:4])


def test_noise_of_keys_that_follow_each_other_is_independent():
    # These keys are more alike than random ones: they differ in few bits, but no two are equal.
    rows = jnp.stack([jnp.arange(32, dtype=jnp.uint32) << 8, jnp.zeros(32, jnp.uint32)], axis=-1)
    found = []
    for call in range(4):
        noise = RowNoise(rows, call)
        found += [noise.of_next_layer(1_500, 500) for _ in range(3)]
    numbers = np.concatenate([np.concatenate(both, axis=-1) for both in found])
    correlations = np.corrcoef(numbers) - np.eye(len(numbers))
    # Of 73,536 pairs of independent rows, the largest is at 4.4 of these deviations.
    assert np.abs(correlations).max() < 6 / np.sqrt(numbers.shape[1])
    assert abs(correlations.mean()) < 1e-3


def test_noise_ends_with_its_block_and_meets_no_other_number_of_rows():
    with noise_of_rows(bits(2)):
        with pytest.raises(fl.errors.PolicyError, match=r"on rows \(3,\), but .* \(2,\)"):
            layer()(jnp.ones((3, 3)))
        with noise_of_rows(None):
            assert NOISE.get() is None
    assert NOISE.get() is None


def weights(seed=0):
    net = network(NOISY, SPACES)
    return net, net.init(jax.random.key(seed))


def test_an_act_has_the_noise_of_its_step_and_a_greedy_one_has_none():
    net, held = weights()
    obs, explore = jnp.ones((200, 4)), fl.NoisyWeights()
    noise = net.noise(
        jax.random.key(0), jnp.uint32(0), jnp.arange(200), steps=2, envs=200, explore=explore
    )
    assert noise.shape == (2, 200, 2) and noise.dtype == jnp.uint32
    values = [net.act(held, obs, x, explore=explore)[0][:, -1] for x in noise]
    # Two of them may round to the same number.
    assert len(np.unique(values)) > 390, "each step of each environment has its own"
    greedy = net.act(held, obs, None, explore=explore)[0]
    assert len(np.unique(greedy[:, -1])) == 1
    # Any other exploration leaves the weights as they are.
    epsilon = fl.EpsilonGreedy()
    drawn = epsilon.noise(net.head, jax.random.key(0), 200, 0.0, jnp.arange(200), 200)
    np.testing.assert_array_equal(
        net.act(held, obs, drawn, explore=epsilon)[0][:, -1], greedy[:, -1]
    )


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"])
def test_runners_record_the_values_of_noisy_weights(env):
    runners = fl.Runners(
        env, NOISY, envs_per_runner=4, rollout_length=6, explore=fl.NoisyWeights()
    ).open()
    first, second = (runners.collect() for _ in range(2))
    runners.close()
    assert len(np.unique(np.asarray(first["action"]))) == 2
    # The same weights see the first observations again without noise: it was in all values.
    values = np.concatenate([np.asarray(x["value"]) for x in (first, second)])
    assert len(np.unique(values)) == values.size


def trained(policy, loss, **changes):
    """The gradients' effect of one update on random transitions."""
    core = core_of(policy, SPACES, as_loss(loss), fl.SGD(1.0))
    rng = np.random.default_rng(0)
    n = 32
    data = {
        "obs": rng.normal(size=(1, n, 4)).astype(np.float32),
        "next_obs": rng.normal(size=(1, n, 4)).astype(np.float32),
        "action": rng.integers(0, 3, (1, n)).astype(np.int32),
        "reward": rng.normal(size=(1, n)).astype(np.float32),
        "discount": np.full((1, n), 0.9, np.float32),
        "valid": np.ones((1, n), bool),
    }
    state = core.init(jax.random.key(0))
    after, _, priority = core.update(
        state["weights"], state, data, {}, epochs=1, minibatch_size=n, shuffle=False, **changes
    )
    before, now = state["weights"].params, after["weights"].params
    return {name: np.asarray(now[name] - before[name]) for name in now}, np.asarray(priority)


def test_an_update_trains_means_and_deviations_by_noise_that_is_new_with_each():
    moved, priority = trained(NOISY, fl.losses.DQNLoss())
    assert any(name.endswith("kernel_deviation") for name in moved)
    assert all(x.any() for x in moved.values())
    plain = fl.Policy(fl.networks.QNetwork, hidden=(8,))
    assert not any("deviation" in name for name in trained(plain, fl.losses.DQNLoss())[0])
    core = core_of(NOISY, SPACES, fl.losses.DQNLoss(), fl.SGD(0.0))
    assert core._noisy and priority.std() > 0


def test_the_calls_of_one_update_have_noise_of_their_own():
    seen = []

    def loss(policy, params, batch):
        one, two = (policy(params, batch["obs"])[0].logits for _ in range(2))
        seen.append(policy(params, batch["obs"], method="returns")[..., 0])
        return jnp.mean((one - two) ** 2 + (one - seen[-1]) ** 2), {}

    moved, _ = trained(NOISY, loss)
    # With equal noise the loss would be 0, and nothing would move.
    assert moved["advantage/kernel_deviation"].all() and moved["trunk/layers/0/kernel"].any()


def test_noisy_weights_of_a_network_without_noisy_layers_are_reported():
    graph = fl.dqn("CartPole-v1").set("runners.explore", fl.NoisyWeights())
    with pytest.raises(
        fl.errors.CheckError,
        match=r"dqn\.runners: explore by noisy layers \(NoisyWeights\), which QNetwork lacks; give",
    ):
        graph.check()


def test_a_loss_of_other_rows_is_reported_with_a_noisy_network():
    def both(policy, params, batch):
        obs = jnp.concatenate([batch["obs"], batch["next_obs"]])
        return policy(params, obs)[1].mean(), {}

    with pytest.raises(fl.errors.PolicyError, match="one of each row; call the policy on obs"):
        trained(NOISY, both)


class NoisyMemory(fl.networks.RecurrentQNetwork):
    """A recurrent network whose last layer is noisy."""

    def __init__(self, obs_space, action_space, *, rngs):
        super().__init__(obs_space, action_space, rngs=rngs)
        self.advantage = NoisyLinear(self.size, int(action_space.n), rngs=rngs)


def test_noisy_layers_in_sequences_are_reported():
    with pytest.raises(fl.errors.CheckError, match=r"r2d2\.train: noisy layers take noise for"):
        fl.r2d2("CartPole-v1", policy=fl.Policy(NoisyMemory)).compile()
