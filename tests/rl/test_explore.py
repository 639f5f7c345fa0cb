"""How runners explore."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flowrl as fl
from environments import Clockwork
from flowrl.rl.actions import RULED_OUT, head
from flowrl.rl.distributions import Categorical, Gaussian, MultiCategorical

DISCRETE, BOX = head(gym.spaces.Discrete(4)), head(gym.spaces.Box(-2, 2, (2,)))


def picked(explore, step, n=20_000, env=None, envs=1):
    """The actions of n environments whose greedy action is number 2."""
    dist = Categorical(jnp.broadcast_to(jnp.array([0.0, 1.0, 9.0, 2.0]), (n, 4)))
    env = jnp.zeros(n, int) if env is None else env
    noise = explore.noise(DISCRETE, jax.random.key(0), n, jnp.float32(step), env, envs)
    return np.asarray(explore.pick(dist, noise))


@pytest.mark.parametrize(("step", "epsilon"), [(0, 1.0), (500, 0.55), (1000, 0.1), (9000, 0.1)])
def test_epsilon_falls_in_a_line_and_any_action_is_as_likely_as_another(step, epsilon):
    actions = picked(fl.EpsilonGreedy(start=1.0, end=0.1, steps=1000), step)
    shares = np.bincount(actions, minlength=4) / len(actions)
    np.testing.assert_allclose(
        shares, np.where(np.arange(4) == 2, 1 - 0.75 * epsilon, epsilon / 4), atol=0.012
    )


def test_environments_may_have_an_epsilon_each():
    explore = fl.EpsilonGreedy(start=0.4, end=0.4, spread=7.0)
    wanted = [0.4 ** (1 + 7 * i / 3) for i in range(4)]
    np.testing.assert_allclose(explore.epsilon(jnp.float32(5), jnp.arange(4), 4), wanted, rtol=1e-4)
    env = jnp.arange(20_000) % 4
    actions = picked(explore, 0, env=env, envs=4)
    for i, epsilon in enumerate(wanted):
        assert np.mean(actions[np.asarray(env) == i] != 2) == pytest.approx(
            0.75 * epsilon, abs=0.012
        )


def test_each_part_of_an_action_explores_by_itself_and_keeps_to_its_mask():
    n, sizes, epsilon = 40_000, (3, 2, 4), 0.4
    # The greedy choices are 2, 0 and 1; the last part may not take choice 3.
    logits = jnp.array([0.0, 1.0, 9.0, 5.0, 4.0, 1.0, 7.0, 2.0, RULED_OUT])
    dist = MultiCategorical(jnp.broadcast_to(logits, (n, 9)), sizes)
    explore, whole = fl.EpsilonGreedy(epsilon, epsilon), head(gym.spaces.MultiDiscrete(sizes))
    assert explore.check(whole) == ""
    noise = explore.noise(whole, jax.random.key(0), n, jnp.float32(0), jnp.zeros(n, int), 1)
    actions = np.asarray(explore.pick(dist, noise))
    assert actions.shape == (n, 3)
    for part, (greedy, choices) in enumerate([(2, (0, 1, 2)), (0, (0, 1)), (1, (0, 1, 2))]):
        share = epsilon / len(choices)
        wanted = [1 - epsilon + share if k == greedy else share for k in choices]
        got = np.bincount(actions[:, part], minlength=len(choices)) / n
        np.testing.assert_allclose(got, wanted, atol=0.012)
    # Parts decide by themselves: two are not greedy at once as often as by chance.
    off = actions[:, :2] != [2, 0]
    assert np.mean(off.all(1)) == pytest.approx(np.prod(off.mean(0)), abs=0.008)


def test_noise_stays_around_the_greedy_action():
    explore, dist = fl.GaussianNoise(0.2), Gaussian(jnp.full((5000, 2), 0.5), jnp.zeros((5000, 2)))
    actions = explore.pick(dist, explore.noise(BOX, jax.random.key(0), 5000, 0, jnp.zeros(5000), 1))
    assert float(actions.mean()) == pytest.approx(0.5, abs=0.02) and float(
        actions.std()
    ) == pytest.approx(0.2, abs=0.02)
    assert (jnp.abs(actions) <= 1).all()


class Always(nnx.Module):
    """Thinks that action 1 is the best."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.bias = nnx.Param(jnp.array([0.0, 5.0]))

    def __call__(self, obs):
        return jnp.broadcast_to(self.bias[...], (obs.shape[0], 2)), jnp.zeros(obs.shape[0])


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"])
def test_runners_explore_less_as_they_go(env):
    runners = fl.Runners(
        env,
        fl.Policy(Always),
        num_runners=2,
        envs_per_runner=8,
        rollout_length=50,
        explore=fl.EpsilonGreedy(steps=1600),
    ).open()
    shares = [float(np.mean(np.asarray(runners.collect()["action"]) == 0)) for _ in range(4)]
    runners.close()
    np.testing.assert_allclose(shares, np.array([0.7625, 0.2875, 0.05, 0.05]) / 2, atol=0.05)


