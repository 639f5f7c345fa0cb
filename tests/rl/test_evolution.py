"""Evolution strategies as pure functions, each beside a slow loop in NumPy that makes the same
noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import rankdata

import flowrl as fl
from flowrl.rl.evolution import (
    AT_ONCE,
    centred_ranks,
    noise,
    perturbed,
    seeds_of,
    top_directions,
    weighted_noise,
)

PARAMS = {"b": jnp.arange(3.0), "a/kernel": jnp.ones((2, 4)), "half": jnp.ones(2, jnp.bfloat16)}
SEEDS = np.asarray(seeds_of(jax.random.key(3), jnp.uint32(0), pairs=AT_ONCE + 5))


def noise_of(seed):
    """The noise of one seed as arrays of NumPy."""
    return {name: np.asarray(x, np.float64) for name, x in noise(seed, PARAMS).items()}


def test_noise_is_normal_and_differs_by_seed_and_place():
    big = {"x": jnp.zeros((100, 50)), "y": jnp.zeros(5000)}
    one, same, other = (noise(seed, big) for seed in (1, 1, 2))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, same))
    for x in jax.tree.leaves(one):
        assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.05
    for x, y in ((one["x"], other["x"]), (one["x"], one["y"])):
        assert abs(np.corrcoef(np.ravel(x), np.ravel(y))[0, 1]) < 0.05
    assert {name: x.dtype for name, x in noise(1, PARAMS).items()} == {
        name: x.dtype for name, x in PARAMS.items()
    }


def test_seeds_differ_from_turn_to_turn_and_by_key():
    seen = set()
    for key in (0, 1):
        for turn in (0, 1):
            seen |= set(seeds_of(jax.random.key(key), jnp.uint32(turn), pairs=50).tolist())
    assert len(seen) == 200


def test_a_perturbation_and_its_mirror_image_are_as_far_apart_on_both_sides():
    plus, minus = (perturbed(PARAMS, 7, jnp.float32(scale)) for scale in (0.5, -0.5))
    for name, x in PARAMS.items():
        near = 0.05 if x.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(
            np.float32(plus[name]) + np.float32(minus[name]), 2 * np.float32(x), atol=near
        )
        np.testing.assert_allclose(
            np.float32(plus[name]), np.float32(x) + 0.5 * noise_of(7)[name], atol=near
        )


@pytest.mark.parametrize("count", [1, AT_ONCE, AT_ONCE + 5])
def test_weighted_noise_is_the_sum_over_all_seeds(count):
    weights = np.linspace(-1, 2, count, dtype=np.float32)
    found = weighted_noise(jnp.asarray(SEEDS[:count]), jnp.asarray(weights), PARAMS)
    for name in PARAMS:
        expected = sum(w * noise_of(seed)[name] for w, seed in zip(weights, SEEDS, strict=False))
        near = 0.2 if name == "half" else 1e-4
        np.testing.assert_allclose(np.float32(found[name]), expected, atol=near)


def test_weighted_noise_holds_no_more_noises_than_it_says():
    size, seeds = 10_000, jnp.arange(2 * AT_ONCE - 1, dtype=jnp.uint32)
    compiled = jax.jit(weighted_noise).lower(seeds, seeds * 1.0, {"w": jnp.zeros(size)}).compile()
    # One more is the sum.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * size * (AT_ONCE + 1.5)


def test_every_bit_of_a_seed_counts():
    params = {"w": jnp.zeros(3)}
    seeds = jnp.asarray([0, *(1 << bit for bit in range(32))], jnp.uint32)
    found = np.asarray(jax.vmap(noise, (0, None))(seeds, params)["w"])
    assert len(np.unique(found[:, 0])) == 33


@pytest.mark.parametrize(
    "returns",
    [[[3.0, 1.0], [2.0, 5.0]], [[1.0, 1.0, 2.0], [1.0, 7.0, 2.0]], [[4.0], [4.0]]],
    ids=["all differ", "ties", "all equal"],
)
def test_ranks_are_those_of_scipy_centred(returns):
    returns = np.float32(returns)
    ranks = (rankdata(returns) - 1) / (returns.size - 1) - 0.5
    found = centred_ranks(jnp.asarray(returns))
    np.testing.assert_allclose(found, ranks.reshape(returns.shape), atol=1e-6)
    assert abs(float(found.sum())) < 1e-5


def gradient(batch, loss=None, params=PARAMS):
    """The gradients of the loss, its value and metrics."""
    loss = loss or fl.losses.EvolutionLoss()

    def of(params):
        return loss(None, params, {name: jnp.asarray(x) for name, x in batch.items()})

    (value, metrics), grads = jax.value_and_grad(of, has_aux=True)(params)
    return {name: np.float64(np.float32(x)) for name, x in grads.items()}, float(value), metrics


def batch_of(returns, utility, sigma=0.1, valid=None):
    pairs = returns.shape[1]
    scale = np.float32(sigma) * np.array([[1.0], [-1.0]], np.float32) * np.ones(pairs, np.float32)
    valid = np.ones((2, pairs), bool) if valid is None else valid
    seeds = np.broadcast_to(SEEDS[:pairs], (2, pairs))
    return {
        "noise_seed": seeds,
        "noise_scale": scale,
        "return": np.float32(returns),
        "utility": np.float32(utility),
        "valid": valid,
    }


RETURNS = np.float32([[10.0, 3.0, 8.0, 3.0, 0.5], [2.0, 4.0, 8.0, 9.0, 1.0]])


def test_the_gradient_is_minus_the_estimate_of_salimans_et_al():
    utility = np.asarray(centred_ranks(jnp.asarray(RETURNS)))
    found, value, metrics = gradient(batch_of(RETURNS, utility))
    for name in PARAMS:
        # 1 / (n sigma) * sum(F_i epsilon_i), where the mirror image of epsilon is minus it.
        estimate = 0.0
        for row, sign in enumerate((1.0, -1.0)):
            for pair in range(5):
                estimate = estimate + utility[row, pair] * sign * noise_of(SEEDS[pair])[name]
        near = 0.1 if name == "half" else 1e-4
        np.testing.assert_allclose(found[name], -estimate / (10 * 0.1), atol=near)
    assert value == pytest.approx(-RETURNS.mean()) and metrics == {}


def test_masked_rows_count_for_nothing_and_nan_is_seen():
    valid = np.ones((2, 5), bool)
    valid[:, 3:] = False
    utility = np.asarray(centred_ranks(jnp.asarray(RETURNS)))
    masked, value, _ = gradient(batch_of(RETURNS, utility, valid=valid))
    short, _, _ = gradient(batch_of(RETURNS[:, :3], utility[:, :3]))
    for name in PARAMS:
        np.testing.assert_allclose(masked[name], short[name], atol=1e-5)
    assert value == pytest.approx(-RETURNS[:, :3].mean())
    wrong = RETURNS.copy()
    wrong[1, 2] = np.nan
    assert np.isnan(gradient(batch_of(wrong, utility))[1])


@pytest.mark.parametrize("top", [1, 3, 5])
def test_a_step_of_ars_is_that_of_the_paper(top):
    batch = batch_of(RETURNS, RETURNS)
    scale = jnp.asarray(batch["noise_scale"])
    batch["utility"] = np.asarray(top_directions(jnp.asarray(RETURNS), scale, top=top))
    found, _, _ = gradient(batch)
    # Algorithm 2 of Mania et al. 2018: sort directions by the better of their two returns.
    best = sorted(range(5), key=lambda k: -max(RETURNS[0, k], RETURNS[1, k]))[:top]
    deviation = np.std([RETURNS[row, k] for k in best for row in (0, 1)])
    for name in PARAMS:
        step = sum((RETURNS[0, k] - RETURNS[1, k]) * noise_of(SEEDS[k])[name] for k in best) / (
            top * deviation
        )
        near = 0.1 if name == "half" else 1e-4
        np.testing.assert_allclose(-found[name], step, atol=near)


def test_equal_returns_give_no_step_and_no_division_by_zero():
    equal = np.full((2, 5), 500.0, np.float32)
    batch = batch_of(equal, equal)
    scale = jnp.asarray(batch["noise_scale"])
    for utility in (
        centred_ranks(jnp.asarray(equal)),
        top_directions(jnp.asarray(equal), scale, top=2),
    ):
        found, _, _ = gradient({**batch, "utility": np.asarray(utility)})
        assert all((x == 0).all() for x in found.values())
