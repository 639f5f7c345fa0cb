"""Random orders of rows."""

from collections import Counter
from itertools import permutations

import jax
import numpy as np
import pytest

from flowrl.core.permuting import permutation, rounds


@pytest.mark.parametrize("count", [1, 2, 3, 5, 512, 1000, 8192, 40_000])
def test_an_order_has_each_number_once_and_keys_give_orders_of_their_own(count):
    one, other = (np.asarray(permutation(jax.random.key(seed), count)) for seed in range(2))
    for order in (one, other):
        np.testing.assert_array_equal(np.sort(order), np.arange(count))
    assert one.dtype == np.int32
    assert count < 5 or (one != other).any()


def test_all_orders_of_a_few_numbers_are_as_likely():
    draws = 12_000
    keys = jax.random.split(jax.random.key(3), draws)
    found = np.asarray(jax.vmap(lambda key: permutation(key, 4))(keys))
    counts = Counter(map(tuple, found.tolist()))
    assert set(counts) == set(permutations(range(4)))
    expected = draws / 24
    # Chi-squared with 23 degrees of freedom is above 49.7 in one of a thousand.
    assert sum((x - expected) ** 2 / expected for x in counts.values()) < 49.7


@pytest.mark.parametrize("count", [512, 1024, 2048, 32_768, 262_144])
def test_pairs_without_a_random_order_are_few(count):
    """Two numbers stay as they were where all their random bits are equal, in each round."""
    bits = rounds(count) * (32 - (count - 1).bit_length())
    assert count**2 / 2 * 2.0**-bits <= 1 / 8


def test_each_place_is_as_likely_for_a_number_of_many():
    count, draws = 2048, 2000
    keys = jax.random.split(jax.random.key(5), draws)
    found = np.asarray(jax.vmap(lambda key: permutation(key, count))(keys))
    for place in (0, 1, count - 1):
        mean, deviation = (count - 1) / 2, count / np.sqrt(12)
        assert abs(found[:, place].mean() - mean) < 4 * deviation / np.sqrt(draws)
    # Neighbours before are no neighbours afterwards.
    together = np.abs(np.diff(found, axis=1)) == 1
    assert together.mean() < 1.2 * 2 / count


def test_rows_of_a_round_with_equal_bits_have_a_random_order_by_the_others():
    """Of 40,000 rows a word has 16 random bits, so a third shares them with its neighbour."""
    count = 40_000
    order = np.asarray(permutation(jax.random.key(7), count))
    rising = np.mean(np.diff(order) > 0)
    # The number of rises has a variance of a twelfth of the count.
    assert abs(rising - 0.5) < 4 * np.sqrt(1 / 12 / count)
