"""Layers with few outputs: the same numbers and gradients as one product."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import numpy as np
import pytest
from flax import nnx

from flowrl.rl.few_outputs import MOST, dot_general
from flowrl.rl.layers import Heads
from flowrl.rl.value_networks import QNetwork

ROWS = (((1,), (0,)), ((), ()))


def products(f: Any, *args: Any) -> int:
    """The products of matrices that a function computes."""
    return str(jax.make_jaxpr(f)(*args)).count("dot_general[")


@pytest.mark.parametrize("outputs", range(1, MOST + 3))
@pytest.mark.parametrize("lead", [(5,), (3, 5), (1,)])
def test_numbers_and_gradients_are_those_of_one_product(lead: Any, outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    x, weights, wanted = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((*lead, 16), (16, outputs), (*lead, outputs))
    )
    dimensions = (((len(lead),), (0,)), ((), ()))

    def loss(product: Any, x: Any, weights: Any) -> Any:
        return (product(x, weights, dimensions) * wanted).sum()

    ours, (ours_x, ours_w) = jax.value_and_grad(loss, (1, 2))(dot_general, x, weights)
    # Doubles of NumPy serve as the reference.
    x64, w64, wanted64 = (a.astype(np.float64) for a in (x, weights, wanted))
    np.testing.assert_allclose(dot_general(x, weights, dimensions), x64 @ w64, atol=1e-5)
    np.testing.assert_allclose(ours, ((x64 @ w64) * wanted64).sum(), rtol=1e-4)
    np.testing.assert_allclose(ours_x, wanted64 @ w64.T, atol=1e-5)
    flat = x64.reshape(-1, 16).T @ wanted64.reshape(-1, outputs)
    np.testing.assert_allclose(ours_w, flat, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU it is one product")
def test_stock_networks_compute_few_outputs_one_by_one() -> None:
    box = gym.spaces.Box(-1, 1, (4,), np.float32)
    rngs = nnx.Rngs(0)
    for outputs, columns in ((2, 2), (MOST, MOST), (MOST + 1, 1)):
        space = gym.spaces.Discrete(outputs)
        heads = Heads(8, 8, space, 0.0, rngs=rngs)
        features = np.zeros((3, 8), np.float32)
        # The value is a product as well.
        assert products(heads, features, features) == columns + 1
        # The weights stay one array, so that policies that were saved earlier can be read.
        assert heads.action.kernel.shape == (8, outputs)
        q = QNetwork(box, space, hidden=(8,), rngs=rngs)
        assert products(q, np.zeros((3, 4), np.float32)) == columns + 1
        # One row is as fast in one product.
        assert products(heads, features[:1], features[:1]) == 2
