"""Losses of distributions of returns against slow loops over rows and atoms, and rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rlax

import flowrl as fl
from flowrl.rl.actions import RULED_OUT
from flowrl.rl.distributional_losses import projected
from flowrl.rl.distributions import Categorical

N, ACTIONS, ATOMS = 12, 3, 7
SUPPORT = np.linspace(-2.0, 4.0, ATOMS, dtype=np.float32)


def c51(params, *args, method=""):
    """A policy whose logits are linear in the observation."""
    if method == "support":
        return jnp.asarray(SUPPORT)
    logits = jnp.einsum("no,oak->nak", args[0], params)
    values = jax.nn.softmax(logits) @ SUPPORT
    return logits if method == "returns" else (Categorical(values), values.max(-1))


def quantiles(params, obs, *, method=""):
    """A policy whose quantiles are linear in the observation."""
    numbers = jnp.einsum("no,oak->nak", obs, params)
    values = numbers.mean(-1)
    return numbers if method == "returns" else (Categorical(values), values.max(-1))


def example(seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return f(4, ACTIONS, ATOMS), {
        "obs": f(N, 4),
        "next_obs": f(N, 4),
        "action": rng.integers(0, ACTIONS, N),
        "reward": 2 * f(N),
        "weight": rng.random(N).astype(np.float32),
        "discount": np.float32(0.9) * (rng.random(N) < 0.7),
        "valid": np.arange(N) % 4 != 3,
        "target_params": f(4, ACTIONS, ATOMS),
    }


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def slow_c51(params, b, double):
    """Algorithm 1 of Bellemare et al. (2017), row by row and atom by atom in float64."""
    z, total, priorities = SUPPORT.astype(float), 0.0, []
    apart = z[1] - z[0]
    for i in range(N):
        after = [
            [softmax(b["next_obs"][i].astype(float) @ p[:, a]) for a in range(ACTIONS)]
            for p in (params.astype(float), b["target_params"].astype(float))
        ]
        means = [[p @ z for p in of_net] for of_net in after]
        best = int(np.argmax(means[0] if double else means[1]))
        m = np.zeros(ATOMS)
        for j in range(ATOMS):
            moved = np.clip(b["reward"][i] + b["discount"][i] * z[j], z[0], z[-1])
            place = (moved - z[0]) / apart
            low, high = int(np.floor(place)), int(np.ceil(place))
            probability = after[1][best][j]
            if low == high:
                m[low] += probability
            else:
                m[low] += probability * (high - place)
                m[high] += probability * (place - low)
        now = softmax(b["obs"][i].astype(float) @ params[:, b["action"][i]].astype(float))
        cross_entropy = -(m * np.log(now)).sum()
        priorities.append(sum(x * np.log(x / y) for x, y in zip(m, now, strict=True) if x > 0))
        total += b["valid"][i] * b["weight"][i] * cross_entropy
    return total / b["valid"].sum(), np.array(priorities)


def slow_quantiles(params, b, double, delta):
    """Algorithm 1 of Dabney et al. (2018), row by row and pair by pair in float64."""
    total, priorities = 0.0, []
    for i in range(N):
        new, old = (
            np.einsum("o,oak->ak", b["next_obs"][i].astype(float), p.astype(float))
            for p in (params, b["target_params"])
        )
        best = int(np.argmax((new if double else old).mean(-1)))
        theta = b["obs"][i].astype(float) @ params[:, b["action"][i]].astype(float)
        loss, sizes = 0.0, []
        for k in range(ATOMS):
            for j in range(ATOMS):
                u = b["reward"][i] + b["discount"][i] * old[best, j] - theta[k]
                size = abs(u)
                if delta is not None:
                    inside = abs(u) <= delta
                    size = u**2 / 2 if inside else delta * (abs(u) - delta / 2)
                loss += abs((k + 0.5) / ATOMS - (u < 0)) * size / ATOMS
                sizes.append(abs(u))
        priorities.append(np.mean(sizes))
        total += b["valid"][i] * b["weight"][i] * loss
    return total / b["valid"].sum(), np.array(priorities)


@pytest.mark.parametrize("double", [False, True])
def test_c51_is_what_a_loop_over_rows_and_atoms_finds(double):
    params, b = example()
    loss, metrics = fl.losses.C51Loss(double=double)(c51, params, b)
    wanted, priorities = slow_c51(params, b, double)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["priority"], priorities, rtol=1e-4, atol=1e-5)
    other = slow_c51(params, b, not double)[0]
    assert abs(other - wanted) > 1e-3, "the example knows both ways apart"


@pytest.mark.parametrize("delta", [None, 0.5])
@pytest.mark.parametrize("double", [False, True])
def test_quantile_regression_is_what_a_loop_over_pairs_finds(double, delta):
    params, b = example()
    loss, metrics = fl.losses.QRLoss(double=double, huber=delta)(quantiles, params, b)
    wanted, priorities = slow_quantiles(params, b, double, delta)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["priority"], priorities, rtol=1e-4, atol=1e-5)
    assert abs(slow_quantiles(params, b, not double, delta)[0] - wanted) > 1e-3


def without_weights(b):
    return {name: x for name, x in b.items() if name != "weight"}


@pytest.mark.filterwarnings("ignore:Rlax categorical_cross_entropy")
def test_c51_agrees_with_rlax():
    params, b = example()
    now, new, old = (
        c51(p, b[name], method="returns")
        for p, name in ((params, "obs"), (params, "next_obs"), (b["target_params"], "next_obs"))
    )
    fields = (b["action"], b["reward"], b["discount"])
    double = jax.vmap(
        lambda x, a, r, d, y, q: rlax.categorical_double_q_learning(
            SUPPORT, x, a, r, d, SUPPORT, y, q
        )
    )(now, *fields, old, jax.nn.softmax(new) @ SUPPORT)
    single = jax.vmap(
        lambda x, a, r, d, y: rlax.categorical_q_learning(SUPPORT, x, a, r, d, SUPPORT, y)
    )(now, *fields, old)
    for wanted, loss in ((double, fl.losses.C51Loss()), (single, fl.losses.C51Loss(double=False))):
        mean = wanted[b["valid"]].mean()
        np.testing.assert_allclose(loss(c51, params, without_weights(b))[0], mean, rtol=1e-5)


@pytest.mark.parametrize("delta", [None, 0.5])
def test_quantile_regression_agrees_with_rlax(delta):
    params, b = example()
    middles = jnp.broadcast_to((jnp.arange(ATOMS) + 0.5) / ATOMS, (N, ATOMS))
    now, new, old = (
        jnp.moveaxis(quantiles(p, b[name], method="returns"), 1, 2)
        for p, name in ((params, "obs"), (params, "next_obs"), (b["target_params"], "next_obs"))
    )
    huber = jnp.full(N, 0.0 if delta is None else delta)
    loss = jax.vmap(rlax.quantile_q_learning, in_axes=(0, 0, 0, 0, 0, 0, 0, None))
    wanted = loss(now, middles, b["action"], b["reward"], b["discount"], new, old, float(huber[0]))
    found = fl.losses.QRLoss(huber=delta)(quantiles, params, without_weights(b))[0]
    np.testing.assert_allclose(found, wanted[b["valid"]].mean(), rtol=1e-5)


def test_a_projection_is_that_of_rlax_and_keeps_the_mean_of_what_lies_inside():
    rng = np.random.default_rng(1)
    returns = rng.uniform(-4, 6, (50, ATOMS)).astype(np.float32)
    p = rng.dirichlet(np.ones(ATOMS), 50).astype(np.float32)
    found = projected(returns, p, jnp.asarray(SUPPORT))
    wanted = jax.vmap(rlax.categorical_l2_project, in_axes=(0, 0, None))(
        np.sort(returns, axis=-1), np.take_along_axis(p, np.argsort(returns), -1), SUPPORT
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    inside = np.clip(returns, -2, 4)
    np.testing.assert_allclose(found @ SUPPORT, (inside * p).sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "policy"),
    [(fl.losses.C51Loss(), c51), (fl.losses.QRLoss(), quantiles)],
    ids=["c51", "quantile"],
)
def test_no_gradient_flows_through_the_target_or_an_invalid_row(loss, policy):
    params, b = example()
    of_target = jax.grad(lambda p: loss(policy, params, {**b, "target_params": p})[0])
    assert not np.any(of_target(b["target_params"]))
    of_priority = jax.grad(lambda p: loss(policy, p, b)[1]["priority"].sum())(params)
    assert not np.any(of_priority)
    # The observations after a step have a part in the target alone, which trains nothing.
    grad = jax.grad(lambda p, b: loss(policy, p, b)[0])(params, b)
    only = {**b, "obs": np.where(b["valid"][:, None], b["obs"], 9).astype(np.float32)}
    np.testing.assert_allclose(
        jax.grad(lambda p: loss(policy, p, only)[0])(params), grad, atol=1e-6
    )
    broken = {**b, "reward": np.where(b["valid"], b["reward"], np.nan).astype(np.float32)}
    assert np.isfinite(loss(policy, params, broken)[0])


@pytest.mark.parametrize(
    ("loss", "policy"),
    [(fl.losses.C51Loss(), c51), (fl.losses.QRLoss(), quantiles)],
    ids=["c51", "quantile"],
)
def test_a_next_action_that_is_ruled_out_is_not_evaluated(loss, policy):
    params, b = example()

    def masked(p, *args, method=""):
        found = policy(p, *args, method=method)
        if method:
            return found
        logits = found[0].logits.at[:, 1:].set(RULED_OUT)
        return Categorical(logits), logits.max(-1)

    other = b["target_params"].copy()
    other[:, 1:] += 5
    one, two = (
        loss(masked, params, {**b, "target_params": p})[0] for p in (b["target_params"], other)
    )
    assert one == two != loss(policy, params, b)[0]


def test_quantile_regression_finds_the_quantiles_of_random_rewards():
    """Gradient descent on one state with rewards 0 and 1: quantiles below 0.3 are 0, above it 1."""
    rng = np.random.default_rng(0)
    n, atoms = 200, 10
    rewards = (np.arange(n) >= 0.3 * n).astype(np.float32)
    rng.shuffle(rewards)
    b = {
        "obs": np.ones((n, 1), np.float32),
        "next_obs": np.ones((n, 1), np.float32),
        "action": np.zeros(n, int),
        "reward": rewards,
        "discount": np.zeros(n, np.float32),
        "valid": np.ones(n, bool),
        "target_params": np.zeros((1, 1, atoms), np.float32),
    }
    loss = fl.losses.QRLoss(huber=0.05)
    step = jax.jit(jax.grad(lambda p: loss(quantiles, p, b)[0]))
    p = jnp.full((1, 1, atoms), 0.5)
    for _ in range(300):
        p = p - step(p)
    np.testing.assert_allclose(p[0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1], atol=0.1)


def misfit(loss, **settings):
    policy = fl.Policy(fl.networks.QNetwork, hidden=(8,), **settings)
    graph = fl.dqn("CartPole-v1", policy=policy).set("learner.loss", loss)
    with pytest.raises(fl.errors.CheckError) as error:
        graph.check()
    return str(error.value)


C51, QUANTILES = {"atoms": 5, "v_min": 0.0, "v_max": 1.0}, {"atoms": 5}


@pytest.mark.parametrize(
    ("loss", "settings", "says"),
    [
        (fl.losses.C51Loss(), {}, "needs a policy with distributions of returns"),
        (fl.losses.C51Loss(), QUANTILES, "QRLoss is for quantiles"),
        (fl.losses.QRLoss(), {}, "DQNLoss is for action values alone"),
        (fl.losses.QRLoss(), C51, "C51Loss is for categorical distributions"),
        (fl.losses.DQNLoss(), C51, "take C51Loss or QRLoss, or leave its atoms out"),
        (fl.losses.DQNLoss(), QUANTILES, "would train only the means of the distributions"),
    ],
)
def test_a_network_that_does_not_fit_the_loss_is_reported(loss, settings, says):
    assert says in misfit(loss, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"atoms": 5, "v_min": 0.0}, "needs atoms, v_min and v_max"),
        ({"v_min": 0.0, "v_max": 1.0}, "needs atoms, v_min and v_max"),
        ({"atoms": 1, "v_min": 0.0, "v_max": 1.0}, "at least 2 atoms"),
        ({"atoms": 5, "v_min": 1.0, "v_max": 1.0}, "from v_min up to v_max"),
        ({"atoms": 0}, "at least 1 atom"),
    ],
)
def test_settings_of_distributions_that_make_no_sense_are_refused(settings, says):
    with pytest.raises(fl.errors.FlowrlError, match=says):
        fl.dqn(policy=fl.Policy(fl.networks.QNetwork, **settings)).check()


def test_an_unknown_distribution_and_a_wrong_huber_are_refused():
    with pytest.raises(fl.errors.SettingError, match="quantil"):
        fl.dqn(distribution="quantil")
    with pytest.raises(fl.errors.SettingError, match="huber must be above 0"):
        fl.losses.QRLoss(huber=0.0)
