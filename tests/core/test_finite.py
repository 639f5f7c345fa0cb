"""Numbers that are not finite are found in arrays of any size.

XLA's maximum leaves NaN out of arrays of a few thousand numbers, and not out of small ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.core.finite import finite_along


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(2, 3), (128, 8), (128, 256), (3, 20_000)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_number_among_many_is_found(shape, bad, dtype):
    x = jnp.full(shape, jnp.finfo(dtype).max, dtype)
    finite = jax.jit(finite_along, static_argnums=1)
    assert finite(x, None) and finite(x, (0,)).all()
    for row, column in ((0, 0), (shape[0] // 2, shape[1] - 1), (shape[0] - 1, shape[1] // 2)):
        spoilt = x.at[row, column].set(bad)
        assert not finite(spoilt, None)
        assert np.flatnonzero(~finite(spoilt, (0,))).tolist() == [column]
