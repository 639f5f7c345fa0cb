"""Mixers beside slow loops in NumPy, what makes them monotonic, and the central critic."""

import itertools

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flowrl as fl
from flowrl.rl.policies import network
from flowrl.rl.spaces import Spaces
from flowrl.rl.team_networks import MonotonicMixer

AGENTS, SIZE, STATE, CHOICES, N = 3, 2, 4, 3, 5
OBS = gym.spaces.Dict(
    agents=gym.spaces.Box(-9, 9, (AGENTS, SIZE)), state=gym.spaces.Box(-9, 9, (STATE,))
)
SPACES = Spaces(OBS, gym.spaces.MultiDiscrete([CHOICES] * AGENTS))


def team(mixer="monotonic", **settings):
    policy = fl.Policy(
        fl.networks.TeamQNetwork, mixer=mixer, hidden=(8,), mixing=6, hyper_hidden=7, **settings
    )
    net = network(policy, SPACES)
    return net, net.init(jax.random.key(1))


def seen(seed=0, n=N):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {"agents": f(n, AGENTS, SIZE), "state": f(n, STATE)}


def slow_mix(params, values, state):
    """QMIX's mixer, one row and one weight at a time, by the names of its parameters."""

    def layer(name, x):
        kernel, bias = params[f"mixer/{name}/kernel"], params[f"mixer/{name}/bias"]
        return [sum(x[i] * kernel[i, j] for i in range(len(x))) + bias[j] for j in range(len(bias))]

    def hyper(name, x):
        return layer(f"{name}/layers/2", [max(v, 0.0) for v in layer(f"{name}/layers/0", x)])

    first, offset = hyper("first", state), layer("first_offset", state)
    second, (last,) = hyper("second", state), hyper("second_offset", state)
    width, total = len(offset), last
    for w in range(width):
        x = offset[w] + sum(values[i] * abs(first[i * width + w]) for i in range(len(values)))
        total += (x if x > 0 else np.exp(x) - 1) * abs(second[w])
    return total


def plain(weights):
    """The parameters in float64, named by where they are in the module."""
    found = {}
    for name, x in weights.params.items():
        path = "/".join(part for part in name.replace("'", "").replace("]", "").split("["))
        found[path.strip("/").replace("//", "/")] = np.asarray(x, np.float64)
    return found


