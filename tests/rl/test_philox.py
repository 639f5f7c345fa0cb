"""The generator for several devices makes the numbers of JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.rl.philox import ON_SEVERAL_DEVICES, hashed, philox

JAX_S_OWN = "philox2x32"


def keys(impl):
    """Keys of all sorts."""
    words = np.random.default_rng(0).integers(0, 2**32, (50, 1), np.uint32)
    return jax.random.wrap_key_data(
        jnp.concatenate([words, np.uint32([[0], [2**32 - 1]])]), impl=impl
    )


def raw(key):
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize(("devices", "expected"), [(1, JAX_S_OWN), (4, ON_SEVERAL_DEVICES)])
def test_it_is_that_of_jax_where_there_is_one_device(monkeypatch, devices, expected):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert philox() is expected


def test_its_words_are_those_of_its_authors():
    # A test vector that they publish, made of digits of pi.
    found = hashed(jnp.uint32(0x13198A2E), jnp.uint32(0x243F6A88), jnp.uint32(0x85A308D3))
    assert [int(x) for x in found] == [0xDD7CE038, 0xF62A4C12]


@pytest.mark.parametrize("shape", [(), (7,), (3, 2)])
def test_its_bits_are_those_of_jax(shape):
    ours, theirs = (
        jax.vmap(lambda key: jax.random.bits(key, shape))(keys(impl))
        for impl in (ON_SEVERAL_DEVICES, JAX_S_OWN)
    )
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == jnp.uint32 and ours.shape == (52, *shape)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, np.uint32(2**32 - 1)])
def test_its_seeds_and_the_keys_made_of_them_are_those_of_jax(seed):
    ours, theirs = (jax.random.key(seed, impl=impl) for impl in (ON_SEVERAL_DEVICES, JAX_S_OWN))
    np.testing.assert_array_equal(raw(ours), raw(theirs))
    np.testing.assert_array_equal(raw(jax.random.split(ours, 3)), raw(jax.random.split(theirs, 3)))
    np.testing.assert_array_equal(
        raw(jax.random.fold_in(ours, 5)), raw(jax.random.fold_in(theirs, 5))
    )


def test_bits_of_another_width_are_refused():
    with pytest.raises(NotImplementedError, match="16 random bits; take 32"):
        jax.random.bits(keys(ON_SEVERAL_DEVICES)[0], dtype=jnp.uint16)
