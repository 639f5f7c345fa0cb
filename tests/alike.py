"""Whether two values are the same, and of the very same kinds."""

import math
from collections import deque
from dataclasses import is_dataclass
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.keeping import Leaves


def alike(a, b):
    """Whether two values are of the same kinds and equal bit for bit."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert len(a) == len(b)
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        for (k, x), (m, y) in zip(a.items(), b.items(), strict=True):
            alike(k, m)
            alike(x, y)
    elif isinstance(a, list | tuple | deque):
        assert len(a) == len(b)
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for x, y in zip(a, b, strict=True):
            alike(x, y)
    elif isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        assert a.dtype == b.dtype
        alike(jax.random.key_data(a), jax.random.key_data(b))
    elif isinstance(a, np.ndarray | np.generic | jax.Array):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).dtype.byteorder == np.asarray(b).dtype.byteorder
        # The bytes between long doubles are whatever the memory held.
        if np.asarray(a).dtype == np.longdouble:
            assert np.array_equal(a, b)
        else:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
    elif isinstance(a, np.random.Generator):
        for held in ("state", "seed_seq.state"):
            alike(*(attrgetter(held)(x.bit_generator) for x in (a, b)))
    elif isinstance(a, Leaves):
        alike(a.arrays, b.arrays)
    elif is_dataclass(a):
        alike(vars(a), vars(b))
    elif isinstance(a, float) and a != a:
        assert b != b
    else:
        assert a == b
        assert math.copysign(1, a) == math.copysign(1, b) if isinstance(a, float) else True
