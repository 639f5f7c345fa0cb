"""Episodes with perturbed weights, beside a loop that plays them one by one."""

from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl
from flowrl.rl.evolution import perturbed, seeds_of
from flowrl.rl.policies import Memory, Weights, network
from flowrl.rollout.jax_perturbed import perturbed_of
from flowrl.rollout.perturbed import PerturbedPlayer

MLP = fl.Policy(fl.networks.MLP, hidden=(8,))
NORM = fl.Policy(fl.networks.MLP, hidden=(), normalize=True)
RNN = fl.Policy(fl.networks.RNN, hidden=(4,), size=3, cell="gru")
HOW = {"sigma": 0.5, "episodes": 1, "max_steps": 30, "sampled": False}
LIMIT = 25


class Cart(fl.envs.JaxEnv):
    """A cart that is pushed to either side; without chance, and so the same in every runtime."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, bound=1.0, nan_at=None):
        self.bound, self.nan_at = bound, nan_at

    def reset(self, key):
        state = {"x": jnp.float32([0.1, -0.05]), "age": jnp.int32(0)}
        return state, state["x"]

    def step(self, state, action, key):
        x, v = state["x"]
        v = v + 0.2 * (2 * action - 1) + 0.1 * x
        x = x + 0.2 * v
        new = {"x": jnp.stack([x, v]).astype(jnp.float32), "age": state["age"] + 1}
        reward = 1.0 - jnp.abs(x)
        if self.nan_at is not None:
            reward = jnp.where(new["age"] == self.nan_at, jnp.nan, reward)
        over = jnp.abs(x) > self.bound
        return new, new["x"], reward.astype(jnp.float32), over, new["age"] >= LIMIT


class GymCart(gym.Env):
    """The same for Gymnasium."""

    observation_space, action_space = Cart.observation_space, Cart.action_space

    def __init__(self, **how):
        self.cart = Cart(**how)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, obs = _reset(self.cart)
        return np.asarray(obs), {}

    def step(self, action):
        self.state, obs, reward, terminated, truncated = _step(
            self.cart, self.state, jnp.int32(action)
        )
        return np.asarray(obs), float(reward), bool(terminated), bool(truncated), {}


@partial(jax.jit, static_argnums=0)
def _reset(cart):
    return cart.reset(None)


@partial(jax.jit, static_argnums=0)
def _step(cart, state, action):
    return cart.step(state, action, None)


def runners(env=GymCart, policy=MLP, **settings):
    return fl.Runners(env, policy, **{"envs_per_runner": 4, **settings})


def parts(spec, pairs=5):
    """The policy, its weights and the seeds of some pairs."""
    net = network(spec.policy, spec.spaces())
    seeds = np.asarray(seeds_of(jax.random.key(0), jnp.uint32(3), pairs=pairs))
    return net, net.init(jax.random.key(1)), seeds


def played(spec, pairs=5, **how):
    net, weights, seeds = parts(spec, pairs)
    player = PerturbedPlayer(spec, net, "runners, runner 0", 0)
    try:
        return player.play(weights, 7, seeds, **{**HOW, **how})
    finally:
        player.close()


def played_in_jax(spec, pairs=5, **how):
    _, weights, seeds = parts(spec, pairs)
    play = jax.jit(partial(perturbed_of(spec).play, **{**HOW, **how}))
    return jax.tree.map(np.asarray, play(weights, seeds))


def one_by_one(spec, pairs=5, max_steps=30):
    """Returns and lengths ``[2, pairs]``, and all observations of each pair."""
    net, weights, seeds = parts(spec, pairs)
    returns, lengths, seen = np.zeros((2, pairs)), np.zeros((2, pairs), int), []
    act = jax.jit(net.greedy)
    for pair, seed in enumerate(seeds):
        seen.append([])
        for row, scale in enumerate((0.5, -0.5)):
            changed = perturbed(weights.params, jnp.uint32(seed), jnp.float32(scale))
            changed = Weights(changed, weights.rest)
            env, memory = GymCart(), net.memory(changed, 1)
            obs, over = env.reset()[0], False
            while not over and lengths[row, pair] < max_steps:
                seen[-1].append(obs)
                action, carry = act(changed, obs[None], memory)
                memory = Memory(carry, np.zeros(1, bool)) if net.recurrent else memory
                obs, reward, terminated, truncated, _ = env.step(int(action[0]))
                returns[row, pair] += reward
                lengths[row, pair] += 1
                over = terminated or truncated
    return returns, lengths, seen


@pytest.mark.parametrize("policy", [MLP, RNN], ids=["MLP", "recurrent"])
def test_each_perturbation_returns_what_it_returns_alone(policy):
    spec = runners(policy=policy)
    sample, (returns, lengths, _) = played(spec), one_by_one(spec)
    batch, episodes = sample.batch, sample.episodes
    assert batch.shape == (2, 5) and len(set(lengths.ravel())) > 1, "episodes of several lengths"
    np.testing.assert_allclose(batch["return"], returns, atol=1e-3)
    np.testing.assert_array_equal(batch["length"], lengths)
    assert batch.columns["version"].tolist() == [7] * 5
    np.testing.assert_array_equal(batch["noise_scale"], np.float32([[0.5], [-0.5]]) * np.ones(5))
    np.testing.assert_array_equal(batch["noise_seed"], [parts(spec)[2]] * 2)
    assert (episodes.env_steps, episodes.cut) == (lengths.sum(), 0)
    np.testing.assert_allclose(np.sort(episodes.returns), np.sort(returns.ravel()), atol=1e-3)


@pytest.mark.parametrize("policy", [MLP, RNN, NORM], ids=["MLP", "recurrent", "normalised"])
def test_environments_in_jax_return_the_same(policy):
    spec, in_jax = runners(policy=policy), runners(Cart, policy)
    data, ended, cut = played_in_jax(in_jax, episodes=2)
    batch = played(spec, episodes=2).batch
    assert set(data) == set(batch.data) and int(cut) == 0
    for name, x in batch.data.items():
        assert data[name].dtype == x.dtype, name
        np.testing.assert_allclose(data[name], x, atol=1e-3, err_msg=name)
    assert int(ended["length"].sum()) == batch["length"].sum()
    assert (ended["broken"] < 0).all()


@pytest.mark.parametrize("envs", [1, 2, 64])
def test_the_number_of_environments_changes_nothing(envs):
    few, many = played(runners(envs_per_runner=envs)), played(runners())
    for name, x in many.batch.data.items():
        np.testing.assert_allclose(few.batch[name], x, atol=1e-4)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_vector_of_ones_own_plays_the_same_in_each_mode(mode):
    def vector():
        return SyncVectorEnv([GymCart] * 3, autoreset_mode=AutoresetMode(mode))

    found = played(runners(vector, envs_per_runner=3), episodes=2)
    np.testing.assert_allclose(found.batch["return"], one_by_one(runners())[0], atol=1e-3)


def test_both_of_a_pair_begin_alike_and_other_pairs_differently():
    # A perturbation so small that all that differs is where an episode begins.
    how = {"sigma": 1e-9, "max_steps": 200}
    returns = played(runners("CartPole-v1"), pairs=12, **how).batch["return"]
    np.testing.assert_array_equal(returns[0], returns[1])
    assert len(set(returns[0])) > 3
    single = played(runners(lambda: gym.make("CartPole-v1")), pairs=12, **how).batch["return"]
    np.testing.assert_array_equal(single[0], single[1])
    assert len(set(single[0])) > 3
    data = played_in_jax(runners("gymnax:CartPole-v1"), pairs=12, **how)[0]
    np.testing.assert_array_equal(data["return"][0], data["return"][1])
    assert len(set(data["return"][0].tolist())) > 3


@pytest.mark.parametrize("envs", [1, 2])
def test_each_episode_of_a_pair_begins_in_its_own_way(envs):
    spec = runners("CartPole-v1", envs_per_runner=envs)
    found = played(spec, pairs=1, episodes=12, max_steps=500, sigma=1e-9).episodes.returns
    plus, minus = found.reshape(2, 12)
    np.testing.assert_array_equal(plus, minus)
    # No round of environments repeats another one.
    assert len({tuple(x) for x in plus.reshape(-1, envs)}) > 12 // envs / 2


class Bits(gym.Env):
    """Shows random bits, or the same as floats, and ends after 40 steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, floats=False):
        self.kind = np.float32 if floats else np.int8
        self.observation_space = gym.spaces.MultiBinary(4)
        if floats:
            self.observation_space = gym.spaces.Box(0, 1, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.step(0)[0], {}

    def step(self, action):
        self.time += 1
        bits = self.np_random.random(4) < 0.3
        return bits.astype(self.kind), 1.0, self.time > 40, False, {}


def test_a_running_norm_learns_of_integers_what_it_learns_of_floats():
    norms = []
    for floats in (False, True):
        how = {"pairs": 2, "top": 2, "report_every": 1}
        graph = fl.ars(partial(Bits, floats), **how)
        with fl.run(graph, until=lambda row: row["updates"] >= 2) as run:
            list(run)
        norms.append(run.policy.weights.rest)
    assert norms[0].keys() == norms[1].keys() and any("mean" in name for name in norms[0])
    for name, x in norms[0].items():
        np.testing.assert_allclose(x, norms[1][name], rtol=1e-5, err_msg=name)
    mean = next(x for name, x in norms[0].items() if name.endswith("mean"))
    assert 0.2 < np.mean(mean) < 0.4


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"])
def test_sampled_actions_are_those_that_remain_of_an_exploration(env):
    # With what it begins with all actions would be random, whatever the weights are.
    explore = fl.EpsilonGreedy(start=1.0, end=0.0, steps=10)
    play = played_in_jax if env.startswith("gymnax") else played

    def returns(explore, sampled):
        found = play(runners(env, explore=explore), sampled=sampled, max_steps=200)
        return (found[0] if env.startswith("gymnax") else found.batch)["return"]

    np.testing.assert_array_equal(returns(explore, True), returns(explore, False))
    random = returns(fl.EpsilonGreedy(1.0, 1.0), True)
    np.testing.assert_array_equal(random[0], random[1])


@pytest.mark.parametrize("env", [GymCart, Cart])
def test_sampled_actions_are_not_the_greedy_ones_and_the_same_each_time(env):
    def returns(sampled):
        if env is Cart:
            return played_in_jax(runners(env), sampled=sampled)[0]["return"]
        return played(runners(env), sampled=sampled).batch["return"]

    greedy, one, two = returns(False), returns(True), returns(True)
    np.testing.assert_array_equal(one, two)
    assert not np.allclose(one, greedy)


def test_two_points_of_a_pair_have_the_moments_of_all_that_it_saw():
    spec = runners(policy=NORM)
    batch, (_, lengths, seen) = played(spec).batch, one_by_one(spec)
    np.testing.assert_allclose(batch["visits"].sum(axis=0), lengths.sum(axis=0))
    for pair in range(5):
        all_of_it = np.array(seen[pair])
        points = batch["obs"][:, pair]
        np.testing.assert_allclose(points.mean(axis=0), all_of_it.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(points.std(axis=0), all_of_it.std(axis=0), atol=1e-4)


@pytest.mark.parametrize("env", [GymCart, Cart])
def test_an_episode_that_never_ends_is_cut_and_counted(env):
    spec = runners(env, env_settings={"bound": 1e9})
    if env is Cart:
        data, _, cut = played_in_jax(spec, max_steps=9)
    else:
        sample = played(spec, max_steps=9)
        data, cut = sample.batch.data, sample.episodes.cut
    assert int(cut) == 10 and (np.asarray(data["length"]) == 9).all()


def test_a_reward_that_is_nan_names_the_environment_and_its_step():
    spec = runners(env_settings={"nan_at": 3})
    with pytest.raises(
        fl.errors.EnvError,
        match=r"runner 0: environment \d of GymCart gave a reward that is not finite, at step 3 of "
        r"an episode with perturbed weights; fix it",
    ):
        played(spec)
    data, ended, _ = played_in_jax(runners(Cart, env_settings={"nan_at": 3}))
    assert np.isnan(np.asarray(data["return"])).any() and int(ended["broken"][0]) == 0
