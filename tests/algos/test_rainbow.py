"""Distributional and noisy DQN through the whole path: settings, and what a policy learned."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl

SETTINGS = {
    "envs_per_runner": 4,
    "rollout_length": 8,
    "learning_starts": 64,
    "batch_size": 1024,
    "minibatch_size": 64,
    "updates_per_step": 1 / 32,
    "target_update_every": 2,
    "hidden": (32,),
    "gamma": 0.5,
    "n_step": 1,
    "noisy": False,
    "epsilon": 0.5,
    "epsilon_steps": 1,
    "prioritized": False,
    "lr": fl.Linear(3e-3, 0.0, 2_800),
    "report_every": 5,
}


class Lottery(fl.envs.JaxEnv):
    """After a first step that is worth nothing, action 0 wins 1 with a probability of 0.7 or loses
    1, and action 1 is worth 0.2 for sure."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.float32([1, 0])

    def step(self, state, action, key):
        won = jax.random.bernoulli(key, 0.7)
        prize = jnp.where(action == 0, jnp.where(won, 1.0, -1.0), 0.2)
        reward = jnp.where(state == 0, 0.0, prize)
        return state + 1, jnp.float32([0, 1]), reward, state == 1, jnp.bool_(False)


RETURNS = np.linspace(-1.0, 1.0, 11)
"""Of C51: among them are all returns of `Lottery` but those of the mean."""


def learned(tmp_path, runtime="local", steps=6_000, **settings):
    """The numbers ``[2, 2, atoms]`` that a saved policy gives for both observations."""
    graph = fl.rainbow(Lottery, **{**SETTINGS, **settings})
    if graph.resources["learner"].loss == fl.losses.QRLoss():
        # Squares up to 1 would blur the quantiles of returns from -1 to 1.
        graph = graph.set("learner.loss.huber", 0.05)
    with fl.run(graph, runtime=runtime, steps=steps, out=tmp_path / "run") as run:
        assert all(np.isfinite(row["loss"]) for row in run)
    policy = fl.load(tmp_path / "run", env=Lottery)
    obs = np.float32([[1, 0], [0, 1]])
    numbers = np.asarray(policy.network.call("returns", policy.weights, obs)[0])
    values = policy.network.apply(policy.weights, obs)[0].logits
    assert (policy.act(obs)[1], policy.evaluate(20).max()) == (0, 1.0)
    return numbers, np.asarray(values)


C51 = {"atoms": 11, "v_min": -1.0, "v_max": 1.0}


@pytest.mark.system
@pytest.mark.parametrize(
    ("runtime", "settings"),
    [
        ("local", {}),
        pytest.param("ray", {}, marks=[pytest.mark.ray, pytest.mark.system]),
        pytest.param("xla", {"prioritized": True, "beta_steps": 1}, marks=pytest.mark.system),
    ],
    ids=["local", "ray", "xla, prioritized"],
    indirect=["runtime"],
)
def test_c51_learns_the_distribution_of_returns(runtime, settings, tmp_path):
    numbers, values = learned(tmp_path, runtime, **C51, **settings)
    probabilities = np.asarray(jax.nn.softmax(numbers))
    found = probabilities[1, 0]
    assert found[0] == pytest.approx(0.3, abs=0.08) and found[-1] == pytest.approx(0.7, abs=0.08)
    assert probabilities[1, 1][6] > 0.9, "0.2 for sure"
    # A step earlier the same is worth half: -0.5 lies between two of the returns.
    for action in range(2):
        before = probabilities[0, action]
        assert before[2:4].sum() == pytest.approx(0.3, abs=0.1)
        assert before[7:9].sum() == pytest.approx(0.7, abs=0.1)
    np.testing.assert_allclose(values, [[0.2, 0.2], [0.4, 0.2]], atol=0.12)
    np.testing.assert_allclose(values, probabilities @ RETURNS, atol=1e-4)


@pytest.mark.system
def test_quantile_regression_learns_the_quantiles_of_returns(tmp_path):
    numbers, values = learned(tmp_path, "xla", distribution="quantile", atoms=10)
    found = np.sort(numbers, axis=-1)
    # The quantile at 0.25 and those below are -1, those from 0.35 on are 1.
    np.testing.assert_allclose(found[1, 0, :2], -1, atol=0.25)
    np.testing.assert_allclose(found[1, 0, 4:], 1, atol=0.25)
    np.testing.assert_allclose(found[1, 1], 0.2, atol=0.15)
    np.testing.assert_allclose(found[0, :, 4:], 0.5, atol=0.2)
    np.testing.assert_allclose(values, numbers.mean(-1), atol=1e-5)
    np.testing.assert_allclose(values[1], [0.4, 0.2], atol=0.15)


def test_what_rainbow_switches_on_is_what_dqn_has_by_settings():
    switched_on = {
        "double": True,
        "dueling": True,
        "prioritized": True,
        "n_step": 3,
        "distribution": "c51",
        "noisy": True,
    }
    graph = fl.rainbow("CartPole-v1", v_max=100.0)
    assert graph == fl.dqn("CartPole-v1", **switched_on, v_max=100.0).rename("rainbow")
    learner, runners = graph.resources["learner"], graph.resources["runners"]
    assert learner.loss == fl.losses.C51Loss() and runners.explore == fl.NoisyWeights()
    assert learner.policy.settings == {
        "hidden": (64, 64), "dueling": True, "normalize": False, "atoms": 51, "v_min": -10.0,
        "v_max": 100.0, "noisy": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "without"),
    [
        ({"v_max": 5.0, "distribution": "quantile"}, {"distribution": "quantile"}),
        ({"atoms": 9, "v_min": -5.0}, {}),
        ({"epsilon": 0.5, "epsilon_steps": 7, "noisy": True}, {"noisy": True}),
    ],
)
def test_what_a_setting_does_not_reach_it_does_not_change(settings, without):
    """So a study, which compares graphs, refuses to search over it."""
    assert fl.dqn("CartPole-v1", **settings) == fl.dqn("CartPole-v1", **without)


def test_apex_takes_distributions_and_noise_in_place_of_its_epsilons():
    graph = fl.apex("CartPole-v1", noisy=True, distribution="c51")
    assert graph.resources["runners"].explore == fl.NoisyWeights()
    assert graph.resources["learner"].loss == fl.losses.C51Loss()
    assert fl.apex("CartPole-v1").resources["runners"].explore.spread == 7.0
    # First priorities of action values would have another scale than those of the loss.
    assert "InitialPriorities" not in repr(graph)
    assert "InitialPriorities" in repr(fl.apex("CartPole-v1"))
    graph.check()
