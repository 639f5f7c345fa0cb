"""Distributions agree with distrax, and with what they draw."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import distrax

from flowrl.rl.distributions import Categorical, Gaussian, MultiCategorical

SIZES = (2, 4, 3)
KINDS = ["categorical", "multi_categorical", "gaussian"]


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape, scale=1.5), jnp.float32)


def ours(kind, seed, *lead):
    if kind == "categorical":
        return Categorical(normal(seed, *lead, 5))
    if kind == "multi_categorical":
        return MultiCategorical(normal(seed, *lead, sum(SIZES)), SIZES)
    return Gaussian(normal(seed, *lead, 3), normal(seed + 1, *lead, 3) / 2)


def noise(dist):
    """What 20,000 draws are made of."""
    draw, like = (
        (jax.random.normal, dist.mean)
        if isinstance(dist, Gaussian)
        else (jax.random.gumbel, dist.logits)
    )
    return draw(jax.random.key(0), (20_000, *like.shape))


def oracle(dist):
    if isinstance(dist, Categorical):
        return distrax.Categorical(logits=dist.logits)
    if isinstance(dist, MultiCategorical):
        return distrax.Joint(
            [
                distrax.Categorical(logits=x)
                for x in jnp.split(dist.logits, np.cumsum(SIZES)[:-1], axis=-1)
            ]
        )
    return distrax.MultivariateNormalDiag(dist.mean, jnp.exp(dist.log_std))


def some_action(dist):
    rng = np.random.default_rng(7)
    if isinstance(dist, Gaussian):
        return jnp.asarray(rng.normal(size=dist.mean.shape), jnp.float32)
    if isinstance(dist, MultiCategorical):
        return jnp.asarray(rng.integers(0, SIZES, (*dist.logits.shape[:-1], 3)), jnp.int32)
    return jnp.asarray(rng.integers(0, 5, dist.logits.shape[:-1]), jnp.int32)


@jax.jit
def all_of(p, q, action):
    return {"mode": p.mode(), "log_prob": p.log_prob(action), "entropy": p.entropy(), "kl": p.kl(q)}


@jax.jit
def all_of_oracle(p, q, action):
    theirs, parts = oracle(p), isinstance(p, MultiCategorical)
    return {
        "mode": jnp.stack(theirs.mode(), -1) if parts else theirs.mode(),
        "log_prob": theirs.log_prob(list(jnp.moveaxis(action, -1, 0)) if parts else action),
        "entropy": theirs.entropy(),
        "kl": theirs.kl_divergence(oracle(q)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_distrax(kind):
    p, q = ours(kind, 0, 2, 4), ours(kind, 10, 2, 4)
    found, theirs = (f(p, q, some_action(p)) for f in (all_of, all_of_oracle))
    for name in theirs:
        np.testing.assert_allclose(found[name], theirs[name], rtol=1e-5, atol=1e-5)
    assert found["log_prob"].shape == found["entropy"].shape == found["kl"].shape == (2, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_jitted_equals_plain(kind):
    p, q = ours(kind, 0, 2, 4), ours(kind, 10, 2, 4)
    plain, jitted = (f(p, q, some_action(p)) for f in (all_of.__wrapped__, all_of))
    for name in plain:
        np.testing.assert_allclose(plain[name], jitted[name], rtol=1e-5, atol=1e-6)
        assert plain[name].dtype == jitted[name].dtype


@cache
def drawn(kind):
    """A distribution without batch axes, many draws from it, and their log-probabilities."""

    @jax.jit
    def draw(p):
        actions = jax.vmap(p.sample)(noise(p))
        return actions, jax.vmap(p.log_prob)(actions), p.log_prob(p.mode()), p.entropy()

    p = ours(kind, 5)
    return p, *map(np.asarray, draw(p))


@pytest.mark.parametrize("kind", KINDS)
def test_a_jitted_draw_equals_a_plain_one(kind):
    p, actions, *_ = drawn(kind)
    np.testing.assert_allclose(p.sample(noise(p)[3]), actions[3], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mode_is_the_most_probable_action(kind):
    _, _, logp, logp_of_mode, _ = drawn(kind)
    assert (logp <= logp_of_mode + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_the_mean_of_minus_log_prob_over_draws(kind):
    _, _, logp, _, entropy = drawn(kind)
    np.testing.assert_allclose(-logp.mean(), entropy, atol=0.05)


def test_categorical_draws_each_action_as_often_as_its_probability():
    p, actions, *_ = drawn("categorical")
    assert actions.dtype == np.int32
    np.testing.assert_allclose(
        [(actions == a).mean() for a in range(5)], jax.nn.softmax(p.logits), atol=0.015
    )


def test_multi_categorical_draws_its_parts_independently():
    p, actions, *_ = drawn("multi_categorical")
    first, second, third = (jax.nn.softmax(x) for x in np.split(p.logits, np.cumsum(SIZES)[:-1]))
    frequency = np.zeros(SIZES)
    np.add.at(frequency, tuple(actions.T), 1 / len(actions))
    np.testing.assert_allclose(frequency, np.einsum("i,j,k", first, second, third), atol=0.015)


def test_gaussian_draws_have_its_moments_and_no_correlation():
    p, actions, *_ = drawn("gaussian")
    std = np.exp(p.log_std)
    z = (actions - p.mean) / std
    np.testing.assert_allclose(z.mean(0), 0, atol=0.03)
    np.testing.assert_allclose(np.cov(z.T), np.eye(3), atol=0.05)


def test_multi_categorical_of_one_part_is_a_categorical():
    logits, action = normal(0, 6, 5), jnp.arange(6) % 5
    np.testing.assert_array_equal(
        MultiCategorical(logits, (5,)).log_prob(action[:, None]),
        Categorical(logits).log_prob(action),
    )


def test_actions_kept_as_floats_have_the_same_log_prob():
    p, action = ours("categorical", 0, 5), jnp.array([0, 4, 2, 1, 3])
    np.testing.assert_array_equal(p.log_prob(action.astype(jnp.float32)), p.log_prob(action))


def test_an_action_ruled_out_by_a_logit_of_minus_infinity_adds_nothing():
    with_it, without = (
        Categorical(jnp.array([0.5, -jnp.inf, -1.0])),
        Categorical(jnp.array([0.5, -1.0])),
    )
    np.testing.assert_allclose(
        with_it.log_prob(jnp.array(2)), without.log_prob(jnp.array(1)), rtol=1e-6
    )
    np.testing.assert_allclose(with_it.entropy(), without.entropy(), rtol=1e-6)
    np.testing.assert_allclose(with_it.kl(with_it), 0.0)


def floats(*shape):
    return arrays(np.float32, shape, elements=st.floats(-20, 20, width=32))


quick = settings(max_examples=60, deadline=None)
divergence = jax.jit(lambda p, q: (p.kl(q), p.kl(p), p.entropy()))


@quick
@given(floats(2, 4), floats(2, 4))
def test_categorical_kl_is_never_negative_and_zero_to_itself(a, b):
    kl, same, entropy = divergence(Categorical(a), Categorical(b))
    assert (kl >= -1e-5).all() and (same == 0).all()
    assert (entropy >= -1e-6).all() and (entropy <= np.log(4) + 1e-5).all()


@quick
@given(
    floats(2, 3),
    floats(2, 3),
    *[arrays(np.float32, (2, 3), elements=st.floats(-3, 3, width=32))] * 2,
)
def test_gaussian_kl_is_never_negative_and_zero_to_itself(mean_p, mean_q, log_p, log_q):
    kl, same, _ = divergence(Gaussian(mean_p, log_p), Gaussian(mean_q, log_q))
    assert (kl >= -1e-4).all()
    np.testing.assert_allclose(same, 0, atol=1e-6)


total_probability = jax.jit(
    lambda logits: sum(jnp.exp(Categorical(logits).log_prob(jnp.full(2, a))) for a in range(4))
)


@quick
@given(floats(2, 4))
def test_categorical_probabilities_sum_to_one(logits):
    np.testing.assert_allclose(total_probability(logits), 1, rtol=1e-5)


@quick
@given(floats(2, 4), st.floats(-50, 50, width=32))
def test_adding_one_number_to_all_logits_changes_nothing(logits, number):
    kl, _, _ = divergence(Categorical(logits), Categorical(logits + np.float32(number)))
    np.testing.assert_allclose(kl, 0, atol=1e-4)


def test_ruled_out_actions_have_finite_gradients():
    masked = jnp.array([0.1, 0.2, -jnp.inf])
    gradients = [
        jax.grad(lambda x: Categorical(x).entropy())(masked),
        jax.grad(lambda x: Categorical(x).kl(Categorical(masked + 1.0)))(masked),
        jax.grad(lambda x: Categorical(masked).kl(Categorical(x)))(masked),
    ]
    assert np.isfinite(gradients).all()


def test_the_logits_of_actions_are_those_of_their_choices():
    one, several = ours("categorical", 0, 6), ours("multi_categorical", 1, 6)
    for dist, action in ((one, some_action(one)), (several, some_action(several))):
        got = np.asarray(dist.logit(action)).reshape(6, -1)
        begins = np.cumsum((0, *(SIZES if dist is several else (5,))))[:-1]
        for row, found in enumerate(got):
            chosen = begins + np.asarray(action)[row].reshape(-1)
            assert found.tolist() == np.asarray(dist.logits)[row, chosen].tolist()
