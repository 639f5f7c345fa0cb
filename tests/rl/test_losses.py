"""Losses against slow loops over rows, and against rlax; and invalid rows.

And what adapts, and what stops an update.
"""

import re
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rlax

import flowrl as fl
from flowrl.rl.distributions import Categorical, Gaussian
from flowrl.rl.function_loss import FunctionLoss, as_loss
from flowrl.rl.masked import mean
from flowrl.rl.policies import network
from flowrl.rl.returns import vtrace
from flowrl.rl.spaces import Spaces

N, ACTIONS = 12, 3


def discrete(params, obs):
    return Categorical(obs @ params["actor"]), obs @ params["critic"]


def continuous(params, obs):
    return Gaussian(
        obs @ params["actor"], jnp.broadcast_to(params["log_std"], (*obs.shape[:-1], ACTIONS))
    ), obs @ params["critic"]


def example(seed=0, off=0.5):
    """Parameters, and rows of which a third is invalid; `off`: how far the policy moved since it
    acted."""
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"actor": f(4, ACTIONS), "critic": f(4), "log_std": f(ACTIONS) / 2}
    obs, action = f(N, 4), rng.integers(0, ACTIONS, N).astype(np.int32)
    logp = np.asarray(discrete(params, obs)[0].log_prob(jnp.asarray(action))) + off * f(N)
    value = obs @ params["critic"] + f(N)
    valid = np.arange(N) % 3 != 2
    return params, {
        "obs": obs,
        "action": action,
        "logp": logp,
        "value": value,
        "advantage": f(N),
        "target": f(N),
        "valid": valid,
    }


@partial(jax.jit, static_argnums=(0, 1))
def gradients(loss, policy, params, batch):
    return jax.value_and_grad(lambda p: loss(policy, p, {**batch, "kl_weight": 0.5}), has_aux=True)(
        params
    )


