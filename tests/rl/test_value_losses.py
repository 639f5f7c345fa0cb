"""Losses of action values against slow loops over rows, rlax and optax.

And the squashed Gaussian against distrax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import distrax, rlax

import flowrl as fl
from flowrl.rl.distributions import Categorical, MultiCategorical, TanhGaussian
from flowrl.rl.value_losses import huber

N, ACTIONS = 12, 3


def values(params, obs):
    return Categorical(obs @ params), (obs @ params).max(-1)


def example(seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    data = {
        "obs": f(N, 4),
        "next_obs": f(N, 4),
        "action": rng.integers(0, ACTIONS, N),
        "reward": f(N),
        "weight": rng.random(N).astype(np.float32),
    }
    return f(4, ACTIONS), {
        **data,
        "discount": np.float32(0.9) * (rng.random(N) < 0.7),
        "valid": np.arange(N) % 4 != 3,
        "target_params": f(4, ACTIONS),
    }


def slow(params, batch, double, delta, weighted):
    """Row by row in float64, over the valid rows only."""
    total, errors = 0.0, []
    for i in range(N):
        q, following = (
            batch["obs"][i].astype(float) @ params,
            batch["next_obs"][i].astype(float) @ batch["target_params"],
        )
        best = (
            np.argmax(batch["next_obs"][i].astype(float) @ params)
            if double
            else np.argmax(following)
        )
        error = batch["reward"][i] + batch["discount"][i] * following[best] - q[batch["action"][i]]
        errors.append(abs(error))
        loss = (
            error**2 / 2
            if delta is None or abs(error) <= delta
            else delta * (abs(error) - delta / 2)
        )
        total += batch["valid"][i] * loss * (batch["weight"][i] if weighted else 1.0)
    return total / batch["valid"].sum(), np.array(errors)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("delta", [None, 0.5])
@pytest.mark.parametrize("double", [False, True])
def test_dqn_is_what_a_loop_over_rows_finds(double, delta, weighted):
    params, batch = example()
    given = batch if weighted else {k: v for k, v in batch.items() if k != "weight"}
    loss, metrics = fl.losses.DQNLoss(double=double, huber=delta)(values, params, given)
    wanted, errors = slow(params, batch, double, delta, weighted)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["priority"], errors, rtol=1e-4, atol=1e-5)


def test_dqn_agrees_with_rlax():
    params, b = example()
    q, following, chooser = (
        b["obs"] @ params,
        b["next_obs"] @ b["target_params"],
        b["next_obs"] @ params,
    )
    error = jax.vmap(rlax.double_q_learning)(
        q, b["action"], b["reward"], b["discount"], following, chooser
    )
    np.testing.assert_allclose(
        fl.losses.DQNLoss()(values, params, b)[1]["priority"], np.abs(error), rtol=1e-4, atol=1e-5
    )


def test_no_gradient_flows_through_the_target_or_an_invalid_row():
    params, b = example()
    grad = jax.grad(lambda p: fl.losses.DQNLoss(huber=None)(values, p, b)[0])(params)
    signed = jax.vmap(rlax.double_q_learning)(
        b["obs"] @ params,
        b["action"],
        b["reward"],
        b["discount"],
        b["next_obs"] @ b["target_params"],
        b["next_obs"] @ params,
    )
    by_hand = np.zeros_like(params)
    for i in np.flatnonzero(b["valid"]):
        by_hand[:, b["action"][i]] -= (
            b["weight"][i] * float(signed[i]) * b["obs"][i] / b["valid"].sum()
        )
    np.testing.assert_allclose(grad, by_hand, rtol=1e-4, atol=1e-6)
    broken = {**b, "reward": np.where(b["valid"], b["reward"], np.nan).astype(np.float32)}
    assert np.isfinite(fl.losses.DQNLoss()(values, params, broken)[0])


AGENTS = 2


def team_values(params, obs, *args, method=""):
    """A team whose agents see one row each, and whose mixer weighs them by their first numbers."""
    if method == "mix":
        return (jnp.abs(obs[..., 0] * params["mix"]) * args[0]).sum(-1) + params["offset"]
    logits = jnp.einsum("bnd,dk->bnk", obs, params["each"])
    return MultiCategorical(logits.reshape(N, -1), (ACTIONS,) * AGENTS), logits.max(-1).sum(-1)


def team_example(seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    made = lambda: {"each": f(4, ACTIONS), "mix": f(AGENTS), "offset": f()}
    _, batch = example(seed)
    data = {"obs": f(N, AGENTS, 4), "next_obs": f(N, AGENTS, 4), "target_params": made()}
    action = rng.integers(0, ACTIONS, (N, AGENTS)).astype(np.int32)
    return made(), {**batch, **data, "action": action}


def slow_team(params, batch, double, delta):
    """QMIX's loss row by row and agent by agent, with the target's mixer (2018, equation 5)."""
    target, total, errors = batch["target_params"], 0.0, []
    for i in range(N):

        def mixed(p, obs, values):
            shares = [abs(float(obs[n, 0] * p["mix"][n])) * values[n] for n in range(AGENTS)]
            return sum(shares) + float(p["offset"])

        after, now = batch["next_obs"][i].astype(float), batch["obs"][i].astype(float)
        best = []
        for n in range(AGENTS):
            chooser = params if double else target
            choice = np.argmax(after[n] @ chooser["each"])
            best.append((after[n] @ target["each"])[choice])
        taken = [(now[n] @ params["each"])[batch["action"][i, n]] for n in range(AGENTS)]
        value = mixed(params, now, taken)
        error = batch["reward"][i] + batch["discount"][i] * mixed(target, after, best) - value
        errors.append(abs(error))
        outside = delta is not None and abs(error) > delta
        loss = delta * (abs(error) - delta / 2) if outside else error**2 / 2
        total += batch["valid"][i] * batch["weight"][i] * loss
    return total / batch["valid"].sum(), np.array(errors)


@pytest.mark.parametrize("delta", [None, 0.5])
@pytest.mark.parametrize("double", [False, True])
def test_the_loss_of_a_team_is_what_a_loop_over_rows_and_agents_finds(double, delta):
    params, batch = team_example()
    loss, metrics = fl.losses.DQNLoss(double=double, huber=delta)(team_values, params, batch)
    wanted, errors = slow_team(params, batch, double, delta)
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    np.testing.assert_allclose(metrics["priority"], errors, rtol=1e-3, atol=1e-4)


def test_a_team_s_loss_trains_its_mixer_and_never_by_way_of_the_target():
    params, b = team_example()
    loss = fl.losses.DQNLoss(huber=None)
    grad = jax.grad(lambda p: loss(team_values, p, b)[0])(params)
    valid, weight = b["valid"], b["weight"]
    error = np.array(loss(team_values, params, b)[1]["priority"])
    target = jax.grad(lambda p: loss(team_values, params, {**b, "target_params": p})[0])
    assert not any(jax.tree.leaves(jax.tree.map(np.any, target(b["target_params"]))))
    # The offset is added to the value, so its gradient is minus the weighted mean of the errors.
    signed = error * np.sign(_signed(params, b))
    np.testing.assert_allclose(
        grad["offset"], -(valid * weight * signed).sum() / valid.sum(), rtol=1e-4
    )
    assert grad["mix"].all() and grad["each"].any()


def _signed(params, batch):
    """The signs of the errors, by moving the offset a little."""
    moved = {**params, "offset": params["offset"] + np.float32(1e-2)}
    loss = fl.losses.DQNLoss(huber=None)
    held = {**batch, "target_params": {**batch["target_params"]}}
    one, two = (loss(team_values, p, held)[1]["priority"] for p in (params, moved))
    return np.asarray(one - two)


def test_huber_is_that_of_optax():
    x = jnp.linspace(-3, 3, 41)
    np.testing.assert_allclose(huber(x, 0.7), optax.losses.huber_loss(x, delta=0.7), rtol=1e-6)


def test_a_squashed_gaussian_is_that_of_distrax():
    rng = np.random.default_rng(0)
    mean, log_std, noise = (jnp.asarray(rng.normal(size=(50, 3)), jnp.float32) for _ in range(3))
    dist = TanhGaussian(mean, log_std / 2)
    oracle = distrax.Transformed(
        distrax.MultivariateNormalDiag(mean, jnp.exp(log_std / 2)), distrax.Block(distrax.Tanh(), 1)
    )
    action, logp = dist.sample_and_log_prob(noise)
    assert (jnp.abs(action) <= 1).all()
    np.testing.assert_allclose(action, dist.sample(noise))
    wanted = oracle.distribution.log_prob(dist.plain.sample(noise)) - distrax.Block(
        distrax.Tanh(), 1
    ).forward_log_det_jacobian(dist.plain.sample(noise))
    np.testing.assert_allclose(logp, wanted, rtol=1e-4, atol=1e-4)
    inside = jnp.abs(action).max(-1) < 0.99
    np.testing.assert_allclose(dist.log_prob(action)[inside], logp[inside], rtol=1e-3, atol=1e-3)
    other = TanhGaussian(mean + 1, log_std)
    np.testing.assert_allclose(dist.kl(other), dist.plain.kl(other.plain))
    with pytest.raises(fl.errors.PolicyError, match="no entropy in closed form"):
        dist.entropy()


# -- SAC, by a policy of which everything is known


def actor_critic(params, *args, method=""):
    if method == "log_alpha":
        return params["log_alpha"]
    if method == "critic":
        obs, action = args
        return jnp.stack(
            [obs @ w + action @ v for w, v in zip(params["w"], params["v"], strict=True)]
        )
    return TanhGaussian(
        args[0] @ params["actor"], jnp.broadcast_to(params["log_std"], (args[0].shape[0], 2))
    ), jnp.zeros(args[0].shape[0])


def sac_example(seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    made = lambda: {
        "actor": f(4, 2) / 2,
        "log_std": f(2) / 2,
        "w": f(2, 4),
        "v": f(2, 2),
        "log_alpha": np.float32(-0.5),
    }
    data = {
        "obs": f(N, 4),
        "next_obs": f(N, 4),
        "action": np.tanh(f(N, 2)),
        "reward": f(N),
        "discount": np.float32(0.9) * (rng.random(N) < 0.7),
        "weight": rng.random(N).astype(np.float32),
    }
    return made(), {
        **data,
        "valid": np.arange(N) % 4 != 3,
        "seed": rng.integers(2**32, size=(N, 2), dtype=np.uint32),
        "target_params": made(),
    }


def test_sac_is_what_a_loop_over_rows_finds():
    params, b = sac_example()
    loss, metrics = fl.losses.SACLoss()(actor_critic, params, b)
    noise = [
        jax.random.normal(jax.random.wrap_key_data(jnp.asarray(seed)), (2, 2)) for seed in b["seed"]
    ]
    now, then = np.moveaxis(np.array(noise), 1, 0)
    alpha, sums = np.exp(-0.5), dict.fromkeys(("critic", "actor", "logp"), 0.0)
    for i in np.flatnonzero(b["valid"]):
        draws = []
        for obs, noise in ((b["obs"][i], now[i]), (b["next_obs"][i], then[i])):
            before = obs @ params["actor"] + np.exp(params["log_std"]) * noise
            density = (
                -0.5 * np.asarray(noise) ** 2
                - params["log_std"]
                - 0.5 * np.log(2 * np.pi)
                - np.log(1 - np.tanh(before) ** 2)
            )
            draws.append((np.tanh(before), density.sum()))
        (action, logp), (next_action, next_logp) = draws
        judge = lambda p, obs, a: np.array([obs @ p["w"][k] + a @ p["v"][k] for k in range(2)])
        target = b["reward"][i] + b["discount"][i] * (
            judge(b["target_params"], b["next_obs"][i], next_action).min() - alpha * next_logp
        )
        error = judge(params, b["obs"][i], b["action"][i]) - target
        np.testing.assert_allclose(metrics["priority"][i], abs(error).mean(), rtol=1e-4)
        # Importance weights are those of the critics' errors alone.
        sums["critic"] += b["weight"][i] * (error**2).sum() / 2
        sums["actor"] += alpha * logp - judge(params, b["obs"][i], action).min()
        sums["logp"] += logp
    n = b["valid"].sum()
    price = -0.5 * (-sums["logp"] / n + 2)
    np.testing.assert_allclose(metrics["loss/critic"], sums["critic"] / n, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss/actor"], sums["actor"] / n, rtol=1e-4)
    np.testing.assert_allclose(loss, (sums["critic"] + sums["actor"]) / n + price, rtol=1e-4)


def test_each_part_of_sac_trains_its_own_parameters():
    params, b = sac_example()
    grad = jax.grad(lambda p: fl.losses.SACLoss()(actor_critic, p, b)[0])(params)
    critic = jax.grad(lambda p: fl.losses.SACLoss()(actor_critic, p, b)[1]["loss/critic"])(params)
    actor = jax.grad(lambda p: fl.losses.SACLoss()(actor_critic, p, b)[1]["loss/actor"])(params)
    for name in ("w", "v"):
        np.testing.assert_allclose(grad[name], critic[name], rtol=1e-5)
        assert not actor[name].any() and critic[name].any()
    for name in ("actor", "log_std"):
        np.testing.assert_allclose(grad[name], actor[name], rtol=1e-5)
        assert not critic[name].any() and actor[name].any()
    entropy = fl.losses.SACLoss()(actor_critic, params, b)[1]["entropy"]
    np.testing.assert_allclose(grad["log_alpha"], entropy + 2, rtol=1e-5)
    assert actor["log_alpha"] == critic["log_alpha"] == 0