class FailsOnce(gym.Wrapper):
    """Raises in its 75th step."""

    steps = 0

    def step(self, action):
        FailsOnce.steps += 1
        if FailsOnce.steps == 75:
            raise OSError("lost")
        return super().step(action)


def test_a_runner_that_is_restarted_explores_as_much_as_the_one_before():
    explore = fl.EpsilonGreedy(end=0.0, steps=50)
    runners = fl.Runners(
        lambda: FailsOnce(gym.make("CartPole-v1")),
        fl.Policy(Always),
        envs_per_runner=1,
        rollout_length=50,
        explore=explore,
        on_error="restart",
    ).open()
    first, second = (np.asarray(runners.collect()["action"]) for _ in range(2))
    assert runners.episodes()["restarts"] == 1 and (first == 0).any() and (second == 1).all()
    runners.close()


class Unbounded(Clockwork):
    action_space = gym.spaces.Box(-np.inf, 1, (1,))


@pytest.mark.parametrize(
    ("explore", "env", "says"),
    [
        (
            fl.EpsilonGreedy(),
            "Pendulum-v1",
            r"ppo\.runners: EpsilonGreedy picks one of n actions; take GaussianNoise",
        ),
        (
            fl.GaussianNoise(),
            "CartPole-v1",
            r"ppo\.runners: GaussianNoise is for actions in a Box; take EpsilonGreedy",
        ),
        (
            fl.GaussianNoise(),
            Unbounded,
            (
                r"ppo\.runners: GaussianNoise keeps actions in \[-1, 1\].*but some of these are "
                r"not finite; give it"
            ),
        ),
    ],
)
def test_what_does_not_fit_the_actions_is_reported(explore, env, says):
    with pytest.raises(fl.errors.CheckError, match=says):
        fl.ppo(env).set("runners.explore", explore).compile()


@pytest.mark.parametrize("wrong", [{"start": 1.5}, {"end": -0.1}, {"steps": 0}, {"spread": -1.0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(fl.errors.SettingError, match="must be"):
        fl.EpsilonGreedy(**wrong)
    with pytest.raises(fl.errors.SettingError, match="must not be negative"):
        fl.GaussianNoise(-1.0)


class Softened(fl.extend.Explore):
    """A user's own, of which nothing is known."""

    def pick(self, dist, noise):
        return dist.sample(noise)


class Declared(Softened):
    samples = True


@pytest.mark.parametrize(
    "explore", [fl.EpsilonGreedy(), fl.GaussianNoise(), Softened()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("graph", ["ppo", "pg", "a2c", "a3c", "impala", "appo"])
def test_a_policy_gradient_refuses_an_exploration_that_it_does_not_correct_for(graph, explore):
    made = getattr(fl, graph)(
        "Pendulum-v1" if isinstance(explore, fl.GaussianNoise) else "CartPole-v1"
    )
    own = (
        "; if Softened does sample them so, set samples = True in it"
        if isinstance(explore, Softened)
        else ""
    )
    says = (
        rf"{graph}\.runners: act by {type(explore).__name__}, for which \w+Loss does not correct: "
        rf".*; leave explore out, .*entropy bonus{own}$"
    )
    with pytest.raises(fl.errors.CheckError, match=says):
        made.set("runners.explore", explore).check()


def only_values(policy, params, batch):
    _, value = policy(params, batch["obs"])
    return jnp.mean(value**2), {}


@pytest.mark.parametrize(
    ("loss", "explore"),
    [
        (fl.losses.PPOLoss(), Declared()),
        (fl.losses.PPOLoss(), fl.Sampled()),
        (only_values, fl.EpsilonGreedy()),
        (only_values, fl.Sampled()),
    ],
    ids=["declared", "sampled", "own loss, epsilon", "own loss, sampled"],
)
def test_what_fits_trains(loss, explore):
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            envs_per_runner=2, rollout_length=8, batch_size=16, minibatch_size=16, epochs=1
        ),
    )
    with fl.run(graph.set("learner.loss", loss).set("runners.explore", explore), steps=16) as run:
        assert next(run)["updates"] == 1


def test_the_recorded_logp_is_the_policy_s_own_and_so_not_that_of_epsilon_greedy():
    explore = fl.EpsilonGreedy(start=1.0, end=1.0)
    runners = fl.Runners(
        "CartPole-v1", fl.Policy(Always), envs_per_runner=8, rollout_length=50, explore=explore
    ).open()
    batch = runners.collect()
    runners.close()
    assert float(np.mean(batch["action"] == 0)) == pytest.approx(
        0.5, abs=0.1
    )  # each with probability 1/2 ...
    wanted = np.where(
        batch["action"] == 0, -5.0067, -0.0067
    )  # ... but the policy has these logarithms of softmax([0, 5])
    np.testing.assert_allclose(batch["logp"], wanted, atol=1e-3)