def slow_ppo(params, batch, clip, value, value_clip, entropy, kl_weight):
    """Row by row in float64, over the valid rows only."""
    sums = dict.fromkeys(("policy", "value", "entropy", "kl", "clipped"), 0.0)
    rows = np.flatnonzero(batch["valid"])
    for i in rows:
        logits = batch["obs"][i].astype(float) @ params["actor"]
        p = np.exp(logits) / np.exp(logits).sum()
        ratio = p[batch["action"][i]] / np.exp(batch["logp"][i])
        nearest = min(max(ratio, 1 - clip), 1 + clip)
        advantage = batch["advantage"][i]
        sums["policy"] -= min(ratio * advantage, nearest * advantage)
        sums["clipped"] += nearest != ratio
        sums["kl"] += ratio - 1 - np.log(ratio)
        sums["entropy"] -= (p * np.log(p)).sum()
        v, old, target = (
            batch["obs"][i].astype(float) @ params["critic"],
            batch["value"][i],
            batch["target"][i],
        )
        error = (v - target) ** 2
        if value_clip is not None:
            error = max(error, (old + min(max(v - old, -value_clip), value_clip) - target) ** 2)
        sums["value"] += error / 2
    m = {k: x / len(rows) for k, x in sums.items()}
    total = m["policy"] + value * m["value"] - entropy * m["entropy"] + kl_weight * m["kl"]
    return total, {
        "loss/policy": m["policy"],
        "loss/value": m["value"],
        "entropy": m["entropy"],
        "kl": m["kl"],
        "clip_fraction": m["clipped"],
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_ratio": 0.05},
        {"clip_ratio": 0.4, "vf_coef": 0.0, "ent_coef": 0.1},
        {"vf_coef": 1.0, "value_clip": 0.3},
        {"kl_penalty_target": 0.01, "ent_coef": 0.02},
    ],
    ids=str,
)
def test_ppo_equals_a_loop_over_valid_rows(settings):
    params, batch = example()
    loss = fl.losses.PPOLoss(**settings)
    found, metrics = loss(discrete, params, {**batch, "kl_weight": 0.5})
    weight = 0.5 if loss.kl_penalty_target else 0.0
    wanted, parts = slow_ppo(
        params, batch, loss.clip_ratio, loss.vf_coef, loss.value_clip, loss.ent_coef, weight
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    for name, number in parts.items():
        np.testing.assert_allclose(metrics[name], number, rtol=1e-4, atol=1e-6)
    assert 0 < metrics["clip_fraction"] <= 1


def test_ppo_jitted_equals_plain():
    params, batch = example()
    loss = fl.losses.PPOLoss(value_clip=0.3, ent_coef=0.01)
    run = lambda params, batch: loss(discrete, params, batch)
    for a, b in zip(
        jax.tree.leaves(run(params, batch)),
        jax.tree.leaves(jax.jit(run)(params, batch)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.1, 0.4])
def test_the_policy_part_of_ppo_and_its_gradient_equal_rlax(clip):
    params, batch = example()
    batch = {**batch, "valid": np.ones(N, bool)}

    @jax.jit
    @jax.value_and_grad
    def ours(params):
        return fl.losses.PPOLoss(clip_ratio=clip)(discrete, params, batch)[1]["loss/policy"]

    @jax.jit
    @jax.value_and_grad
    def theirs(params):
        ratio = jnp.exp(
            discrete(params, batch["obs"])[0].log_prob(jnp.asarray(batch["action"])) - batch["logp"]
        )
        return rlax.clipped_surrogate_pg_loss(ratio, jnp.asarray(batch["advantage"]), clip)

    (a, grad_a), (b, grad_b) = ours(params), theirs(params)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(grad_a["actor"], grad_b["actor"], rtol=1e-4, atol=1e-6)


def test_no_gradient_flows_through_a_ratio_that_already_left_the_clip_range():
    ratio = np.array([0.5, 0.5, 1.5, 1.5, 1.1, 0.9], np.float32)
    advantage = np.array([-1, 1, 1, -1, 1, -1], np.float32)
    obs, rows = np.zeros((6, 4), np.float32), jnp.zeros(6)
    batch = {
        "obs": obs,
        "action": np.zeros((6, 1), np.float32),
        "valid": np.ones(6, bool),
        "advantage": advantage,
        "value": rows,
        "target": rows,
    }

    class Fixed:
        """A policy whose ratio to the old one is what its parameters say."""

        def __init__(self, logp):
            self.logp = logp

        def log_prob(self, action):
            return self.logp

        def entropy(self):
            return jnp.zeros(6)

    def loss(log_ratio):
        return fl.losses.PPOLoss(clip_ratio=0.2, vf_coef=0.0)(
            lambda params, obs: (Fixed(params), rows), log_ratio, {**batch, "logp": rows}
        )[0]

    np.testing.assert_allclose(
        jax.grad(loss)(jnp.log(ratio)),
        [0, -0.5 / 6, 0, 1.5 / 6, -1.1 / 6, 0.9 / 6],
        rtol=1e-5,
        atol=1e-7,
    )


def slow_pg(params, batch, value, entropy):
    total = 0.0
    rows = np.flatnonzero(batch["valid"])
    for i in rows:
        logits = batch["obs"][i].astype(float) @ params["actor"]
        p = np.exp(logits) / np.exp(logits).sum()
        error = (batch["obs"][i].astype(float) @ params["critic"] - batch["target"][i]) ** 2
        total += (
            -np.log(p[batch["action"][i]]) * batch["advantage"][i]
            + value * error / 2
            + entropy * (p * np.log(p)).sum()
        )
    return total / len(rows)


@pytest.mark.parametrize("settings", [{}, {"vf_coef": 0.25, "ent_coef": 0.1}], ids=str)
def test_pg_equals_a_loop_over_valid_rows(settings):
    params, batch = example()
    loss = fl.losses.PGLoss(**settings)
    (found, metrics), _ = gradients(loss, discrete, params, batch)
    np.testing.assert_allclose(
        found, slow_pg(params, batch, loss.vf_coef, loss.ent_coef), rtol=1e-4
    )
    np.testing.assert_allclose(metrics["loss/policy"], slow_pg(params, batch, 0, 0), rtol=1e-4)


def test_the_pg_gradient_of_the_logits_is_probability_minus_choice_times_advantage():
    params, batch = example()
    found = gradients(fl.losses.PGLoss(), discrete, params, batch)[1]["actor"]
    chosen = np.eye(ACTIONS)[batch["action"]]
    of_logits = (
        (jax.nn.softmax(batch["obs"] @ params["actor"]) - chosen)
        * (batch["advantage"] * batch["valid"])[:, None]
        / batch["valid"].sum()
    )
    np.testing.assert_allclose(found, batch["obs"].T @ of_logits, rtol=1e-4, atol=1e-6)


LOSSES = {
    "ppo": fl.losses.PPOLoss(ent_coef=0.01, value_clip=0.2, kl_penalty_target=0.01, target_kl=0.1),
    "pg": fl.losses.PGLoss(ent_coef=0.01),
}


def filled(batch, fields, filler):
    """The batch with `filler` in these fields of its invalid rows."""
    out = dict(batch)
    for k in fields:
        invalid = ~batch["valid"].reshape(-1, *[1] * (batch[k].ndim - 1))
        out[k] = np.where(invalid, np.asarray(filler).astype(batch[k].dtype), batch[k])
    return out


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradient_are_those_of_the_valid_rows_alone(kind):
    params, batch = example()
    alone = {k: v[batch["valid"]] for k, v in batch.items()}
    for a, b in zip(
        *(jax.tree.leaves(gradients(LOSSES[kind], discrete, params, b)) for b in (batch, alone)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("filler", [1e30, -1e30])
@pytest.mark.parametrize("kind", LOSSES)
def test_invalid_rows_change_neither_loss_nor_gradient_whatever_they_hold(kind, filler):
    params, batch = example()
    assert_same(
        *(
            gradients(
                LOSSES[kind],
                discrete,
                params,
                filled(batch, ["logp", "value", "advantage", "target"], x),
            )
            for x in (0, filler)
        )
    )


@pytest.mark.parametrize("kind", LOSSES)
def test_invalid_rows_of_continuous_actions_change_neither_loss_nor_gradient(kind):
    params, batch = example()
    batch["action"] = np.random.default_rng(1).normal(size=(N, ACTIONS)).astype(np.float32)
    assert_same(
        *(
            gradients(
                LOSSES[kind],
                continuous,
                params,
                filled(batch, [k for k in batch if k != "valid"], x),
            )
            for x in (0, 1e6)
        )
    )


@pytest.mark.parametrize("kind", LOSSES)
def test_a_batch_without_a_valid_row_has_loss_and_gradient_zero(kind):
    params, batch = example()
    batch["valid"] = np.zeros(N, bool)
    (loss, metrics), grads = gradients(LOSSES[kind], discrete, params, batch)
    assert loss == 0 and metrics["entropy"] == 0 and all((g == 0).all() for g in grads.values())


def test_mean_weighs_rows():
    x, weight = jnp.array([1.0, 2.0, jnp.nan, 6.0]), jnp.array([1.0, 1.0, 0.0, 2.0])
    assert mean(x, weight) == (1 + 2 + 12) / 4
    assert mean(x, weight > 0) == 3


def test_mean_is_zero_where_all_weights_are_zero():
    assert mean(jnp.array([1.0, jnp.nan]), jnp.zeros(2)) == 0


def test_mean_of_weights_that_sum_to_less_than_one():
    np.testing.assert_allclose(mean(jnp.array([2.0, 4.0]), jnp.array([0.25, 0.25])), 3.0)


TARGET = 0.01


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (1.6 * TARGET, 2),
        (1.4 * TARGET, 1),
        (TARGET, 1),
        (TARGET / 1.4, 1),
        (TARGET / 1.6, 0.5),
        (0.0, 0.5),
    ],
    ids=str,
)
def test_the_kl_penalty_doubles_above_its_target_and_halves_below(kl, factor):
    loss = fl.losses.PPOLoss(kl_penalty_target=TARGET)
    first = loss.init()
    assert first["kl_weight"] == np.float32(0.2)
    np.testing.assert_allclose(
        loss.adapt(first, {"kl": jnp.float32(kl)})["kl_weight"], 0.2 * factor, rtol=1e-6
    )


def test_the_kl_penalty_stays_within_bounds():
    loss, low = (
        fl.losses.PPOLoss(kl_penalty_target=TARGET),
        fl.losses.PPOLoss(kl_penalty_target=TARGET).init(),
    )
    high = low
    for _ in range(60):
        low, high = (
            loss.adapt(low, {"kl": jnp.float32(0)}),
            loss.adapt(high, {"kl": jnp.float32(1)}),
        )
    np.testing.assert_allclose([low["kl_weight"], high["kl_weight"]], [1e-6, 1e6], rtol=1e-5)


def test_a_loss_without_a_kl_penalty_target_adapts_nothing():
    for loss in (fl.losses.PPOLoss(), fl.losses.PGLoss()):
        assert loss.init() == {} == loss.adapt({}, {"kl": 1.0})


def test_stop_is_true_once_the_divergence_exceeds_one_and_a_half_targets():
    params, batch = example()
    kl = float(fl.losses.PPOLoss()(discrete, params, batch)[1]["kl"])
    for target, stop in ((kl / 1.5 * 0.99, True), (kl / 1.5 * 1.01, False)):
        loss = fl.losses.PPOLoss(target_kl=target)
        assert loss.stops_early and bool(loss.stop(loss(discrete, params, batch)[1])) is stop


def test_there_is_no_stop_without_target_kl():
    assert not fl.losses.PPOLoss().stops_early and not fl.losses.PPOLoss().stop({"kl": 100.0})


@pytest.mark.parametrize("clip", [0, -0.1])
def test_clip_must_be_positive(clip):
    with pytest.raises(
        fl.errors.SettingError, match=rf"^PPOLoss: clip_ratio must be above 0, got {clip}$"
    ):
        fl.losses.PPOLoss(clip_ratio=clip)


@pytest.mark.parametrize("wrong", [fl.losses.PPOLoss, "ppo", 0.2, None], ids=str)
def test_as_loss_says_what_a_loss_is(wrong):
    with pytest.raises(
        fl.errors.SettingError,
        match=r"loss must be one such as fl.losses.PPOLoss\(\) or a function .* got "
        r".*(PPOLoss|ppo|0.2|None)",
    ):
        as_loss(wrong)


def test_as_loss_takes_ours_as_it_is_and_wraps_a_function():
    def mine(policy, params, batch):
        return params["a"] * batch["obs"], {"seen": batch["obs"]}

    ours = fl.losses.PGLoss()
    assert as_loss(ours) is ours
    wrapped = as_loss(mine)
    assert (
        wrapped == as_loss(mine) == FunctionLoss(mine)
        and wrapped.needs == ("obs",)
        and not wrapped.on_policy
        and not wrapped.stops_early
    )
    assert wrapped(None, {"a": 2}, {"obs": 3}) == (6, {"seen": 3})


# -- losses of sequences


def sequence(seed=0, T=6, B=3):
    """Columns [T, B] in which some episodes end, their old log-probabilities a little off."""
    rng = np.random.default_rng(seed)
    valid = np.ones((T, B), bool)
    terminated, truncated = np.zeros((2, T, B), bool)
    terminated[2, 0], truncated[1, 1] = True, True
    valid[3, 0] = valid[2, 1] = False
    return {
        "obs": rng.normal(size=(T, B, 3)).astype(np.float32),
        "action": rng.integers(0, 2, (T, B)),
        "logp": (np.log(0.5) + rng.normal(0, 0.3, (T, B))).astype(np.float32),
        "reward": np.where(valid, rng.normal(size=(T, B)), 0).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
        "bootstrap_obs": rng.normal(size=(B, 3)).astype(np.float32),
    }


def linear(params, obs):
    out = obs @ params
    return Categorical(out[..., :2]), out[..., 2]


def columns_alone(loss, params, batch, target, valued=None):
    """The V-trace targets, advantages and terms of each column by itself, in loops; `valued`: the
    parameters for values, if other ones."""
    found = []
    for b in range(batch["valid"].shape[1]):
        obs = np.concatenate([batch["obs"][:, b], batch["bootstrap_obs"][None, b]])
        dist, value = linear(target, obs)[0], linear(target if valued is None else valued, obs)[1]
        log_ratio = (
            np.asarray(Categorical(dist.logits[:-1]).log_prob(batch["action"][:, b]))
            - batch["logp"][:, b]
        )
        stream = (batch[k][:, b] for k in ("terminated", "truncated", "valid"))
        goal, advantage = vtrace(
            log_ratio,
            batch["reward"][:, b],
            value[:-1],
            value[-1],
            *stream,
            loss.gamma,
            loss.vtrace_lambda,
        )
        found += [
            (t, b, float(goal[t]), float(advantage[t]))
            for t in range(len(log_ratio))
            if batch["valid"][t, b]
        ]
    return found


def test_the_vtrace_loss_equals_a_loop_over_valid_rows():
    batch, params = sequence(), np.random.default_rng(1).normal(0, 0.5, (3, 3)).astype(np.float32)
    loss = fl.losses.VTraceLoss(gamma=0.9, vtrace_lambda=0.8, vf_coef=0.3, ent_coef=0.02)
    total = 0.0
    rows = columns_alone(loss, params, batch, params)
    for t, b, goal, advantage in rows:
        dist, value = linear(params, batch["obs"][t, b])
        total += (
            -float(dist.log_prob(batch["action"][t, b])) * advantage
            + 0.3 * 0.5 * (float(value) - goal) ** 2
            - 0.02 * float(dist.entropy())
        )
    np.testing.assert_allclose(loss(linear, params, batch)[0], total / len(rows), rtol=1e-4)


@pytest.mark.parametrize("target_values", [False, True])
@pytest.mark.parametrize("standardize", [False, True])
def test_the_appo_loss_equals_a_loop_over_valid_rows(standardize, target_values):
    rng = np.random.default_rng(2)
    batch, params, old = (
        sequence(3),
        *(rng.normal(0, 0.5, (3, 3)).astype(np.float32) for _ in range(2)),
    )
    loss = fl.losses.APPOLoss(
        clip_ratio=0.2,
        gamma=0.9,
        vf_coef=0.3,
        ent_coef=0.02,
        kl_coef=0.1,
        standardize=standardize,
        target_values=target_values,
    )
    rows = columns_alone(loss, params, batch, old, old if target_values else params)
    advantages = np.array([a for *_, a in rows])
    scaled = (
        (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8)
        if standardize
        else advantages
    )
    total = 0.0
    for (t, b, goal, _), advantage in zip(rows, scaled, strict=True):
        (dist, value), (anchor, _) = (
            linear(params, batch["obs"][t, b]),
            linear(old, batch["obs"][t, b]),
        )
        ratio = np.exp(
            float(dist.log_prob(batch["action"][t, b]))
            - float(anchor.log_prob(batch["action"][t, b]))
        )
        total -= min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        total += (
            0.3 * 0.5 * (float(value) - goal) ** 2
            - 0.02 * float(dist.entropy())
            + 0.1 * float(anchor.kl(dist))
        )
    np.testing.assert_allclose(
        loss(linear, params, {**batch, "target_params": old})[0], total / len(rows), rtol=1e-4
    )


def test_no_gradient_flows_through_targets_or_the_target_network():
    batch, params = sequence(), np.ones((3, 3), np.float32)
    gradient = jax.grad(
        lambda old: fl.losses.APPOLoss()(linear, params, {**batch, "target_params": old})[0]
    )(params)
    assert not gradient.any()


WRONG = [
    (lambda: fl.losses.PPOLoss(vf_coef=-1.0), "PPOLoss: vf_coef must not be negative, got -1.0"),
    (lambda: fl.losses.PPOLoss(target_kl=0.0), "target_kl must be above 0 or None, got 0.0"),
    (lambda: fl.losses.PPOLoss(value_clip=-1.0), "value_clip must be above 0 or None"),
    (lambda: fl.losses.PPOLoss(ent_coef=np.nan), r"PPOLoss\.ent_coef must be a number, got nan"),
    (lambda: fl.losses.PGLoss(vf_coef=-1.0), "vf_coef must not be negative"),
    (lambda: fl.losses.VTraceLoss(gamma=1.5), "VTraceLoss: gamma must be from 0 to 1, got 1.5"),
    (lambda: fl.losses.VTraceLoss(rho_clip=-1.0), "rho_clip must not be negative"),
    (lambda: fl.losses.APPOLoss(vtrace_lambda=2.0), "vtrace_lambda must be from 0 to 1"),
    (lambda: fl.losses.APPOLoss(kl_coef=-1.0), "kl_coef must not be negative"),
    (lambda: fl.SGD(momentum=1.5), "SGD: momentum must be from 0 to 1, got 1.5"),
    (lambda: fl.Adam(weight_decay=-1.0), "weight_decay must not be negative"),
    (lambda: fl.Adam(max_grad_norm=np.nan), "max_grad_norm must be above 0 or None, got nan"),
    (lambda: fl.GaussianNoise(np.nan), "deviation must not be negative, got nan"),
    (lambda: fl.EpsilonGreedy(spread=np.nan), "spread not negative, got .*spread=nan"),
    (lambda: fl.td3(noise=np.nan), r"TD3Settings\.noise must be a number, got nan"),
    (lambda: fl.losses.MARWILLoss(vf_coef=-1.0), "vf_coef must not be negative"),
    (lambda: fl.Evaluate(seed=-1), "seed must be from 0 to 2"),
    (lambda: fl.Report(every_seconds=np.nan), "every_seconds must not be negative, got nan"),
]


@pytest.mark.parametrize(("make", "says"), WRONG, ids=[says for _, says in WRONG])
def test_numbers_that_would_train_in_vain_are_refused(make, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        make()


def test_a_temperature_that_is_not_above_0_is_refused():
    for alpha in (0.0, -1.0):
        with pytest.raises(fl.errors.CheckError, match=f"alpha must be above 0, got {alpha}"):
            fl.sac("Pendulum-v1", alpha=alpha).compile()


BOX_SPACES = Spaces(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,)))
CHOICE_SPACES = Spaces(BOX_SPACES.obs, gym.spaces.Discrete(2))