def test_the_monotonic_mixer_is_what_a_loop_over_weights_finds():
    net, weights = team()
    obs, values = seen(), np.random.default_rng(7).normal(size=(N, AGENTS)).astype(np.float32)
    got, _ = net.call("mix", weights, obs, values * 3)
    params = plain(weights)
    wanted = [slow_mix(params, 3.0 * values[i], obs["state"][i]) for i in range(N)]
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
    # It depends on the state, and the sum does not.
    other, _ = net.call("mix", weights, {**obs, "state": obs["state"] + 1}, values * 3)
    assert (np.abs(other - got) > 1e-3).all()
    vdn, its = team("sum")
    summed, _ = vdn.call("mix", its, {"agents": obs["agents"]}, values)
    np.testing.assert_allclose(summed, [sum(row) for row in values.tolist()], rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_team_s_value_never_falls_where_an_agent_s_value_rises(seed):
    mixer = MonotonicMixer(AGENTS, STATE, 6, 7, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.normal(size=(200, AGENTS)) * 4, jnp.float32)
    state = jnp.asarray(rng.normal(size=(200, STATE)) * 2, jnp.float32)
    slopes = jax.grad(lambda v: mixer(v, state).sum())(values)
    assert (slopes >= 0).all() and (slopes > 0).mean() > 0.99
    # Weights before their absolute values have both signs, so this is the mixer's own doing.
    assert (mixer.first(state) < 0).any() and (mixer.second(state) < 0).any()


def test_the_best_joint_action_is_each_agent_s_own_best_one():
    net, weights = team()
    obs = seen(3)
    dist, best, _ = net.apply(weights, obs)
    every = list(itertools.product(range(CHOICES), repeat=AGENTS))
    mixed = []
    for action in every:
        taken = dist.logit(jnp.broadcast_to(jnp.array(action), (N, AGENTS)))
        mixed.append(np.asarray(net.call("mix", weights, obs, taken)[0]))
    chosen = [every[i] for i in np.argmax(mixed, axis=0)]
    assert chosen == [tuple(row) for row in np.asarray(dist.mode()).tolist()]
    assert len(set(chosen)) > 1
    np.testing.assert_allclose(best, np.max(mixed, axis=0), rtol=1e-5)


def test_agents_share_one_network_and_differ_by_their_numbers():
    net, weights = team("sum")
    obs = seen(4)
    logits = np.asarray(net.apply(weights, obs)[0].logits).reshape(N, AGENTS, CHOICES)
    # Agents that see the same have other values, for they know their numbers ...
    same = {"agents": np.repeat(obs["agents"][:, :1], AGENTS, axis=1), "state": obs["state"]}
    equal = np.asarray(net.apply(weights, same)[0].logits).reshape(N, AGENTS, CHOICES)
    np.testing.assert_allclose(equal[:, 0], logits[:, 0], rtol=1e-6)
    assert np.abs(equal[:, 1] - equal[:, 0]).max() > 1e-3
    # ... and what another one sees, or the state, changes nothing for an agent.
    shifted = {"agents": obs["agents"] + np.float32([[0], [1], [0]]), "state": obs["state"] + 1}
    moved = np.asarray(net.apply(weights, shifted)[0].logits).reshape(N, AGENTS, CHOICES)
    np.testing.assert_allclose(moved[:, [0, 2]], logits[:, [0, 2]], rtol=1e-6)
    assert np.abs(moved[:, 1] - logits[:, 1]).max() > 1e-3
    # All layers of agents are there once, not once for each.
    kernels = [x.shape for name, x in weights.params.items() if "kernel" in name]
    assert sorted(kernels) == [(SIZE + AGENTS, 8), (8, CHOICES)]


def test_observations_are_normalised_by_agent():
    net, weights = team(normalize=True)
    obs = seen(5, 64)
    rest = net.observe(weights, obs, np.ones(64, np.float32))
    found = {name: x for name, x in rest.items() if "mean" in name}
    means = sorted(found.values(), key=lambda x: x.ndim)
    np.testing.assert_allclose(means[0], obs["state"].mean(0), atol=1e-5)
    np.testing.assert_allclose(means[1], obs["agents"].mean(0), atol=1e-5)


WHOLE = {
    "observations that are no Dict": (
        gym.spaces.Box(0, 1, (2, 3)),
        SPACES.action,
        "TeamQNetwork reads the part 'agents' of observations, but they are Box.*fl.envs.Joint",
    ),
    "no state": (
        gym.spaces.Dict(agents=OBS["agents"]),
        SPACES.action,
        "a monotonic mixer reads the part 'state' of observations, but they are Dict",
    ),
    "unequal choices": (
        OBS,
        gym.spaces.MultiDiscrete([2, 3, 3]),
        "has values for the choices of equal agents, not for MultiDiscrete",
    ),
    "one action": (OBS, gym.spaces.Discrete(9), "of equal agents, not for Discrete"),
    "rows for others": (
        OBS,
        gym.spaces.MultiDiscrete([2, 2]),
        "reads a row for each of 2 agents, not Box",
    ),
}


@pytest.mark.parametrize("what", WHOLE)
def test_what_is_no_team_is_refused(what):
    obs, action, text = WHOLE[what]
    policy = fl.Policy(fl.networks.TeamQNetwork, mixer="monotonic")
    with pytest.raises(fl.errors.PolicyError, match=text):
        network(policy, Spaces(obs, action))


def test_a_mixer_is_one_of_two():
    with pytest.raises(fl.errors.PolicyError, match="mixer must be sum or monotonic, got 'max'"):
        team("max")


def test_a_central_critic_acts_without_the_state_and_values_with_it():
    obs_space = gym.spaces.Dict(own=gym.spaces.Box(-9, 9, (3,)), state=gym.spaces.Box(-9, 9, (4,)))
    net = network(
        fl.Policy(fl.networks.CentralCritic, hidden=(8,)), Spaces(obs_space, gym.spaces.Discrete(3))
    )
    weights = net.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    obs = {key: rng.normal(size=(N, n)).astype(np.float32) for key, n in (("own", 3), ("state", 4))}

    def outputs(obs):
        dist, value, _ = net.apply(weights, obs)
        return dist.logits, value

    logits, value = outputs(obs)
    by_state = jax.jacobian(lambda state: outputs({**obs, "state": state}))(obs["state"])
    by_own = jax.jacobian(lambda own: outputs({**obs, "own": own}))(obs["own"])
    assert not by_state[0].any() and by_state[1].any()
    assert by_own[0].any() and by_own[1].any()
    assert logits.shape == (N, 3) and value.shape == (N,)
    with pytest.raises(fl.errors.PolicyError, match="reads the part 'own'.*fl.envs.WithState"):
        network(net.policy, Spaces(obs_space["own"], gym.spaces.Discrete(3)))
