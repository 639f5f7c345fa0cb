"""The loss of R2D2 against a slow loop over steps of one environment at a time, and rlax."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rlax

import flowrl as fl
from flowrl.learner.core import core_of
from flowrl.rl.policies import Memory, Weights
from flowrl.rl.returns import n_step_returns
from flowrl.rl.sequence_losses import rescaled, unscaled
from flowrl.rl.spaces import Spaces

T, B, GAMMA = 9, 3, 0.9
SPACES = Spaces(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3))
POLICY = fl.Policy(fl.networks.RecurrentQNetwork, hidden=(4,), cell="gru", size=3)


def core(**settings):
    loss = fl.losses.R2D2Loss(**{"gamma": GAMMA, "n_step": 3, **settings})
    return core_of(POLICY, SPACES, loss, fl.SGD(0.1))


def example(seed=0):
    """Weights, those of a target network, and sequences in which episodes end and begin."""
    rng, net = np.random.default_rng(seed), core().network
    weights, target = (net.init(jax.random.key(seed + i)) for i in range(2))
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    valid, terminated, truncated = np.ones((T, B), bool), *np.zeros((2, T, B), bool)
    # The second column's episode terminates, and its next one is cut; the third is padded.
    terminated[2, 1], valid[3, 1], truncated[7, 1], valid[8, 1] = True, False, True, False
    truncated[4, 2], valid[5:, 2] = True, False
    batch = {
        "obs": f(T, B, 2),
        "action": rng.integers(0, 3, (T, B)).astype(np.int32),
        "reward": 5 * f(T, B) * valid,
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
        "weight": np.tile(rng.random(B).astype(np.float32), (T, 1)),
        "bootstrap_obs": f(B, 2),
        "carry": f(B, 3),
    }
    return weights, target, batch


@jax.jit
def step(weights, obs, memory):
    """The action values of one row of observations, and the carry after it."""
    net = core().network
    return net.apply(weights, obs, memory)[0].logits, net.greedy(weights, obs, memory)[1]


def values_of(weights, batch, column):
    """The action values ``[T + 1, n]`` of one column, a step at a time."""
    obs = np.concatenate([batch["obs"][:, column], batch["bootstrap_obs"][column][None]])
    carry, reset, found = batch["carry"][column][None], False, []
    for t in range(T + 1):
        logits, carry = step(weights, obs[t][None], Memory(carry, np.array([reset])))
        found.append(np.asarray(logits[0], float))
        reset = t < T and not batch["valid"][t, column]
    return np.array(found)


def h(x):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x


def h_inverse(x):
    return np.sign(x) * (((np.sqrt(1 + 4e-3 * (abs(x) + 1 + 1e-3)) - 1) / 2e-3) ** 2 - 1)


def slow(loss, weights, target, batch):
    """Loss and priorities, step by step in float64."""
    total, count, priorities = 0.0, 0, []
    for b in range(B):
        q, q_target = values_of(weights, batch, b), values_of(target, batch, b)
        errors = []
        for t in range(loss.burn_in, T):
            if not batch["valid"][t, b]:
                continue
            returned, discount, k = 0.0, 1.0, t
            while True:
                returned += discount * batch["reward"][k, b]
                discount *= 0.0 if batch["terminated"][k, b] else GAMMA
                over = batch["terminated"][k, b] or batch["truncated"][k, b]
                if over or k - t + 1 == loss.n_step or k == T - 1:
                    break
                k += 1
            best = np.argmax((q if loss.double else q_target)[k + 1])
            value = q_target[k + 1][best]
            returned += discount * (h_inverse(value) if loss.rescale else value)
            error = (h(returned) if loss.rescale else returned) - q[t][batch["action"][t, b]]
            size = abs(error)
            cost = error**2 / 2
            if loss.huber is not None and size > loss.huber:
                cost = loss.huber * (size - loss.huber / 2)
            total, count = total + batch["weight"][0, b] * cost, count + 1
            errors.append(size)
        mean = np.mean(errors) if errors else 0.0
        priorities.append(loss.eta * max(errors, default=0.0) + (1 - loss.eta) * mean)
    return total / count, np.array(priorities)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"double": False},
        {"rescale": False, "n_step": 1, "huber": 0.5},
        {"burn_in": 4, "eta": 0.3},
        {"burn_in": 6, "n_step": 20},
    ],
    ids=str,
)
def test_it_is_what_a_loop_over_steps_finds(settings):
    weights, target, batch = example()
    made = core(**settings)
    (loss, (metrics, _)), _ = jax.jit(made._gradients)(
        weights, (), batch, {"target_params": target.params}
    )
    wanted, priorities = slow(made.loss, weights, target, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    np.testing.assert_allclose(metrics["priority"], priorities, rtol=1e-4, atol=1e-6)


def test_burn_in_gives_the_carry_and_no_gradient():
    weights, _, batch = example(1)
    n, made = 4, core(burn_in=4)
    given = {"target_params": weights.params}
    carry = batch["carry"]
    for t in range(n):
        reset = ~batch["valid"][t - 1] if t else np.zeros(B, bool)
        carry = step(weights, batch["obs"][t], Memory(carry, reset))[1]
    # The row after the burn-in may begin an episode, too.
    carry = jnp.where(batch["valid"][n - 1][:, None], carry, 0.0)
    rest = {name: x[n:] for name, x in batch.items() if name not in ("bootstrap_obs", "carry")}
    rest |= {"bootstrap_obs": batch["bootstrap_obs"], "carry": carry}
    (loss, _), gradients = jax.jit(made._gradients)(weights, (), batch, given)
    (wanted, _), expected = jax.jit(core()._gradients)(weights, (), rest, given)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for name, x in gradients.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-3, atol=1e-6)
        assert np.abs(x).max() > 0


def test_no_gradient_flows_through_the_target():
    """Its values are of the target network, and the choice among them has no gradient."""
    weights, target, batch = example()
    made = core()

    def loss(params, target_params):
        given = {"target_params": target_params}
        return jax.jit(made._gradients)(Weights(params, weights.rest), (), batch, given)[0][0]

    gradients = jax.grad(loss, argnums=1)(weights.params, target.params)
    assert all(np.all(np.asarray(x) == 0) for x in gradients.values())


def test_a_policy_without_memory_learns_from_sequences_too():
    policy = fl.Policy(fl.networks.QNetwork, hidden=(4,))
    _, _, batch = example()
    made = core_of(policy, SPACES, fl.losses.R2D2Loss(GAMMA, 1, 2, rescale=False), fl.SGD(0.1))
    weights, target = made.network.init(jax.random.key(0)), made.network.init(jax.random.key(1))
    (_, (metrics, _)), _ = jax.jit(made._gradients)(
        weights, (), batch, {"target_params": target.params}
    )
    obs = np.concatenate([batch["obs"], batch["bootstrap_obs"][None]])
    q, q_target = (
        np.stack([np.asarray(made.network.apply(w, x)[0].logits) for x in obs])
        for w in (weights, target)
    )
    errors = jax.vmap(jax.vmap(rlax.double_q_learning))(
        q[2:-1],
        batch["action"][2:],
        batch["reward"][2:],
        GAMMA * (1.0 - batch["terminated"][2:]),
        q_target[3:],
        q[3:],
    )
    errors = np.abs(np.where(batch["valid"][2:], errors, 0))
    means = errors.sum(0) / batch["valid"][2:].sum(0)
    np.testing.assert_allclose(
        metrics["priority"], 0.9 * errors.max(0) + 0.1 * means, rtol=1e-4, atol=1e-5
    )


def test_rescaled_values_are_those_of_rlax_and_come_back():
    x = np.float32([-1e4, -30, -1, -1e-3, 0, 1e-3, 0.5, 3, 200, 1e5])
    np.testing.assert_allclose(rescaled(x), rlax.signed_hyperbolic(x, 1e-3), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(unscaled(x), rlax.signed_parabolic(x, 1e-3), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(unscaled(rescaled(x)), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_n_step_returns_are_those_of_rlax_and_two_streams_joined_are_each_alone(n):
    rng = np.random.default_rng(0)
    reward, value = jnp.float32(rng.normal(size=(2, 7)))
    no = jnp.zeros(7, bool)
    mine = n_step_returns(reward, value, no, no, GAMMA, n)
    wanted = rlax.n_step_bootstrapped_returns(reward, np.full(7, np.float32(GAMMA)), value, n)
    np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    over = no.at[-1].set(True)
    for ends in ((over, no), (no, over)):
        twice = [jnp.concatenate([x, x]) for x in (reward, value, *ends)]
        alone = n_step_returns(reward, value, *ends, GAMMA, n)
        np.testing.assert_allclose(
            n_step_returns(*twice, GAMMA, n), np.tile(alone, 2), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gamma": 1.1}, "gamma must be from 0 to 1, got 1.1"),
        ({"eta": -0.1}, "eta must be from 0 to 1"),
        ({"n_step": 0}, "n_step must be at least 1"),
        ({"burn_in": -1}, "burn_in not negative"),
        ({"huber": 0.0}, "huber must be above 0 or None"),
    ],
)
def test_settings_out_of_range(settings, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.losses.R2D2Loss(**settings)


def test_a_burn_in_that_leaves_nothing_to_train_on_is_refused():
    weights, target, batch = example()
    with pytest.raises(fl.errors.ContractError, match=r"burn_in=9 leaves no row of sequences of 9"):
        core(burn_in=9)._gradients(weights, (), batch, {"target_params": target.params})