class Beside(fl.networks.MLP):
    """A policy with a value of its own, and with action values as one of its parts."""

    def __init__(self, *spaces, rngs):
        super().__init__(*spaces, hidden=(4,), rngs=rngs)
        self.part = fl.networks.QNetwork(*spaces, hidden=(4,), rngs=rngs)


@pytest.mark.parametrize("loss", ["PPOLoss", "PGLoss", "VTraceLoss", "APPOLoss"])
@pytest.mark.parametrize(
    ("module", "spaces", "says"),
    [
        ("SACNetwork", BOX_SPACES, "entropy .* take fl.networks.MLP, or SACLoss"),
        ("TD3Network", BOX_SPACES, "squashed Gaussian of TD3Network has none"),
        ("QNetwork", CHOICE_SPACES, r"outputs of QNetwork are action values, .* DQNLoss \(fl.dqn"),
        ("RecurrentQNetwork", CHOICE_SPACES, "its value is the highest of them; take fl.networks"),
    ],
)
def test_a_network_without_a_value_apart_from_its_actions_is_refused(loss, module, spaces, says):
    net = network(fl.Policy(getattr(fl.networks, module), hidden=(4,)), spaces)
    found = getattr(fl.losses, loss)().check(net)
    assert found.startswith(f"{loss} ")
    assert re.search(says, found)


@pytest.mark.parametrize("policy", [fl.Policy(fl.networks.MLP), fl.Policy(Beside)])
def test_a_network_with_a_value_apart_from_its_actions_is_taken(policy):
    assert fl.losses.PPOLoss().check(network(policy, CHOICE_SPACES)) == ""


@pytest.mark.parametrize("loss", [fl.losses.SACLoss(), fl.losses.CQLLoss()])
def test_a_network_without_a_temperature_is_refused(loss):
    says = loss.check(network(fl.Policy(fl.networks.TD3Network, hidden=(4,)), BOX_SPACES))
    assert says.startswith(f"{type(loss).__name__} needs a policy with a temperature")
    assert "TD3Network has no method log_alpha" in says
    assert loss.check(network(fl.Policy(fl.networks.SACNetwork, hidden=(4,)), BOX_SPACES)) == ""
