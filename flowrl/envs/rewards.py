"""Checks of rewards, as environments return them."""

from __future__ import annotations

from numbers import Number
from typing import Any

import numpy as np

from flowrl.errors import a

REWARDS = frozenset((float, int, bool, np.float64, np.float32, np.int64, np.bool_))
"""The types that need no closer look."""
WANTED = "it must be a single number"
"""The way out, for errors."""


def no_number(value: Any) -> str:
    """Return how to call a reward that is not a single number; empty for one that is.

    A number is also one that stands alone in an array. NumPy would make a number of a text, and
    NaN of None.

    >>> from decimal import Decimal
    >>> no_number(1.5), no_number(np.array([2])), no_number(Decimal("0.5"))
    ('', '', '')
    >>> no_number("7"), no_number(None), no_number([]), no_number(np.zeros(2)), no_number(1j)
    ("'7'", 'None', 'a list', 'an array float64[2]', 'a complex')
    """
    if type(value) in REWARDS:
        return ""
    if value is None or isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, list | tuple | dict | complex):
        return a(value)
    x = np.asarray(value)
    # Python's exact numbers, such as Decimal, are objects for NumPy.
    exact = x.dtype.kind == "O" and isinstance(value, Number)
    if x.size == 1 and (exact or x.dtype.kind in "biufV"):
        return ""
    return f"an array {x.dtype}{list(x.shape)}" if x.ndim else a(value)


def as_number(value: Any) -> float:
    """Return a reward that `no_number` takes as a float."""
    return float(np.asarray(value).item())
