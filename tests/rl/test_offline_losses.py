"""Losses of learning from a dataset against slow loops over rows."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import distrax

import flowrl as fl
from flowrl.errors import SettingError
from flowrl.rl.distributions import Categorical, Gaussian, TanhGaussian
from flowrl.rl.offline_losses import expectile_loss
from flowrl.rl.policies import network
from flowrl.rl.spaces import Spaces

N, D = 12, 2
VALID = np.arange(N) % 4 != 3


def rows(seed=0, discrete=False):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "obs": f(N, 4),
        "next_obs": f(N, 4),
        "action": rng.integers(0, 3, N) if discrete else np.tanh(f(N, D)),
        "reward": f(N),
        "discount": np.float32(0.9) * (rng.random(N) < 0.7),
        "valid": VALID,
    }


def mean(x):
    return np.mean([y for y, valid in zip(x, VALID, strict=True) if valid])


def choosing(params, obs):
    logits = obs @ params["logits"]
    return Categorical(logits), obs @ params["value"]


CHOOSING = {
    "logits": np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32),
    "value": np.random.default_rng(2).normal(size=4).astype(np.float32),
}


def test_behaviour_cloning_is_the_mean_of_log_likelihoods():
    batch = rows(discrete=True)
    loss, metrics = fl.losses.BCLoss()(choosing, CHOOSING, batch)
    logp = distrax.Categorical(batch["obs"] @ CHOOSING["logits"]).log_prob(batch["action"])
    assert loss == pytest.approx(-mean(logp), rel=1e-5) and metrics["loss/policy"] == loss


@pytest.mark.parametrize("state", [{"square": 0.0, "seen": 0.0}, {"square": 0.3, "seen": 0.2}])
def test_marwil_is_that_of_a_slow_loop(state):
    batch, loss = rows(discrete=True), fl.losses.MARWILLoss(beta=2.0, vf_coef=0.5, max_weight=3.0)
    given = {**batch, **{name: jnp.float32(x) for name, x in state.items()}}
    total, metrics = loss(choosing, CHOOSING, given)
    value, after = batch["obs"] @ CHOOSING["value"], batch["next_obs"] @ CHOOSING["value"]
    advantage = batch["reward"] + batch["discount"] * after - value
    square = state["square"] / state["seen"] if state["seen"] else mean(advantage**2)
    weight = np.minimum(np.exp(2 * advantage / np.sqrt(square)), 3.0)
    logp = distrax.Categorical(batch["obs"] @ CHOOSING["logits"]).log_prob(batch["action"])
    assert total == pytest.approx(mean(-weight * logp) + 0.5 * 0.5 * mean(advantage**2), rel=1e-4)
    assert metrics["weight_mean"] == pytest.approx(mean(weight), rel=1e-4)
    new = loss.adapt(state, {"advantage_square": mean(advantage**2)})
    wanted = 0.99 * state["square"] + 0.01 * mean(advantage**2)
    assert new["square"] == pytest.approx(wanted, rel=1e-5)
    assert new["seen"] == pytest.approx(0.99 * state["seen"] + 0.01)


def test_marwil_with_beta_0_is_behaviour_cloning():
    batch = {**rows(discrete=True), "square": jnp.float32(0), "seen": jnp.float32(0)}
    _, metrics = fl.losses.MARWILLoss(beta=0.0)(choosing, CHOOSING, batch)
    cloning, _ = fl.losses.BCLoss()(choosing, CHOOSING, batch)
    assert metrics["loss/policy"] == pytest.approx(float(cloning), rel=1e-6)


def critics(params, obs, action, method):
    assert method == "critic"
    both = jnp.concatenate([obs, action], -1)
    return jnp.stack([both @ params["one"], both @ params["two"]])


def weights(seed):
    f = lambda *shape: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    shapes = {"mean": (4, D), "value": (4,), "one": (4 + D,), "two": (4 + D,)}
    return {name: f(*shape) * (i + 1) for i, (name, shape) in enumerate(shapes.items())}


def implicit(params, *args, method=""):
    if method:
        return critics(params, *args, method=method)
    (obs,) = args
    return Gaussian(obs @ params["mean"], jnp.full((len(obs), D), -0.5)), obs @ params["value"]


def test_iql_is_that_of_a_slow_loop():
    batch, params, target = rows(), weights(1), weights(2)
    loss = fl.losses.IQLLoss(expectile=0.8, beta=2.0, max_weight=5.0)
    total, metrics = loss(implicit, params, {**batch, "target_params": target})
    policies, values, judges = [], [], []
    for i in range(N):
        obs, after, action = batch["obs"][i], batch["next_obs"][i], batch["action"][i]
        both = np.concatenate([obs, action])
        judged = min(both @ target["one"], both @ target["two"])
        gap = judged - obs @ params["value"]
        values.append((0.8 if gap > 0 else 0.2) * gap**2)
        wanted = batch["reward"][i] + batch["discount"][i] * (after @ params["value"])
        judges.append(sum((both @ params[name] - wanted) ** 2 / 2 for name in ("one", "two")))
        logp = distrax.MultivariateNormalDiag(obs @ params["mean"], np.full(D, np.exp(-0.5)))
        policies.append(-min(np.exp(2 * gap), 5.0) * logp.log_prob(action))
    parts = {"policy": policies, "value": values, "critic": judges}
    for name, each in parts.items():
        assert metrics[f"loss/{name}"] == pytest.approx(mean(each), rel=1e-4), name
    assert total == pytest.approx(sum(map(mean, parts.values())), rel=1e-4)


def test_each_part_of_iql_trains_its_own_parameters_and_no_others():
    batch, params = {**rows(), "target_params": weights(2)}, weights(1)

    def gradient(part):
        of = lambda p: fl.losses.IQLLoss()(implicit, p, batch)[1][f"loss/{part}"]
        found = jax.grad(of)(params)
        return {name for name, x in found.items() if np.abs(x).max() > 0}

    assert gradient("policy") == {"mean"}
    assert gradient("value") == {"value"}
    assert gradient("critic") == {"one", "two"}


def test_the_expectile_loss_has_its_least_mean_at_the_expectile():
    x = np.random.default_rng(0).normal(size=1000)
    grid = np.linspace(-2, 2, 4001)
    of = lambda tau: grid[np.argmin([expectile_loss(x - v, tau).mean() for v in grid])]
    assert of(0.5) == pytest.approx(x.mean(), abs=2e-3)
    low, high = of(0.1), of(0.9)
    # At the expectile, weighed distances above and below are equal.
    for tau, v in ((0.1, low), (0.9, high)):
        above, below = np.maximum(x - v, 0).sum(), np.maximum(v - x, 0).sum()
        assert tau * above == pytest.approx((1 - tau) * below, rel=0.01)


def squashed(params, *args, method=""):
    if method == "log_alpha":
        return params["log_alpha"]
    if method:
        return critics(params, *args, method=method)
    (obs,) = args
    # It is as broad as that it comes to all actions.
    means, log_std = 0.2 * obs @ params["mean"], jnp.full((len(obs), D), 0.0)
    return TanhGaussian(means, log_std), jnp.zeros(len(obs))


CQL = {**weights(1), "log_alpha": np.float32(0.1)}


def conserving(seed=0):
    return {
        **rows(),
        "target_params": weights(2),
        "seed": np.asarray(jax.random.bits(jax.random.key(seed), (N, 2))),
    }


def losses(loss, batch):
    """The loss, its metrics, and the gradients of its conservative part."""

    @jax.jit
    def all_of_it(params, batch):
        gap = lambda p: loss(squashed, p, batch)[1].get("loss/conservative", 0.0)
        total, metrics = loss(squashed, params, batch)
        return total, metrics, jax.grad(gap)(params)

    total, metrics, gradients = all_of_it(CQL, batch)
    return float(total), float(metrics.get("loss/conservative", 0)), gradients


def test_cql_adds_to_sac_what_is_above_the_actions_of_the_data():
    batch = conserving()
    total, gap, gradients = losses(fl.losses.CQLLoss(2.0, 4), batch)
    sac, _, _ = losses(fl.losses.SACLoss(), batch)
    assert total - sac == pytest.approx(2 * gap, rel=1e-3)
    # It trains the critics alone.
    assert {k for k, x in gradients.items() if np.abs(x).max() > 0} == {"one", "two"}
    same, other = (losses(fl.losses.CQLLoss(2.0, 4), conserving(seed))[1] for seed in (0, 1))
    assert same == gap != other


def test_the_conservative_part_estimates_the_log_sum_exp_over_all_actions():
    """Against an integral over a grid of actions."""
    batch = conserving()
    _, found, _ = losses(fl.losses.CQLLoss(1.0, 4_000), batch)
    grid = np.stack(np.meshgrid(*[(np.arange(200) + 0.5) / 100 - 1] * D), -1).reshape(-1, D)
    gaps = []
    for i in range(N):
        gap = 0.0
        for name in ("one", "two"):
            of_obs, of_action = batch["obs"][i] @ CQL[name][:4], CQL[name][4:]
            q = of_obs + grid @ of_action
            integral = np.log(np.mean(np.exp(q - q.max())) * 4.0) + q.max()
            gap += integral - of_obs - batch["action"][i] @ of_action
        gaps.append(gap)
    assert found == pytest.approx(mean(gaps), rel=0.03)


def test_the_conservative_part_is_that_of_a_loop_over_rows_and_kinds_of_actions():
    """Uniform ones, and those of the policy at both observations, all judged at the first one."""
    batch, count, gaps = conserving(), 3, []
    _, found, _ = losses(fl.losses.CQLLoss(1.0, count), batch)
    for i in range(N):
        key = jax.random.fold_in(jax.random.wrap_key_data(batch["seed"][i]), 1)
        keys = jax.random.split(key, 3)
        taken = [*np.asarray(jax.random.uniform(keys[0], (count, D), minval=-1.0, maxval=1.0))]
        densities = [0.25] * count
        for obs, each in ((batch["obs"][i], keys[1]), (batch["next_obs"][i], keys[2])):
            for noise in np.float64(jax.random.normal(each, (count, D))):
                action = np.tanh(0.2 * obs @ CQL["mean"] + noise)
                taken.append(action)
                normal = np.exp(-(noise**2) / 2) / np.sqrt(2 * np.pi)
                densities.append(np.prod(normal / (1 - action**2)))
        gap = 0.0
        for name in ("one", "two"):
            *values, seen = (
                np.concatenate([batch["obs"][i], action]) @ CQL[name]
                for action in (*taken, batch["action"][i])
            )
            gap += np.log(np.mean(np.exp(values) / densities)) - seen
        gaps.append(gap)
    assert found == pytest.approx(mean(gaps), rel=1e-4)


BOX = Spaces(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-2, 2, (2,)))


def test_the_network_of_iql_keeps_means_within_finite_bounds():
    module = fl.networks.IQLNetwork(BOX.obs, BOX.action, hidden=(8,), rngs=nnx.Rngs(0))
    outputs, value = module(100 * jnp.ones((5, 3)))
    assert outputs.shape == (5, 4) and value.shape == (5,) and jnp.abs(outputs[:, :2]).max() <= 1
    assert module.critic(jnp.ones((5, 3)), jnp.ones((5, 2))).shape == (2, 5)
    with pytest.raises(fl.errors.PolicyError, match="take MLP with MARWILLoss"):
        fl.networks.IQLNetwork(BOX.obs, gym.spaces.Discrete(2), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (fl.losses.IQLLoss(), "IQLLoss needs .* not MLP; MARWILLoss is for one of n"),
        (fl.losses.CQLLoss(), "CQLLoss needs a policy with critics"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(loss, text):
    import re

    spaces = Spaces(BOX.obs, gym.spaces.Discrete(2))
    assert re.search(text, loss.check(network(fl.Policy(fl.networks.MLP, hidden=(8,)), spaces)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fl.losses.MARWILLoss(beta=-1),
        lambda: fl.losses.MARWILLoss(rate=0),
        lambda: fl.losses.IQLLoss(expectile=1.0),
        lambda: fl.losses.IQLLoss(max_weight=0),
        lambda: fl.losses.CQLLoss(actions=0),
        lambda: fl.losses.CQLLoss(cql_coef=-1),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(SettingError):
        make()


@pytest.mark.parametrize("name", ["SACNetwork", "TD3Network"])
def test_a_policy_without_a_value_is_refused_where_one_is_learned(name):
    policy = fl.Policy(getattr(fl.networks, name))
    for make, way in ((fl.iql, "IQLNetwork"), (fl.marwil, "MLP")):
        with pytest.raises(
            fl.errors.CheckError, match=rf"of which {name} has none .*take fl\.networks\.{way}"
        ):
            make("Pendulum-v1", policy=policy).compile()


def test_what_a_loss_can_not_train_is_refused_before_anything_starts():
    with pytest.raises(fl.errors.CheckError, match=r"IQLLoss needs a policy with a value"):
        fl.iql("Pendulum-v1", policy=fl.Policy(fl.networks.MLP)).compile()
    with pytest.raises(fl.errors.CheckError, match=r"BCLoss trains on single transitions"):
        fl.bc("CartPole-v1", policy=fl.Policy(fl.networks.RNN)).compile()
